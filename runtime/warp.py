"""From logits to the distribution that a token is drawn from: penalties → temperature → top-k → top-p → min-p.

The order is transformers', whose top-k is the same set as one before the temperature. Every function is pure numpy
over one row of the vocabulary, and target and draft go through the same ones: rejection sampling is exact only if p and
q are the realised, warped distributions.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from draftc.runtime.engine import Logits
from draftc.runtime.errors import UsageError

__all__ = [
    "LEAST_DISTANCE",
    "TEMPERATURES",
    "Distribution",
    "LogitsMask",
    "Sampling",
    "distances",
    "min_p",
    "nucleus_threshold",
    "penalise",
    "softmax",
    "top_k_threshold",
    "warp",
]

Distribution = NDArray[np.float64]  # (V,), sums to 1

TEMPERATURES = (1e-30, 1e30)  # least and largest: float32 holds them and their reciprocals
SLACK = 1e-6  # more than float32 rounds by
LEAST_DISTANCE = np.float32(2.0**-126)  # the smallest float32 that is not denormal

# Given the tokens generated so far, which ids may come next: (V,) bool, or None for all. For structured output.
LogitsMask = Callable[[Sequence[int]], NDArray[np.bool_] | None]


@dataclass(frozen=True)
class Sampling:
    """How a request turns logits into tokens. The defaults are greedy decoding.

    temperature 0 is greedy: argmax after penalties, bias and mask. top_k 0, top_p 1, min_p 0, repetition_penalty 1,
    presence_penalty 0 and frequency_penalty 0 each mean "off". `logit_bias` maps token id to an added logit
    (-inf forbids a token). Raises UsageError when a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        def require(name: str, holds: bool, allowed: str) -> None:
            if not holds:
                raise UsageError(f"{name} must be {allowed}, got {getattr(self, name)!r}")

        numbers = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        for name in numbers:
            require(name, _is_number(getattr(self, name)), "a number")
        require("temperature", 0 <= self.temperature < math.inf, "a finite number of 0 (greedy) or more")
        require("top_k", _is_integer(self.top_k) and self.top_k >= 0, "a whole number of 0 (off) or more")
        require("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        require("min_p", 0 <= self.min_p <= 1, "in [0, 1]")
        require("repetition_penalty", 0 < self.repetition_penalty < math.inf, "a finite number above 0")
        require("presence_penalty", math.isfinite(self.presence_penalty), "a finite number")
        require("frequency_penalty", math.isfinite(self.frequency_penalty), "a finite number")
        pairs = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else [(None, None)]
        fits = all(_is_integer(token) and _is_number(bias) and bias < math.inf for token, bias in pairs)
        require("logit_bias", fits, "a map of token ids (whole numbers) to finite numbers or -inf")

    @property
    def greedy(self) -> bool:
        """Whether tokens are chosen by argmax."""
        return self.temperature == 0

    @property
    def edits_logits(self) -> bool:
        """Whether logits change before the temperature, so that the history matters."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or bool(self.logit_bias)
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def penalise(logits: Logits, sampling: Sampling, seen: Mapping[int, int], generated: Mapping[int, int]) -> Logits:
    """A copy of `logits` (V,) with repetition, presence and frequency penalties and the logit bias applied.

    `seen` counts the tokens of prompt and output, `generated` those of the output alone. Repetition (Keskar et al.
    2019, CTRL, section 4.1): positive logits of seen tokens are divided by the penalty, negative ones multiplied.
    Presence and frequency: logit -= presence * [count > 0] + frequency * count, over the output alone.
    """
    scores = logits.copy()
    if sampling.repetition_penalty != 1 and seen:
        ids = np.fromiter(seen, np.int64, len(seen))
        chosen = scores[ids]
        factor = np.float32(sampling.repetition_penalty)
        scores[ids] = np.where(chosen > 0, chosen / factor, chosen * factor)
    if (sampling.presence_penalty or sampling.frequency_penalty) and generated:
        ids = np.fromiter(generated, np.int64, len(generated))
        counts = np.fromiter(generated.values(), np.float32, len(generated))
        scores[ids] -= np.float32(sampling.presence_penalty) + np.float32(sampling.frequency_penalty) * counts
    for token, bias in sampling.logit_bias.items():
        scores[token] += np.float32(bias)
    return scores


def softmax(scores: Logits) -> Distribution:
    """exp(scores) / Σ exp(scores) over (V,), summed in double precision."""
    p: Distribution = np.exp(scores - scores.max()).astype(np.float64)
    p /= p.sum()
    return p


def distances(scores: Logits) -> Logits:
    """How far each of `scores` (V,) lies below the largest: what the cuts of top-k and top-p are defined on.

    Unlike probabilities, distances tell tokens apart at any temperature. They are float32 everywhere, and denormals
    are zero, as GPUs have it: so a compiled graph cuts in the same place.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # infinitely far is right
        y: Logits = scores.max() - scores
        y *= y >= LEAST_DISTANCE
    return y


def top_k_threshold(y: Logits, k: int) -> float:
    """The smallest t with k of `y` (V,) or more at y <= t: top-k is {y <= t}, ties with the k-th included."""
    return float(np.partition(y, k - 1)[k - 1])


def nucleus_threshold(y: Logits, weights: Distribution, mass: float, total: float | None = None) -> float:
    """The smallest t with Σ weights[y <= t] >= mass · Σ weights.

    The nucleus of top-p (Holtzman et al. 2020) is {y <= t}, ties included. `weights` (V,) fall as `y` (V,) rises.
    Where `total` says what Σ weights is, these are the head alone: tokens that may lie in the nucleus.

    Tokens of less than (1 - mass) / V of the sum each have less than 1 - mass of it together, so the others hold the
    nucleus: only they are sorted, and they are few.
    """
    head = np.arange(y.size)
    if total is None:
        total = float(weights.sum())
        head = np.flatnonzero(weights >= (1 - mass) / weights.size * total)
    head = head[np.argsort(y[head])]
    reached = np.searchsorted(np.cumsum(weights[head]), mass * total)
    return float(y[head[reached]]) if reached < head.size else math.inf  # rounding left the sum of all just under it


def min_p(weights: Distribution, ratio: float) -> Distribution:
    """`weights` without tokens of less than `ratio` times the largest (Nguyen et al. 2024)."""
    return np.where(weights >= ratio * weights.max(), weights, 0.0)


def warp(scores: Logits, sampling: Sampling) -> Distribution:
    """The distribution (V,) that a token is drawn from, given penalised `scores` (V,) and a temperature above 0."""
    y = distances(scores)
    if 0 < sampling.top_k < y.size:
        ids = np.flatnonzero(y <= top_k_threshold(y, sampling.top_k))
        p = np.zeros(y.size)
        p[ids] = _warp(y[ids], sampling)
        return p
    return _warp(y, sampling)


def _warp(y: Logits, sampling: Sampling) -> Distribution:
    """Temperature, then top-p, then min-p, then normalisation."""
    temperature = np.float32(min(max(sampling.temperature, TEMPERATURES[0]), TEMPERATURES[1]))
    with np.errstate(over="ignore"):  # infinitely far, and a probability of zero, is right
        rough: Logits = np.divide(y, -temperature)
    np.exp(rough, out=rough)  # 1 for the largest, so that nothing overflows
    if sampling.top_p == 1:
        return _normalised(rough.astype(np.float64), sampling)
    # A vocabulary is long and a nucleus short: all but the passes above look at its likeliest tokens alone.
    total = float(rough.sum(dtype=np.float64))
    head = np.flatnonzero(rough >= np.float32((1 - SLACK) * (1 - sampling.top_p) / y.size * total))
    weights: Distribution = rough[head].astype(np.float64)
    threshold = nucleus_threshold(y[head], weights, sampling.top_p, total)
    if threshold == math.inf:
        return _normalised(rough.astype(np.float64), sampling)
    inside = y[head] <= threshold
    p = np.zeros(y.size)
    p[head[inside]] = _normalised(weights[inside], sampling)
    return p


def _normalised(weights: Distribution, sampling: Sampling) -> Distribution:
    if sampling.min_p > 0:
        weights = min_p(weights, sampling.min_p)
    weights /= weights.sum()
    return weights
