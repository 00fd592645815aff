"""Drafters: what proposes the next tokens. A third kind implements `Drafter` and nothing else changes."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from draftc.runtime.accept import Proposal
from draftc.runtime.decoder import Decoder
from draftc.runtime.engine import Tokens
from draftc.runtime.errors import UsageError
from draftc.runtime.sampler import NoTokenAllowedError, Sampler
from draftc.runtime.warp import Distribution

__all__ = ["Drafter", "ModelDrafter", "NgramDrafter"]


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

    @property
    def decoders(self) -> Sequence[Decoder]:
        """The graphs that it runs, so that the session can time, reset and close them."""


class ModelDrafter:
    """A small language model drafts autoregressively, warped exactly as the target is ("draft_model")."""

    method = "draft_model"

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def propose(self, text: Tokens, k: int, sampler: Sampler) -> Proposal:
        """`k` tokens of the draft model: its argmax when greedy, else draws with their q. See Drafter.propose."""
        # The text may outgrow a draft with a shorter context; then there is nothing to propose.
        k = min(k, self.decoder.limits.max_length - text.size)
        if k <= 0:
            return Proposal()
        tokens = np.empty(k, np.int64)
        q: list[Distribution] = []
        pending = self.decoder.sync(text)
        for i in range(k):
            row = self.decoder.extend(pending, rows=1)[0]  # (V,)
            try:
                if sampler.greedy:
                    tokens[i] = sampler.argmax(row)
                else:
                    q.append(sampler.distribution(row))
                    tokens[i] = sampler.draw(q[i])
            except NoTokenAllowedError:  # the proposal has gone past where the request's mask ends the text
                k = i
                break
            sampler.push(int(tokens[i]))
            pending = tokens[i : i + 1]
        sampler.pop(k)
        return Proposal(tokens[:k], q or None)

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

    def __init__(self, min_ngram: int = 2, max_ngram: int = 4) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise UsageError(f"n-grams need 1 <= min_ngram <= max_ngram, got {min_ngram} and {max_ngram}")
        self.min_ngram = min_ngram
        self.max_ngram = max_ngram

    def propose(self, text: Tokens, k: int, sampler: Sampler) -> Proposal:
        """`k` copied tokens, or none where no suffix occurs earlier. See Drafter.propose."""
        match = self.latest_match(text) if k > 0 else None
        if match is None:
            return Proposal()
        period = text.size - match
        return Proposal(text[match + np.arange(k) % period])

    def latest_match(self, text: Tokens) -> int | None:
        """Where the continuation of the longest, then latest, earlier occurrence of the suffix begins; None if none."""
        ends = np.arange(self.min_ngram - 1, text.size - 1)  # index of the last token of each earlier n-gram
        best: int | None = None
        for n in range(1, self.max_ngram + 1):
            ends = ends[(ends >= n - 1) & (text[ends - (n - 1)] == text[text.size - n])]
            if ends.size == 0:
                break
            if n >= self.min_ngram:
                best = int(ends[-1]) + 1
        return best

    @property
    def decoders(self) -> Sequence[Decoder]:
        """None: nothing is run."""
        return ()
