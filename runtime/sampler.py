"""One request's random generator and token history: turns logits into tokens, for target and draft alike."""

import secrets
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftc.runtime.engine import Logits
from draftc.runtime.errors import EngineError, UsageError
from draftc.runtime.warp import Distribution, LogitsMask, Sampling, penalise, warp

__all__ = ["NoTokenAllowedError", "Sampler"]


class NoTokenAllowedError(UsageError):
    """The request's mask, bias and penalties leave no token that may come next."""


class Sampler:
    """Warps and draws for one request.

    The history (prompt, then generated tokens) is what penalties and the mask see. `push` and `pop` move its end, so
    that position i of a proposal is treated as if the tokens before it had been decoded one at a time.

    `seed` None takes fresh entropy; the seed in use is `self.seed`. Raises UsageError when a biased token id is not in
    the vocabulary.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        vocab_size: int,
        seed: int | None = None,
        logits_mask: LogitsMask | None = None,
    ) -> None:
        if seed is not None and not (isinstance(seed, int | np.integer) and seed >= 0):
            raise UsageError(f"seed must be a whole number of 0 or more, got {seed!r}")
        for token in sampling.logit_bias:
            if not 0 <= token < vocab_size:
                raise UsageError(f"logit_bias names token {token}, outside the vocabulary of {vocab_size}")
        if logits_mask is not None and not callable(logits_mask):
            raise UsageError(f"logits_mask must be callable, got {logits_mask!r}")
        self.sampling = sampling
        self.seed = secrets.randbits(63) if seed is None else int(seed)
        self._bits = np.random.PCG64(self.seed)
        self._rng = np.random.Generator(self._bits)
        self._mask = logits_mask
        self._generated: list[int] = []
        self._generated_counts: Counter[int] = Counter()
        self._seen_counts: Counter[int] = Counter(prompt)

    @property
    def greedy(self) -> bool:
        """Whether tokens are chosen by argmax."""
        return self.sampling.greedy

    def push(self, token: int) -> None:
        """Append `token` to the history."""
        self._generated.append(token)
        self._generated_counts[token] += 1
        self._seen_counts[token] += 1

    def pop(self, count: int) -> None:
        """Take the last `count` tokens off the history."""
        for _ in range(count):
            token = self._generated.pop()
            for counts in (self._generated_counts, self._seen_counts):
                counts[token] -= 1
                if counts[token] == 0:
                    del counts[token]

    def argmax(self, logits: Logits) -> int:
        """The greedy token for a row of logits (V,) after the history. Raises EngineError on NaN or infinity."""
        scores = self._scores(logits)
        token = int(scores.argmax())
        self._require_finite(scores[token], logits)
        return token

    def distribution(self, logits: Logits) -> Distribution:
        """The warped distribution (V,) for a row of logits (V,). Raises EngineError on NaN or infinity."""
        scores = self._scores(logits)
        self._require_finite(scores.max(), logits)
        return warp(scores, self.sampling)

    def draw(self, p: Distribution) -> int:
        """One token from `p` (V,), by inversion of its cumulative sum."""
        support = np.flatnonzero(p > 0)  # after top-k and top-p a few of V; the comparison makes the search fast
        cumulative = np.cumsum(p if support.size == p.size else p[support])
        # Scaling by the last entry absorbs the sum's rounding: a uniform of at most 1 - 2**-53 times it stays below it,
        # so that an index past the end cannot come out.
        return int(support[np.searchsorted(cumulative, self.uniform() * cumulative[-1], side="right")])

    def uniform(self) -> float:
        """One draw from [0, 1)."""
        return float(self._rng.random())

    @property
    def sees_text(self) -> bool:
        """Whether a distribution depends on the tokens so far, or on a mask, and not on the logits alone."""
        return self.sampling.edits_logits or self._mask is not None

    def uniforms(self, count: int) -> NDArray[np.float32]:
        """The next `count` draws (count,), cut to the 24 bits that float32 holds below 1."""
        return np.floor(self._rng.random(count) * 2**24).astype(np.float32) / np.float32(2**24)

    def give_back(self, count: int) -> None:
        """Take back the last `count` draws: they come again."""
        self._bits.advance(-count)

    def _scores(self, logits: Logits) -> Logits:
        scores = logits
        if self.sampling.edits_logits:
            scores = penalise(logits, self.sampling, self._seen_counts, self._generated_counts)
        if self._mask is not None:
            allowed = self._mask(tuple(self._generated))
            if allowed is not None and not (isinstance(allowed, np.ndarray) and allowed.dtype == np.bool_):
                raise UsageError(f"the logits mask must be an array of bool, got {type(allowed).__name__}")
            if allowed is not None:
                if allowed.shape != logits.shape:
                    raise UsageError(f"the logits mask has shape {allowed.shape}, expected {logits.shape}")
                if not allowed.any():
                    raise NoTokenAllowedError("the logits mask allows no token: it must allow one until the text ends")
                scores = np.where(allowed, scores, np.float32(-np.inf))
        return scores

    def _require_finite(self, best: np.float32, logits: Logits) -> None:
        """`best` is the largest edited logit; a NaN wins every maximum, so this one look is enough."""
        if np.isfinite(best):
            return
        if np.isfinite(logits.max()):
            raise NoTokenAllowedError("penalties, logit_bias and mask leave no token that may come next: allow one")
        raise EngineError(
            f"the graph returned {logits.max()} among its logits: the weights or the precision are broken; "
            "run `draftc verify`"
        )
