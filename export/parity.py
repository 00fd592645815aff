"""The parity gate: a graph that does not compute what the checkpoint computes never becomes a bundle.

Two steps, so that a fault of the capture cannot hide behind rounding: the float graph against eager PyTorch, with a
tolerance that only reordered float32 sums fit into; then the quantized graph against the float graph, by how much its
predictions differ, over a longer text as well. Both run through the runtime's own engine, in the widths that the loop
uses, with a rewind.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from draftc.runtime.decoder import Decoder
from draftc.runtime.engine import Tokens
from draftc.runtime.errors import ParityError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "MAX_HALF_KL",
    "MAX_KL",
    "Comparison",
    "LogitRows",
    "check_capture",
    "check_rounded",
    "compare",
    "eager_logits",
    "graph_logits",
    "held_out_tokens",
    "parity_tokens",
    "perplexity",
    "text_logits",
]

# float32 sums in another order differ by about 1e-6 of the largest logit for each of some tens of layers; a wrong mask,
# scale or position shows as 1e-2 of it and more.
CAPTURE_TOLERANCE = 3e-4
MAX_HALF_KL = 0.02  # nats; fp16 costs 3e-6 to 8e-5 on models of 135M to 1.5B parameters
MAX_KL = 1.0  # nats; round-to-nearest int4 costs 0.33 on a model of 135M parameters, a misread block is past 5

LogitRows = dict[int, NDArray[np.float32]]  # position → (V,)


@dataclass(frozen=True)
class Comparison:
    """`tokens` positions compared: max |Δlogit|, mean KL(reference ‖ graph) in nats, share of equal argmax.

    `scale` is the largest |logit| of the reference.
    """

    tokens: int
    max_abs_diff: float
    kl: float
    greedy_agreement: float
    scale: float


def parity_tokens(tokenizer: "PreTrainedTokenizerBase", length: int) -> Tokens:
    """The first `length` tokens of the text that ships with draftc (code, prose, numbers, other scripts), repeated."""
    start, ids = _shipped_text("parity.txt", tokenizer)
    repeated = ids * (length // len(ids) + 1)
    return np.asarray((start + repeated)[:length], np.int64)


def held_out_tokens(tokenizer: "PreTrainedTokenizerBase", length: int) -> Tokens:
    """Up to `length` tokens of a text that ships with draftc and that no rounding was fitted to: chat, code, prose."""
    start, ids = _shipped_text("held_out.txt", tokenizer)
    return np.asarray((start + ids)[:length], np.int64)


def _shipped_text(name: str, tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[int]]:
    """The token that starts a text, where there is one, and the tokens of a text that ships with draftc."""
    text = resources.files("draftc.export").joinpath(name).read_text("utf-8")
    start = [tokenizer.bos_token_id] if isinstance(tokenizer.bos_token_id, int) else []
    return start, list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def eager_logits(model: "PreTrainedModel", tokens: Tokens) -> LogitRows:
    """The checkpoint's own logits for every position of `tokens` (n,), from one PyTorch pass without a cache."""
    import torch

    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits[0].float()  # (n, V)
    return dict(enumerate(logits.numpy()))


def graph_logits(decoder: Decoder, tokens: Tokens, k: int) -> LogitRows:
    """A graph's logits for `tokens` (n,), through every kind of call that the loop makes.

    A prefill chunk, a verification of k+1 tokens (fewer in a text too short for that) of which all but one are then
    rejected, single steps, and verifications to the end. Positions inside the first chunk that no call asked logits of
    are missing.
    """
    limits = decoder.limits
    rows: LogitRows = {}

    def run(width: int) -> None:
        start = len(decoder.cache)
        count = min(width, limits.max_width)
        logits = decoder.extend(tokens[start : start + width], rows=count)
        for i in range(count):
            rows[start + width - count + i] = logits[i].copy()

    decoder.cache.clear()
    chunk = min(limits.prefill_chunk, tokens.size // 2)
    run(chunk)
    k = min(k, tokens.size - chunk - 1)
    rejected = np.concatenate((tokens[chunk : chunk + 1], np.roll(tokens[:k], 1)))
    rows[chunk] = decoder.extend(rejected, rows=k + 1)[0].copy()  # writes k wrong entries …
    decoder.cache.align(np.append(tokens[: chunk + 1], -1))  # … and takes them back
    for _ in range(min(4, tokens.size - len(decoder.cache))):
        run(1)
    while (left := tokens.size - len(decoder.cache)) > 0:
        run(min(left, k + 1 if left > 2 * limits.max_width else limits.max_width))
    return rows


def text_logits(decoder: Decoder, tokens: Tokens) -> LogitRows:
    """A graph's logits for every position of `tokens` (n,), from calls of max_width tokens."""
    rows: LogitRows = {}
    decoder.cache.clear()
    for start in range(0, tokens.size, decoder.limits.max_width):
        chunk = tokens[start : start + decoder.limits.max_width]
        for i, row in enumerate(decoder.extend(chunk, rows=chunk.size)):
            rows[start + i] = row.copy()
    return rows


def perplexity(rows: LogitRows, following: Mapping[int, int], vocab_size: int) -> float:
    """exp of the mean of -log p(the token that comes next), over the positions of `following` {position: token}."""
    losses = [-_log_softmax(rows[position][:vocab_size])[token] for position, token in following.items()]
    return math.exp(math.fsum(losses) / len(losses))


def compare(reference: LogitRows, actual: LogitRows, vocab_size: int) -> Comparison:
    """Compare the positions that both have, over the first `vocab_size` logits."""
    worst = kl = scale = 0.0
    agree = 0
    positions = sorted(reference.keys() & actual.keys())
    for position in positions:
        a, b = reference[position][:vocab_size], actual[position][:vocab_size]
        if not np.isfinite(b.max()):
            raise ParityError(
                f"the graph's logits at position {position} are {b.max()}: if fp16 is too small for this model, use "
                "--precision bf16; nothing was written"
            )
        worst = max(worst, float(np.abs(a - b).max()))
        scale = max(scale, float(np.abs(a).max()))
        log_a, log_b = _log_softmax(a), _log_softmax(b)
        kl += float((np.exp(log_a) * (log_a - log_b)).sum())
        agree += int(a.argmax() == b.argmax())
    count = len(positions)
    return Comparison(count, worst, kl / count, agree / count, scale)


def check_capture(name: str, result: Comparison) -> float:
    """Return the tolerance that held, or raise ParityError: the capture must be the checkpoint, but for rounding."""
    tolerance = CAPTURE_TOLERANCE * max(1.0, result.scale)
    if result.max_abs_diff > tolerance:
        raise ParityError(
            f"{name}: the captured graph differs from the checkpoint by up to {result.max_abs_diff:.3g} in its logits "
            f"({tolerance:.2g} allowed, {result.greedy_agreement:.0%} same argmax): this architecture cannot be "
            "compiled faithfully; nothing was written"
        )
    return tolerance


def check_rounded(name: str, precision: str, result: Comparison) -> float:
    """The KL divergence that was allowed, in nats. `precision` is the name of the smaller type.

    Raises ParityError when it broke the model rather than rounded it.
    """
    allowed = MAX_HALF_KL if precision == "fp16" else MAX_KL
    if result.kl > allowed or not math.isfinite(result.kl):
        way_out = "--precision bf16" if precision == "fp16" else "--precision int8, or one without integers"
        raise ParityError(
            f"{name}: the {precision} graph predicts something else than the checkpoint (KL {result.kl:.2f} nats, "
            f"{result.greedy_agreement:.0%} same argmax): use {way_out}; nothing was written"
        )
    return allowed


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max()
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result
