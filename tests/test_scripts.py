"""Scripts that people run on machines which CI has not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from draftc.runtime.devices import free_device_memory
from draftc.runtime.prompts import load_prompts

ROOT = Path(__file__).parents[1]


def test_gpu_check_runs_to_its_end_without_a_driver(tmp_path: Path) -> None:
    if free_device_memory(0) is not None:
        pytest.skip("this machine has a GPU: run scripts/gpu_check.sh on it")
    script = [sys.executable, str(ROOT / "scripts" / "gpu_check.py")]
    done = subprocess.run(
        [*script, "no-such-bundle", "--json", "out.json"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "skipped: no driver" in done.stdout.splitlines()
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["packages"]["onnxruntime"] != "-"
    assert report["gpu"]["skipped"] == "no driver"


def test_compile_memory_passes_the_compilers_error_on(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "scripts" / "compile_memory.py")]
    done = subprocess.run(
        [*script, "--target", "no-such", "--draft", "ngram", "-o", "out"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "draftc: " in done.stderr
    assert not (tmp_path / "out").exists()


def test_humaneval_becomes_prompts_for_bench(tmp_path: Path) -> None:
    problems = [{"task_id": f"HumanEval/{i}", "prompt": f"\ndef f{i}():\n"} for i in range(3)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    done = humaneval(tmp_path, "problems.jsonl", "--count", "2")
    assert (done.returncode, done.stderr) == (0, "")
    (tmp_path / "prompts.jsonl").write_text(done.stdout)
    cases = load_prompts(tmp_path / "prompts.jsonl")
    assert [case.id for case in cases] == ["HumanEval/0", "HumanEval/1"]
    content = "Complete this Python function.\n\n```python\ndef f1():\n```"
    assert cases[1].messages == ({"role": "user", "content": content},)


@pytest.mark.parametrize("text", [None, "{", '{"prompt": "def f():"}', '{"task_id": "a"}'])
def test_a_file_that_is_not_humaneval_is_one_line(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "problems.jsonl").write_text(text)
    done = humaneval(tmp_path, "problems.jsonl")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("humaneval_prompts: ")
    assert len(done.stderr.splitlines()) == 1


def humaneval(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(ROOT / "scripts" / "humaneval_prompts.py"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
