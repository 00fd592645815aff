"""How far to speculate next, and from what: the choice that gains most, by measured costs and by what held so far.

A proposal of n tokens that are right with chances p_1, p_2, … (each given that those before it were) is worth

    gain(n) = Σ_{t ≤ n} p_1 ⋯ p_t  -  rate · (cost of making it + verify(1 + n) - verify(1))

tokens: what it adds, less what could be decoded in the time that it takes. `rate` is in tokens per millisecond, that of
plain decoding or, where that is higher, of the steps so far (as for any average reward, time is worth what one usually
makes of it). The source and length with the largest gain are taken, and none where no gain is positive.

Chances are running estimates, per request (`estimates`). Everything is a function of the profile and the tokens; which
tokens a draft draws is never asked before they are proposed, so acceptance stays exact (Leviathan et al. 2023).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from draftc.runtime.costs import CostProfile
from draftc.runtime.drafter import DraftState
from draftc.runtime.engine import Tokens
from draftc.runtime.estimates import CopyRecord, DraftRecord, Estimate, Pace
from draftc.runtime.ngrams import NgramIndex

__all__ = ["Chooser", "Copy", "DraftPlan", "best_length"]

OUTLOOK = 8  # draft tokens that are looked ahead to
HORIZON = 128  # tokens that an answer is expected to go on for, at least, where it may
FRESH_PRIOR, FRESH_WEIGHT = 0.4, 8.0
PATIENCE = 6  # tokens of an answer in which copies may show that they do, before a draft model reads the prompt
SHORT_LAG, FEW_STEPS = 8, 3  # a lag that copies left behind, and over how many steps catching up pays


@dataclass(frozen=True)
class Copy:
    """Propose `tokens`, an earlier continuation of the text."""

    tokens: list[int]


@dataclass
class DraftPlan:
    """Ask the draft model, token by token: it proposes x_i if `proposes` says so of q_i, then another if `goes_on`.

    Neither question depends on what was drawn at the position that it is about.
    """

    record: DraftRecord
    rate: float
    verify: list[float]  # ms of calls of 0, 1, … tokens
    first_ms: float  # of the draft's first call, which runs what is new to it
    call_ms: float  # of each call after that
    most: int
    confidences: list[float] = field(default_factory=list)  # of the tokens that were proposed
    reach: float = 1.0  # chance that everything proposed so far is right
    calls: int = 0

    def proposes(self, confidence: float) -> bool:
        """Whether to draw and propose a token from a q_i whose largest probability is `confidence`."""
        self.calls += 1
        chance = self.record.chance(confidence)
        count = len(self.confidences)
        chances = [chance, *self.record.outlook(self.most - count - 1)]
        costs = [0.0] + [self.call_ms] * (len(chances) - 1)  # its own call has been made
        if best_length(chances, costs, self.verify[1 + count :], self.rate, self.reach)[1] == 0:
            self.record.forgive(confidence)
            return False
        self.confidences.append(confidence)
        self.reach *= chance
        return True

    def goes_on(self) -> bool:
        """Whether to run the draft model for one more."""
        count = len(self.confidences)
        chances = self.record.outlook(self.most - count)
        costs = [self.call_ms] * len(chances)
        return best_length(chances, costs, self.verify[1 + count :], self.rate, self.reach)[1] > 0

    @property
    def ms(self) -> float:
        """What its calls of the draft model cost."""
        return self.first_ms + (self.calls - 1) * self.call_ms if self.calls else 0.0


class Chooser:
    """The choices of one request: at every step `learn` the text, `choose`, and say with `spent` what was done."""

    def __init__(self, costs: CostProfile, ngrams: NgramIndex, widest: int, room: int) -> None:
        self._costs = costs
        self._ngrams = ngrams
        self._widest = widest
        self._room = room  # tokens that the answer may have
        self._prompt: int | None = None  # tokens of the prompt
        self._copies = CopyRecord(ngrams)
        self._drafts = DraftRecord()
        self._pace = Pace()
        self._fresh = Estimate(FRESH_PRIOR, weight=FRESH_WEIGHT)  # share of the answer's tokens that come from no copy
        self._step: tuple[float, bool] | None = None  # (ms, whether it was a copy) of a step whose tokens are to come

    def learn(self, text: Tokens) -> None:
        """Take note of what the text (n,) has become since the last step."""
        new = self._copies.learn(text)
        if self._prompt is None:
            self._prompt = text.size
        self._drafts.learn(new, text.size)
        if self._step is not None:
            ms, copied = self._step
            self._pace.count(len(new), ms)
            for _ in new:
                self._fresh.count(not copied)
            self._step = None

    def choose(self, k: int, draft: DraftState | None) -> Copy | DraftPlan | None:
        """What to propose, at most `k` tokens; None for nothing. `draft` None: no draft model can be asked."""
        if k <= 0:
            return None
        verify = self._costs.target.curve(len(self._ngrams), self._widest)
        rate = max(1 / verify[1], self._pace.value)
        match = self._ngrams.match()
        copied, length = 0.0, 0
        if match is not None:
            copied, length = best_length(self._copies.chances(match[1], k), [0.0] * k, verify[1:], rate)
        plan = self._plan(draft, k, verify, rate)
        if plan is not None and self._worth_drafting(draft, plan) > copied:
            return plan
        return Copy(self._ngrams.copy(match[0], length)) if length and match is not None else None

    def copy_behind(self, drafted: list[int], plan: DraftPlan) -> list[int]:
        """What to copy behind the tokens that the draft model proposed, which may repeat the text in their turn."""
        count = len(drafted)
        match = self._ngrams.match(drafted) if drafted and count < plan.most else None
        if match is None or match[1] <= count:  # the text before them says nothing about it
            return []
        chances = self._copies.chances(match[1], plan.most - count)
        _, length = best_length(chances, [0.0] * len(chances), plan.verify[1 + count :], plan.rate, plan.reach)
        return self._ngrams.copy(match[0], length, drafted)

    def spent(self, proposed: int, plan: Copy | DraftPlan | None, drafted: Sequence[int] = ()) -> None:
        """Say what was done: `proposed` tokens in all, of which the draft model gave `drafted`."""
        width = 1 + proposed
        ms = self._costs.ngram_ms + self._costs.target.curve(len(self._ngrams), width)[width]
        if isinstance(plan, DraftPlan):
            ms += plan.ms
            self._drafts.proposed(drafted, plan.confidences)
        self._step = ms, isinstance(plan, Copy)

    def _plan(self, draft: DraftState | None, k: int, verify: list[float], rate: float) -> DraftPlan | None:
        """How to ask the draft model, where it may be asked."""
        if draft is None or self._costs.draft is None or self._drafts.rests(len(self._ngrams)):
            return None
        if draft.lag > SHORT_LAG and self._written < PATIENCE:
            return None
        curve = self._costs.draft.curve(draft.fill, max(draft.lag, 2))
        return DraftPlan(self._drafts, rate, verify, curve[draft.lag], curve[1], k)

    def _worth_drafting(self, draft: DraftState | None, plan: DraftPlan) -> float:
        """The gain of a step with the draft model, in tokens, less its part of what it costs to catch up with the text.

        Running tokens that are new to it is paid once and serves all steps to come: its cost is spread over as many as
        the answer may still have, or over a few where copies have only kept it from following.
        """
        assert draft is not None
        chances = self._drafts.outlook(min(plan.most, OUTLOOK))
        gain, length = best_length(chances, [plan.call_ms] * len(chances), plan.verify[1:], plan.rate)
        steps = FEW_STEPS if draft.lag <= SHORT_LAG else max(1.0, self._fresh.value * self._ahead() / (1 + length))
        return gain - plan.rate * (plan.first_ms - plan.call_ms) / steps

    def _ahead(self) -> int:
        """How many tokens the answer is expected to have from here."""
        return min(self._room - self._written, max(HORIZON, self._written))

    @property
    def _written(self) -> int:
        """Tokens of the answer so far."""
        return len(self._ngrams) - (self._prompt or 0)


def best_length(
    chances: Iterable[float], costs: Iterable[float], verify: Sequence[float], rate: float, reach: float = 1.0
) -> tuple[float, int]:
    """(largest gain in tokens, its length n): see the module. (0, 0) where no length gains anything.

    `costs` of making each token and `verify` of calls of 1, 2, … tokens are in milliseconds; `verify[0]` is what
    happens anyway. `reach` is the chance that the tokens before are right.
    """
    best, length, tokens, spent = 0.0, 0, 0.0, 0.0
    for n, (chance, cost) in enumerate(zip(chances, costs, strict=False), start=1):
        if n >= len(verify):
            break
        reach *= chance
        tokens += reach
        spent += cost
        gain = tokens - rate * (spent + verify[n] - verify[0])
        if gain > best:
            best, length = gain, n
    return best, length
