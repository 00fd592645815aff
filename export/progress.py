"""What a compile tells while it runs: stages with a name and, where it is known, a length."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

__all__ = ["Advance", "Lines", "Quiet", "Reporter", "RichReporter"]

Advance = Callable[[int, int], None]
"""Called with (done, total)."""


class Reporter(Protocol):
    """Where progress goes."""

    def stage(self, name: str) -> AbstractContextManager[Advance]:
        """A stage that lasts as long as the block; the value that it gives moves its bar."""

    def note(self, text: str) -> None:
        """One line that the user should read."""


class Quiet:
    """Says nothing."""

    @contextmanager
    def stage(self, name: str) -> Iterator[Advance]:
        """See Reporter.stage."""
        yield lambda done, total: None

    def note(self, text: str) -> None:
        """See Reporter.note."""


class Lines:
    """Notes as plain lines on standard error, for programs that read the standard output; no progress."""

    @contextmanager
    def stage(self, name: str) -> Iterator[Advance]:
        """See Reporter.stage."""
        yield lambda done, total: None

    def note(self, text: str) -> None:
        """See Reporter.note."""
        print(text, file=sys.stderr)


class RichReporter:
    """Progress bars on a terminal, one line per finished stage; elsewhere the lines alone."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

    def __enter__(self) -> "RichReporter":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @contextmanager
    def stage(self, name: str) -> Iterator[Advance]:
        """See Reporter.stage."""
        begin = time.monotonic()
        task = self._progress.add_task(name, total=None)
        try:
            yield lambda done, total: self._progress.update(task, completed=done, total=total)
        finally:
            self._progress.remove_task(task)
        self._console.print(f"[green]✓[/] {name} [dim]{time.monotonic() - begin:.0f} s[/]", highlight=False)

    def note(self, text: str) -> None:
        """See Reporter.note."""
        self._console.print(f"[yellow]·[/] {escape(text)}", highlight=False, soft_wrap=True)
