"""Drafters: what proposes the next tokens. A third kind implements `Drafter` and nothing else changes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from draftc.runtime.accept import Proposal
from draftc.runtime.decoder import Decoder
from draftc.runtime.engine import Logits, Tokens
from draftc.runtime.errors import UsageError
from draftc.runtime.kvcache import common_prefix
from draftc.runtime.ngrams import NgramIndex
from draftc.runtime.sampler import NoTokenAllowedError, Sampler
from draftc.runtime.vocabulary import CutVocabulary
from draftc.runtime.warp import Distribution

__all__ = ["DraftRule", "DraftState", "Drafter", "ModelDrafter", "NgramDrafter", "confidence"]


class Drafter(Protocol):
    """Proposes a continuation of the text, and is told nothing else: a rejection shows as a text that differs."""

    @property
    def method(self) -> str:
        """The manifest's word for it: "draft_model", "ngram", …"""

    def propose(self, text: Tokens, k: int, sampler: Sampler) -> Proposal:
        """Up to `k` ≥ 0 tokens that may follow `text` (n,).

        If tokens are drawn, `Proposal.q` must hold the very distributions they were drawn from, and all drawn tokens
        must be proposed: stopping early may depend on the text and on q_i, never on x_i. The sampler's history is left
        as it was found.
        """

    def begin(self, room: int) -> None:
        """A new request, whose text has room for `room` more tokens.

        What was learnt in earlier ones is forgotten, so that the same request gives the same text.
        """

    @property
    def decoders(self) -> Sequence[Decoder]:
        """The graphs that it runs, so that the session can time, reset and close them."""


class DraftRule(Protocol):
    """Says how far a draft model goes. Asked before a token is drawn, so never about the draw; see Drafter.propose."""

    def proposes(self, confidence: float) -> bool:
        """Whether to draw and propose a token from the q_i whose logits have a softmax of at most `confidence`."""

    def goes_on(self) -> bool:
        """Whether to run the model for one token more."""


@dataclass(frozen=True)
class DraftState:
    """Where a draft model stands: `lag` ≥ 1 tokens are new to it, and `fill` lie before those in its cache."""

    lag: int
    fill: int


class ModelDrafter:
    """A small language model drafts autoregressively, warped exactly as the target is ("draft_model").

    `vocabulary` says which tokens the columns of its logits are, where they are not all tokens in order. `window`: of a
    text that is new to it, it reads no more than so many tokens at the end (None: all), and from then on what follows.
    A draft that saw less proposes worse, and may be there sooner; the target decides either way.
    """

    method = "draft_model"

    def __init__(self, decoder: Decoder, vocabulary: CutVocabulary | None = None, window: int | None = None) -> None:
        self.decoder = decoder
        self.vocabulary = vocabulary
        self.window = window
        self.start = 0  # of what it reads, in the text

    def begin(self, room: int) -> None:
        """Nothing: it learns nothing."""

    def forget(self) -> None:
        """Begin the next text as if it were the first: what it will read depends on that text alone."""
        self.decoder.cache.clear()
        self.start = 0

    def state(self, text: Tokens) -> DraftState | None:
        """How much of `text` (n,) a proposal runs first, and behind what; None where the text is too long for it."""
        self._place(text)
        seen = text[self.start :]
        if seen.size >= self.decoder.limits.max_length:
            return None
        fill = min(common_prefix(self.decoder.cache.tokens, seen), seen.size - 1)
        return DraftState(seen.size - fill, fill)

    def _place(self, text: Tokens) -> None:
        """Choose where in `text` (n,) to begin: as before, unless it is another text or too much of it would be new."""
        if self.window is None:
            return
        seen = text[self.start :]
        known = common_prefix(self.decoder.cache.tokens, seen)
        if known == 0 or seen.size - known > self.window or seen.size >= self.decoder.limits.max_length:
            self.start = max(0, text.size - self.window)

    def propose(self, text: Tokens, k: int, sampler: Sampler, rule: DraftRule | None = None) -> Proposal:
        """`k` tokens of the draft model: its argmax when greedy, else draws with their q. See Drafter.propose.

        `rule` may end the proposal earlier.
        """
        self._place(text)
        text = text[self.start :]
        # The text may outgrow a draft with a shorter context; then there is nothing to propose.
        k = min(k, self.decoder.limits.max_length - text.size)
        if k <= 0:
            return Proposal()
        tokens: list[int] = []
        q: list[Distribution] = []
        pending = self.decoder.sync(text)
        while len(tokens) < k:
            row = self.decoder.extend(pending, rows=1)[0]  # (V,), or (N,) of a cut head
            if rule is not None and not rule.proposes(confidence(row)):
                break
            try:
                token = self._choose(row, sampler, q)
            except NoTokenAllowedError:  # the proposal has gone past where the request's mask ends the text
                break
            tokens.append(token)
            sampler.push(token)
            if rule is not None and not rule.goes_on():
                break
            pending = np.array([token])
        sampler.pop(len(tokens))
        return Proposal(np.array(tokens, np.int64), q or None)

    def _choose(self, row: Logits, sampler: Sampler, q: list[Distribution]) -> int:
        """The next token for a row of logits; where it is drawn, its distribution (V,) is added to `q`."""
        if sampler.greedy:
            return self.vocabulary.argmax(row, sampler) if self.vocabulary else sampler.argmax(row)
        drawn_from = self.vocabulary.distribution(row, sampler) if self.vocabulary else sampler.distribution(row)
        q.append(drawn_from)
        return sampler.draw(drawn_from)

    @property
    def decoders(self) -> Sequence[Decoder]:
        """The draft model's graph."""
        return (self.decoder,)


class NgramDrafter:
    """Prompt lookup ("ngram"): copies what followed the latest earlier occurrence of the text's longest suffix.

    (Saxena 2023, prompt lookup decoding.) Suffixes of `max_ngram` down to `min_ngram` tokens are tried. Where the copy
    reaches the end of the text, it goes on with what it has copied itself, so that a short cycle is proposed in full.
    """

    method = "ngram"

    def __init__(self, min_ngram: int = 2, max_ngram: int = 6) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise UsageError(f"n-grams need 1 <= min_ngram <= max_ngram, got {min_ngram} and {max_ngram}")
        self._index = NgramIndex(min_ngram, max_ngram)

    def begin(self, room: int) -> None:
        """Nothing: an index of another text is seen to be one."""

    def propose(self, text: Tokens, k: int, sampler: Sampler) -> Proposal:
        """`k` copied tokens, or none where no suffix occurs earlier. See Drafter.propose."""
        if k <= 0:
            return Proposal()
        self._index.extend(text)
        match = self._index.match()
        return Proposal() if match is None else Proposal(np.array(self._index.copy(match[0], k), np.int64))

    @property
    def decoders(self) -> Sequence[Decoder]:
        """None: nothing is run."""
        return ()


def confidence(row: Logits) -> float:
    """The largest of softmax(row), for logits (V,): how sure a draft is of its likeliest token at temperature 1."""
    return float(1 / np.exp(row - row.max()).sum(dtype=np.float32))
