"""Does a sample come from the distribution that it should? Two tests whose false alarm rate is proven, not asymptotic.

At a false alarm rate of 1e-6 the chi-square approximation of Pearson's or the G statistic can't be trusted: its tail is
a limit for infinitely many draws. Both p-values here are upper bounds that hold for every number of draws:

* `g_tail_bound`: the G statistic, G = 2 Σ O ln(O/E), of multinomial counts. Agrawal (2020, Finite-sample concentration
  of the multinomial in relative entropy, arXiv 1904.02291) bounds the moment generating function of G/2 by that of a
  gamma variable of shape k-1 and rate 1, whatever the k probabilities and the number of draws. So bounds of several
  tables add up: G's are summed, and shapes too.
* `betting_p_value`: a run of yes/no events, each with its own probability, which may depend on everything before it.
  A gambler whose bets are fair if those probabilities are right multiplies his stake by M or more with probability
  1/M at most (Ville's inequality).

Where both hold, the price against the asymptotic test is about half as many draws again.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "betting_p_value",
    "detectable_shift",
    "detectable_tv",
    "g_statistic",
    "g_tail_bound",
    "total_variation",
]

# How hard the gambler leans, for and against: from an event that is a little more frequent to one that always happens.
LEANS = tuple(sign * 2.0**power for power in range(-6, 3) for sign in (-1, 1))


def total_variation(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """½ Σ |p - q| of two distributions (V,): the largest difference in probability that any event can have."""
    return float(np.abs(p - q).sum() / 2)


def g_statistic(counts: ArrayLike, p: ArrayLike) -> float:
    """G = 2 Σ O ln(O/E) = 2 N KL(O/N ‖ p) of `counts` O (k,) under cell probabilities `p` (k,) above 0; E = N p."""
    observed = np.asarray(counts, np.float64)
    expected = observed.sum() * np.asarray(p, np.float64)
    seen = observed > 0
    return max(0.0, 2 * float(np.sum(observed[seen] * np.log(observed[seen] / expected[seen]))))


def g_tail_bound(g: float, dof: int) -> float:
    """An upper bound of P(G ≥ `g`), with the k-1 of all tables summing to `dof`: e^-x (e x / dof)^dof at x = g/2.

    (Agrawal 2020: the Chernoff bound of a gamma variable of shape `dof`.) 1 where x ≤ dof, and for no cells at all.
    """
    x = g / 2
    if dof == 0 or x <= dof:
        return 1.0
    return math.exp(dof - x + dof * math.log(x / dof))


def detectable_tv(draws: int, dof: int, alpha: float) -> float:
    """The total variation that the G-test finds every other time or more often: 2 N TV² + dof/2 reaches its threshold.

    2 N TV² ≤ N KL is Pinsker's inequality (so most deviations are found earlier), dof/2 what chance adds to G/2.
    1 (nothing can be found) for too few draws.
    """
    if draws == 0 or dof == 0:
        return 1.0
    low, high = float(dof), dof - 2 * math.log(alpha) + 8.0 * dof
    for _ in range(60):  # bisection: the bound falls with x
        middle = (low + high) / 2
        low, high = (middle, high) if g_tail_bound(2 * middle, dof) > alpha else (low, middle)
    return min(1.0, math.sqrt((high - dof / 2) / (2 * draws)))


def betting_p_value(events: Sequence[bool], probabilities: Sequence[float]) -> float:
    """An upper bound of the probability, if event i has `probabilities[i]`, of `events` that favour one side so much.

    For a lean λ, Π exp(λ e_i) / (1 + a_i (exp(λ) - 1)) has expectation 1 at every step; so has the mean M over all
    LEANS. P(M ≥ m) ≤ 1/m, at any time of stopping, and for probabilities that depend on earlier events.
    """
    a = np.clip(np.asarray(probabilities, np.float64), 0, 1)
    happened = float(np.sum(np.asarray(events, np.float64)))
    # 1 + a (e^λ - 1) at a = 1 and a strongly negative λ stays positive: e^-4 at least.
    gains = [lean * happened - float(np.log1p(a * math.expm1(lean)).sum()) for lean in LEANS]
    best = max(gains)
    log_m = best + math.log(sum(math.exp(gain - best) for gain in gains) / len(LEANS))
    return min(1.0, math.exp(-log_m)) if log_m > -700 else 1.0


def detectable_shift(probabilities: Sequence[float], alpha: float) -> float:
    """By how much the events' frequency must differ for `betting_p_value` to fall below `alpha` every other time.

    The gambler's log gain grows by about δ²/2v an event, with v the mean of a (1 - a); he needs ln(bets / alpha).
    """
    a = np.asarray(probabilities, np.float64)
    if a.size == 0:
        return 1.0
    return min(1.0, math.sqrt(2 * float(np.mean(a * (1 - a))) * math.log(len(LEANS) / alpha) / a.size))
