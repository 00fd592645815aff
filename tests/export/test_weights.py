"""Safetensors headers and fingerprints: what a damaged or incomplete folder says about itself."""

import hashlib
import json
import struct
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from draftc.export.weights import find_weights, fingerprint, read_weights
from draftc.runtime.errors import CheckpointError


@pytest.fixture
def weight_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(
        {"a.weight": torch.zeros(3, 4), "b": torch.zeros(5, dtype=torch.bfloat16)}, path, metadata={"format": "pt"}
    )
    return path


def test_headers_give_shapes_and_bytes(weight_file: Path) -> None:
    weights = read_weights([weight_file])
    assert weights.shapes == {"a.weight": (3, 4), "b": (5,)}
    assert weights.nbytes == 3 * 4 * 4 + 5 * 2
    assert weights.elements == 17


def test_a_cut_file_is_refused_with_both_sizes(weight_file: Path) -> None:
    whole = weight_file.stat().st_size
    weight_file.write_bytes(weight_file.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=rf"model.safetensors.*says {whole} bytes, the file has {whole - 7};"):
        read_weights([weight_file])


@pytest.mark.parametrize("size", [0, 5, 8, 40])
def test_a_file_cut_inside_its_header_is_refused(weight_file: Path, size: int) -> None:
    weight_file.write_bytes(weight_file.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="truncated or corrupt safetensors"):
        read_weights([weight_file])


@pytest.mark.parametrize(
    "header",
    [b"{", b"[]", b'{"a": 1}', b'{"a": {"shape": [1], "data_offsets": [0]}}', b'{"a": {}}', b"[" * 5000, b"\xff\xfe"],
)
def test_a_malformed_header_is_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CheckpointError, match="corrupt safetensors header"):
        read_weights([path])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(position=st.integers(0, 150), value=st.integers(0, 255))
def test_a_flipped_header_byte_is_read_or_refused_but_never_crashes(
    weight_file: Path, position: int, value: int
) -> None:
    original = weight_file.read_bytes()
    damaged = weight_file.with_name("damaged.safetensors")
    damaged.write_bytes(original[:position] + bytes([value]) + original[position + 1 :])
    with suppress(CheckpointError):  # any other exception fails the test
        read_weights([damaged])


def index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_missing_shard_is_named(weight_file: Path) -> None:
    index(weight_file.parent, {"a.weight": "model.safetensors", "c": "model-00002-of-00002.safetensors"})
    with pytest.raises(CheckpointError, match=r"1 of 2 weight files are missing, first model-00002-of-00002"):
        find_weights(weight_file.parent)


@pytest.mark.parametrize("weight_map", [{}, {"a": "../other.safetensors"}, {"a": "/etc/passwd"}])
def test_an_index_names_files_of_its_own_folder_only(weight_file: Path, weight_map: dict[str, str]) -> None:
    index(weight_file.parent, weight_map)
    with pytest.raises(CheckpointError, match="does not name files of this folder"):
        find_weights(weight_file.parent)


def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"only pickled weights \(pytorch_model.bin\).*save_pretrained"):
        find_weights(tmp_path)


def test_an_adapter_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="an adapter, not a whole model"):
        find_weights(tmp_path)


def test_a_folder_without_weights_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"looked for model.safetensors and model.safetensors.index.json"):
        find_weights(tmp_path)


def test_fingerprint_of_one_file_is_its_sha256(weight_file: Path) -> None:
    assert fingerprint([weight_file]) == hashlib.sha256(weight_file.read_bytes()).hexdigest()


def test_fingerprint_of_several_files_depends_on_content_and_names_not_on_order(tmp_path: Path) -> None:
    first, second, renamed = (tmp_path / name for name in ("1", "2", "3"))
    first.write_bytes(b"a")
    second.write_bytes(b"b")
    renamed.write_bytes(b"b")
    whole = fingerprint([first, second])
    assert whole == fingerprint([second, first])
    assert whole != fingerprint([first, renamed])
    second.write_bytes(b"c")
    assert whole != fingerprint([first, second])
