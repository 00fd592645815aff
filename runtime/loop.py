"""The speculative loop, on one screen: draft → verify → accept → commit."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from draftc.runtime.accept import Proposal, accept
from draftc.runtime.decoder import Decoder
from draftc.runtime.drafter import Drafter
from draftc.runtime.engine import Logits
from draftc.runtime.kvcache import TokenBuffer
from draftc.runtime.sampler import Sampler
from draftc.runtime.stats import Stats

__all__ = ["Loop", "Step", "token_logprobs"]


@dataclass(frozen=True)
class Step:
    """One verification: `tokens` were kept, the first `accepted` of them proposals; `proposed` had been offered.

    The token after the accepted ones, if it was kept, is the target's own: a correction, or the bonus when everything
    was accepted. `logprobs` has log p(token) of the target's unwarped distribution, when asked for.
    """

    tokens: list[int]
    accepted: int
    proposed: int
    logprobs: list[float]


class Loop:
    """Decodes one request. `keep(tokens)` applies the stop rules in order and returns the tokens that stand.

    With `drafter` None, or k = 0, a step is plain decoding: the same code with an empty proposal.
    """

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter | None,
        text: TokenBuffer,
        sampler: Sampler,
        keep: Callable[[list[int]], list[int]],
        stats: Stats,
        logprobs: bool = False,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.text = text
        self.sampler = sampler
        self.keep = keep
        self.stats = stats
        self.logprobs = logprobs

    def step(self, k: int) -> Step:
        """Propose up to `k` tokens, verify them in one target call, keep between 1 and k+1."""
        with self.stats.phase("draft_s"):
            proposal = self.drafter.propose(self.text.view, k, self.sampler) if self.drafter and k else Proposal()
        proposed = proposal.tokens.size
        with self.stats.phase("verify_s"):
            pending = self.target.sync(self.text.view, upcoming=proposed)
            logits = self.target.extend(np.concatenate((pending, proposal.tokens)), rows=proposed + 1)  # (k+1, V)
        with self.stats.phase("accept_s"):
            outcome = accept(proposal, logits, self.sampler)
            logprobs = token_logprobs(logits, outcome.tokens) if self.logprobs else []
        kept = self.keep(outcome.tokens)
        self.text.extend(kept)
        accepted = min(outcome.accepted, len(kept))
        # A proposal that a stop rule cut short was not rejected there: only what was looked at counts.
        self.stats.count(proposed if len(kept) == len(outcome.tokens) else len(kept), accepted)
        return Step(kept, accepted, proposed, logprobs[: len(kept)])


def token_logprobs(logits: Logits, tokens: list[int]) -> list[float]:
    """log softmax(logits[i])[tokens[i]] for each i (natural logarithm) of the target's unwarped logits (k+1, V)."""
    result = []
    for row, token in zip(logits, tokens, strict=False):
        shifted = (row - row.max()).astype(np.float64)
        result.append(float(shifted[token] - np.log(np.exp(shifted).sum())))
    return result
