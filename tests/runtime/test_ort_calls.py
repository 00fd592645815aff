"""The engine on a GPU whose memory is faked: the CPU's numbers, and no copy but of ids, positions and logits."""

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from draftc.runtime.decoder import Decoder, Limits
from draftc.runtime.devices import DeviceOptions
from draftc.runtime.errors import DraftcWarning, EngineError, ResourceError
from draftc.runtime.graphio import GraphSpec
from draftc.runtime.ort import OrtEngine
from tests.runtime.fake_ort_gpu import Copy, FakeOnnxRuntime, cuda_failure, install
from tests.runtime.fakes import tokens
from tests.runtime.tiny_model import DIM, TinyModel

LENGTH, VOCAB = 40, 11  # L, V
MAX_WIDTH = 5
SPEC = GraphSpec.decoder([(1, DIM, DIM)], LENGTH, VOCAB, "float32")
TINY = TinyModel(LENGTH, VOCAB)
KV_TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY.save(tmp_path_factory.mktemp("graph") / "model.onnx")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeOnnxRuntime:
    return install(monkeypatch)


def open_engine(path: Path, spec: GraphSpec = SPEC, *, max_call: int = 16, **options: Any) -> OrtEngine:
    chosen = DeviceOptions(**{"device": "cuda", "threads": 1, **options})
    return OrtEngine(path, spec, max_call=max_call, max_rows=MAX_WIDTH, options=chosen)


def random_texts(engine: OrtEngine, steps: int) -> None:
    """Any text after any other, at any width, compared with recomputation from the text alone."""
    decoder = Decoder(engine, Limits(LENGTH - MAX_WIDTH, MAX_WIDTH, 16, VOCAB))
    rng = np.random.default_rng(1)
    text = tokens(1)
    for step in range(steps):
        keep = int(rng.integers(1, text.size + 1))
        tail = rng.integers(0, VOCAB, int(rng.integers(0, 20)))
        text = np.concatenate((text[:keep], tail))[: LENGTH - MAX_WIDTH]
        proposal = rng.integers(0, VOCAB, step % MAX_WIDTH)
        pending = decoder.sync(text, upcoming=proposal.size)
        logits = decoder.extend(np.concatenate((pending, proposal)), rows=proposal.size + 1)
        everything = np.concatenate((text, proposal))
        np.testing.assert_allclose(logits, TINY.expected(everything, proposal.size + 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cuda_graph", [True, False])
def test_rewinds_and_alternating_widths_are_recomputation(gpu: FakeOnnxRuntime, graph: Path, cuda_graph: bool) -> None:
    engine = open_engine(graph, cuda_graph=cuda_graph)
    addresses = engine.kv_addresses
    random_texts(engine, 150)
    assert engine.kv_addresses == addresses
    kinds = Counter(kind for _, kind, _ in gpu.runs)
    if cuda_graph:
        assert kinds["replay"] > kinds["capture"] > 0
        captured = [number for _, kind, number in gpu.runs if kind == "capture"]
        assert captured == [*range(1, len(captured) + 1)], "one graph for each shape"
    else:
        assert set(kinds) == {"run"}


@pytest.mark.parametrize("cuda_graph", [True, False])
def test_a_call_copies_its_ids_its_position_and_its_rows_of_logits(
    gpu: FakeOnnxRuntime, graph: Path, cuda_graph: bool
) -> None:
    engine = open_engine(graph, cuda_graph=cuda_graph)
    for start in (0, 4, 8):  # the first makes the binding, the second captures, the third replays
        gpu.copies.clear()
        engine.forward(tokens(1, 2, 3, 4), start, 2)
        out = Copy("cuda", "cpu", 2 * VOCAB * 4)
        steady = [Copy("cpu", "cuda", 4 * 8), Copy("cpu", "cuda", 8), out]
        assert gpu.copies == ([Copy("cpu", "cuda", 2 * 8), *steady] if start == 0 else steady)


def test_caches_cross_to_the_device_as_zeros_and_never_again(gpu: FakeOnnxRuntime, graph: Path) -> None:
    engine = open_engine(graph)
    buffer = LENGTH * DIM * 4
    assert gpu.copies == [Copy("cpu", "cuda", buffer)] * 2
    gpu.copies.clear()
    random_texts(engine, 30)
    assert buffer not in {copy.size for copy in gpu.copies}
    gpu.copies.clear()
    engine.clear()
    assert gpu.copies == [Copy("cpu", "cuda", buffer)] * 2
    assert not any(value.real.numpy().any() for value in engine._buffers.kv.values())  # type: ignore[union-attr]


def test_a_shape_is_captured_when_it_comes_again_and_a_prefill_chunk_never(gpu: FakeOnnxRuntime, graph: Path) -> None:
    engine = open_engine(graph, max_call=8)
    for width, rows in ((8, 1), (8, 1), (1, 1), (4, 4), (1, 1), (4, 4), (8, 1), (1, 1), (4, 4), (4, 2)):
        engine.forward(np.arange(width) % VOCAB, 0, rows)
    numbers = [(kind, number) for _, kind, number in gpu.runs]
    plain = ("run", -1)
    assert numbers == [
        *[plain] * 4,  # the two chunks, and the first of each shape
        ("capture", 1),
        ("capture", 2),
        plain,
        ("replay", 1),
        ("replay", 2),
        plain,
    ]


def test_another_thread_captures_its_own(gpu: FakeOnnxRuntime, graph: Path) -> None:
    """ONNX Runtime keeps captured graphs per thread."""
    engine = open_engine(graph)
    for start in range(3):
        engine.forward(tokens(1), start, 1)
    results = []
    thread = threading.Thread(target=lambda: results.append(engine.forward(tokens(2), 3, 1).copy()))
    thread.start()
    thread.join()
    np.testing.assert_allclose(results[0], TINY.expected(tokens(1, 1, 1, 2), 1), rtol=1e-4, atol=1e-4)
    assert [kind for _, kind, _ in gpu.runs] == ["run", "capture", "replay", "capture"]


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
def test_half_precision_caches_start_as_zeros(gpu: FakeOnnxRuntime, tmp_path: Path, kv_dtype: str) -> None:
    """Device memory is NaN before, and NaN would enter: numpy has no bfloat16 to write zeros with."""
    spec = GraphSpec.decoder([(1, DIM, DIM)], LENGTH, VOCAB, kv_dtype)
    engine = open_engine(TINY.save(tmp_path / "half.onnx", kv_type=KV_TYPES[kv_dtype]), spec)
    engine.forward(tokens(1, 2, 3), 0, 1)
    logits = engine.forward(tokens(4), 3, 1)
    np.testing.assert_allclose(logits, TINY.expected(tokens(1, 2, 3, 4), 1), rtol=3e-2, atol=3e-2)
    engine.clear()
    engine.forward(tokens(1, 2, 3), 0, 1)
    np.testing.assert_allclose(engine.forward(tokens(4), 3, 1), logits)


def test_logits_are_a_view_of_one_buffer(gpu: FakeOnnxRuntime, graph: Path) -> None:
    engine = open_engine(graph)
    first = engine.forward(tokens(1, 2), 0, 2)
    assert np.shares_memory(first, engine.forward(tokens(3), 2, 1))


def test_a_call_past_the_end_does_not_reach_the_device(gpu: FakeOnnxRuntime, graph: Path) -> None:
    engine = open_engine(graph)
    engine.forward(tokens(1, 2), LENGTH - 2, 1)
    gpu.reset()
    with pytest.raises(EngineError, match=f"2 tokens at {LENGTH - 1} do not fit into KV buffers of {LENGTH}"):
        engine.forward(tokens(1, 2), LENGTH - 1, 1)
    assert gpu.copies == []
    assert gpu.runs == []


def test_closing_gives_the_memory_back(gpu: FakeOnnxRuntime, graph: Path) -> None:
    gpu.weights = 1000
    engine = open_engine(graph)
    for start in range(3):
        engine.forward(tokens(1), start, 1)
    assert gpu.allocated > 1000 + SPEC.kv_bytes()
    engine.close()
    engine.close()
    assert gpu.allocated == 0
    assert engine.kv_addresses == {}


# --- graphs that cannot be captured ----------------------------------------------------------------------------------


def test_a_failed_capture_is_noted_once_and_the_text_goes_on(gpu: FakeOnnxRuntime, graph: Path) -> None:
    gpu.captures_fail = True
    gpu.weights = 1 << 20
    gpu.memory = (1 << 20) + (1 << 19)  # room for the weights once
    engine = open_engine(graph)
    addresses = engine.kv_addresses
    with pytest.warns(DraftcWarning, match=r"runs without CUDA graphs.*CUDA failure 900: operation not perm") as noted:
        random_texts(engine, 60)
    assert len(noted) == 1
    assert "\n" not in str(noted[0].message)
    assert not engine.cuda_graph
    assert engine.kv_addresses == addresses
    kinds = [kind for _, kind, _ in gpu.runs]
    assert kinds.count("capture") == 1
    assert set(kinds[kinds.index("capture") + 1 :]) == {"run"}


def test_a_run_that_fails_uncaptured_is_an_error_and_leaves_the_engine_usable(
    gpu: FakeOnnxRuntime, graph: Path, recwarn: pytest.WarningsRecorder
) -> None:
    engine = open_engine(graph)
    gpu.fail_at, gpu.failure = 1, cuda_failure(700, "an illegal memory access was encountered")
    engine.forward(tokens(1), 0, 1)
    with pytest.raises(EngineError) as caught:
        engine.forward(tokens(1, 2), 1, 1)
    assert not recwarn.list
    said = "ONNX Runtime failed on 2 tokens at 1: CUDA failure 700: an illegal memory access was encountered"
    assert str(caught.value) == said
    gpu.fail_at = None
    np.testing.assert_allclose(engine.forward(tokens(1, 2), 0, 1), TINY.expected(tokens(1, 2), 1), rtol=1e-4, atol=1e-4)


def test_no_memory_for_a_call(monkeypatch: pytest.MonkeyPatch, graph: Path) -> None:
    gpu = install(monkeypatch, free=3 << 20)
    engine = open_engine(graph, cuda_graph=False)
    gpu.fail_at = 0
    gpu.failure = (
        "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running MatMul node. "
        "bfc_arena.cc:358 AllocateRawInternal Failed to allocate memory for requested buffer of size 1073741824\n"
    )
    with pytest.raises(
        ResourceError, match=r"cuda has no memory for 3 tokens at 0 \(1\.0 GiB more is needed, 3\.0 MiB"
    ):
        engine.forward(tokens(1, 2, 3), 0, 1)


def test_no_memory_for_the_caches(monkeypatch: pytest.MonkeyPatch, graph: Path) -> None:
    install(monkeypatch, memory=1000)  # what is free cannot be known: only trying tells
    with pytest.raises(
        ResourceError, match=r"cuda has no memory for KV buffers of 1\.2 KiB .*CUDA failure 2: out of m"
    ):
        open_engine(graph)
    install(monkeypatch, free=1000)
    with pytest.raises(ResourceError, match=r"need 1\.2 KiB of device memory, 1000 B is free on cuda:0.*--max-length"):
        open_engine(graph)
