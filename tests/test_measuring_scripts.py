"""scripts/compare_calls.py and scripts/bench_steps.py on tiny bundles: what they print, and what they refuse."""

import subprocess
import sys
from pathlib import Path

import pytest

from draftc.runtime.text import Tokenizer
from tests.runtime.conftest import byte_level_tokenizer, write_folder
from tests.runtime.tiny_bundle import LENGTH, write_bundle, write_manifest
from tests.runtime.tiny_model import TinyModel

SCRIPTS = Path(__file__).parents[1] / "scripts"
ROOMY = 400  # the longest built-in prompt and its answer fit


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `small`, `roomy` and `ngram`. Widest verification 6, prefill chunk 8."""
    root = tmp_path_factory.mktemp("bundles")
    folder = write_folder(root / "tokenizer", byte_level_tokenizer(), {"eos_token": "<|im_end|>"})
    tokenizer = Tokenizer.from_folder(folder)
    for name, length in (("small", LENGTH), ("roomy", ROOMY), ("ngram", LENGTH)):
        write_bundle(root / name, folder, TinyModel(length, tokenizer.vocab_size))
    (root / "ngram" / "draft" / "model.onnx").unlink()
    write_manifest(root / "ngram", tokenizer, method="ngram")
    return root


def run(script: str, bundles: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    return subprocess.run(command, cwd=bundles, capture_output=True, text=True, check=False)


def compare(bundles: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return run("compare_calls.py", bundles, "small", "roomy", "--rounds", "2", *arguments)


def steps(bundles: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return run("bench_steps.py", bundles, *arguments)


def calls(printed: str) -> dict[str, str]:
    """What is said of each call, by "fill 5 S= 1"."""
    lines = [" ".join(line.split()).replace("S= ", "S=") for line in printed.splitlines()[1:]]
    return {call: said.strip() for call, _, said in (line.partition(":") for line in lines)}


def test_what_does_not_fit_is_said_in_a_line_each(bundles: Path) -> None:
    done = compare(bundles, "--widths", "1,6,7", "--fills", "5,62,400")
    assert (done.returncode, done.stderr) == (0, "")
    said = calls(done.stdout)
    assert len(said) == 9
    assert {call for call, text in said.items() if text.endswith("x")} == {"fill 5 S=1", "fill 5 S=6", "fill 62 S=1"}
    assert said["fill 5 S=7"] == "left out: max_width is 6 (--rows last goes further)"
    assert said["fill 62 S=6"] == said["fill 400 S=1"] == f"left out: the caches hold {LENGTH}"


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_prompts_calls_go_to_the_prefill_chunk(bundles: Path, role: str) -> None:
    done = compare(bundles, "--rows", "last", "--role", role, "--widths", "7,8,9", "--fills", "0")
    assert (done.returncode, done.stderr) == (0, "")
    said = calls(done.stdout)
    assert said["fill 0 S=7"].endswith("x")
    assert said["fill 0 S=8"].endswith("x")
    assert said["fill 0 S=9"] == "left out: the prefill chunk is 8"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--widths", "7,8"), "no width of 7 or more fits: max_width is 6"),
        (("--fills", "66"), "nothing fits behind a fill of 66: the caches hold 66"),
    ],
)
def test_where_nothing_fits_nothing_is_printed(bundles: Path, arguments: tuple[str, str], line: str) -> None:
    done = compare(bundles, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"compare_calls: {line}")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("option", "text"),
    [("--widths", "x"), ("--widths", "0"), ("--widths", "1,"), ("--fills", "-1"), ("--rounds", "0"), ("--rounds", "x")],
)
def test_compare_calls_refuses_a_number_that_is_none(bundles: Path, option: str, text: str) -> None:
    done = run("compare_calls.py", bundles, "small", "small", f"{option}={text}")
    assert_refused(done, option, text)


@pytest.mark.parametrize(
    ("option", "text"), [("--rounds", "2"), ("--rounds", "x"), ("--fill", "-1"), ("--threads", "0")]
)
def test_bench_steps_refuses_a_number_that_is_none(bundles: Path, option: str, text: str) -> None:
    assert_refused(steps(bundles, "small", f"{option}={text}"), option, text)


def assert_refused(done: "subprocess.CompletedProcess[str]", option: str, text: str) -> None:
    assert (done.returncode, done.stdout) == (2, "")
    last = done.stderr.splitlines()[-1]
    assert f"argument {option}: takes" in last
    assert last.endswith(f"got {text!r}")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("small", "--fill", "57"), "--fill 57 is more than small has room for: give 56 or less"),
        (("ngram",), "ngram has no draft model: name a bundle of two models"),
        (("no-such",), "no-such: no such folder: name the output folder of `draftc compile`"),
    ],
)
def test_bench_steps_refuses_what_the_bundle_does_not_allow(
    bundles: Path, arguments: tuple[str, ...], said: str
) -> None:
    done = steps(bundles, *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"bench_steps: {said}\n")


def test_a_role_that_a_bundle_lacks(bundles: Path) -> None:
    done = run("compare_calls.py", bundles, "small", "ngram", "--role", "draft")
    said = "ngram has no draft model: name bundles of two models, or leave out --role draft"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"compare_calls: {said}\n")


def test_bench_steps_measures_turns_and_steps(bundles: Path) -> None:
    done = steps(bundles, "roomy", "--rounds", "4", "--fill", "20", "--threads", "1")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].endswith("medians of 3")
    assert [line.split(":")[0] for line in lines[1:]] == [
        "turns",
        "step at K = 3, greedy",
        "step at K = 3, T 0.8, top-p 0.95",
    ]
    assert all("x" in line for line in lines[1:])
