"""Who owns each length. A KV buffer is static and written in place; only this record of what it holds ever moves.

| length            | owner                  | changes                                                          |
|-------------------|------------------------|------------------------------------------------------------------|
| tokens of the text | TokenBuffer            | grows by the tokens that the stop rules let through              |
| valid KV entries  | KVCache, one per graph | `append` after a call; `align` shrinks it to what the text shares |
| L, the buffer     | the graph              | never                                                            |

A rejected token is not undone: `align` stops counting it, and the next call writes over it. Because entry i of a causal
decoder is a function of tokens 0 … i alone, "the longest common prefix with the text" is always a correct length, for a
rewind in the loop as for the reuse of a prompt between requests.
"""

import numpy as np

from draftc.runtime.engine import Tokens
from draftc.runtime.errors import CapacityError, ResourceError

__all__ = ["KVCache", "TokenBuffer", "common_prefix"]


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Number of leading tokens that `a` (n,) and `b` (m,) share."""
    size = min(a.size, b.size)
    differs = a[:size] != b[:size]
    return int(differs.argmax()) if differs.any() else size


class TokenBuffer:
    """A growing sequence of token ids in one preallocated array: no copy of the text per step.

    Raises ResourceError where there is no memory for `capacity` tokens.
    """

    def __init__(self, tokens: Tokens, capacity: int) -> None:
        try:
            self._data = np.empty(capacity, np.int64)
        except (MemoryError, ValueError):  # numpy raises ValueError for more bytes than an address has bits for
            raise ResourceError(f"no memory for {capacity:,} token ids: compile with a smaller --max-length") from None
        self._length = 0
        self.extend(tokens)

    def __len__(self) -> int:
        return self._length

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return self._data.size

    @property
    def view(self) -> Tokens:
        """The tokens so far (n,), read-only; valid until the next `extend`."""
        view = self._data[: self._length]
        view.flags.writeable = False
        return view

    def extend(self, tokens: Tokens | list[int]) -> None:
        """Append `tokens`. Raises CapacityError when they do not fit."""
        end = self._length + len(tokens)
        if end > self._data.size:
            raise CapacityError(f"{end} tokens do not fit into {self._data.size}: shorten the prompt or max_new_tokens")
        self._data[self._length : end] = tokens
        self._length = end

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self._length = min(length, self._length)


class KVCache:
    """Which tokens a graph's KV buffers hold. `capacity` is L, the length of the buffers."""

    def __init__(self, capacity: int) -> None:
        self._tokens = TokenBuffer(np.empty(0, np.int64), capacity)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def capacity(self) -> int:
        """L: entries that the buffers have room for."""
        return self._tokens.capacity

    @property
    def tokens(self) -> Tokens:
        """The tokens whose keys and values the buffers hold."""
        return self._tokens.view

    def align(self, text: Tokens) -> int:
        """Keep what the buffers share with `text` (n,), at most n-1 entries, and return how many that are.

        The last token of the text is never kept: its logits are what the caller wants, so it must be run again.
        """
        self._tokens.truncate(min(common_prefix(self.tokens, text), max(text.size - 1, 0)))
        return len(self)

    def append(self, tokens: Tokens) -> None:
        """Record that `tokens` (S,) were written behind the current end."""
        self._tokens.extend(tokens)

    def clear(self) -> None:
        """Forget everything; nothing is copied or freed."""
        self._tokens.truncate(0)
