"""The speculative loop, on one screen: draft → verify → accept → commit."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from draftc.runtime.accept import Proposal, accept
from draftc.runtime.decoder import Decoder
from draftc.runtime.drafter import Drafter
from draftc.runtime.engine import Logits
from draftc.runtime.kvcache import TokenBuffer
from draftc.runtime.sampler import Sampler
from draftc.runtime.stats import Stats

__all__ = ["Loop", "LoopMaker", "Step", "Steps", "token_logprobs"]


@dataclass(frozen=True)
class Step:
    """One verification: it emitted `tokens`, the first `accepted` of them proposals; `proposed` had been offered.

    The token after the accepted ones is the target's own: a correction, or the bonus when everything was accepted; it
    is missing where the text ended before. `logprobs` has log p(token) under the target's unwarped distribution.
    """

    tokens: list[int]
    accepted: int
    proposed: int
    logprobs: list[float]


class Steps(Protocol):
    """What decodes one request: `Loop`, or one that a backend makes of its own."""

    def step(self, k: int) -> Step:
        """See Loop.step."""


class LoopMaker(Protocol):
    """A backend's own way to decode, for the requests of one session."""

    @property
    def captured(self) -> int:
        """How many kinds of step are replayed as CUDA graphs by now."""

    def loop(
        self,
        target: Decoder,
        drafter: Drafter | None,
        text: TokenBuffer,
        sampler: Sampler,
        emit: Callable[[int], bool],
        stats: Stats,
    ) -> Steps | None:
        """What decodes this request, whose logprobs nobody wants; None where it must be `Loop`."""

    def close(self) -> None:
        """Release what it holds; the engines are closed after it. Calling it twice is allowed."""


class Loop:
    """Decodes one request. `emit(token)` takes the tokens one by one, and says whether the text goes on.

    With `drafter` None, or k = 0, a step is plain decoding: the same code with an empty proposal.
    """

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter | None,
        text: TokenBuffer,
        sampler: Sampler,
        emit: Callable[[int], bool],
        stats: Stats,
        logprobs: bool = False,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.text = text
        self.sampler = sampler
        self.emit = emit
        self.stats = stats
        self.logprobs = logprobs
        if drafter is not None:
            drafter.begin(text.capacity - len(text))

    def step(self, k: int) -> Step:
        """Propose up to `k` tokens, verify them in one target call, emit between 1 and k+1."""
        with self.stats.phase("draft_s"):
            proposal = self.drafter.propose(self.text.view, k, self.sampler) if self.drafter and k else Proposal()
        proposed = proposal.tokens.size
        with self.stats.phase("verify_s"):
            pending = self.target.sync(self.text.view, upcoming=proposed)
            logits = self.target.extend(np.concatenate((pending, proposal.tokens)), rows=proposed + 1)  # (k+1, V)
        with self.stats.phase("accept_s"):
            outcome = accept(proposal, logits, self.sampler, self.emit)
            logprobs = token_logprobs(logits, outcome.tokens) if self.logprobs else []
        self.text.extend(outcome.tokens)
        self.stats.count_step(proposed, outcome.accepted, len(outcome.tokens))
        return Step(outcome.tokens, outcome.accepted, proposed, logprobs)


def token_logprobs(logits: Logits, tokens: list[int]) -> list[float]:
    """log softmax(logits[i])[tokens[i]] for each i (natural logarithm) of the target's unwarped logits (k+1, V)."""
    result = []
    for row, token in zip(logits, tokens, strict=False):
        shifted = (row - row.max()).astype(np.float64)
        result.append(float(shifted[token] - np.log(np.exp(shifted).sum())))
    return result
