"""The ONNX Runtime engine, on a graph of one layer that is small enough to be spelled out in numpy."""

import ctypes
import importlib.metadata
import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto

from draftc.runtime.decoder import Decoder, Limits
from draftc.runtime.devices import DeviceOptions
from draftc.runtime.errors import BackendUnavailableError, BundleError, EngineError, ResourceError
from draftc.runtime.graphio import GraphSpec, TensorSpec
from draftc.runtime.ort import OrtEngine, load_onnxruntime
from tests.runtime.fakes import tokens
from tests.runtime.tiny_model import DIM, TinyModel

LENGTH, VOCAB = 40, 11  # L, V
MAX_WIDTH = 5
SPEC = GraphSpec.decoder([(1, DIM, DIM)], LENGTH, VOCAB, "float32")
TINY = TinyModel(LENGTH, VOCAB)


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY.save(tmp_path_factory.mktemp("graph") / "model.onnx")


def open_engine(
    path: Path, spec: GraphSpec = SPEC, *, max_call: int = 16, max_rows: int = MAX_WIDTH, threads: int | None = 1
) -> OrtEngine:
    return OrtEngine(path, spec, max_call=max_call, max_rows=max_rows, options=DeviceOptions(threads=threads))


def buffer(address: int) -> NDArray[np.float32]:
    """The cache (L, D) at `address`, read from memory rather than through ONNX Runtime."""
    raw: Any = (ctypes.c_float * (LENGTH * DIM)).from_address(address)
    return np.ctypeslib.as_array(raw).reshape(LENGTH, DIM)


def test_a_call_writes_its_tokens_where_it_is_told_and_nothing_else(graph: Path) -> None:
    engine = open_engine(graph)
    address = engine.kv_addresses["past_key_values.0.key"]
    assert (buffer(address) == 0).all()
    engine.forward(tokens(1, 2, 3), 0, 1)
    engine.forward(tokens(4, 5), 2, 1)  # over the third
    np.testing.assert_array_equal(buffer(address)[:4], TINY.keys[[1, 2, 4, 5]])
    np.testing.assert_array_equal(buffer(engine.kv_addresses["past_key_values.0.value"])[:4], TINY.values[[1, 2, 4, 5]])
    assert (buffer(address)[4:] == 0).all()
    engine.close()


def test_rewinds_and_alternating_widths_are_recomputation(graph: Path) -> None:
    """Through the decoder: any text after any other, at any width, and never another buffer."""
    engine = open_engine(graph)
    decoder = Decoder(engine, Limits(LENGTH - MAX_WIDTH, MAX_WIDTH, 16, VOCAB))
    addresses = engine.kv_addresses
    rng = np.random.default_rng(1)
    text = tokens(1)
    for step in range(150):
        keep = int(rng.integers(1, text.size + 1))
        tail = rng.integers(0, VOCAB, int(rng.integers(0, 20)))
        text = np.concatenate((text[:keep], tail))[: LENGTH - MAX_WIDTH]
        proposal = rng.integers(0, VOCAB, step % MAX_WIDTH)
        pending = decoder.sync(text, upcoming=proposal.size)
        logits = decoder.extend(np.concatenate((pending, proposal)), rows=proposal.size + 1)
        everything = np.concatenate((text, proposal))
        np.testing.assert_allclose(logits, TINY.expected(everything, proposal.size + 1), rtol=1e-4, atol=1e-4)
        assert engine.kv_addresses == addresses
    assert len(set(addresses.values())) == len(addresses) == 2
    engine.close()


def test_the_last_call_may_end_at_the_end_of_the_buffer(graph: Path) -> None:
    engine = open_engine(graph)
    text = np.arange(LENGTH) % VOCAB
    for start in range(0, LENGTH, 8):
        logits = engine.forward(text[start : start + 8], start, MAX_WIDTH)
    np.testing.assert_allclose(logits, TINY.expected(text, MAX_WIDTH), rtol=1e-4, atol=1e-4)
    with pytest.raises(EngineError, match=f"2 tokens at {LENGTH - 1} do not fit into KV buffers of {LENGTH}"):
        engine.forward(tokens(1, 2), LENGTH - 1, 1)
    with pytest.raises(EngineError, match="ONNX Runtime failed on 2 tokens at 3: "):
        engine.forward(tokens(1, VOCAB), 3, 1)  # no such row in the embedding
    # A failed call leaves the engine usable.
    np.testing.assert_allclose(engine.forward(text[:8], 0, 1), TINY.expected(text[:8], 1), rtol=1e-4, atol=1e-4)


def test_logits_are_a_view_of_one_buffer(graph: Path) -> None:
    engine = open_engine(graph)
    first = engine.forward(tokens(1, 2), 0, 2)
    second = engine.forward(tokens(3), 2, 1)
    assert np.shares_memory(first, second)
    assert first.shape == (2, VOCAB)
    assert first.dtype == np.float32


def test_a_repeated_width_is_bound_once(graph: Path) -> None:
    """A step of the loop binds nothing: the two widths that it alternates between are kept."""
    engine = open_engine(graph, max_call=40)
    for start in range(0, 30, 5):
        engine.forward(tokens(1, 2, 3, 4), start, 4)
        engine.forward(tokens(5), start + 4, 1)
    assert set(engine._calls) == {(4, 4), (1, 1)}
    kept = dict(engine._calls)
    engine.forward(tokens(1, 2, 3, 4), 30, 4)
    assert engine._calls == kept


def test_a_full_chunk_is_bound_once_and_the_end_of_a_prompt_each_time(tmp_path: Path) -> None:
    length = 300
    spec = GraphSpec.decoder([(1, DIM, DIM)], length, VOCAB, "float32")
    engine = open_engine(TinyModel(length, VOCAB).save(tmp_path / "model.onnx"), spec, max_call=100)
    for start, width in ((0, 100), (100, 100), (200, 70)):
        engine.forward(np.arange(width) % VOCAB, start, 1)
    assert set(engine._calls) == {(100, 1)}


def test_half_precision_caches(tmp_path: Path) -> None:
    spec = GraphSpec.decoder([(1, DIM, DIM)], LENGTH, VOCAB, "float16")
    engine = open_engine(TINY.save(tmp_path / "half.onnx", kv_type=TensorProto.FLOAT16), spec)
    engine.forward(tokens(1, 2, 3), 0, 1)
    logits = engine.forward(tokens(4), 3, 1)
    np.testing.assert_allclose(logits, TINY.expected(tokens(1, 2, 3, 4), 1), rtol=1e-2, atol=1e-2)


def test_nan_spoils_every_later_call_until_the_buffers_are_cleared(tmp_path: Path) -> None:
    model = TinyModel(LENGTH, VOCAB)
    model.keys[7] = np.nan  # what token 7 writes
    engine = open_engine(model.save(tmp_path / "nan.onnx"))
    decoder = Decoder(engine, Limits(LENGTH - MAX_WIDTH, MAX_WIDTH, 16, VOCAB))
    addresses = engine.kv_addresses

    def row(*text: int) -> NDArray[np.float32]:
        return decoder.extend(decoder.sync(tokens(*text)), rows=1)

    assert np.isnan(row(1, 2, 3, 7)).all()
    assert np.isnan(row(1, 2)).all(), "the entry of token 7 is masked, and enters all the same"
    decoder.cache.clear()
    assert np.isnan(row(1, 2)).all(), "forgetting is not enough"
    decoder.mark_broken()
    np.testing.assert_allclose(row(1, 2), model.expected(tokens(1, 2), 1), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(row(1, 2, 3), model.expected(tokens(1, 2, 3), 1), rtol=1e-4, atol=1e-4)
    assert engine.kv_addresses == addresses


@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
def test_clearing_zeroes_all_of_a_buffer(graph: Path, tmp_path: Path, kv_dtype: str) -> None:
    if kv_dtype == "float16":
        graph = TINY.save(tmp_path / "half.onnx", kv_type=TensorProto.FLOAT16)
    engine = open_engine(graph, GraphSpec.decoder([(1, DIM, DIM)], LENGTH, VOCAB, kv_dtype), max_call=LENGTH)
    engine.forward(np.arange(LENGTH) % VOCAB, 0, 1)
    assert engine._buffers is not None
    caches = engine._buffers.kv.values()
    assert all(value.numpy().any() for value in caches)
    engine.clear()
    assert not any(value.numpy().any() for value in caches)


def test_closing_twice(graph: Path) -> None:
    engine = open_engine(graph)
    engine.close()
    engine.close()
    assert engine.kv_addresses == {}


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [b"", b"not a graph at all", b"\x08\x0a" * 50, bytes(range(256)) * 40],
    ids=["empty", "text", "protobuf", "bytes"],
)
def test_bytes_that_are_no_graph(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(BundleError, match=r"cannot load model\.onnx: .+") as caught:
        open_engine(path)
    assert "\n" not in str(caught.value)


def test_a_truncated_graph(graph: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(graph.read_bytes()[:-100])
    with pytest.raises(BundleError, match=r"cannot load model\.onnx"):
        open_engine(path)


def test_a_missing_graph(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"cannot load model\.onnx"):
        open_engine(tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("rename", "kind"),
    [
        ({"write_index": "past_length"}, "inputs"),
        ({"past_key_values.0.key": "past.0.key"}, "inputs"),
        ({"logits": "scores"}, "outputs"),
        ({"present.0.value": "present.1.value"}, "outputs"),
    ],
)
def test_a_graph_with_other_names(tmp_path: Path, rename: dict[str, str], kind: str) -> None:
    path = TINY.save(tmp_path / "model.onnx", rename=rename)
    with pytest.raises(BundleError, match=rf"the graph's {kind} are not those of bundle\.json"):
        open_engine(path)


def test_a_graph_with_other_shapes_or_types(graph: Path, tmp_path: Path) -> None:
    def with_cache(shape: tuple[int | str, ...], dtype: str = "float32") -> GraphSpec:
        def change(tensor: TensorSpec) -> TensorSpec:
            is_cache = tensor.name.endswith(".value")
            return replace(tensor, shape=shape, dtype=dtype) if is_cache else tensor

        return GraphSpec(tuple(map(change, SPEC.inputs)), tuple(map(change, SPEC.outputs)))

    for spec, said in (
        (with_cache(("B", 1, LENGTH + 1, DIM)), rf"bundle\.json says float32 \['B', 1, {LENGTH + 1}, {DIM}\]"),
        (with_cache(("B", 1, LENGTH, DIM, 1)), r"bundle\.json says float32 .*1\]"),
        (with_cache(("B", 1, LENGTH, DIM), "float16"), r"bundle\.json says float16"),
    ):
        with pytest.raises(BundleError, match=rf"input past_key_values\.0\.value is tensor\(float\) .*{said}"):
            open_engine(graph, spec)
    with pytest.raises(BundleError, match=rf"output logits is .*13\], bundle\.json says .*{VOCAB}\]"):
        open_engine(TinyModel(LENGTH, 13).save(tmp_path / "wide.onnx"))


def test_caches_of_a_type_that_this_backend_cannot_hold(graph: Path) -> None:
    with pytest.raises(BackendUnavailableError, match="bfloat16"):
        open_engine(graph, GraphSpec.decoder([(1, DIM, DIM)], LENGTH, VOCAB, "bfloat16"))


def test_caches_that_do_not_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    length = 2**45
    path = TINY.save(tmp_path / "model.onnx", length="L")  # a graph may leave L open, bundle.json names it
    spec = GraphSpec.decoder([(1, DIM, DIM)], length, VOCAB, "float32")
    monkeypatch.setattr("draftc.runtime.memory.available_memory", lambda: 3 << 30)
    with pytest.raises(ResourceError, match=r"need 1048576\.0 GiB of memory, 3\.0 GiB is available.*--max-length"):
        open_engine(path, spec)
    monkeypatch.setattr("draftc.runtime.memory.available_memory", lambda: None)  # no Linux: only trying tells
    with pytest.raises(ResourceError, match=r"no memory for KV buffers of 1048576\.0 GiB.*smaller --max-length"):
        open_engine(path, spec)


def test_sizes_that_the_schema_allows_and_no_address_can_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftc.runtime.memory.available_memory", lambda: None)
    path = TINY.save(tmp_path / "model.onnx", length="L")
    with pytest.raises(ResourceError, match="no memory for KV buffers"):
        open_engine(path, GraphSpec.decoder([(1, DIM, DIM)], 2**61, VOCAB, "float32"))
    with pytest.raises(ResourceError, match="no memory for KV buffers"):
        open_engine(path, max_rows=2**62)


# --- the process around it -------------------------------------------------------------------------------------------


def two_packages(name: str) -> str:
    if name in ("onnxruntime", "onnxruntime-gpu"):
        return name
    raise importlib.metadata.PackageNotFoundError(name)


def test_a_double_install_is_detected(monkeypatch: pytest.MonkeyPatch, graph: Path) -> None:
    monkeypatch.setattr(importlib.metadata, "distribution", two_packages)
    with pytest.raises(BackendUnavailableError, match=r"both installed.*pip uninstall -y onnxruntime onnxruntime-gpu"):
        open_engine(graph)


def test_a_single_install_of_either_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    def only(wanted: str) -> Callable[[str], str]:
        def distribution(name: str) -> str:
            if name != wanted:
                raise importlib.metadata.PackageNotFoundError(name)
            return name

        return distribution

    for name in ("onnxruntime", "onnxruntime-gpu"):
        monkeypatch.setattr(importlib.metadata, "distribution", only(name))
        assert load_onnxruntime() is ort


def test_a_missing_onnxruntime_says_what_to_install(monkeypatch: pytest.MonkeyPatch, graph: Path) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'draftc\[cpu\]' or 'draftc\[gpu\]'"):
        open_engine(graph)


def test_nothing_process_wide_is_changed(graph: Path) -> None:
    """An ordinary InferenceSession, with its own thread pool, opens and runs beside and after an engine."""
    environment = dict(os.environ)
    root = logging.getLogger()
    configuration = (
        root.level,
        list(root.handlers),
        logging.root.manager.disable,
        list(logging.Logger.manager.loggerDict),
    )
    hooks = (sys.excepthook, threading.excepthook)
    engine = open_engine(graph, threads=None)
    engine.forward(tokens(1, 2), 0, 1)

    def ordinary() -> None:
        for threads in (0, 2):
            options = ort.SessionOptions()
            options.intra_op_num_threads = threads
            session = ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
            cache = np.zeros((1, 1, LENGTH, DIM), np.float32)
            feeds = {"input_ids": [[1, 2]], "write_index": [0], "logit_positions": [[1]]}
            logits, *_ = session.run(
                ["logits"],
                {name: np.array(value, np.int64) for name, value in feeds.items()}
                | {"past_key_values.0.key": cache, "past_key_values.0.value": cache},
            )
            np.testing.assert_allclose(logits[0], TINY.expected(tokens(1, 2), 1), rtol=1e-4, atol=1e-4)

    ordinary()
    engine.close()
    ordinary()
    assert dict(os.environ) == environment
    assert (
        root.level,
        list(root.handlers),
        logging.root.manager.disable,
        list(logging.Logger.manager.loggerDict),
    ) == configuration
    assert (sys.excepthook, threading.excepthook) == hooks
