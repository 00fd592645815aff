"""How often proposals held so far, within one request: what the chooser takes chances from (see `chooser`).

Nothing here looks at a clock or at which tokens were drawn before they are proposed.
"""

from bisect import bisect_right
from collections.abc import Sequence

from draftc.runtime.engine import Tokens
from draftc.runtime.ngrams import NgramIndex

__all__ = ["CopyRecord", "DraftRecord", "Estimate", "Pace"]

# Beginning of each class, and the chance that is assumed before anything was counted.
MATCH_LENGTHS = (2, 3, 4, 5, 7, 10, 16, 24)
MATCH_PRIORS = (0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97)
CONFIDENCES = (0.0, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
CONFIDENCE_PRIORS = (0.15, 0.28, 0.4, 0.52, 0.65, 0.78, 0.88, 0.96)
DRAFT_PRIOR = 0.8  # of the next draft token, whose confidence is not known yet
FORGIVING = 0.02  # part by which that estimate goes back to its prior with every token that no draft was asked for
TOLERATED, LONGEST_PAUSE = 3, 63  # failures in a row before a draft model pauses, twice as long each time; tokens
PACE_MEMORY = 0.9  # weight of the past in the pace, per step


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


class CopyRecord:
    """Of copies, by how many tokens match before them: counted on every token of the text, proposed or not."""

    def __init__(self, ngrams: NgramIndex) -> None:
        self._ngrams = ngrams
        self._matches = [Estimate(prior) for prior in MATCH_PRIORS]
        self._expected: tuple[int, int] | None = None  # (token, class) of the copy that could be made now

    def learn(self, text: Tokens) -> list[int]:
        """Take note of what `text` (n,) has become; return the tokens that were not known."""
        new: list[int] = text[self._ngrams.follow(text) :].tolist()
        for token in new:
            if self._expected is not None:
                expected, kind = self._expected
                self._matches[kind].count(token == expected)
            self._ngrams.append(token)
            match = self._ngrams.match()
            self._expected = None if match is None else (self._ngrams.tokens[match[0]], _class(MATCH_LENGTHS, match[1]))
        return new

    def chances(self, matched: int, count: int) -> list[float]:
        """Of `count` tokens behind a match of `matched`: with each that is right, the match is one longer."""
        return [self._matches[_class(MATCH_LENGTHS, matched + i)].value for i in range(count)]


class DraftRecord:
    """Of a draft model's tokens, by how sure it was: counted as far as the text shows whether they were right."""

    def __init__(self) -> None:
        self._confident = [Estimate(prior, weight=8.0) for prior in CONFIDENCE_PRIORS]
        self._next = Estimate(DRAFT_PRIOR, memory=24.0)
        self._asked: tuple[list[int], list[float]] | None = None  # what it proposed in the last step, and how sure
        self._failures = 0  # how often in a row the first of its tokens was wrong, or missing
        self._resume = 0  # length of the text at which it may be asked again

    def chance(self, confidence: float) -> float:
        """Of a token whose q has `confidence` as its largest probability."""
        return self._confident[_class(CONFIDENCES, confidence)].value

    def outlook(self, count: int) -> list[float]:
        """Of the next `count` tokens, of which nothing is known yet."""
        return [self._next.value] * count

    def forgive(self, confidence: float) -> None:
        """A token of this confidence was not proposed, so nothing is learnt of it: it is tried again some day."""
        self._confident[_class(CONFIDENCES, confidence)].relax(FORGIVING)

    def rests(self, length: int) -> bool:
        """Whether it pauses at a text of `length` tokens, after failures in a row."""
        return length < self._resume

    def proposed(self, tokens: Sequence[int], confidences: Sequence[float]) -> None:
        """It was asked, and proposed these, perhaps none."""
        self._asked = list(tokens), list(confidences)

    def learn(self, new: Sequence[int], length: int) -> None:
        """The text goes on with `new` tokens, to `length`."""
        drafted: list[int] = []
        if self._asked is not None:
            drafted, confidences = self._asked
            self._asked = None
            self._failures = 0 if drafted and new and drafted[0] == new[0] else self._failures + 1
            pause = 2 ** max(0, self._failures - TOLERATED) - 1
            self._resume = length + min(pause, LONGEST_PAUSE)
            for token, confidence, written in zip(drafted, confidences, new, strict=False):
                self._confident[_class(CONFIDENCES, confidence)].count(token == written)
                self._next.count(token == written)
                if token != written:
                    break
        if not drafted:
            self._next.relax(1 - (1 - FORGIVING) ** len(new))


class Pace:
    """Tokens per millisecond of the steps so far, by the profile; the recent ones count most."""

    def __init__(self) -> None:
        self._tokens, self._ms = 0.0, 0.0

    @property
    def value(self) -> float:
        """0 before the first step."""
        return self._tokens / self._ms if self._ms else 0.0

    def count(self, tokens: int, ms: float) -> None:
        """Record one step."""
        self._tokens = PACE_MEMORY * self._tokens + tokens
        self._ms = PACE_MEMORY * self._ms + ms


def _class(bounds: Sequence[float], value: float) -> int:
    return max(0, bisect_right(bounds, value) - 1)
