"""A tiny model with real arithmetic and a real cache, whole and broken in the ways that backends break."""

import numpy as np

from draftc.runtime.decoder import Decoder, Limits
from draftc.runtime.drafter import Drafter, ModelDrafter, NgramDrafter
from draftc.runtime.engine import Logits, Tokens
from draftc.runtime.graphio import GraphSpec
from draftc.runtime.session import Session
from draftc.runtime.text import Tokenizer
from tests.runtime.cli_fakes import manifest_for
from tests.runtime.fakes import FakeEngine, fixed

__all__ = [
    "CHUNK",
    "MAX_LENGTH",
    "MAX_WIDTH",
    "BlindWideEngine",
    "KvEngine",
    "LateWriteEngine",
    "NanEngine",
    "OutlierEngine",
    "StaleEngine",
    "kv_session",
]

MAX_LENGTH, MAX_WIDTH, CHUNK = 80, 8, 16  # as in manifest_for
DIM = 16


class KvEngine:
    """Logits from a decaying sum over cache entries, which are written where a call says and read from there.

    `noise` moves every logit by up to that much in calls wider than one token, as kernels of low precision do.
    `near` another seed: a draft that resembles the model of that seed, less so the larger `apart` is.
    """

    def __init__(
        self, vocab: int, seed: int = 0, *, near: int | None = None, apart: float = 0.35, noise: float = 0.0
    ) -> None:
        rng = np.random.default_rng(seed if near is None else near)
        self._embedding = rng.standard_normal((vocab, DIM)).astype(np.float32)
        self._head = (1.1 * rng.standard_normal((DIM, vocab))).astype(np.float32)
        if near is not None:
            other = np.random.default_rng([seed, 1])
            self._head += (apart * other.standard_normal((DIM, vocab))).astype(np.float32)
        length = MAX_LENGTH + MAX_WIDTH
        self._cache = np.full((length, DIM), 7.0, np.float32)  # (L, D); a slot that nobody wrote must not matter
        self._logits = np.empty((MAX_WIDTH, vocab), np.float32)
        self._spec = GraphSpec.decoder([(1, DIM, DIM)], length, vocab, "float32")
        self._noise = noise

    @property
    def spec(self) -> GraphSpec:
        return self._spec

    def forward(self, tokens: Tokens, start: int, rows: int) -> Logits:
        width = tokens.size
        assert start + width <= len(self._cache)
        self.write(tokens, start)
        for row, end in enumerate(range(start + width - rows + 1, start + width + 1)):
            self._logits[row] = self.row(start, width, end)
        return self._logits[:rows]

    def write(self, tokens: Tokens, start: int) -> None:
        self._cache[start : start + tokens.size] = self._embedding[tokens]

    def row(self, start: int, width: int, end: int) -> Logits:
        """The logits (V,) behind `end` tokens, in a call of `width` tokens from `start`."""
        weights = np.float32(0.75) ** np.arange(end - 1, -1, -1, dtype=np.float32)
        logits: Logits = np.tanh(weights @ self._cache[:end]) @ self._head
        if self._noise and width > 1:
            logits += self._noise * np.sin(np.arange(logits.size, dtype=np.float32) + width + end)
        return logits

    def clear(self) -> None:
        self._cache.fill(0.0)

    def close(self) -> None:
        pass


class OutlierEngine(KvEngine):
    """Not a fault: behind every third token from 70 on, a wide call rounds a hundred times as coarsely."""

    def row(self, start: int, width: int, end: int) -> Logits:
        logits = super().row(start, width, end)
        if width > 1:
            coarse = (self._embedding[70::3] == self._cache[end - 1]).all(axis=1).any()
            noise = np.float32(0.3 if coarse else 0.003)
            logits += noise * np.sin(np.arange(logits.size, dtype=np.float32) + width + end)
        return logits


class BlindWideEngine(KvEngine):
    """Fault: in a call of several tokens behind a past, a row does not see the newest entry of that past."""

    def row(self, start: int, width: int, end: int) -> Logits:
        if width == 1 or start == 0:
            return super().row(start, width, end)
        kept = self._cache[start - 1].copy()
        self._cache[start - 1] = 0.0
        logits = super().row(start, width, end)
        self._cache[start - 1] = kept
        return logits


class LateWriteEngine(KvEngine):
    """Fault: a call of several tokens that starts behind a past writes one slot too far."""

    def write(self, tokens: Tokens, start: int) -> None:
        super().write(tokens, start + (tokens.size > 1 and start > 0 and start + tokens.size < len(self._cache)))


class StaleEngine(KvEngine):
    """Fault: a slot that was written once keeps its entry, unless the call starts from an empty cache."""

    def __init__(self, vocab: int, seed: int = 0) -> None:
        super().__init__(vocab, seed)
        self._written = np.zeros(len(self._cache), bool)

    def write(self, tokens: Tokens, start: int) -> None:
        if start == 0:
            self._written[:] = False
        for slot, token in enumerate(tokens, start):
            if not self._written[slot]:
                self._cache[slot] = self._embedding[token]
                self._written[slot] = True

    def clear(self) -> None:
        super().clear()
        self._written[:] = False


class NanEngine(KvEngine):
    """Fault: NaN among the logits of every call of `width` tokens."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__(vocab)
        self._width = width

    def row(self, start: int, width: int, end: int) -> Logits:
        logits = super().row(start, width, end)
        if width == self._width:
            logits[3] = np.nan
        return logits


def kv_session(
    tokenizer: Tokenizer,
    target: KvEngine | None = None,
    draft: KvEngine | None = None,
    drafters: dict[str, Drafter] | None = None,
    max_length: int = MAX_LENGTH,
) -> Session:
    """A session over a target and a draft that resembles it, K = 2. `drafters` replaces the usual two."""
    vocab = tokenizer.vocab_size
    limits = Limits(max_length, MAX_WIDTH, min(CHUNK, max_length), vocab)
    target = target or KvEngine(vocab)
    spec = FakeEngine(fixed([1.0]), vocab, max_length + MAX_WIDTH)  # only its spec is looked at
    manifest = manifest_for(vocab, spec, max_length=max_length, k=2)
    if drafters is None:
        draft_decoder = Decoder(draft or KvEngine(vocab, 5, near=0), limits)
        drafters = {"draft_model": ModelDrafter(draft_decoder), "ngram": NgramDrafter()}
    return Session(manifest, tokenizer, Decoder(target, limits), drafters)
