"""Measuring what calls cost: a fake engine, on a fake clock that its calls advance."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from draftc.runtime.decoder import Decoder, Limits
from draftc.runtime.engine import Logits, Tokens
from draftc.runtime.errors import EngineError, UsageError
from draftc.runtime.graphio import GraphSpec
from draftc.runtime.tune import measure_costs
from tests.runtime.cost_fakes import make_machine
from tests.runtime.fakes import tokens

Cost = Callable[[int, int, int], float]  # (tokens, fill, number of the call) → milliseconds


class Clock:
    """Seconds, as engines say that they pass."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class TimedEngine:
    """Takes the time that `cost` says. `faults` by number of the call."""

    def __init__(self, clock: Clock, cost: Cost, length: int) -> None:
        self.spec = GraphSpec.decoder([(1, 2, 2)], length, 12, "float32")
        self.clock = clock
        self.cost = cost
        self.length = length
        self.calls: list[tuple[int, int, int]] = []
        self.faults: dict[int, BaseException] = {}
        self.cleared = 0

    def forward(self, tokens: Tokens, start: int, rows: int) -> Logits:
        assert tokens.dtype == np.int64
        assert 0 <= start <= self.length - tokens.size
        assert 1 <= rows <= tokens.size
        assert tokens.min() >= 0
        assert tokens.max() < 10
        if len(self.calls) in self.faults:
            raise self.faults[len(self.calls)]
        self.calls.append((tokens.size, start, rows))
        self.clock.now += self.cost(tokens.size, start, len(self.calls)) / 1e3
        return np.zeros((rows, 12), np.float32)

    def clear(self) -> None:
        self.cleared += 1

    def close(self) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("draftc.runtime.tune.time", SimpleNamespace(perf_counter=clock.perf_counter))
    return clock


def timed(
    clock: Clock, cost: Cost, max_length: int = 256, max_width: int = 32, chunk: int = 64
) -> tuple[Decoder, TimedEngine]:
    engine = TimedEngine(clock, cost, max_length + max_width)
    return Decoder(engine, Limits(max_length, max_width, chunk, 10)), engine


def verification(width: int, fill: int, call: int) -> float:
    return 10 + 0.5 * width + fill / 64


def drafting(width: int, fill: int, call: int) -> float:
    return 1 + 0.25 * width + fill / 128


def test_medians_are_what_calls_cost(clock: Clock) -> None:
    target, engine = timed(clock, verification)
    draft, draft_engine = timed(clock, drafting)
    machine = make_machine()
    costs = measure_costs(target, draft, machine)
    assert costs.machine == machine
    assert costs.draft is not None
    for graph, cost, run in ((costs.target, verification, engine), (costs.draft, drafting, draft_engine)):
        for fill, row in zip(graph.fills, graph.ms, strict=True):
            assert row == pytest.approx([cost(width, fill, 0) for width in graph.widths], abs=1e-3)
        assert graph.fills[0] < graph.fills[1] < 256
        assert {call[:2] for call in run.calls} >= {(width, fill) for width in graph.widths for fill in graph.fills}
    assert costs.target.widths[-1] == 32, "the widest verification"
    assert costs.draft.widths[-1] == 64, "the widest call of a draft that lags behind"
    assert all(rows == min(width, 32) for width, _, rows in engine.calls), "a row for each token, as in verification"
    assert all(rows == 1 for _, _, rows in draft_engine.calls), "a draft model is asked for its last row"
    assert costs.ngram_ms >= 0


@pytest.mark.parametrize(
    ("max_length", "fills"), [(2048, (128, 1024)), (4096, (128, 1024, 4064)), (32768, (128, 1024, 8192))]
)
def test_long_texts_are_measured_far_out(clock: Clock, max_length: int, fills: tuple[int, ...]) -> None:
    """What costs grow by with the fill is not extrapolated over many times the distance that was measured."""
    target, _ = timed(clock, verification, max_length=max_length)
    assert measure_costs(target, None, make_machine()).target.fills == fills


def test_a_hiccup_does_not_move_a_median(clock: Clock) -> None:
    """A call in every 7 takes a second."""

    def cost(width: int, fill: int, call: int) -> float:
        return 1000.0 if call % 7 == 0 else verification(width, fill, call)

    costs = measure_costs(timed(clock, cost)[0], None, make_machine(), budget_s=1e6)
    assert costs.draft is None
    for fill, row in zip(costs.target.fills, costs.target.ms, strict=True):
        assert row == pytest.approx([verification(width, fill, 0) for width in costs.target.widths], abs=1e-3)


def test_the_budget_bounds_the_rounds(clock: Clock) -> None:
    rounds, seconds = [], []
    for budget in (1e-9, 5.0, 8.0, 1e6):
        begin = clock.now
        rounds.append(measure_costs(timed(clock, verification)[0], None, make_machine(), budget_s=budget).rounds)
        seconds.append(clock.now - begin)
    assert rounds[0] >= 3, "a median of fewer says little"
    assert rounds == sorted(rounds)
    assert rounds[0] < rounds[-1] < 100
    assert seconds[1] <= 5
    assert seconds[2] <= 8


@pytest.mark.parametrize("budget", [0, -1, float("nan"), float("inf")])
def test_a_budget_that_is_none(clock: Clock, budget: float) -> None:
    target, engine = timed(clock, verification)
    with pytest.raises(UsageError, match="the budget must be a finite number of seconds above 0, got"):
        measure_costs(target, None, make_machine(), budget_s=budget)
    assert engine.calls == []


def test_what_the_caches_held_is_forgotten(clock: Clock) -> None:
    target, engine = timed(clock, verification)
    draft, draft_engine = timed(clock, drafting)
    text = tokens(1, 2, 3, 4)
    for graph in (target, draft):
        graph.extend(graph.sync(text), rows=1)
        assert graph.cache.tokens.tolist() == [1, 2, 3, 4]
    measure_costs(target, draft, make_machine())
    for graph, run in ((target, engine), (draft, draft_engine)):
        assert len(graph.cache) == 0
        assert graph.sync(text).tolist() == [1, 2, 3, 4], "all of it is run again"
        assert run.cleared == 1, "in buffers that hold nothing of what was measured"


@pytest.mark.parametrize("fault", [EngineError("no more"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("at", [0, 5, 60])
@pytest.mark.parametrize("which", ["target", "draft"])
def test_a_fault_in_the_middle_is_raised_and_the_caches_are_forgotten(
    clock: Clock, fault: BaseException, at: int, which: str
) -> None:
    target, engine = timed(clock, verification)
    draft, draft_engine = timed(clock, drafting)
    for graph in (target, draft):
        graph.extend(graph.sync(tokens(1, 2, 3)), rows=1)
    (engine if which == "target" else draft_engine).faults[at + 1] = fault
    with pytest.raises(type(fault)):
        measure_costs(target, draft, make_machine())
    for graph, run in ((target, engine), (draft, draft_engine)):
        assert graph.sync(tokens(1, 2, 3)).tolist() == [1, 2, 3]
        assert run.cleared == 1


@pytest.mark.parametrize(
    ("max_length", "max_width", "chunk"),
    [(8, 4, 8), (8, 8, 4), (8, 32, 8), (2, 2, 1), (1, 2, 1), (40, 2, 16), (130, 8, 64), (1030, 32, 512)],
)
def test_buffers_too_small_for_the_usual_fills(clock: Clock, max_length: int, max_width: int, chunk: int) -> None:
    """The engine checks that no call goes past its buffers; what was measured is a profile all the same."""
    target, engine = timed(clock, verification, max_length, max_width, chunk)
    draft, _ = timed(clock, drafting, max_length, max_width, chunk)
    costs = measure_costs(target, draft, make_machine())
    assert costs.draft is not None
    assert costs.target.widths[-1] <= max_width
    assert costs.draft.widths[-1] <= max(chunk, 1)
    assert max(start + width for width, start, _ in engine.calls) <= max_length + max_width
    assert np.array(costs.target.ms)[:, 0] == pytest.approx(
        [verification(1, fill, 0) for fill in costs.target.fills], abs=1e-3
    )


def test_progress_rises_to_the_end(clock: Clock) -> None:
    said: list[float] = []
    measure_costs(
        timed(clock, verification)[0],
        timed(clock, drafting)[0],
        make_machine(),
        on_progress=lambda what, done: said.append(done),
    )
    assert said == sorted(said)
    assert 0 <= said[0] < 0.1
    assert said[-1] == 1.0
    assert len(said) > 10
