"""Warping against transformers' processors, against full sorts, and against closed forms."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftc.runtime.engine import Logits
from draftc.runtime.errors import UsageError
from draftc.runtime.warp import (
    Distribution,
    Sampling,
    distances,
    min_p,
    nucleus_threshold,
    penalise,
    softmax,
    top_k_threshold,
    warp,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_logits(seed: int, vocab: int, spread: float = 3.0) -> Logits:
    return (spread * np.random.default_rng(seed).standard_normal(vocab)).astype(np.float32)


def peer(logits: Logits, seen: list[int], sampling: Sampling) -> NDArray[np.float64]:
    """What transformers' `generate` samples from: its processors, in its order."""
    processors: list[Any] = []
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        processors.append(MinPLogitsWarper(sampling.min_p))
    ids = torch.tensor([seen], dtype=torch.int64)
    pipeline: Any = LogitsProcessorList(processors)
    scores = pipeline(ids, torch.from_numpy(logits)[None].double())
    return np.asarray(torch.softmax(scores[0], -1))


@given(
    seed=st.integers(0, 2**32),
    vocab=st.integers(2, 400),
    temperature=st.floats(0.05, 20),
    k=st.one_of(st.just(0), st.integers(1, 500)),
    nucleus=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    ratio=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    repetition=st.one_of(st.just(1.0), st.floats(0.3, 3)),
    seen=st.lists(st.integers(0, 399), max_size=30),
)
@settings(deadline=None, max_examples=80)
def test_any_combination_is_transformers(
    seed: int, vocab: int, temperature: float, k: int, nucleus: float, ratio: float, repetition: float, seen: list[int]
) -> None:
    sampling = Sampling(temperature, k, nucleus, ratio, repetition_penalty=repetition)
    logits = random_logits(seed, vocab)
    assume(np.unique(logits).size == vocab)
    seen = [token % vocab for token in seen]
    history = dict.fromkeys(seen, 1)
    # Where a threshold is met to within rounding, either answer is right.
    untruncated = Sampling(temperature, k, repetition_penalty=repetition)
    p = np.sort(peer(logits, seen, untruncated))[::-1]
    assume(np.abs(np.cumsum(p) - nucleus).min() > 1e-5 or nucleus == 1)
    assume(ratio == 1 or np.abs(p / p[0] - ratio).min() > 1e-5)
    # A repetition penalty may move two logits into each other.
    assume(k == 0 or k >= vocab or p[k] == 0)

    ours = warp(penalise(logits, sampling, history, {}), sampling)
    theirs = peer(logits, seen, sampling)
    np.testing.assert_array_equal(ours > 0, theirs > 0)
    np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=1e-9)


def ranks(p: Distribution) -> Logits:
    """Distances that order the tokens as `p` does, ties included."""
    return np.unique(-p, return_inverse=True)[1].astype(np.float32)


def by_sort(p: Distribution, mass: float) -> float:
    """The nucleus by its definition: the smallest t with Σ p[ranks <= t] >= mass."""
    order = np.argsort(-p)
    reached = np.flatnonzero(np.cumsum(p[order]) >= mass * p.sum())
    return float(ranks(p)[order[reached[0]]]) if reached.size else math.inf


@pytest.mark.parametrize("vocab", [2, 3, 63, 64, 65, 4095, 4096, 4097, 152_064])
@pytest.mark.parametrize("shape", ["flat", "zipf", "peaked", "random", "tied"])
def test_nucleus_threshold_is_that_of_a_full_sort(vocab: int, shape: str) -> None:
    rng = np.random.default_rng(vocab)
    weights = {
        "flat": np.ones(vocab),
        "zipf": 1 / np.arange(1.0, vocab + 1),
        "peaked": np.exp(-np.arange(vocab) / 2.0),
        "random": np.exp(4 * rng.standard_normal(vocab)),
        "tied": rng.integers(0, 4, vocab) + np.arange(vocab) % 2,
    }[shape]
    p = rng.permutation(weights / weights.sum())
    for mass in (1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 1e-12):
        assert nucleus_threshold(ranks(p), p, mass) == by_sort(p, mass)
        assert nucleus_threshold(ranks(p), 1024 * p, mass) == by_sort(p, mass)


@given(weights=st.lists(st.integers(0, 4), min_size=1, max_size=12).filter(any), mass=st.integers(1, 20))
@settings(deadline=None)
def test_the_nucleus_keeps_ties_and_nothing_that_it_could_lose(weights: list[int], mass: int) -> None:
    """All sizes are multiples of 1/64, so that sums are exact and a mass may be met exactly."""
    p = np.array([*weights, 64 - sum(weights)]) / 64
    y = ranks(p)
    threshold = nucleus_threshold(y, p, mass / 20)
    assert p[y <= threshold].sum() >= mass / 20
    assert p[y < threshold].sum() < mass / 20, "a smaller set that respects ties would do"


def test_a_nucleus_with_ties_is_not_cut_between_them() -> None:
    logits = np.log(np.array([1, 3, 3, 3], np.float32))
    np.testing.assert_allclose(warp(logits, Sampling(1.0, top_p=0.31)), [0, 1 / 3, 1 / 3, 1 / 3], rtol=1e-6)


def test_rounding_below_the_mass_keeps_everything() -> None:
    p = np.full(1000, 0.1)  # one order of adding gives another sum than the other
    assert np.cumsum(p)[-1] < p.sum()
    assert nucleus_threshold(np.zeros(1000, np.float32), p, 1 - 1e-16) == math.inf


def test_top_k_keeps_ties_with_the_kth() -> None:
    scores = np.array([0, 5, 3, 3, 1], np.float32)
    assert np.flatnonzero(warp(scores, Sampling(temperature=1, top_k=2))).tolist() == [1, 2, 3]
    assert np.flatnonzero(warp(scores, Sampling(temperature=1, top_k=1))).tolist() == [1]
    assert [top_k_threshold(distances(scores), k) for k in (1, 2, 3, 4, 5)] == [0, 2, 2, 4, 5]
    for k in (0, 5, 99):  # off, or nothing to cut
        np.testing.assert_array_equal(warp(scores, Sampling(temperature=1, top_k=k)), softmax(scores))


@pytest.mark.parametrize(
    ("filters", "kept"),
    [({"top_k": 2}, [1, 3]), ({"top_p": 0.4}, [1, 3]), ({"top_k": 3, "top_p": 0.6}, [1, 3]), ({"top_p": 0.1}, [3])],
)
@pytest.mark.parametrize("temperature", [1e9, 1e30])
def test_the_hottest_temperature_does_not_make_ties(
    temperature: float, filters: dict[str, Any], kept: list[int]
) -> None:
    """The probabilities are equal in float32; which logits are larger is known all the same."""
    p = warp(np.array([1, 3, 0, 4, 2], np.float32), Sampling(temperature, **filters))
    assert np.flatnonzero(p).tolist() == kept
    np.testing.assert_allclose(p[kept], 1 / len(kept), rtol=1e-6)


def test_distances_that_float32_only_holds_as_denormals_are_ties() -> None:
    tiny = np.float32(2.0**-126)
    y = distances(np.array([2 * tiny, tiny, 1.5 * tiny, -np.inf, 0], np.float32))
    np.testing.assert_array_equal(y, np.array([0, tiny, 0, np.inf, 2 * tiny], np.float32))
    with np.errstate(all="raise"):
        assert distances(np.array([3e38, -3e38], np.float32)).tolist() == [0, math.inf]


def test_min_p_is_relative_to_the_largest() -> None:
    np.testing.assert_array_equal(min_p(np.array([0.5, 0.25, 0.2, 0.05]), 0.5), [0.5, 0.25, 0, 0])


FILTERS = [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.4}, {"top_k": 3, "top_p": 0.7, "min_p": 0.4}]


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-6, 0.01, 1.0, 1e3, 1e30, 1e300])
def test_extreme_temperatures_give_a_distribution(temperature: float, filters: dict[str, Any]) -> None:
    logits = np.array([-np.inf, 1.0, 1.001, -30.0, 1e4, 9_999.0, -1e30], np.float32)
    with np.errstate(over="raise", invalid="raise", divide="raise"):  # numpy would print a warning for each
        p = warp(logits, Sampling(temperature, **filters))
    assert abs(p.sum() - 1) < 1e-12
    assert (p >= 0).all()
    assert p[0] == 0, "a forbidden token came back"
    assert p[4] == p.max()
    if temperature <= 1e-6:
        assert p[4] == 1
    if temperature >= 1e30 and not filters:
        np.testing.assert_allclose(p[1:6], p[1], rtol=1e-6)


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("vocab", [2, 5, 1000])
@pytest.mark.parametrize("temperature", [1e-6, 1.0, 1e3])
def test_equal_logits_stay_equal(vocab: int, temperature: float, filters: dict[str, Any]) -> None:
    p = warp(np.full(vocab, -7.25, np.float32), Sampling(temperature, **filters))
    np.testing.assert_allclose(p, 1 / vocab, rtol=1e-12)


@pytest.mark.parametrize("filters", FILTERS)
def test_the_only_allowed_token_is_certain(filters: dict[str, Any]) -> None:
    logits = np.full(50, -np.inf, np.float32)
    logits[17] = -3
    p = warp(logits, Sampling(0.7, **filters))
    assert p[17] == 1
    assert p.sum() == 1


def test_softmax_in_double_precision_over_a_large_vocabulary() -> None:
    logits = random_logits(1, 152_064)
    exact = np.exp(logits.astype(np.float64) - float(logits.max()))
    p = softmax(logits)
    assert abs(p.sum() - 1) < 1e-12
    np.testing.assert_allclose(p, exact / exact.sum(), rtol=1e-5)


def test_presence_and_frequency_penalties_count_the_output_alone() -> None:
    logits = np.array([1.0, 2.0, -3.0, 0.5], np.float32)
    sampling = Sampling(1.0, presence_penalty=0.5, frequency_penalty=0.25)
    scores = penalise(logits, sampling, seen={0: 3, 1: 2, 2: 1}, generated={1: 2, 2: 1})
    np.testing.assert_allclose(scores, [1.0, 2.0 - 0.5 - 2 * 0.25, -3.0 - 0.5 - 0.25, 0.5])
    np.testing.assert_array_equal(logits, np.array([1.0, 2.0, -3.0, 0.5], np.float32))


def test_negative_penalties_encourage() -> None:
    sampling = Sampling(1.0, presence_penalty=-1.0, frequency_penalty=-0.5)
    assert penalise(np.zeros(3, np.float32), sampling, {}, {2: 2}).tolist() == [0, 0, 2]


def test_repetition_penalty_counts_prompt_and_output_once() -> None:
    scores = penalise(np.array([2, -2, 2, 0], np.float32), Sampling(1.0, repetition_penalty=2), {0: 5, 1: 1, 3: 1}, {})
    assert scores.tolist() == [1, -4, 2, 0]


def test_logit_bias_is_added_last_and_minus_infinity_forbids() -> None:
    sampling = Sampling(1.0, repetition_penalty=2, logit_bias={0: 3.0, 2: -math.inf})
    scores = penalise(np.array([4, 1, 9], np.float32), sampling, {0: 1}, {})
    assert scores.tolist() == [5, 1, -math.inf]
    assert warp(scores, sampling)[2] == 0


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -0.1, "0 (greedy) or more"),
        ("temperature", math.nan, "0 (greedy) or more"),
        ("temperature", math.inf, "finite"),
        ("top_k", -1, "0 (off) or more"),
        ("top_k", 1.5, "whole number"),
        ("top_p", 0.0, "in (0, 1]"),
        ("top_p", -0.5, "in (0, 1]"),
        ("top_p", 1.0001, "in (0, 1]"),
        ("top_p", math.nan, "in (0, 1]"),
        ("min_p", -0.01, "in [0, 1]"),
        ("min_p", 1.01, "in [0, 1]"),
        ("min_p", math.nan, "in [0, 1]"),
        ("repetition_penalty", 0.0, "above 0"),
        ("repetition_penalty", -1.0, "above 0"),
        ("repetition_penalty", math.inf, "finite"),
        ("repetition_penalty", math.nan, "above 0"),
        ("presence_penalty", math.nan, "finite"),
        ("presence_penalty", -math.inf, "finite"),
        ("frequency_penalty", math.inf, "finite"),
        ("logit_bias", {3: math.nan}, "finite numbers or -inf"),
        ("logit_bias", {3: math.inf}, "finite numbers or -inf"),
    ],
)
def test_a_value_out_of_range_is_named(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(UsageError) as caught:
        Sampling(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"{field} must be ")
    assert allowed in message
    assert message.endswith(f"got {value!r}")
    assert "\n" not in message


def test_bounds_that_are_allowed() -> None:
    Sampling(0.0, 0, 1.0, 0.0)
    Sampling(1e-9, 10**9, 1e-9, 1.0, 1e-3, -2.0, 2.0, {0: -math.inf})


def test_what_needs_the_history() -> None:
    assert Sampling().greedy
    assert not Sampling(temperature=0.1).greedy
    assert not Sampling(1.0, 5, 0.5, 0.1).edits_logits
    for edit in (
        Sampling(repetition_penalty=1.1),
        Sampling(presence_penalty=0.1),
        Sampling(frequency_penalty=0.1),
        Sampling(logit_bias={1: 1.0}),
    ):
        assert edit.edits_logits
