"""A decoder graph with its cache record: the one place that decides what a call runs, and where it writes."""

import time
from dataclasses import dataclass

from draftc.runtime.engine import Engine, Logits, Tokens
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
    """Engine plus KVCache. `calls`, `tokens_run` and `seconds` count what went through the engine so far."""

    def __init__(self, engine: Engine, limits: Limits) -> None:
        self.engine = engine
        self.limits = limits
        self.cache = KVCache(engine.spec.buffer_length)
        self.calls = 0
        self.tokens_run = 0
        self.seconds = 0.0

    def sync(self, text: Tokens, upcoming: int = 0) -> Tokens:
        """Bring the cache in line with `text` (n,) and return the tail of it (≥ 1 token) that is still to be run.

        The tail and `upcoming` more tokens fit into one call; what does not is prefilled here, in chunks.
        """
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
        """
        begin = time.perf_counter()
        logits = self.engine.forward(tokens, len(self.cache), rows)
        self.seconds += time.perf_counter() - begin
        self.calls += 1
        self.tokens_run += tokens.size
        # Only now: an interrupt inside the call leaves the old length, and the next call writes over what it left.
        self.cache.append(tokens)
        return logits[:, : self.limits.vocab_size]

    def close(self) -> None:
        """Release the engine."""
        self.cache.clear()
        self.engine.close()
