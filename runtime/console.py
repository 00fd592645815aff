"""What the commands write: answers to stdout, piece by piece; figures and notes to stderr, which keeps stdout clean."""

import json
import math
import os
import signal
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

import draftc.runtime as draftc
from draftc.runtime.reports import jsonable
from draftc.runtime.request import Generation, StreamEvent, TokenKind
from draftc.runtime.session import GenerationStream, Session
from draftc.runtime.stats import Stats

__all__ = [
    "AnswerWriter",
    "CancelOnInterrupt",
    "follow",
    "generation_record",
    "legend",
    "note",
    "opened",
    "print_json",
    "print_report",
    "printable",
    "progress",
    "stats_line",
    "stats_record",
    "to_json",
]

MEASURING = "measuring what calls cost on this machine, once (about half a minute; --no-tune does without)"
FILE_WIDTH = 160  # of reports in a file or a pipe, which has no width of its own
STYLES: dict[TokenKind, str] = {"accepted": "green", "corrected": "yellow", "bonus": "cyan", "plain": ""}
MARKS: dict[TokenKind, tuple[str, str]] = {
    "accepted": ("{+", "+}"),
    "corrected": ("{!", "!}"),
    "bonus": ("{*", "*}"),
    "plain": ("", ""),
}
MEANING: dict[TokenKind, str] = {
    "accepted": "proposal that the target accepted",
    "corrected": "the target's own token where it rejected one",
    "bonus": "the target's next token after accepting all",
    "plain": "decoded without a proposal",
}


class AnswerWriter:
    """Writes one answer to stdout as it is generated.

    On a terminal, control characters in a model's text are shown as symbols: a text must not move the cursor or set
    the window's title. Into a file or a pipe the text goes as it is.
    """

    def __init__(self, show_drafts: bool = False) -> None:
        self._console = Console(file=sys.stdout, highlight=False)
        self._show_drafts = show_drafts
        self._last = "\n"

    @property
    def coloured(self) -> bool:
        """Whether stdout shows colours: a terminal, without NO_COLOR."""
        return self._console.color_system is not None and not self._console.no_color

    def write(self, event: StreamEvent) -> None:
        """Write what one verification added, at once."""
        if self._show_drafts:
            for kind, group in groupby(event.pieces, key=lambda piece: piece[1]):
                self._write_marked("".join(text for text, _ in group), kind)
        else:
            self._write(event.text)

    def end(self) -> None:
        """Finish the answer's last line."""
        if self._last != "\n":
            self._write("\n")

    def _write_marked(self, text: str, kind: TokenKind) -> None:
        if not text:
            return
        if self.coloured:
            self._console.out(printable(text), style=STYLES[kind] or None, highlight=False, end="")
            self._last = text[-1]
        else:
            before, after = MARKS[kind]
            self._write(before + text + after)

    def _write(self, text: str) -> None:
        if text:
            sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
            sys.stdout.flush()
            self._last = text[-1]


class CancelOnInterrupt:
    """While entered, Ctrl-C calls `cancel` once an answer has begun, so that it ends in order and can be reported.

    Before `begun` is called, and when Ctrl-C is pressed a second time, KeyboardInterrupt is raised as usual.
    """

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._armed = False
        self._previous: Any = None

    def __enter__(self) -> Self:
        try:
            self._previous = signal.signal(signal.SIGINT, self._on_interrupt)
        except ValueError:  # not the main thread: whoever runs us there handles interrupts
            self._previous = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def begun(self) -> None:
        """The first token is there."""
        self._armed = True

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        if not self._armed:
            raise KeyboardInterrupt
        self._armed = False
        self._cancel()


def follow(stream: GenerationStream, writer: AnswerWriter | None) -> Generation:
    """Run `stream` to its end, or until Ctrl-C, writing what comes. Raises what the session raises."""
    with CancelOnInterrupt(stream.cancel) as interrupt:
        for event in stream.events():
            interrupt.begun()
            if writer is not None:
                writer.write(event)
    if writer is not None:
        writer.end()
    return stream.result


def printable(text: str) -> str:
    """`text` with its control characters, but for newline and tab, as visible symbols; carriage returns are dropped."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else _symbol(c) for c in text)


def _symbol(control: str) -> str:
    code = ord(control)
    return "" if control == "\r" else chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"


@contextmanager
def progress(quiet: bool = False, *, unseen: str | None = None) -> Iterator[Callable[[str, float], None]]:
    """A progress bar on stderr; the context's value is called with what runs now and the share (0 to 1) that is done.

    Where stderr is no terminal, the line `unseen`, if there is one, is written at the first call instead, and nothing
    more. Nothing at all is shown if `quiet`.
    """
    console = Console(stderr=True, highlight=False)
    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    shown = console.is_terminal and not quiet
    bar = Progress(*columns, console=console, transient=True)
    with ExitStack() as started:

        def report(what: str, done: float) -> None:
            if not bar.tasks:  # only now: a bar that shows nothing would still take hold of the terminal
                bar.add_task("", total=1.0)
                started.enter_context(bar)
            bar.update(bar.task_ids[0], description=printable(what), completed=done)

        def announce(what: str, done: float) -> None:
            nonlocal unseen
            if unseen is not None and not quiet:
                note(unseen)
                unseen = None  # once

        yield report if shown else announce


@contextmanager
def opened(out: Path, quiet: bool = False, **opening: Any) -> Iterator[Session]:
    """An open bundle, with a progress bar, or a line, while its costs are measured for the first time."""
    with progress(quiet, unseen=MEASURING) as on_progress:
        session = draftc.open(out, on_progress=on_progress, **opening)
    with session:
        yield session


def print_report(report: RenderableType) -> None:
    """Print a report on stdout; where that is no terminal, on lines wide enough for its tables."""
    free = sys.stdout.isatty() or "COLUMNS" in os.environ
    Console(highlight=False, width=None if free else FILE_WIDTH).print(report)


def note(text: str) -> None:
    """A line for the user, on stderr; dim on a terminal."""
    Console(stderr=True, highlight=False).out(text, style="dim", highlight=False)


def legend(coloured: bool) -> None:
    """Explain on stderr how `--show-drafts` marks tokens on stdout."""
    console = Console(stderr=True, highlight=False)
    for kind, meaning in MEANING.items():
        before, after = MARKS[kind]
        sign = f"{kind} ({STYLES[kind] or 'uncoloured'})" if coloured else f"{before}{kind}{after}"
        console.out(f"{sign}: ", style=STYLES[kind] or None, highlight=False, end="")
        console.out(meaning, highlight=False)


def stats_line(result: Generation, seed: bool = False) -> str:
    """The figures of one answer on one line. `seed`: name it, since the answer was sampled."""
    stats = result.stats
    parts = [f"{stats.new_tokens} tokens"]
    if math.isfinite(stats.tokens_per_second):
        parts.append(f"{stats.tokens_per_second:.1f} tokens/s")
    if stats.proposed:
        parts.append(f"mean acceptance length {stats.mean_acceptance_length:.2f}")
        parts.append(f"acceptance {stats.acceptance_rate:.0%}")
    parts.append(f"first token {stats.ttft:.2f} s")
    if stats.cached_tokens:
        parts.append(f"{stats.cached_tokens} of {stats.prompt_tokens} prompt tokens cached")
    if seed:
        parts.append(f"seed {result.seed}")
    parts.append(f"finish reason {result.finish_reason}")
    return ", ".join(parts)


def stats_record(stats: Stats) -> dict[str, Any]:
    """`stats` as JSON data, under the names that the API has for them; what is undefined is null."""
    names = (
        *("prompt_tokens", "cached_tokens", "new_tokens", "steps", "target_calls", "draft_calls"),
        *("proposed", "accepted", "acceptance_rate", "acceptance_by_position", "mean_acceptance_length"),
        *("ttft", "tpot", "tokens_per_second"),
        *("prefill_s", "decode_s", "draft_s", "verify_s", "accept_s", "other_s", "engine_s"),
    )
    return {name: jsonable(getattr(stats, name)) for name in names}


def generation_record(result: Generation) -> dict[str, Any]:
    """`result` as JSON data: what `draftc run --json` prints."""
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "logprobs": jsonable(result.logprobs),
        "stats": stats_record(result.stats),
    }


def to_json(record: object) -> str:
    """`record` as JSON text, in ASCII: any terminal and any locale can carry it."""
    return json.dumps(record, indent=2, allow_nan=False) + "\n"


def print_json(record: object) -> None:
    """`record` as JSON on stdout."""
    sys.stdout.write(to_json(record))
