"""Scripts that people run on machines which CI has not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from draftc.runtime.devices import free_device_memory

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
