"""Where a growing text has said the same before: n-grams, and how well continuing an earlier occurrence predicts.

(Saxena 2023, prompt lookup decoding.) The work for each new token is a few dictionary
operations, however long the text.
"""

import numpy as np

from draftc.runtime.engine import Tokens

__all__ = ["LONGEST_MATCH", "NgramIndex"]

LONGEST_MATCH = 32  # matches are not measured beyond this


class NgramIndex:
    """The latest occurrence of every n-gram of `min_ngram` to `max_ngram` tokens that something follows."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self.min_ngram = min_ngram
        self.max_ngram = max_ngram
        self._tokens: list[int] = []
        self._array = np.empty(0, np.int64)
        self._next: dict[tuple[int, ...], int] = {}  # n-gram → where its latest continuation begins

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> list[int]:
        """The text; read only."""
        return self._tokens

    def follow(self, text: Tokens) -> int:
        """How many tokens of `text` (n,) are indexed already; 0, and an empty index, where it begins differently."""
        known = len(self._tokens)
        if known > text.size or not np.array_equal(self._array[:known], text[:known]):
            self.clear()
            known = 0
        self._array = text
        return known

    def extend(self, text: Tokens) -> None:
        """Make `text` (n,) the indexed text."""
        for token in text[self.follow(text) :].tolist():
            self.append(token)

    def append(self, token: int) -> None:
        """The text goes on with `token`."""
        tokens = self._tokens
        end = len(tokens)
        for n in range(self.min_ngram, min(self.max_ngram, end) + 1):
            self._next[tuple(tokens[end - n :])] = end
        tokens.append(token)

    def clear(self) -> None:
        """Forget the text."""
        self._tokens.clear()
        self._next.clear()
        self._array = np.empty(0, np.int64)

    def match(self, ahead: list[int] | None = None) -> tuple[int, int] | None:
        """(where the continuation begins, how many tokens before it match) of the longest, then latest, occurrence.

        `ahead` are tokens that may follow the text. Of a match of `max_ngram` tokens or more, which occurrence is the
        longest is not asked; its length is, up to LONGEST_MATCH.
        """
        ahead = ahead or []
        tail = (self._tokens[-LONGEST_MATCH:] + ahead)[-LONGEST_MATCH:]
        for n in range(min(self.max_ngram, len(tail)), self.min_ngram - 1, -1):
            start = self._next.get(tuple(tail[-n:]))
            if start is None:
                continue
            while n < min(len(tail), start) and self._tokens[start - n - 1] == tail[-n - 1]:
                n += 1
            return start, n
        return None

    def copy(self, start: int, count: int, ahead: list[int] | None = None) -> list[int]:
        """`count` tokens from `start` on; past the end of the text (and `ahead`), of what was copied itself."""
        tokens = self._tokens
        source = tokens[start : start + count] + (ahead or [])[: max(0, start + count - len(tokens))]
        return [source[i % len(source)] for i in range(count)]
