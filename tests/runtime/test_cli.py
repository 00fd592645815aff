"""The `draftc` command itself: which subcommands there are, and how failures end."""

import importlib.metadata
import importlib.util
import io
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from draftc.runtime.cli import main
from draftc.runtime.errors import BundleError
from tests.runtime.cli_fakes import Draftc, one_line

HEAVY = ["torch", "transformers", "onnx", "onnxruntime", "draftc.export.compile"]


@pytest.fixture
def draftc(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Draftc:
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return Draftc(monkeypatch, capsys)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Make every command that opens a bundle fail with an exception."""

    def fail(error: BaseException) -> None:
        def opened(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr("draftc.runtime.open", opened)

    return fail


def in_new_process(code: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code], text=True, check=False, timeout=120, **options)


# Subcommands


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["bench", "-h"], ["inspect", "no-such-bundle"]])
def test_no_heavy_package_is_imported_before_it_is_needed(arguments: list[str], tmp_path: Path) -> None:
    code = (
        "import sys\nfrom draftc.runtime.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        f"print('loaded:', *[name for name in {HEAVY!r} if name in sys.modules])"
    )
    result = in_new_process(code, capture_output=True, cwd=tmp_path)
    assert result.stdout.splitlines()[-1].strip() == "loaded:", result.stdout


def test_version(draftc: Draftc) -> None:
    result = draftc("--version")
    assert (result.code, one_line(result.out)) == (0, f"draftc {importlib.metadata.version('draftc')}")


def test_help_lists_commands(draftc: Draftc) -> None:
    result = draftc("--help")
    assert result.code == 0
    assert {"run", "chat", "verify", "bench", "inspect", "compile", "fetch"} <= set(result.out.split())


def test_an_unknown_command_is_named_and_the_nearest_one_suggested(draftc: Draftc) -> None:
    result = draftc("inspct", "out")
    assert result.code == 2
    assert "inspct" in result.err
    assert "'inspect'" in result.err


@pytest.mark.parametrize("missing", ["torch", "onnxscript"])
@pytest.mark.parametrize(
    "arguments", [["compile", "--target", "model", "-k", "4", "-o", "out"], ["fetch", "smollm2-135m"], ["compile"]]
)
def test_without_the_compilers_packages_its_commands_say_how_to_get_them(
    draftc: Draftc, monkeypatch: pytest.MonkeyPatch, missing: str, arguments: list[str]
) -> None:
    find_spec = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == missing else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    result = draftc(*arguments)
    assert (result.code, result.out) == (2, "")
    message = one_line(result.err)
    assert message.startswith(f"draftc: `draftc {arguments[0]}` needs {missing}")
    assert message.endswith("pip install 'draftc[cpu,export]'")
    assert "pip install 'draftc[cpu,export]'" in draftc("--help").out


def test_the_compilers_commands_exist_where_its_module_cannot_be_imported(
    draftc: Draftc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "draftc.export.commands", None)
    result = draftc("compile", "--target", "model")
    assert result.code == 2
    assert "pip install 'draftc[cpu,export]'" in one_line(result.err)


def test_a_broken_plug_in_leaves_the_other_commands(
    draftc: Draftc, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = importlib.metadata.EntryPoint("other", "no_such_package.commands:register", "draftc.commands")
    installed = importlib.metadata.entry_points(group="draftc.commands")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [broken, *installed])
    result = draftc("inspect", str(tmp_path / "none"))
    warning, failure = result.err.splitlines()
    assert "no_such_package" in warning
    assert "no such folder" in failure
    assert result.code == 2


# Failures


def test_a_missing_bundle_is_one_line_and_exit_code_2(draftc: Draftc, tmp_path: Path) -> None:
    for command in (["run", "-p", "x"], ["chat"], ["verify"], ["bench"], ["inspect"]):
        result = draftc(command[0], str(tmp_path / "nowhere"), *command[1:])
        assert (result.code, result.out) == (2, "")
        assert one_line(result.err).startswith("draftc: ")
        assert "nowhere: no such folder" in result.err


@pytest.mark.parametrize("arguments", ["--debug run out -p x", "run out --debug -p x", "run out -p x --debug"])
def test_debug_adds_the_traceback(draftc: Draftc, failing: Callable[[BaseException], None], arguments: str) -> None:
    failing(BundleError("the cause:\n  the way out"))
    result = draftc(*arguments.split())
    assert result.code == 2
    assert result.err.startswith("Traceback (most recent call last)")
    assert result.err.endswith("\ndraftc: the cause: the way out\n")


def test_debug_after_two_dashes_is_an_argument(draftc: Draftc) -> None:
    result = draftc("inspect", "--", "--debug")
    assert result.code == 2
    assert one_line(result.err).startswith("draftc: --debug: no such folder")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (
            OSError(28, "No space left on device"),
            2,
            "draftc: No space left on device: free some space and run it again",
        ),
        (PermissionError(13, "Permission denied", "x/y"), 2, "draftc: x/y: Permission denied"),
        (MemoryError(), 2, "draftc: not enough memory"),
        (ModuleNotFoundError("No module named 'gguf'", name="gguf"), 2, "draftc: the package gguf is not installed"),
        (ZeroDivisionError("division\nby zero"), 70, "draftc: internal error, ZeroDivisionError: division by zero"),
        (ModuleNotFoundError("No module", name="draftc.runtime.x"), 70, "draftc: internal error, ModuleNotFoundError"),
    ],
)
def test_every_failure_is_one_line(
    draftc: Draftc, failing: Callable[[BaseException], None], error: Exception, code: int, message: str
) -> None:
    failing(error)
    result = draftc("run", "out", "-p", "x")
    assert (result.code, result.out) == (code, "")
    assert one_line(result.err).startswith(message)


def test_an_interrupt_is_130_without_a_word(draftc: Draftc, failing: Callable[[BaseException], None]) -> None:
    failing(KeyboardInterrupt())
    result = draftc("run", "out", "-p", "x")
    assert (result.code, result.out, result.err) == (130, "", "\n")


def test_wrong_usage_is_exit_code_2(draftc: Draftc) -> None:
    assert draftc("run", "out", "-n", "many").code == 2
    assert draftc("run", "out", "--no-such-option").code == 2
    assert draftc("run").code == 2


def printing_command(text: str) -> str:
    """A program that is `draftc inspect`, but for printing `text` instead of a bundle."""
    return (
        "from types import SimpleNamespace\n"
        "from draftc.runtime import cli, commands\n"
        "commands.open_bundle = lambda *_, **__: SimpleNamespace(manifest=None)\n"
        f"commands.print_bundle = lambda *_: print({text})\n"
        "cli.main(['inspect', 'out'])"
    )


@pytest.mark.parametrize("size", [1, 1_000_000], ids=["at the end", "while writing"])
def test_a_reader_that_goes_away_is_quiet(size: int) -> None:
    """As in `draftc inspect out | head -1`."""
    read, write = os.pipe()
    os.close(read)
    result = in_new_process(printing_command(f"'x' * {size}"), stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (result.returncode, result.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_a_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        result = in_new_process(printing_command("'x'"), stdout=full, stderr=subprocess.PIPE)
    assert result.returncode == 2
    assert one_line(result.stderr) == "draftc: No space left on device: free some space and run it again"


def test_a_terminal_that_lacks_the_characters_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr("draftc.runtime.commands.open_bundle", lambda *_, **__: print("naïve 你 \udcff"))
    with pytest.raises(SystemExit):
        main(["inspect", "out"])
    sys.stdout.flush()
    assert raw.getvalue() == b"na\\xefve \\u4f60 \\udcff\n"
