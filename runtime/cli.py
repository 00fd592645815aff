"""The `draftc` command: collects the installed subcommands, and turns every failure into one line and an exit code.

| exit code | meaning                                                                                   |
|-----------|-------------------------------------------------------------------------------------------|
| 0         | done                                                                                      |
| 1         | `draftc verify` found a fault; or the reader of the output went away                      |
| 2         | wrong arguments, or anything else that the message explains: bundle, model, memory, disk  |
| 70        | a bug in draftc                                                                           |
| 130       | interrupted with Ctrl-C                                                                   |
"""

import errno
import importlib.metadata
import importlib.util
import io
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from draftc.runtime.console import printable
from draftc.runtime.errors import DraftcError, DraftcWarning

__all__ = ["build_app", "main"]

GROUP = "draftc.commands"
COMPILER = "draftc.export."
COMPILER_COMMANDS = {
    "compile": "Compile a target and its drafter into a bundle.",
    "fetch": "Download the sources of a tested pair.",
}
COMPILER_PACKAGES = ("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "safetensors")
INSTALL_COMPILER = "pip install 'draftc[cpu,export]'"

EXIT_EXPLAINED = 2
EXIT_BUG = 70  # EX_SOFTWARE of sysexits.h
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main(args: Sequence[str] | None = None) -> None:
    """Run `draftc` with `args` (default: the process's own) and raise SystemExit with the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a character is no error
    try:
        app = build_app()
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
    app(args=args, prog_name="draftc")


def build_app() -> typer.Typer:
    """The app with all commands that are installed, and stand-ins for the compiler's where its packages are missing.

    Nothing heavy is imported: whether a package is there is asked of the import system's finders.
    """
    app = typer.Typer(
        cls=_Group,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    missing = next((name for name in COMPILER_PACKAGES if importlib.util.find_spec(name) is None), "draftc.export")
    entry_points = importlib.metadata.entry_points(group=GROUP)
    for entry_point in sorted(entry_points, key=lambda one: not one.value.startswith(COMPILER)):  # compile comes first
        compiler = entry_point.value.startswith(COMPILER)
        if compiler and missing in COMPILER_PACKAGES:
            continue
        try:
            entry_point.load()(app)
        except ImportError as error:  # one broken plug-in must not take the others' commands away
            if compiler:
                missing = error.name or missing
            else:
                typer.echo(f"draftc: cannot load the commands of {entry_point.value}: {_one_line(error)}", err=True)
    for name in sorted(COMPILER_COMMANDS.keys() - getattr(typer.main.get_command(app), "commands", {}).keys()):
        _add_stand_in(app, name, missing)
    return app


def _add_stand_in(app: typer.Typer, name: str, missing: str) -> None:
    def stand_in() -> None:
        raise DraftcError(f"`draftc {name}` needs {missing}, which is not installed: {INSTALL_COMPILER}")

    take_anything = {"allow_extra_args": True, "ignore_unknown_options": True}
    help_text = f"{COMPILER_COMMANDS[name]} Not installed here: {INSTALL_COMPILER}".replace("[", "\\[")
    app.command(name, help=help_text, context_settings=take_anything)(stand_in)


class _Group(TyperGroup):
    """The top-level command. All its subcommands' failures pass through `invoke`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """`--debug` may stand anywhere, so that it can be added to the end of a line that has just failed."""
        end = args.index("--") if "--" in args else len(args)
        rest = [arg for arg in args[:end] if arg != "--debug"]
        debug = ["--debug"] if len(rest) < end and rest else []
        return super().parse_args(ctx, [*debug, *rest, *args[end:]])

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand, or say in one line why it cannot be done."""
        try:
            try:
                with _noting_warnings():
                    return super().invoke(ctx)
            finally:
                sys.stdout.flush()  # here rather than at exit, where a full disk would go unexplained
        except KeyboardInterrupt as interrupt:
            self._traceback(ctx)
            typer.echo(err=True)  # the shell's prompt goes on a line of its own
            raise typer.Exit(EXIT_INTERRUPTED) from interrupt
        except BrokenPipeError as error:
            _give_up_stdout()
            raise typer.Exit(1) from error
        except Exception as error:
            if isinstance(error, typer.Abort) or hasattr(error, "exit_code"):  # typer's own ways to end a command
                raise
            self._traceback(ctx)
            _settle_stdout()
            message, code = _explain(error)
            typer.echo(f"draftc: {message}", err=True)
            raise typer.Exit(code) from error

    def _traceback(self, ctx: Any) -> None:
        if ctx.params.get("debug"):
            traceback.print_exc()


@contextmanager
def _noting_warnings() -> Iterator[None]:
    """Write draftc's own warnings as notes, on one line each, and others as ever."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def note(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, DraftcWarning):
                typer.echo(f"draftc: note: {printable(' '.join(str(message).split()))}", err=True)
            else:
                show(message, category, *where, **more)

        warnings.showwarning = note
        yield


def _root(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show a traceback where something fails; may also follow the command.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=lambda wanted: _version(wanted)),
    ] = False,
) -> None:
    """Compile model pairs for speculative decoding, and run them: the target's exact distribution, faster."""


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"draftc {importlib.metadata.version('draftc')}")
        raise typer.Exit


def _explain(error: Exception) -> tuple[str, int]:
    """(message, exit code) for whatever a command raised."""
    if isinstance(error, DraftcError):
        return _one_line(error), EXIT_EXPLAINED
    if isinstance(error, ModuleNotFoundError) and not (error.name or "draftc").startswith("draftc"):
        return f"the package {error.name} is not installed: {INSTALL_COMPILER}", EXIT_EXPLAINED
    if isinstance(error, MemoryError):
        return "not enough memory: close other programs, or use a smaller model or --max-length", EXIT_EXPLAINED
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename is not None else ""
        advice = ": free some space and run it again" if error.errno == errno.ENOSPC else ""
        return f"{where}{error.strerror}{advice}", EXIT_EXPLAINED
    name = type(error).__name__
    return f"internal error, {name}: {_one_line(error)}: please report it with the output of --debug", EXIT_BUG


def _settle_stdout() -> None:
    """Make sure that nothing is left in stdout's buffer that the interpreter's last flush could fail on."""
    try:
        sys.stdout.flush()
    except OSError:
        _give_up_stdout()


def _give_up_stdout() -> None:
    """Point stdout's descriptor at the null device: its buffer cannot be emptied any other way."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError, AttributeError):
        return  # not a real file: nothing will fail
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def _one_line(error: Exception) -> str:
    return printable(" ".join(str(error).split())) or type(error).__name__
