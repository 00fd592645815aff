"""A decoder graph with its cache record: the one place that decides what a call runs, and where it writes."""

import time
from dataclasses import dataclass

from draftc.runtime.engine import Engine, Fills, Logits, Tokens
from draftc.runtime.errors import EngineError
from draftc.runtime.kvcache import KVCache

__all__ = ["Decoder", "Limits"]


@dataclass(frozen=True)
class Limits:
    """What the compiled graphs allow: tokens of text, widest verification, widest prefill call, real vocabulary."""

    max_length: int
    max_width: int
    prefill_chunk: int
    vocab_size: int


class Decoder:
    """Engine plus KVCache. `calls` and `seconds` count what went through the engine so far."""

    def __init__(self, engine: Engine, limits: Limits) -> None:
        self.engine = engine
        self.limits = limits
        self.cache = KVCache(engine.spec.buffer_length)
        self.calls = 0
        self.seconds = 0.0
        self._broken = False

    def sync(self, text: Tokens, upcoming: int = 0) -> Tokens:
        """Bring the cache in line with `text` (n,) and return the tail of it (≥ 1 token) that is still to be run.

        The tail and `upcoming` more tokens fit into one call; what does not is prefilled here, in chunks.
        """
        start = self._align(text)
        widest = self.limits.max_width if upcoming else self.limits.prefill_chunk
        while (missing := text.size - start) + upcoming > widest:
            width = min(self.limits.prefill_chunk, missing - 1)
            self.fill(text[start : start + width])
            start += width
        return text[start:]

    def sync_but(self, count: int, text: Tokens) -> None:
        """Bring the cache in line with `text` (n,) so that exactly its last `count` ≥ 1 tokens are still to be run."""
        start, end = self._align(text[: text.size - count + 1]), text.size - count
        while start < end:
            width = min(self.limits.prefill_chunk, end - start)
            self.fill(text[start : start + width])
            start += width

    def fill(self, tokens: Tokens) -> None:
        """`extend` where nobody wants the logits: they stay where the engine computes them."""
        if not isinstance(self.engine, Fills):
            self.extend(tokens, rows=1)
            return
        begin = time.perf_counter()
        try:
            self.engine.fill(tokens, len(self.cache))
        except EngineError:
            self.mark_broken()
            raise
        self.ran(tokens, time.perf_counter() - begin)

    def extend(self, tokens: Tokens, rows: int) -> Logits:
        """Run `tokens` (S,) behind the cache's end; return the logits (rows, vocab_size) of the last `rows` of them.

        The result is a view that the next call overwrites. Padding rows of the head (ids ≥ vocab_size) are cut off.
        After an EngineError the buffers count as broken.
        """
        begin = time.perf_counter()
        try:
            logits = self.engine.forward(tokens, len(self.cache), rows)
        except EngineError:
            self.mark_broken()
            raise
        self.ran(tokens, time.perf_counter() - begin)
        return logits[:, : self.limits.vocab_size]

    def ran(self, tokens: Tokens, seconds: float, calls: int = 1) -> None:
        """Record that `tokens` were run behind the cache's end, by `calls` calls of the engine.

        Only now: an interrupt inside a call leaves the old length, and the next call writes over what it left.
        """
        self.seconds += seconds
        self.calls += calls
        self.cache.append(tokens)

    def mark_broken(self) -> None:
        """Say that the KV buffers may hold NaN, as after NaN among the logits: `sync` clears them and starts anew.

        Looking for NaN in every call would cost a pass over the vocabulary; whoever reads the logits sees it anyway.
        """
        self.cache.clear()
        self._broken = True

    def _align(self, text: Tokens) -> int:
        if self._broken:
            self.engine.clear()
            self._broken = False
        return self.cache.align(text)

    def close(self) -> None:
        """Release the engine."""
        self.cache.clear()
        self.engine.close()
