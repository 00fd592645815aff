"""`optimum-cli export draftc`: found by Optimum, spelled as its exports are, and the same compile as draftc's own."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from draftc.export import optimum_plugin
from draftc.export.commands import register
from draftc.runtime.bundle import open_bundle
from tests.export.tiny_models import save_folder

CLI = "from optimum.commands.optimum_cli import main; main()"


def optimum_cli(*args: str | Path, cwd: Path, code: str = CLI) -> "subprocess.CompletedProcess[str]":
    """Run optimum-cli in a new interpreter, offline."""
    environment = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def forwarded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `draftc` is called with: filled by `export`, nothing runs."""
    calls: list[str] = []

    def record(args: Sequence[str]) -> None:
        calls.extend(args)

    monkeypatch.setattr(optimum_plugin, "main", record)
    return calls


def test_optimum_lists_the_export(tmp_path: Path) -> None:
    result = optimum_cli("export", "--help", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "draftc" in result.stdout.split()


def test_starting_optimum_cli_loads_nothing_of_ours_but_the_registration(tmp_path: Path) -> None:
    """The other exports of an Optimum user must start as fast as without draftc."""
    code = (
        "import sys, optimum.commands.optimum_cli as cli\n"
        "names = [command.COMMAND.name for command, _ in cli.load_optimum_namespace_cli_commands()]\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "print('draftc' in names, sorted(loaded & {'draftc', 'numpy', 'rich', 'torch', 'transformers', 'typer'}))"
    )
    result = optimum_cli(cwd=tmp_path, code=code)
    assert result.stdout.strip() == "True []", result.stderr


def test_it_compiles_the_bundle_that_draftc_compiles(tmp_path: Path) -> None:
    save_folder(tmp_path / "model")
    given = ["-m", "model", "--draft", "ngram", "--max-length", "64", "--precision", "int8", "-k", "3", "out"]
    result = optimum_cli("export", "draftc", *given, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    manifest = open_bundle(tmp_path / "out").manifest
    assert (manifest.precision, manifest.max_length, manifest.num_speculative_tokens) == ("int8", 64, 3)
    assert manifest.draft.method == "ngram"
    assert manifest.name == "out"


def test_every_option_of_compile_is_forwarded_as_it_is(forwarded: list[str]) -> None:
    app = typer.Typer()
    register(app)
    commands: dict[str, Any] = getattr(typer.main.get_command(app), "commands", {})
    given = ["compile"]
    for option in commands["compile"].params:
        for name in [*option.opts, *option.secondary_opts]:
            if option.name != "out":
                given += [name] if option.is_flag else [name, "7"]
    optimum_plugin.export([*given[1:], "-o", "folder"])
    assert len(given) > 25
    assert forwarded == [*given, "--out", "folder"]


@pytest.mark.parametrize(
    "given",
    [
        ["--model", "M", "--draft", "D", "OUT"],
        ["-m", "M", "--draft=D", "OUT"],
        ["OUT", "-m=M", "--draft", "D"],
        ["--target", "M", "OUT", "--draft", "D"],
        ["--target", "M", "--draft", "D", "--out", "OUT"],
        ["-mM", "-oOUT", "--draft", "D"],
    ],
)
def test_optimums_spellings(forwarded: list[str], given: list[str]) -> None:
    optimum_plugin.export(given)
    pairs = dict(zip(forwarded[1::2], forwarded[2::2], strict=True))
    assert (forwarded[0], pairs) == ("compile", {"--target": "M", "--draft": "D", "--out": "OUT"})


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        (["-m", "M", "--draft", "ngram"], "name the folder to write to"),
        (["-m", "M", "--draft", "ngram", "-o", "a", "b"], "given twice"),
        (["-m", "M", "--draf", "ngram", "out"], "--draf"),
        (["-m", "M", "--draft", "ngram", "out", "--opset", "17"], "--opset"),
        (["out", "-m"], "-m/--model/--target"),
    ],
)
def test_what_cannot_be_understood_is_one_line(
    capsys: pytest.CaptureFixture[str], given: list[str], cause: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        optimum_plugin.export(given)
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("draftc: ")
    assert cause in line


def test_what_the_compiler_refuses_is_one_line(tmp_path: Path) -> None:
    result = optimum_cli("export", "draftc", "-m", "no-such-model", "--draft", "ngram", "out", cwd=tmp_path)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("draftc: ")
    assert "no-such-model" in line
    assert not (tmp_path / "out").exists()


def test_help_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        optimum_plugin.export(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert "OUTPUT" in text
    for option in ("-m ", "--model", "--target", "--draft", "--recipe", "--precision", "--no-symmetric", "--json"):
        assert option in text
