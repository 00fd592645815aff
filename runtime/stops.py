"""Stop rules, applied token by token before anything is committed.

Speculation delivers several tokens at once. Looking at them one by one, in order, is what keeps an end-of-sequence
inside an accepted draft, or a stop string that spans one, from being run over.
"""

from collections.abc import Sequence
from numbers import Integral
from typing import Literal, Protocol

from draftc.runtime.detokenizer import Detokenizer
from draftc.runtime.errors import UsageError

__all__ = ["FinishReason", "OutputStream", "StartsStreams"]

FinishReason = Literal["stop", "length", "cancelled"]


class StartsStreams(Protocol):
    """What an OutputStream needs of a tokenizer."""

    def detokenizer(self) -> Detokenizer:
        """A new stream of text."""


class OutputStream:
    """The output of one request: its token ids, its text, and when to stop.

    `token_ids` ends with the token that ended the output (end-of-sequence, stop id, or the one that completed a stop
    string), as transformers has it; nothing follows it. `text` shows no end-of-sequence or stop token and ends before
    the first stop string. Text is released to `take_text` once no stop string can begin in it any more, so the pieces
    always join to `text`.

    `eos_token_ids` are the model's own end tokens: pass none of them to ignore them; they give no text either way where
    they are special tokens. Raises UsageError when an argument is out of range.
    """

    def __init__(
        self,
        tokenizer: StartsStreams,
        *,
        eos_token_ids: Sequence[int] = (),
        stop_token_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        max_new_tokens: int | None = None,
    ) -> None:
        self._end_ids = _check_ids("eos_token_ids", eos_token_ids) | _check_ids("stop_token_ids", stop_token_ids)
        self._stops = _check_stop_strings(stop_strings)
        if max_new_tokens is not None and not _is_whole(max_new_tokens, low=1):
            raise UsageError(f"max_new_tokens must be a whole number of 1 or more, got {max_new_tokens!r}")
        self._max_new_tokens = max_new_tokens
        self._detokenizer = tokenizer.detokenizer()
        self._tail = ""  # final text, withheld because a stop string may begin in it
        self._pieces: list[str] = []  # released text
        self._taken = 0  # how many pieces take_text has given out
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        """The text so far, as far as it is certain; all of it once `finish_reason` is set."""
        return "".join(self._pieces)

    def push(self, token_id: int) -> FinishReason | None:
        """Add the next token. Returns why the output ends with it, or None. Stop beats the length cap.

        Raises UsageError when the output has already ended.
        """
        if self.finish_reason is not None:
            raise UsageError(f"the output has ended ({self.finish_reason}): it takes no further tokens")
        self.token_ids.append(token_id)
        if token_id in self._end_ids:
            self.finish("stop")
        elif self._scan(self._detokenizer.push(token_id)) or self._held_text_stops():
            self.finish_reason = "stop"
        elif len(self.token_ids) == self._max_new_tokens:
            self.finish("length")
        return self.finish_reason

    def finish(self, reason: FinishReason) -> FinishReason:
        """End the output and release everything withheld. Returns the reason: "stop" if that completes a stop string.

        Does nothing when the output has ended.
        """
        if self.finish_reason is None:
            stopped = self._scan(self._detokenizer.finish())
            if not stopped:
                self._release(self._tail)
            self.finish_reason = "stop" if stopped else reason
        return self.finish_reason

    def take_text(self) -> str:
        """The text that became certain since the last call."""
        new = "".join(self._pieces[self._taken :])
        self._taken = len(self._pieces)
        return new

    def _scan(self, new: str) -> bool:
        """Add final text; True if it completes a stop string, the text then ends before it.

        A stop string that is complete now begins in `_tail` or in `new`: the tail is the longest suffix that one could
        begin with. So nothing before the tail is ever looked at again.
        """
        if not new:
            return False
        window = self._tail + new
        end = self._first_stop(window)
        if end is not None:
            self._release(window[:end])
            return True
        withheld = max((_overlap(window, stop) for stop in self._stops), default=0)
        self._tail = window[len(window) - withheld :]
        self._release(window[: len(window) - withheld])
        return False

    def _held_text_stops(self) -> bool:
        """Whether text that the detokenizer withholds completes a stop string, were the output to end here.

        A byte-fallback tokenizer withholds a line feed, say, because a later byte could still spoil it; but stopping
        now means that no byte follows. U+FFFD stands for an unfinished character, which may yet become another one.
        """
        held = self._detokenizer.held if self._stops else ""
        if not held or "\ufffd" in held:
            return False
        window = self._tail + held
        end = self._first_stop(window)
        if end is not None:
            self._release(window[:end])
        return end is not None

    def _first_stop(self, window: str) -> int | None:
        """Where the first stop string in `window` begins."""
        return min((start for stop in self._stops if (start := window.find(stop)) >= 0), default=None)

    def _release(self, text: str) -> None:
        if text:
            self._pieces.append(text)


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`, short of all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def _check_stop_strings(stops: Sequence[str]) -> tuple[str, ...]:
    if isinstance(stops, str):
        raise UsageError(f"stop strings must be a list of strings, got the string {stops!r}: put it in a list")
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise UsageError(f"a stop string must be text of at least one character, got {stop!r}")
    return tuple(dict.fromkeys(stops))


def _check_ids(name: str, ids: Sequence[int]) -> frozenset[int]:
    for token_id in ids:
        if not _is_whole(token_id, low=0):
            raise UsageError(f"{name} must be token ids of 0 or more, got {token_id!r}")
    return frozenset(ids)


def _is_whole(value: object, *, low: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= low
