"""Counters and clocks of one request, and the figures that the field derives from them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["Stats"]


@dataclass
class Stats:
    """What one request did. Times are seconds of wall clock; `prefill_s` runs from the call to the first token."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that the target's cache already held
    new_tokens: int = 0
    steps: int = 0  # verifications after the first token: plain decoding has one per token
    step_tokens: int = 0  # tokens kept from those steps
    target_calls: int = 0
    draft_calls: int = 0
    proposed_at: list[int] = field(default_factory=list)  # [i]: how often a proposal had an i-th token …
    accepted_at: list[int] = field(default_factory=list)  # [i]: … and how often it was accepted
    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0  # the phases of the steps after the first token
    verify_s: float = 0.0
    accept_s: float = 0.0
    engine_s: float = 0.0  # the part of decode_s that was spent inside engine calls

    @property
    def proposed(self) -> int:
        """Tokens that were proposed, those behind a rejection included; without those behind a stop."""
        return sum(self.proposed_at)

    @property
    def accepted(self) -> int:
        """Proposed tokens that were accepted and kept."""
        return sum(self.accepted_at)

    @property
    def acceptance_rate(self) -> float:
        """accepted ÷ proposed; NaN when nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else float("nan")

    @property
    def acceptance_by_position(self) -> list[float]:
        """For each place i in a proposal: accepted at i ÷ proposed at i."""
        return [a / p if p else float("nan") for a, p in zip(self.accepted_at, self.proposed_at, strict=True)]

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per target forward after the prefill, as Spec-Bench counts: plain decoding is 1.00."""
        return self.step_tokens / self.steps if self.steps else float("nan")

    @property
    def ttft(self) -> float:
        """Time to first token, seconds."""
        return self.prefill_s

    @property
    def tpot(self) -> float:
        """Time per output token after the first, seconds."""
        return self.decode_s / (self.new_tokens - 1) if self.new_tokens > 1 else float("nan")

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens after the first ÷ decode time."""
        return (self.new_tokens - 1) / self.decode_s if self.new_tokens > 1 and self.decode_s > 0 else float("nan")

    @property
    def other_s(self) -> float:
        """Decode time outside draft, verify and accept (which has the stop rules and detokenizing): what joins them."""
        return max(0.0, self.decode_s - self.draft_s - self.verify_s - self.accept_s)

    def count(self, proposed: int, accepted: int) -> None:
        """Record one proposal of `proposed` tokens of which the first `accepted` were kept."""
        while len(self.proposed_at) < proposed:
            self.proposed_at.append(0)
            self.accepted_at.append(0)
        for i in range(proposed):
            self.proposed_at[i] += 1
            self.accepted_at[i] += i < accepted

    def count_step(self, proposed: int, accepted: int, emitted: int) -> None:
        """Record a verification of `proposed` tokens that emitted the `accepted` ones and one of the target's own.

        The own token is missing where the text ended before. Such a proposal was not rejected there: only what was
        looked at counts.
        """
        self.count(accepted if emitted == accepted else proposed, accepted)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to `draft_s`, `verify_s` or `accept_s`."""
        begin = time.perf_counter()
        yield
        setattr(self, name, getattr(self, name) + time.perf_counter() - begin)
