"""Acceptance: which proposed tokens stand, and the one token that the target adds itself. Pure numpy.

Speculative sampling (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2). With q_i the distribution that
proposal x_i was drawn from and p_i the target's warped distribution at the same place:

    accept x_i with probability min(1, p_i(x_i) / q_i(x_i))
    at the first rejection emit a token from norm(max(p_i - q_i, 0)) and stop
    if all k are accepted, emit the bonus token from p_k

The emitted tokens are then distributed exactly as if they had been drawn from p one at a time. A drafter may stop
early, but only by a rule on earlier tokens and on q_i as a distribution: once x_i is drawn, it must be proposed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from draftc.runtime.engine import Logits, Tokens
from draftc.runtime.sampler import Sampler
from draftc.runtime.warp import Distribution

__all__ = ["EMPTY", "Outcome", "Proposal", "accept", "one_hot", "residual"]

EMPTY: Tokens = np.empty(0, np.int64)
EMPTY.flags.writeable = False


@dataclass(frozen=True)
class Proposal:
    """Proposed tokens x (k,), and for each the distribution q (V,) that it was drawn from.

    `q` None means that every q_i is one-hot at x_i: the tokens were chosen, not drawn (n-grams, a greedy draft).
    """

    tokens: Tokens = field(default_factory=lambda: EMPTY)
    q: Sequence[Distribution] | None = None


@dataclass(frozen=True)
class Outcome:
    """What one verification emits: `accepted` proposals, then one token of the target's own (correction or bonus)."""

    tokens: list[int]
    accepted: int


def accept(proposal: Proposal, logits: Logits, sampler: Sampler) -> Outcome:
    """Compare a proposal with the target's `logits` (k+1, V) and emit between 1 and k+1 tokens.

    The emitted tokens are pushed to the sampler's history, one by one. Rows after the first rejection are never read.
    """
    emitted: list[int] = []

    def emit(token: int) -> None:
        emitted.append(token)
        sampler.push(token)

    for i, x in enumerate(proposal.tokens.tolist()):
        if sampler.greedy:
            best = sampler.argmax(logits[i])
            emit(best)
            if best != x:
                return Outcome(emitted, accepted=i)
        else:
            p = sampler.distribution(logits[i])
            q = one_hot(x, p.size) if proposal.q is None else proposal.q[i]
            if sampler.uniform() * q[x] >= p[x]:
                emit(sampler.draw(residual(p, q)))
                return Outcome(emitted, accepted=i)
            emit(x)
    last = logits[len(proposal.tokens)]
    emit(sampler.argmax(last) if sampler.greedy else sampler.draw(sampler.distribution(last)))
    return Outcome(emitted, accepted=len(proposal.tokens))


def residual(p: Distribution, q: Distribution) -> Distribution:
    """norm(max(p - q, 0)): where the token after a rejection is drawn from (Leviathan et al. 2023, section 2.3).

    p = q never rejects in exact arithmetic; should rounding bring us here all the same, p itself is returned.
    """
    difference = np.maximum(p - q, 0.0)
    total = difference.sum()
    return difference / total if total > 0 else p


def one_hot(token: int, size: int) -> Distribution:
    """The distribution (size,) with all its mass on `token`."""
    q = np.zeros(size)
    q[token] = 1.0
    return q
