"""Rewind and append fuzz: after any history of appends and rewinds, a graph computes what it does from scratch."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from draftc.runtime.check_numerics import Difference, Graph, WidthVariance, difference, recomputed_rows, rows_of
from draftc.runtime.engine import Logits, Tokens
from draftc.runtime.session import Session

__all__ = ["CacheDetails", "GraphFuzz", "check_cache", "fuzz"]

ROUNDS = 24
MAX_TEXT = 96
REWIND_SHARE = 0.6


@dataclass(frozen=True)
class GraphFuzz:
    """One graph: `compared` rows of logits, the difference to a recompute from an empty cache.

    `found` is that of the text which comes closest to what is `allowed` there, or is farthest beyond; `worst_text` is
    its length; `argmax_changes` counts rows with another best
    token.
    """

    graph: str
    calls: int
    rewinds: int
    compared: int
    found: Difference
    allowed: Difference
    worst_text: int
    argmax_changes: int
    variance: WidthVariance

    @property
    def passed(self) -> bool:
        """Whether wide and narrow calls agree, and rewound caches with fresh ones."""
        return self.variance.sound and self.found.within(self.allowed)


@dataclass(frozen=True)
class CacheDetails:
    """All graphs of the session."""

    graphs: tuple[GraphFuzz, ...]

    @property
    def passed(self) -> bool:
        """Whether every graph passed."""
        return all(graph.passed for graph in self.graphs)

    @property
    def verdict(self) -> str:
        """One line."""
        for graph in self.graphs:
            if not graph.variance.sound:
                return (
                    f"{graph.graph}: calls of different widths disagree over the same text: logits differ by "
                    f"{graph.variance.rms:.3g} rms, rounding explains {graph.variance.ceiling:.2g}"
                )
        for graph in self.graphs:
            if not graph.passed:
                return (
                    f"{graph.graph}: after rewinds and appends logits differ from a recompute by {graph.found.rms:.3g} "
                    f"rms at {graph.worst_text} tokens (allowed {graph.allowed.rms:.2g})"
                )
        return "; ".join(
            f"{graph.graph}: {graph.calls} appends, {graph.rewinds} rewinds, logits within {graph.found.rms:.2g} rms "
            f"of a recompute (allowed {graph.allowed.rms:.2g})"
            for graph in self.graphs
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """None."""
        return ()


def check_cache(
    session: Session,
    graphs: list[Graph],
    variances: list[WidthVariance],
    corpus: Tokens,
    seed: int,
    on_progress: Callable[[float], None],
) -> CacheDetails:
    """Fuzz each of `graphs`. `corpus` (n,) is what the texts are cut from."""
    session.reset()
    results = []
    for graph, variance in zip(graphs, variances, strict=True):
        results.append(fuzz(graph, variance, corpus, seed))
        on_progress(len(results) / len(graphs))
    return CacheDetails(tuple(results))


@dataclass(frozen=True)
class _Snapshot:
    text: Tokens  # (n,)
    rows: Logits  # (R, V): after its last tokens


def fuzz(graph: Graph, variance: WidthVariance, corpus: Tokens, seed: int, rounds: int = ROUNDS) -> GraphFuzz:
    """`rounds` appends of 1 … max_width tokens, most of them behind a rewind, then the same texts from scratch.

    All appends come first: a recompute overwrites the buffers that they are about.
    """
    decoder = graph.decoder
    rng = np.random.default_rng(seed)
    longest = min(MAX_TEXT, decoder.limits.max_length)
    text = np.empty(0, np.int64)
    snapshots = []
    rewinds = 0
    decoder.cache.clear()
    for _ in range(rounds):
        if text.size == longest or (text.size and rng.random() < REWIND_SHARE):
            text = text[: rng.integers(text.size)]
            rewinds += 1
        width = int(rng.integers(1, min(decoder.limits.max_width, longest - text.size) + 1))
        begin = int(rng.integers(corpus.size))
        # Cut at random, so that what is appended is not what was there before the rewind.
        text = np.concatenate((text, np.resize(corpus[begin:], width)))
        rows = rows_of(decoder, text, width)
        picked = rows[[0, -1]] if len(rows) == width > 1 else rows[-1:]
        snapshots.append((_Snapshot(text, picked), width))
    worst, changes, compared = (0.0, Difference(), variance.limit, 0), 0, 0
    for snapshot, width in snapshots:
        fresh = recomputed_rows(decoder, snapshot.text, decoder.limits.max_width)
        wanted = fresh[[-width, -1]] if len(snapshot.rows) == 2 and width <= len(fresh) else fresh[-1:]
        rows = snapshot.rows[-len(wanted) :]
        found = difference(rows, wanted)
        allowed = variance.limit_for(found, decoder, snapshot.text, width)
        share = max(found.rms / allowed.rms, found.spread / allowed.spread)
        worst = max(worst, (share, found, allowed, snapshot.text.size), key=lambda text: text[0])
        changes += int((rows.argmax(axis=1) != wanted.argmax(axis=1)).sum())
        compared += len(wanted)
    _, found, allowed, size = worst
    return GraphFuzz(graph.name, len(snapshots), rewinds, compared, found, allowed, size, changes, variance)
