"""The one place that knows the backends by name."""

from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from draftc.runtime.backends import check_device_options, open_engine
from draftc.runtime.devices import DeviceOptions
from draftc.runtime.errors import BackendUnavailableError, UsageError
from draftc.runtime.graphio import GraphSpec
from draftc.runtime.manifest import Backend
from draftc.runtime.ort import OrtEngine
from tests.runtime.fakes import tokens
from tests.runtime.tiny_model import DIM, TinyModel

LENGTH, VOCAB = 12, 5
SPEC = GraphSpec.decoder([(1, DIM, DIM)], LENGTH, VOCAB, "float32")


def test_the_manifests_name_opens_an_engine(tmp_path: Path) -> None:
    path = TinyModel(LENGTH, VOCAB).save(tmp_path / "model.onnx")
    engine = open_engine("onnxruntime", path, SPEC, max_call=4, max_rows=2, options=DeviceOptions(threads=1))
    assert isinstance(engine, OrtEngine)
    assert engine.spec == SPEC
    assert engine.forward(tokens(1, 2, 3, 4), 0, 2).shape == (2, VOCAB)
    with pytest.raises(UsageError, match="unknown device 'abacus'"):
        open_engine("onnxruntime", path, SPEC, max_call=4, max_rows=2, options=DeviceOptions("abacus"))


@pytest.mark.parametrize("name", get_args(get_type_hints(Backend)["name"]))
def test_every_name_that_a_manifest_may_have_is_known(name: str) -> None:
    check_device_options(name, DeviceOptions("cuda"))
    with pytest.raises(UsageError, match="device 'abacus'"):
        check_device_options(name, DeviceOptions("abacus"))


def test_an_unknown_backend_is_named(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match="unknown backend 'abaci'"):
        check_device_options("abaci", DeviceOptions())
    with pytest.raises(BackendUnavailableError, match="unknown backend 'abaci'"):
        open_engine("abaci", tmp_path / "model.onnx", SPEC, max_call=4, max_rows=2)
