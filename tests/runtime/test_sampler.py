"""One request's draws and history."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftc.runtime.errors import EngineError, UsageError
from draftc.runtime.sampler import Sampler
from draftc.runtime.warp import LogitsMask, Sampling
from tests.runtime.fakes import reference_distribution

LAST_BELOW_ONE = float(np.nextafter(1.0, 0.0))
EDITS = Sampling(
    0.8, repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=-0.3, logit_bias={1: 0.9, 4: -np.inf}
)


class Scripted(Sampler):
    """Its uniform variable is `u`."""

    u = 0.0

    def uniform(self) -> float:
        return self.u


def scripted() -> Scripted:
    return Scripted(Sampling(1.0), [], 8, seed=0)


@given(weights=st.lists(st.integers(0, 5), min_size=1, max_size=9).filter(any))
@settings(deadline=None)
def test_each_token_is_drawn_on_an_interval_as_long_as_its_probability(weights: list[int]) -> None:
    """Probabilities are multiples of 1/64, so that the ends of the intervals are exact."""
    p = np.array([*weights, 64 - sum(weights)]) / 64
    sampler = scripted()
    ends = np.cumsum(p)
    for token in np.flatnonzero(p).tolist():
        for u in (ends[token] - p[token], ends[token] - p[token] / 2, float(np.nextafter(ends[token], 0))):
            sampler.u = u
            assert sampler.draw(p) == token


@given(
    weights=st.lists(st.one_of(st.just(0.0), st.floats(1e-12, 1)), min_size=1, max_size=50).filter(any),
    u=st.one_of(st.just(0.0), st.just(LAST_BELOW_ONE), st.floats(0, LAST_BELOW_ONE)),
)
@settings(deadline=None, max_examples=150)
def test_a_token_of_probability_zero_is_never_drawn(weights: list[float], u: float) -> None:
    p = np.array(weights)
    sampler = scripted()
    for total in (p.sum(), p.sum() * (1 + 1e-9), p.sum() * (1 - 1e-9)):  # rounding leaves sums near 1
        sampler.u = u
        assert p[sampler.draw(p / total)] > 0


def test_zeros_at_both_ends_are_skipped() -> None:
    sampler = scripted()
    p = np.array([0.0, 0.0, 0.3, 0.0, 0.7, 0.0, 0.0])
    for u, token in ((0.0, 2), (0.3, 4), (LAST_BELOW_ONE, 4)):
        sampler.u = u
        assert sampler.draw(p) == token


def test_a_large_vocabulary_is_drawn_from_evenly() -> None:
    """Inversion over 152k entries: the u-quantile of a flat distribution is u * V."""
    sampler = scripted()
    p = np.full(152_064, 1 / 152_064)
    for u in np.linspace(0, LAST_BELOW_ONE, 50).tolist():
        sampler.u = u
        assert abs(sampler.draw(p) - u * p.size) <= 1


@given(
    prompt=st.lists(st.integers(0, 5), max_size=6),
    moves=st.lists(st.one_of(st.integers(0, 5), st.just(None)), max_size=25),
    seed=st.integers(0, 999),
)
@settings(deadline=None, max_examples=60)
def test_after_any_pushes_and_pops_the_history_is_the_text(
    prompt: list[int], moves: list[int | None], seed: int
) -> None:
    """Against a reference that counts tokens anew, and a mask that is told the generated tokens."""
    logits = np.random.default_rng(seed).standard_normal(6).astype(np.float32)
    generated: list[int] = []
    told: list[list[int]] = []

    def mask(tokens: Sequence[int]) -> NDArray[np.bool_]:
        told.append(list(tokens))
        allowed: NDArray[np.bool_] = np.arange(6) != len(tokens) % 3
        return allowed

    sampler = Sampler(EDITS, prompt, 6, seed=0, logits_mask=mask)
    for move in moves:
        if move is not None:
            generated.append(move)
            sampler.push(move)
        elif generated:
            count = 1 + len(generated) // 2
            del generated[-count:]
            sampler.pop(count)
    expected = reference_distribution(logits, EDITS, prompt, generated, mask)
    np.testing.assert_allclose(sampler.distribution(logits), expected, atol=1e-6)
    assert sampler.argmax(logits) == expected.argmax()
    assert told == [generated] * 3


def test_without_edits_the_history_changes_nothing() -> None:
    logits = np.arange(4, dtype=np.float32)
    sampler = Sampler(Sampling(1.0), [0, 1], 4, seed=0)
    before = sampler.distribution(logits)
    sampler.push(3)
    np.testing.assert_array_equal(sampler.distribution(logits), before)


def test_logits_are_left_as_they_are() -> None:
    """They are a view of the engine's buffer, and logprobs are read from it afterwards."""
    logits = np.arange(6, dtype=np.float32)
    sampler = Sampler(EDITS, [1, 2], 6, seed=0, logits_mask=lambda _: np.arange(6) > 2)
    sampler.push(3)
    sampler.distribution(logits)
    sampler.argmax(logits)
    np.testing.assert_array_equal(logits, np.arange(6))


def test_same_seed_same_draws() -> None:
    p = np.full(100, 0.01)

    def draws(seed: int | None) -> list[float]:
        sampler = Sampler(Sampling(1.0), [], 100, seed)
        return [value for _ in range(10) for value in (sampler.uniform(), sampler.draw(p))]

    assert draws(7) == draws(7)
    assert draws(7) != draws(8)
    assert draws(0) == draws(0)


def test_a_seed_that_was_not_given_is_fresh_and_reproduces_the_request() -> None:
    one, two = (Sampler(Sampling(1.0), [], 4) for _ in range(2))
    assert one.seed != two.seed
    again = Sampler(Sampling(1.0), [], 4, seed=one.seed)
    assert [again.uniform() for _ in range(5)] == [one.uniform() for _ in range(5)]


def test_uniform_is_in_its_range_and_uses_its_bits() -> None:
    sampler = Sampler(Sampling(1.0), [], 4, seed=3)
    values = [sampler.uniform() for _ in range(2000)]
    assert all(0 <= value < 1 for value in values)
    assert len(set(values)) == 2000


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 3, 6])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, top_p=0.9), EDITS], ids=["greedy", "plain", "edits"])
def test_nan_and_infinite_logits_are_an_engine_error(broken: float, place: int, sampling: Sampling) -> None:
    logits = np.arange(7, dtype=np.float32)
    logits[place] = broken
    for method in ("argmax", "distribution"):
        with pytest.raises(EngineError, match=rf"returned {broken} among its logits.*draftc verify"):
            getattr(Sampler(sampling, [0], 7, seed=0), method)(logits)


def test_logits_that_are_all_minus_infinity_are_an_engine_error() -> None:
    for method in ("argmax", "distribution"):
        with pytest.raises(EngineError, match="-inf"):
            getattr(Sampler(Sampling(1.0), [], 3, seed=0), method)(np.full(3, -np.inf, np.float32))


def test_some_logits_may_be_minus_infinity() -> None:
    sampler = Sampler(Sampling(1.0), [], 3, seed=0)
    logits = np.array([-np.inf, 0, 0], np.float32)
    np.testing.assert_allclose(sampler.distribution(logits), [0, 0.5, 0.5])
    assert sampler.argmax(logits) == 1


def test_the_mask_forbids_and_none_allows_everything() -> None:
    logits = np.array([3, 2, 1], np.float32)
    masked = Sampler(Sampling(1.0), [], 3, seed=0, logits_mask=lambda _: np.array([False, True, True]))
    assert masked.argmax(logits) == 1
    assert masked.distribution(logits)[0] == 0
    free = Sampler(Sampling(1.0), [], 3, seed=0, logits_mask=lambda _: None)
    assert free.argmax(logits) == 0


def test_a_mask_of_another_shape_or_without_a_token_is_refused() -> None:
    logits = np.zeros(3, np.float32)
    for mask, message in (
        (np.ones(4, bool), r"shape \(4,\), expected \(3,\)"),
        (np.ones((1, 3), bool), r"shape \(1, 3\), expected \(3,\)"),
        (np.zeros(3, bool), "allows no token"),
    ):
        sampler = Sampler(Sampling(1.0), [], 3, seed=0, logits_mask=lambda _, mask=mask: mask)  # type: ignore[misc]
        with pytest.raises(UsageError, match=message):
            sampler.distribution(logits)


def test_arguments_out_of_range_are_named() -> None:
    with pytest.raises(UsageError, match="seed must be a whole number of 0 or more, got -1"):
        Sampler(Sampling(), [], 10, seed=-1)
    for token in (10, -1):
        with pytest.raises(UsageError, match=f"logit_bias names token {token}, outside the vocabulary of 10"):
            Sampler(Sampling(logit_bias={token: 1.0}), [], 10)


@given(seed=st.integers(0, 2**40), counts=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=6))
@settings(deadline=None, max_examples=50)
def test_a_block_of_draws_is_the_same_draws_and_what_was_not_used_comes_again(
    seed: int, counts: list[tuple[int, int]]
) -> None:
    blocks, one_by_one = (Sampler(Sampling(1.0), [], 8, seed=seed) for _ in range(2))
    for count, unused in counts:
        block = blocks.uniforms(count)
        assert block.dtype == np.float32
        unused = min(unused, count)
        blocks.give_back(unused)
        for cut in block[: count - unused].tolist():
            whole = one_by_one.uniform()
            assert whole - 2**-24 < cut <= whole
    assert blocks.uniform() == one_by_one.uniform()


def test_no_draw_of_a_block_reaches_one() -> None:
    """Rounding to the nearest float32 would turn one in 2**25 draws into 1, which is no draw."""
    sampler = scripted()
    sampler._rng = type("Top", (), {"random": lambda self, count: np.full(count, LAST_BELOW_ONE)})()
    assert sampler.uniforms(3).tolist() == [1 - 2**-24] * 3


@pytest.mark.parametrize(
    ("sampling", "mask", "sees"),
    [
        (Sampling(0.7, top_k=4), None, False),
        (Sampling(), None, False),
        (Sampling(0.7), lambda generated: None, True),
        (EDITS, None, True),
    ],
)
def test_who_needs_the_text_besides_the_logits(sampling: Sampling, mask: LogitsMask | None, sees: bool) -> None:
    assert Sampler(sampling, [1], 8, seed=0, logits_mask=mask).sees_text == sees
