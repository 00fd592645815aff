"""How much a graph's logits depend on the width of the call, measured on this device: what every tolerance comes from.

Kernels sum in another order, or quantize activations in other groups, at S = 1 than at S = K+1. In fp32 that moves a
logit by about 1e-5, with int4 weights by a few tenths: a greedy choice between two tokens that are closer than that may
go either way without any fault.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from draftc.runtime.decoder import Decoder
from draftc.runtime.engine import Logits, Tokens
from draftc.runtime.errors import EngineError
from draftc.runtime.manifest import Model
from draftc.runtime.session import Session

__all__ = [
    "CALIBRATION_TOKENS",
    "Difference",
    "Graph",
    "WidthVariance",
    "difference",
    "graphs",
    "measure_variance",
    "recomputed_rows",
    "rows_of",
]

CALIBRATION_TOKENS = 64
LIKELIEST = 16

# The largest difference, relative to the spread of the logits, that rounding may be blamed for. A graph whose calls
# disagree by more is broken, or is too coarse to be called the same model at two widths.
CEILINGS = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.2}
QUANTIZED_CEILING = 0.2
SPREAD_PER_RMS = 4  # about what the spread of 16 tokens is to the standard deviation of all
NEAR_TIE = 4  # three standard deviations of the difference of two logits, each of which moves by `rms`
FLOAT_EPS = float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Difference:
    """How far two sets of logits are apart; adding a constant to a row makes no difference, as to its softmax.

    `rms` is the standard deviation of the difference over the vocabulary, `spread` by how much the distance between two
    of the likeliest tokens changes; each is the largest of all rows.
    """

    rms: float = 0.0
    spread: float = 0.0

    def __or__(self, other: "Difference") -> "Difference":
        """The larger of both."""
        return Difference(max(self.rms, other.rms), max(self.spread, other.spread))

    def within(self, limit: "Difference") -> bool:
        """Whether both numbers are at most those of `limit`."""
        return self.rms <= limit.rms and self.spread <= limit.spread


def difference(a: Logits, b: Logits) -> Difference:
    """Of rows (R, V) and (R, V). The likeliest are the LIKELIEST of either row."""
    worst = Difference()
    for one, other in zip(a, b, strict=True):
        delta = one - other
        count = min(LIKELIEST, delta.size)
        likeliest = np.concatenate([np.argpartition(row, delta.size - count)[-count:] for row in (one, other)])
        worst |= Difference(float(delta.std()), float(np.ptp(delta[likeliest])))
    return worst


@dataclass(frozen=True)
class Graph:
    """One decoder graph of a session, with the name that reports call it by."""

    name: str
    decoder: Decoder
    ceiling: float  # of Difference.rms ÷ standard deviation of the logits


def graphs(session: Session) -> list[Graph]:
    """Every graph of the session, the target first."""
    models = dict(session.manifest.models)
    found = [Graph("target", session.target, _ceiling(models["target"]))]
    for method, drafter in session.drafters.items():
        ceiling = _ceiling(models.get("draft.model", models["target"]))
        known = [graph.decoder for graph in found]  # two drafters may share one
        found += [Graph(method, decoder, ceiling) for decoder in drafter.decoders if decoder not in known]
    return found


def _ceiling(model: Model) -> float:
    past, _ = next(model.spec.cache_pairs)
    return max(CEILINGS[past.dtype], QUANTIZED_CEILING if model.quantization else 0.0)


@dataclass(frozen=True)
class WidthVariance:
    """The Difference between one-token calls and wider ones over the same text, `positions` tokens of it.

    A choice between tokens whose logits are closer than `near_tie` (NEAR_TIE times the rms) can be the width's doing.
    Logits that are compared as such may differ by `limit`, three times the measured difference, because that is itself
    only the largest of a sample (`limit_for` takes a closer look). All end where `rms` is at `ceiling`; `sound` says
    that it is not above.
    """

    graph: str
    positions: int
    widths: tuple[int, ...]
    rms: float
    spread: float
    logit_std: float
    ceiling: float
    near_tie: float
    limit: Difference
    sound: bool

    def limit_for(self, found: Difference, decoder: Decoder, text: Tokens, rows: int) -> Difference:
        """How far apart the last `rows` logits of `text` may be, which are `found` apart: `limit`, or where that is
        exceeded, by what the width of calls changes over this very text.

        Kernels that quantize activations differ much at a few places of a few texts (an outlier takes the whole range
        of its block), which a sample of 64 tokens may lack. The cache is filled from scratch: no rewind is part of it.
        """
        if found.within(self.limit):
            return self.limit
        width = min(decoder.limits.max_width, text.size)
        decoder.cache.clear()
        if text.size > width:  # so that the last call is the widest
            rows_of(decoder, text[:-width])
        wide = rows_of(decoder, text, width)[-rows:]
        narrow = np.concatenate(list(_chain(decoder, text, 0, 1)))[-rows:]
        return self.limit | _limit(difference(narrow, wide), self.ceiling)


def rows_of(decoder: Decoder, text: Tokens, rows: int = 1) -> Logits:
    """A copy of the logits (R, V) after the last R ≤ `rows` tokens of `text`, with what the cache holds already.

    R is smaller where fewer tokens had to be run. Raises EngineError for NaN or infinite logits.
    """
    pending = decoder.sync(text)
    return _extend(decoder, pending, min(rows, pending.size))


def recomputed_rows(decoder: Decoder, text: Tokens, rows: int = 1) -> Logits:
    """`rows_of` from an empty cache."""
    decoder.cache.clear()
    return rows_of(decoder, text, rows)


def _extend(decoder: Decoder, tokens: Tokens, rows: int) -> Logits:
    start = len(decoder.cache)
    logits = decoder.extend(tokens, rows).copy()
    if not np.isfinite(logits).all():
        raise EngineError(f"NaN or infinite logits in a call of {tokens.size} tokens at position {start}")
    return logits


def measure_variance(graph: Graph, corpus: Tokens, speculative_tokens: int) -> WidthVariance:
    """Compare one-token calls with wider ones (2, K+1, the widest, and one from scratch) over a piece of `corpus`."""
    try:
        return _measure(graph, corpus, speculative_tokens)
    except EngineError as error:
        raise EngineError(f"{graph.name}: {error}") from error


def _measure(graph: Graph, corpus: Tokens, speculative_tokens: int) -> WidthVariance:
    decoder = graph.decoder
    limits = decoder.limits
    text = corpus[: min(CALIBRATION_TOKENS, limits.max_length)]
    begin = min(16, text.size // 4)
    single = np.concatenate(list(_chain(decoder, text, begin, 1)))  # (n - begin, V)
    widths = sorted(
        {width for width in (2, speculative_tokens + 1, limits.max_width) if 2 <= width <= limits.max_width}
    )
    # Where all widths agree to the bit, what float32 can tell apart is still the smallest meaningful difference.
    found = Difference(rms := 4 * FLOAT_EPS * float(np.abs(single).max()), SPREAD_PER_RMS * rms)
    for width in widths:
        done = 0
        for rows in _chain(decoder, text, begin, width):
            found |= difference(rows, single[done : done + len(rows)])
            done += len(rows)
    scratch = recomputed_rows(decoder, text, min(limits.max_width, len(single)))
    found |= difference(scratch, single[-len(scratch) :])
    std = float(single.std(axis=1).mean())
    ceiling = graph.ceiling * std
    return WidthVariance(
        graph=graph.name,
        positions=len(single),
        widths=(1, *widths, text.size),
        rms=found.rms,
        spread=found.spread,
        logit_std=std,
        ceiling=ceiling,
        near_tie=NEAR_TIE * min(found.rms, ceiling),
        limit=_limit(found, ceiling),
        sound=found.rms <= ceiling,
    )


def _limit(found: Difference, ceiling: float) -> Difference:
    return Difference(min(3 * found.rms, ceiling), min(3 * found.spread, SPREAD_PER_RMS * ceiling))


def _chain(decoder: Decoder, text: Tokens, begin: int, width: int) -> Iterator[Logits]:
    """The logits after each token of `text` from `begin` on, in calls of `width` tokens behind an equal beginning."""
    decoder.cache.clear()
    if begin:
        _extend(decoder, decoder.sync(text[:begin]), 1)
    for start in range(begin, text.size, width):
        piece = text[start : start + width]
        yield _extend(decoder, piece, piece.size)
