"""How far to speculate next, and from what: the choice that gains most, by measured costs and by what held so far.

A proposal of n tokens that are right with chances p_1, p_2, … (each given that those before it were) is worth

    gain(n) = Σ_{t ≤ n} p_1 ⋯ p_t  -  rate · (cost of making it + verify(1 + n) - verify(1))

tokens: what it adds, less what could be decoded in the time that it takes. `rate` is in tokens per millisecond, that of
plain decoding or, where that is higher, of the steps so far (as for any average reward, time is worth what one usually
makes of it). The source and length with the largest gain are taken, and none where no gain is positive.

Chances are running estimates, per request: of n-gram copies by how many tokens match before them, counted on every
token of the text, proposed or not; of draft tokens by how sure the draft model is, counted where they were looked at.
Everything is a function of the profile and the tokens; which tokens a draft draws is never asked before they are
proposed, so acceptance stays exact (Leviathan et al. 2023).
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from draftc.runtime.costs import CostProfile
from draftc.runtime.engine import Tokens
from draftc.runtime.ngrams import NgramIndex

__all__ = ["Chooser", "Copy", "DraftPlan", "Estimate", "best_length"]

# Beginning of each class, and the chance that is assumed before anything was counted.
MATCH_LENGTHS = (2, 3, 4, 5, 7, 10, 16, 24)
MATCH_PRIORS = (0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97)
CONFIDENCES = (0.0, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
CONFIDENCE_PRIORS = (0.15, 0.28, 0.4, 0.52, 0.65, 0.78, 0.88, 0.96)
DRAFT_PRIOR = 0.8  # of the next draft token, whose confidence is not known yet
FORGIVING = 0.02  # part by which that estimate goes back to its prior with every token that no draft was asked for
OUTLOOK = 8  # draft tokens that are looked ahead to
HORIZON = 128  # tokens that an answer is expected to go on for, at least, where it may
FRESH_PRIOR, FRESH_WEIGHT = 0.4, 8.0
TOLERATED, LONGEST_PAUSE = 3, 63  # failures in a row before a draft model pauses, twice as long each time; tokens
PATIENCE = 6  # tokens of an answer in which copies may show that they do, before a draft model reads the prompt
SHORT_LAG, FEW_STEPS = 8, 3  # a lag that copies left behind, and over how many steps catching up pays
RATE_MEMORY = 0.9  # weight of the past in the rate, per step


class Estimate:
    """A share of successes: begins at `prior`, which counts as `weight` trials, and forgets beyond `memory` trials."""

    def __init__(self, prior: float, weight: float = 4.0, memory: float = 64.0) -> None:
        self.prior = prior
        self._successes = prior * weight
        self._trials = weight
        self._memory = memory

    @property
    def value(self) -> float:
        """The estimate."""
        return self._successes / self._trials

    def count(self, success: bool) -> None:
        """Record one trial."""
        self._successes += success
        self._trials += 1
        if self._trials > self._memory:
            self._successes *= self._memory / self._trials
            self._trials = self._memory

    def relax(self, part: float) -> None:
        """Move `part` of the way back to the prior."""
        self._successes += part * (self.prior * self._trials - self._successes)


@dataclass(frozen=True)
class Copy:
    """Propose `tokens`, an earlier continuation of the text."""

    tokens: list[int]


@dataclass
class DraftPlan:
    """Ask the draft model, token by token: it proposes x_i if `proposes` says so of q_i, then another if `goes_on`.

    Neither question depends on what was drawn at the position that it is about.
    """

    chooser: "Chooser"
    rate: float
    verify: list[float]
    call_ms: float
    most: int
    classes: list[int] = field(default_factory=list)  # of each proposed token: its class of confidence
    reach: float = 1.0  # chance that everything proposed so far is right
    calls: int = 0

    def proposes(self, confidence: float) -> bool:
        """Whether to draw and propose a token from a q_i whose largest probability is `confidence`."""
        self.calls += 1
        chance = self.chooser.draft_chance(confidence)
        count = len(self.classes)
        chances = [chance, *self.chooser.draft_outlook(self.most - count - 1)]
        costs = [0.0] + [self.call_ms] * (len(chances) - 1)  # its own call has been made
        if best_length(chances, costs, self.verify[1 + count :], self.rate, self.reach)[1] == 0:
            self.chooser.forgive(confidence)
            return False
        self.classes.append(_class(CONFIDENCES, confidence))
        self.reach *= chance
        return True

    def goes_on(self) -> bool:
        """Whether to run the draft model for one more."""
        count = len(self.classes)
        chances = self.chooser.draft_outlook(self.most - count)
        costs = [self.call_ms] * len(chances)
        return best_length(chances, costs, self.verify[1 + count :], self.rate, self.reach)[1] > 0


class Chooser:
    """The choices of one request. `learn` the text, `choose`, and afterwards `spent` says what was done about it."""

    def __init__(self, costs: CostProfile, ngrams: NgramIndex, widest: int, model: bool, room: int) -> None:
        self._costs = costs
        self._room = room
        self._ngrams = ngrams
        self._widest = widest
        self._model = model and costs.draft is not None
        self._matches = [Estimate(prior) for prior in MATCH_PRIORS]
        self._confident = [Estimate(prior, weight=8.0) for prior in CONFIDENCE_PRIORS]
        self._draft = Estimate(DRAFT_PRIOR, memory=24.0)
        self._asked = False  # whether the draft model was, in the last step
        self._refused = 0  # how often in a row it then gave nothing
        self._resume = 0  # length of the text at which it may be asked again
        self._fresh = Estimate(FRESH_PRIOR, weight=FRESH_WEIGHT)  # share of the tokens that come from no copy
        self._copied = False
        self._predicted: tuple[int, int] | None = None  # (token, class) that the n-grams expect next
        self._drafted: tuple[list[int], list[int]] = [], []  # tokens of the last draft proposal, and their classes
        self._tokens, self._ms = 0.0, 0.0  # of the steps so far, the recent ones counting most
        self._step_ms = 0.0
        self._prompt: int | None = None

    # What held

    def learn(self, text: Tokens) -> None:
        """Take note of what the text (n,) has become since the last step."""
        known = self._ngrams.follow(text)
        if self._prompt is None:
            self._prompt = text.size
        new = text[known:].tolist()
        self._learn_drafted(new)
        answered = self._step_ms > 0
        for token in new:
            if answered:
                self._fresh.count(not self._copied)
            if self._predicted is not None:
                expected, kind = self._predicted
                self._matches[kind].count(token == expected)
            self._ngrams.append(token)
            self._predicted = self._predict()
        if self._step_ms:
            self._tokens = RATE_MEMORY * self._tokens + len(new)
            self._ms = RATE_MEMORY * self._ms + self._step_ms
            self._step_ms = 0.0

    def _learn_drafted(self, new: list[int]) -> None:
        drafted, classes = self._drafted
        if self._asked:
            self._refused = 0 if drafted and new and drafted[0] == new[0] else self._refused + 1
            pause = 2 ** max(0, self._refused - TOLERATED) - 1
            self._resume = len(self._ngrams) + len(new) + min(pause, LONGEST_PAUSE)
            self._asked = False
        for token, kind, written in zip(drafted, classes, new, strict=False):
            self._confident[kind].count(token == written)
            self._draft.count(token == written)
            if token != written:
                break
        if not drafted:
            self._draft.relax(1 - (1 - FORGIVING) ** len(new))
        self._drafted = [], []

    def _predict(self) -> tuple[int, int] | None:
        match = self._ngrams.match()
        return None if match is None else (self._ngrams.tokens[match[0]], _class(MATCH_LENGTHS, match[1]))

    def draft_chance(self, confidence: float) -> float:
        """The chance that a draft token of this confidence is right."""
        return self._confident[_class(CONFIDENCES, confidence)].value

    def forgive(self, confidence: float) -> None:
        """A token of this confidence was not proposed, so nothing is learnt of it: it is tried again some day."""
        self._confident[_class(CONFIDENCES, confidence)].relax(FORGIVING)

    def draft_outlook(self, count: int) -> list[float]:
        """The chances of the next `count` draft tokens, of which nothing is known yet."""
        return [self._draft.value] * count

    # What to do

    def choose(self, k: int, lag: int) -> Copy | DraftPlan | None:
        """What to propose, at most `k` tokens; None for nothing. `lag` tokens are new to the draft model."""
        if k <= 0:
            return None
        fill = len(self._ngrams)
        verify = self._costs.target.curve(fill, self._widest)
        rate = max(1 / verify[1], self._tokens / self._ms if self._ms else 0.0)
        match = self._ngrams.match()
        copied = (0.0, 0)
        if match is not None:
            copied = best_length(self.copy_chances(match[1], k), [0.0] * k, verify[1:], rate)
        drafted = self._worth_drafting(fill, lag, k, verify, rate) if self._model and lag > 0 else 0.0
        if drafted > max(0.0, copied[0]):
            assert self._costs.draft is not None
            return DraftPlan(self, rate, verify, self._costs.draft.curve(fill, 1)[1], k)
        if copied[1] and match is not None:
            return Copy(self._ngrams.copy(match[0], copied[1]))
        return None

    def copy_behind(self, drafted: list[int], plan: DraftPlan) -> list[int]:
        """What to copy behind the tokens that the draft model proposed, which may repeat the text in their turn."""
        count = len(drafted)
        match = self._ngrams.match(drafted) if drafted and count < plan.most else None
        if match is None or match[1] <= count:  # the text before them says nothing about it
            return []
        chances = self.copy_chances(match[1], plan.most - count)
        _, length = best_length(chances, [0.0] * len(chances), plan.verify[1 + count :], plan.rate, plan.reach)
        return self._ngrams.copy(match[0], length, drafted)

    def spent(self, proposed: int, plan: Copy | DraftPlan | None, drafted: Sequence[int] = ()) -> None:
        """Say what was done: `proposed` tokens in all, of which the draft model gave `drafted`."""
        fill = len(self._ngrams)
        self._step_ms = self._costs.target.curve(fill, 1 + proposed)[1 + proposed] + self._costs.ngram_ms
        self._copied = isinstance(plan, Copy)
        self._asked = isinstance(plan, DraftPlan)
        if isinstance(plan, DraftPlan):
            self._step_ms += plan.calls * plan.call_ms
            self._drafted = list(drafted), plan.classes

    def copy_chances(self, matched: int, count: int) -> list[float]:
        """The chances of `count` copied tokens: with each that is right, the match before the next is one longer."""
        return [self._matches[_class(MATCH_LENGTHS, matched + i)].value for i in range(count)]

    def _worth_drafting(self, fill: int, lag: int, k: int, verify: list[float], rate: float) -> float:
        """The gain of a step with the draft model, in tokens, less its part of what it costs to catch up with the text.

        Running `lag` tokens that are new to it is paid once and serves all steps to come: its cost is spread over as
        many as the answer may still have, or over a few where copies have only kept it from following.
        """
        assert self._costs.draft is not None
        if len(self._ngrams) < self._resume:
            return 0.0
        if lag > SHORT_LAG and self._written < PATIENCE:
            return 0.0
        draft = self._costs.draft.curve(fill, max(lag, 2))
        chances = self.draft_outlook(min(k, OUTLOOK))
        gain, length = best_length(chances, [draft[1]] * len(chances), verify[1:], rate)
        steps = FEW_STEPS if lag <= SHORT_LAG else max(1.0, self._fresh.value * self._ahead() / (1 + length))
        return gain - rate * (draft[lag] - draft[1]) / steps

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


def _class(bounds: Sequence[float], value: float) -> int:
    return max(0, bisect_right(bounds, value) - 1)
