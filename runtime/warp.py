"""From logits to the distribution that a token is drawn from: penalties → temperature → top-k → top-p → min-p.

The order is transformers'. Every function is pure numpy over one row of the vocabulary, and target and draft go through
the same ones: rejection sampling is exact only if p and q are the realised, warped distributions.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from draftc.runtime.engine import Logits
from draftc.runtime.errors import UsageError

__all__ = [
    "Distribution",
    "LogitsMask",
    "Sampling",
    "min_p",
    "nucleus_threshold",
    "penalise",
    "softmax",
    "top_k",
    "warp",
]

Distribution = NDArray[np.float64]  # (V,), sums to 1

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


def top_k(scores: Logits, k: int) -> NDArray[np.int64]:
    """Ids of the tokens whose score is at least the k-th largest of `scores` (V,), ties with the k-th included."""
    kth = np.partition(scores, scores.size - k)[scores.size - k]
    return np.flatnonzero(scores >= kth)


def nucleus_threshold(p: Distribution, mass: float) -> float:
    """The largest t with Σ p[p >= t] >= mass: the nucleus of top-p (Holtzman et al. 2020) is {p >= t}, ties included.

    Tokens of less than (1 - mass) / V each sum to less than 1 - mass, so the others hold the nucleus: only they are
    sorted, and they are few.
    """
    head = np.sort(p[p >= (1 - mass) / p.size])[::-1]
    reached = np.searchsorted(np.cumsum(head), mass)
    return float(head[reached]) if reached < head.size else 0.0  # rounding left the sum of all just under `mass`


def min_p(p: Distribution, ratio: float) -> Distribution:
    """`p` without tokens of less than `ratio` times the largest probability (Nguyen et al. 2024); not renormalised."""
    return np.where(p >= ratio * p.max(), p, 0.0)


def warp(scores: Logits, sampling: Sampling) -> Distribution:
    """The distribution (V,) that a token is drawn from, given penalised `scores` (V,) and a temperature above 0."""
    # Shifted before the division, so that the largest logit never overflows, however small the temperature.
    temperature = np.float32(min(max(sampling.temperature, 1e-30), 1e30))
    with np.errstate(over="ignore"):  # far below the largest: -inf, and a probability of zero, is right
        shifted = (scores - scores.max()) / temperature
    if 0 < sampling.top_k < shifted.size:
        ids = top_k(shifted, sampling.top_k)
        p = np.zeros(shifted.size)
        p[ids] = _cut(softmax(shifted[ids]), sampling)
        return p
    return _cut(softmax(shifted), sampling)


def _cut(p: Distribution, sampling: Sampling) -> Distribution:
    """Top-p, then min-p, then renormalisation."""
    if sampling.top_p < 1:
        p = np.where(p >= nucleus_threshold(p, sampling.top_p), p, 0.0)
    if sampling.min_p > 0:
        p = min_p(p, sampling.min_p)
    return p / p.sum() if sampling.top_p < 1 or sampling.min_p > 0 else p
