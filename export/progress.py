"""What a compile tells while it runs: stages with a name and, where it is known, a length."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

__all__ = ["Advance", "Quiet", "Reporter", "RichReporter"]

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


class RichReporter:
    """Progress bars on `console`, one line per stage; finished stages keep their line and their time."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console)

    def __enter__(self) -> "RichReporter":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @contextmanager
    def stage(self, name: str) -> Iterator[Advance]:
        """See Reporter.stage."""
        task = self._progress.add_task(name, total=None)
        yield lambda done, total: self._progress.update(task, completed=done, total=total)
        total = self._progress.tasks[task].total or 1
        self._progress.update(task, completed=total, total=total)

    def note(self, text: str) -> None:
        """See Reporter.note."""
        self._console.print(f"[yellow]note[/] {text}", highlight=False, soft_wrap=True)
