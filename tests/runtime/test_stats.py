"""The figures, from counts small enough to do by hand."""

import math
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftc.runtime.stats import Stats


def test_counts_by_position() -> None:
    stats = Stats()
    for proposed, accepted in [(3, 3), (3, 1), (0, 0), (2, 0), (1, 1)]:
        stats.count(proposed, accepted)
    assert stats.proposed_at == [4, 3, 2]
    assert stats.accepted_at == [3, 1, 1]
    assert (stats.proposed, stats.accepted) == (9, 5)
    assert stats.acceptance_rate == pytest.approx(5 / 9)
    assert stats.acceptance_by_position == pytest.approx([3 / 4, 1 / 3, 1 / 2])


@given(st.lists(st.integers(0, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=20))
@settings(deadline=None, max_examples=50)
def test_totals_are_those_of_the_proposals(proposals: list[tuple[int, int]]) -> None:
    stats = Stats()
    for proposed, accepted in proposals:
        stats.count(proposed, accepted)
    assert stats.proposed == sum(proposed for proposed, _ in proposals)
    assert stats.accepted == sum(accepted for _, accepted in proposals)
    assert all(0 <= rate <= 1 for rate in stats.acceptance_by_position)
    assert stats.accepted_at == sorted(stats.accepted_at, reverse=True), "a place is accepted only behind the others"


def test_two_requests_share_nothing() -> None:
    Stats().count(2, 1)
    assert Stats().proposed_at == []


def test_nothing_done_is_nan_not_zero() -> None:
    stats = Stats()
    for figure in ("acceptance_rate", "mean_acceptance_length", "tpot", "tokens_per_second"):
        assert math.isnan(getattr(stats, figure)), figure
    assert stats.acceptance_by_position == []
    assert math.isnan(Stats(new_tokens=1, decode_s=0.1).tpot)
    assert math.isnan(Stats(new_tokens=5).tokens_per_second), "no time has passed"


def test_speeds() -> None:
    stats = Stats(new_tokens=11, steps=4, step_tokens=10, prefill_s=0.25, decode_s=2.0)
    assert stats.mean_acceptance_length == 2.5
    assert stats.ttft == 0.25
    assert stats.tpot == pytest.approx(0.2)
    assert stats.tokens_per_second == pytest.approx(5)


def test_other_time_is_what_the_phases_leave() -> None:
    assert Stats(decode_s=1.0, draft_s=0.25, verify_s=0.5, accept_s=0.125).other_s == pytest.approx(0.125)
    assert Stats(decode_s=1.0, draft_s=0.6, verify_s=0.5).other_s == 0


def test_phases_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([10.0, 10.5, 20.0, 20.25, 30.0, 31.0])
    monkeypatch.setattr("draftc.runtime.stats.time.perf_counter", lambda: next(ticks))
    stats = Stats()
    for name in ("draft_s", "draft_s", "verify_s"):
        with stats.phase(name):
            pass
    assert (stats.draft_s, stats.verify_s, stats.accept_s) == (0.75, 1.0, 0.0)


def test_every_time_is_in_seconds_by_name() -> None:
    """Readers of the JSON rely on the suffix."""
    times = {field.name for field in fields(Stats) if field.type is float}
    assert times == {name for name in (field.name for field in fields(Stats)) if name.endswith("_s")}
