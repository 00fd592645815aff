"""A decoder graph with its cache record: the one place that decides what a call runs, and where it writes."""

import time
from dataclasses import dataclass

from draftc.runtime.engine import Engine, Logits, Tokens
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
        if self._broken:
            self.engine.clear()
            self._broken = False
        start = self.cache.align(text)
        widest = self.limits.max_width if upcoming else self.limits.prefill_chunk
        while (missing := text.size - start) + upcoming > widest:
            width = min(self.limits.prefill_chunk, missing - 1)
            self.extend(text[start : start + width], rows=1)
            start += width
        return text[start:]

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
        self.seconds += time.perf_counter() - begin
        self.calls += 1
        # Only now: an interrupt inside the call leaves the old length, and the next call writes over what it left.
        self.cache.append(tokens)
        return logits[:, : self.limits.vocab_size]

    def mark_broken(self) -> None:
        """Say that the KV buffers may hold NaN, as after NaN among the logits: `sync` clears them and starts anew.

        Looking for NaN in every call would cost a pass over the vocabulary; whoever reads the logits sees it anyway.
        """
        self.cache.clear()
        self._broken = True

    def close(self) -> None:
        """Release the engine."""
        self.cache.clear()
        self.engine.close()
