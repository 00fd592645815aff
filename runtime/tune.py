"""`draftc tune`: measure what calls of a bundle's graphs cost on this machine, for `profile.json`.

Calls of both graphs are timed in turns, round after round, as the loop makes them: weights that do not fit into a cache
are cold, and thread pools wake up. Each figure is the median of its rounds.
"""

import importlib.metadata
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from draftc.runtime.costs import CostProfile, GraphCosts, MachineId
from draftc.runtime.decoder import Decoder, Limits
from draftc.runtime.errors import UsageError
from draftc.runtime.ngrams import NgramIndex
from draftc.runtime.reports import Progress

__all__ = ["BUDGET_S", "measure_costs"]

BUDGET_S = 20.0
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 32)  # of a target call
DRAFT_WIDTHS = (1, 2, 3, 4, 8, 16, 32, 64, 128)  # of a draft call: one, or as many as it lags behind
FILLS = (128, 1024, 8192)  # tokens in the cache, as far as a text may become so long, and some way beyond
LEAST_ROUNDS, MOST_ROUNDS = 3, 15
NGRAM_TEXT = 512  # tokens of the text that a lookup is timed in

Cell = tuple[Decoder, int, int]  # (graph, tokens in its cache, tokens of the call)


@dataclass(frozen=True)
class _Axes:
    """What is measured of a graph: calls of `widths` at `fills`, asking for up to `rows` rows of logits."""

    fills: tuple[int, ...]
    widths: tuple[int, ...]
    rows: int


def measure_costs(
    target: Decoder,
    draft: Decoder | None,
    machine: MachineId,
    *,
    budget_s: float = BUDGET_S,
    on_progress: Progress | None = None,
) -> CostProfile:
    """Time calls of every width at two or three fills, for about `budget_s` seconds; at least three rounds are made.

    What the caches held is overwritten; they are empty afterwards. Raises UsageError for a budget that is not
    above 0 or has no end, EngineError.
    """
    if not (budget_s > 0 and math.isfinite(budget_s)):
        raise UsageError(f"the budget must be a finite number of seconds above 0, got {budget_s}")
    report = on_progress or (lambda what, done: None)
    axes = {target: _axes(target.limits, WIDTHS, target.limits.max_width, rows=target.limits.max_width)}
    if draft is not None:
        axes[draft] = _axes(draft.limits, DRAFT_WIDTHS, draft.limits.prefill_chunk, rows=1)
    # Target and draft in turns; narrow and wide calls mixed, so that a drift of the machine meets all of them.
    queues = [[(graph, fill, width) for width in own.widths for fill in own.fills] for graph, own in axes.items()]
    placed = [(i / len(queue), cell) for queue in queues for i, cell in enumerate(queue)]
    cells = [cell for _, cell in sorted(placed, key=lambda one: one[0])]
    times: dict[Cell, list[float]] = {cell: [] for cell in cells}
    begin = time.perf_counter()
    try:
        for graph, own in axes.items():  # kernels are chosen and scratch memory is taken at the first call of a width
            for width in own.widths:
                _time(graph, 0, width, own.rows)
        started = time.perf_counter()
        rounds = 0
        while rounds < MOST_ROUNDS:
            now = time.perf_counter()
            if rounds >= LEAST_ROUNDS and now - begin + (now - started) / rounds > budget_s:
                break
            for i, cell in enumerate(cells):
                times[cell].append(_time(*cell, axes[cell[0]].rows))
                spent = (time.perf_counter() - begin) / budget_s
                report("measuring the cost of calls", min(0.99, max(spent, (rounds + i / len(cells)) / MOST_ROUNDS)))
            rounds += 1
    finally:
        for graph in axes:
            graph.mark_broken()  # the buffers hold what no text wrote
    report("measured", 1.0)

    def costs(graph: Decoder) -> GraphCosts:
        own = axes[graph]
        medians = [[statistics.median(times[graph, fill, width]) for width in own.widths] for fill in own.fills]
        ms = tuple(tuple(round(one, 4) for one in row) for row in medians)
        return GraphCosts(widths=own.widths, fills=own.fills, ms=ms)

    return CostProfile(
        draftc_version=importlib.metadata.version("draftc"),
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        machine=machine,
        rounds=rounds,
        target=costs(target),
        draft=None if draft is None else costs(draft),
        ngram_ms=round(_lookup_ms(), 4),
    )


def _axes(limits: Limits, widths: tuple[int, ...], widest: int, rows: int) -> _Axes:
    """Those that the graph's buffers and limits allow, calls being of up to `widest` tokens."""
    widest = min(widest, limits.max_length)
    longest = limits.max_length - widest
    fills = {min(fill, longest) for fill in FILLS if fill <= FILLS[1] or longest >= 2 * FILLS[1]}
    if len(fills) == 1:
        fills.add(longest // 2)
    return _Axes(tuple(sorted(fills)), tuple(width for width in widths if width <= widest), rows)


def _time(graph: Decoder, fill: int, width: int, rows: int) -> float:
    """Milliseconds of one call of `width` tokens at `fill`, with up to `rows` rows of logits, as the loop asks for."""
    tokens = np.arange(width, dtype=np.int64) % graph.limits.vocab_size
    begin = time.perf_counter()
    graph.engine.forward(tokens, fill, min(width, rows))
    return (time.perf_counter() - begin) * 1e3


def _lookup_ms(clock: Callable[[], float] = time.perf_counter) -> float:
    """Milliseconds that the index of n-grams takes per step: a token is added, and its continuation looked up."""
    index = NgramIndex(2, 6)
    text = (np.arange(NGRAM_TEXT) ** 2 % 97).tolist()
    begin = clock()
    for token in text:
        index.append(token)
        if (match := index.match()) is not None:
            index.copy(match[0], 8)
    return (clock() - begin) * 1e3 / NGRAM_TEXT
