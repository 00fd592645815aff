"""Acceptance: which proposed tokens stand, and the one token that the target adds itself. Pure numpy.

Speculative sampling (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2). With q_i the distribution that
proposal x_i was drawn from and p_i the target's warped distribution at the same place:

    accept x_i with probability min(1, p_i(x_i) / q_i(x_i))
    at the first rejection emit a token from norm(max(p_i - q_i, 0)) and stop
    if all k are accepted, emit the bonus token from p_k

The emitted tokens are then distributed exactly as if they had been drawn from p one at a time. A drafter may stop
early, but only by a rule on earlier tokens and on q_i as a distribution: once x_i is drawn, it must be proposed.
"""

from collections.abc import Callable, Sequence
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

    A q_i of None, and `q` None for all of them, is one-hot at x_i: it was chosen, not drawn (n-grams, a greedy draft).
    """

    tokens: Tokens = field(default_factory=lambda: EMPTY)
    q: Sequence[Distribution | None] | None = None


@dataclass(frozen=True)
class Outcome:
    """What one verification emits: `accepted` proposals, then one token of the target's own (correction or bonus).

    The last is missing when `emit` ended the text at an accepted proposal.
    """

    tokens: list[int]
    accepted: int


def accept(
    proposal: Proposal, logits: Logits, sampler: Sampler, emit: Callable[[int], bool] = lambda token: True
) -> Outcome:
    """Compare a proposal with the target's `logits` (k+1, V) and emit between 1 and k+1 tokens.

    Each token is pushed to the sampler's history and given to `emit` before the next row is looked at; when that says
    False, the text has ended and nothing behind it is computed. Rows after the first rejection are never read either.
    """
    tokens: list[int] = []

    def goes_on(token: int) -> bool:
        tokens.append(token)
        sampler.push(token)
        return emit(token)

    for i, x in enumerate(proposal.tokens.tolist()):
        if sampler.greedy:
            choice = sampler.argmax(logits[i])
            accepted = choice == x
        else:
            p = sampler.distribution(logits[i])
            q = None if proposal.q is None else proposal.q[i]
            q_x = 1.0 if q is None else q[x]
            accepted = bool(sampler.uniform() * q_x < p[x])
            choice = x if accepted else sampler.draw(residual(p, one_hot(x, p.size) if q is None else q))
        if not goes_on(choice) or not accepted:
            return Outcome(tokens, accepted=i + accepted)
    last = logits[len(proposal.tokens)]
    goes_on(sampler.argmax(last) if sampler.greedy else sampler.draw(sampler.distribution(last)))
    return Outcome(tokens, accepted=len(proposal.tokens))


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
