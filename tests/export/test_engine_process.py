"""Engines are built in a process of their own: the same result and errors, and an end for every way that it can end."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from draftc.export.engine_process import build_engine_apart
from draftc.export.tensorrt import build_engine
from draftc.runtime.errors import CaptureError, ResourceError
from draftc.runtime.graphio import GraphSpec
from tests.export.test_tensorrt import PROFILES, attention, decoder

pytest.importorskip("tensorrt_rtx")


def arguments(folder: Path, model: ir.Model, spec: GraphSpec, name: str = "model") -> dict[str, Any]:
    ir.save(model, folder / "model.onnx", external_data="model.onnx.data")
    return {
        "flavour": "tensorrt-rtx",
        "graph": folder / "model.onnx",
        "spec": spec,
        "profiles": PROFILES,
        "sms": ("89",),
        "engine": folder / f"{name}.engine",
        "log": folder / f"{name}.log",
    }


def test_the_process_builds_what_a_call_builds(tmp_path: Path) -> None:
    model, spec = decoder()
    told: list[tuple[int, int]] = []
    built = build_engine_apart(
        **arguments(tmp_path, model, spec), progress=lambda done, total: told.append((done, total))
    )
    assert built == build_engine(**arguments(tmp_path, model, spec, "other"))
    assert told
    assert all(0 < done <= total for done, total in told)
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("*.engine")}
    assert sizes["model.engine"] == sizes["other.engine"] > 0


def test_errors_come_through_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(CaptureError) as apart:
        build_engine_apart(**arguments(tmp_path, *decoder(attention(softcap=2.0))), progress=lambda done, total: None)
    with pytest.raises(CaptureError) as here:
        build_engine(**arguments(tmp_path, *decoder(attention(softcap=2.0))))
    assert str(apart.value) == str(here.value)


class Started(subprocess.Popen[bytes]):
    """Remembers itself."""

    last: "Started"

    def __init__(self, command: list[str], **more: Any) -> None:
        super().__init__(command, **more)
        Started.last = self


@pytest.fixture
def popen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", Started)


@pytest.mark.usefixtures("popen")
@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGKILL, "most likely for lack of memory"), (signal.SIGSEGV, "was ended by signal 11")]
)
def test_a_builder_that_dies_is_one_line(tmp_path: Path, number: int, said: str) -> None:
    with pytest.raises(ResourceError, match=said) as caught:
        build_engine_apart(
            **arguments(tmp_path, *decoder()), progress=lambda done, total: os.kill(Started.last.pid, number)
        )
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("popen")
def test_a_builder_that_cannot_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ResourceError, match=r"ended with code 1 \(it said nothing\)"):
        build_engine_apart(**arguments(tmp_path, *decoder()), progress=lambda done, total: None)


@pytest.mark.usefixtures("popen")
def test_an_interrupt_ends_the_builder(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_engine_apart(**arguments(tmp_path, *decoder()), progress=interrupt)
    assert Started.last.returncode == -signal.SIGKILL
