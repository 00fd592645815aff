"""What `optimum-cli export draftc` does: `draftc compile`, with arguments in the way of Optimum's other exports.

The options are those of `draftc compile`, read from that command; `-m`/`--model` is `--target`, and the output folder
needs no `-o`.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

import typer

from draftc.export.commands import register
from draftc.runtime.cli import main

__all__ = ["export"]

PROG = "optimum-cli export draftc"
ALIASES = {"--target": ("-m", "--model")}


def export(arguments: Sequence[str]) -> None:
    """Run `draftc compile` with `arguments`. Raises SystemExit with its exit code, which is 0 on success."""
    main(["compile", *_translate(arguments)])


def _translate(arguments: Sequence[str]) -> list[str]:
    """`arguments` as `draftc compile` spells them. Raises SystemExit after --help, and for what cannot be parsed."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.output is not None:
        given.forwarded.append(["--out", given.output])
    folders = sum(words[0] == "--out" for words in given.forwarded)
    if folders != 1:
        parser.error("name the folder to write to" if folders == 0 else "the folder to write to is given twice")
    return [word for words in given.forwarded for word in words]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROG,
        usage=f"{PROG} -m MODEL --draft DRAFT [options] OUTPUT",
        description="Export a target and its drafter to a draftc bundle of ONNX graphs, as `draftc compile` does.",
        epilog=f"example: {PROG} -m Qwen/Qwen2.5-Coder-1.5B-Instruct --draft ngram --precision int4 out/qwen",
        allow_abbrev=False,
    )
    parser.set_defaults(forwarded=[])
    parser.add_argument("output", metavar="OUTPUT", nargs="?", help="Folder to write the bundle to.")
    _add(parser, ["--debug"], "Show a traceback where something fails.", nargs=0)
    for option in _compile_options():
        names, text = option.opts, option.help.replace("%", "%%")
        if option.is_flag:
            _add(parser, names, f"{text} This is the default." if option.default else text, nargs=0)
            if option.secondary_opts:
                _add(parser, option.secondary_opts, f"The opposite of {names[-1]}.", nargs=0)
        else:
            text = text if option.default is None else f"{text} Default: {option.default}."
            _add(parser, [*ALIASES.get(names[-1], ()), *names], text, metavar=option.name.upper())
    return parser


def _compile_options() -> list[Any]:
    """The options of `draftc compile`, as Typer made them from its signature."""
    app = typer.Typer()
    register(app)
    commands: dict[str, Any] = getattr(typer.main.get_command(app), "commands", {})
    return list(commands["compile"].params)


def _add(parser: argparse.ArgumentParser, names: Sequence[str], text: str, **more: Any) -> None:
    """An option that is forwarded as the last of `names`, with its value."""
    parser.add_argument(*names, dest=names[-1], action=_Forward, help=text, default=argparse.SUPPRESS, **more)


class _Forward(argparse.Action):
    """Appends [name, value …] to `forwarded`."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option_string: object = None
    ) -> None:
        """See argparse.Action."""
        namespace.forwarded.append([self.dest, *([values] if isinstance(values, str) else values)])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line and exit code 2, as every error of draftc."""
        self.exit(2, f"draftc: {message}: see {PROG} --help\n")
