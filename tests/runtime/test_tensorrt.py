"""A TensorRT engine behind the Engine protocol: numbers, calls and memory, on a fake GPU that runs the same graph."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftc.runtime.cuda import DeviceMemory
from draftc.runtime.decoder import Decoder, Limits
from draftc.runtime.devices import DeviceOptions
from draftc.runtime.engine import Engine, Tokens
from draftc.runtime.errors import BackendUnavailableError, EngineError, UsageError
from draftc.runtime.graphio import INPUT_IDS, WRITE_INDEX, GraphSpec
from draftc.runtime.tensorrt import TensorRtEngine, check_options
from tests.runtime.fake_cuda_python import ErrorCode, Machine
from tests.runtime.fake_tensorrt import IExecutionContext
from tests.runtime.fake_tensorrt_api import DynamicShapesKernelSpecializationStrategy as Strategy
from tests.runtime.fake_tensorrt_api import ExecutionContextAllocationStrategy, RtxRuntimeConfig
from tests.runtime.sessions import MAX_LENGTH, MAX_WIDTH, PREFILL_CHUNK
from tests.runtime.tiny_engines import BUILT, INFO, LENGTH, Gpu, fake_gpu, save_graph, write_engine
from tests.runtime.tiny_model import TinyModel

VOCAB, PADDING = 40, 3
TEXT = np.arange(LENGTH, dtype=np.int64) * 7 % (VOCAB - PADDING)
LIMITS = Limits(MAX_LENGTH, MAX_WIDTH, PREFILL_CHUNK, VOCAB - PADDING)


@dataclass(frozen=True)
class Files:
    """Two graphs of one model family, as engine files."""

    target: Path
    draft: Path
    target_spec: GraphSpec
    draft_spec: GraphSpec
    model: TinyModel


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("engines")
    model = TinyModel(LENGTH, VOCAB)
    target_spec = save_graph(folder / "target.onnx", model, "verify", VOCAB - PADDING)
    draft_spec = save_graph(folder / "draft.onnx", TinyModel(LENGTH, VOCAB, noise=0.2), "draft", VOCAB - PADDING)
    return Files(
        write_engine(folder / "target.engine", folder / "target.onnx", target_spec),
        write_engine(folder / "draft.engine", folder / "draft.onnx", draft_spec),
        target_spec,
        draft_spec,
        model,
    )


Opener = Callable[..., TensorRtEngine]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gpu:
    return fake_gpu(monkeypatch, tmp_path)


@pytest.fixture
def opened(files: Files) -> Opener:
    def opener(kind: str = "target", device: str = "cuda", beside: Engine | None = None, **changes: Any) -> Any:
        path, spec = (files.target, files.target_spec) if kind == "target" else (files.draft, files.draft_spec)
        return TensorRtEngine(
            path,
            spec,
            built=replace(BUILT, **changes),
            info=INFO,
            max_call=PREFILL_CHUNK,
            max_rows=MAX_WIDTH,
            options=DeviceOptions(device),
            beside=beside,
        )

    return opener


def run(engine: TensorRtEngine, model: TinyModel, begin: int, end: int, rows: int, text: Tokens = TEXT) -> None:
    logits = engine.forward(text[begin:end], begin, rows)
    np.testing.assert_allclose(logits, model.expected(text[:end], rows), atol=1e-4)


# Numbers


def test_logits_are_the_models_over_prefill_rollback_and_the_whole_buffer(
    gpu: Gpu, opened: Opener, files: Files
) -> None:
    engine, model = opened(), files.model
    run(engine, model, 0, 8, 1)
    run(engine, model, 8, 9, 1)
    run(engine, model, 9, 13, 4)
    other = TEXT.copy()
    other[10:] = other[10:][::-1]
    run(engine, model, 10, 12, 2, other)  # a rollback
    run(engine, model, 12, 20, 1, other)  # a chunk again
    for begin in range(20, LENGTH, MAX_WIDTH):
        end = min(begin + MAX_WIDTH, LENGTH)  # to the last slot
        run(engine, model, begin, end, end - begin, other)


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("function", ["set_input_shape", "set_tensor_address"])
def test_an_interrupt_while_a_call_is_prepared(
    gpu: Gpu, opened: Opener, files: Files, monkeypatch: pytest.MonkeyPatch, function: str, at: int
) -> None:
    """The next call is prepared as a whole, although it looks like the one before the interrupt."""
    engine, model = opened(), files.model
    run(engine, model, 0, 4, 4)
    elsewhere = DeviceMemory(engine.gpu, 64), DeviceMemory(engine.gpu, 64)
    addresses = {name: memory.address for name, memory in zip((INPUT_IDS, WRITE_INDEX), elsewhere, strict=True)}
    original = getattr(IExecutionContext, function)
    left = at

    def interrupted(*arguments: Any) -> bool:
        nonlocal left
        done = original(*arguments)
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return bool(done)

    with monkeypatch.context() as patched:
        patched.setattr(IExecutionContext, function, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.queue(2, 2, addresses)
    run(engine, model, 4, 8, 4)


@pytest.mark.parametrize("kind", ["target", "draft"])
def test_tails_do_not_disturb_the_hosts_path(gpu: Gpu, opened: Opener, files: Files, kind: str) -> None:
    engine = opened(kind)
    first = engine.forward(TEXT[:6], 0, 6 if kind == "target" else 1).copy()
    again = engine.forward(TEXT[:6], 0, 6 if kind == "target" else 1)
    np.testing.assert_array_equal(first, again)


def test_the_result_is_a_view_of_pinned_memory_that_outlives_the_engine(gpu: Gpu, opened: Opener, files: Files) -> None:
    engine = opened()
    logits = engine.forward(TEXT[:3], 0, 2)
    engine.close()
    np.testing.assert_allclose(logits, files.model.expected(TEXT[:3], 2), atol=1e-4)


def test_clear_takes_nan_out_of_the_buffers_in_place(gpu: Gpu, opened: Opener, files: Files) -> None:
    engine = opened()
    before = engine.kv_addresses
    for address in before.values():
        gpu.cuda.device_bytes(address, 64).fill(0xFF)
    assert np.isnan(engine.forward(TEXT[10:11], 10, 1)).all()
    engine.clear()
    run(engine, files.model, 0, 1, 1)
    assert engine.kv_addresses == before


# Calls and profiles


def test_a_wide_call_with_several_rows_is_split(gpu: Gpu, opened: Opener, files: Files) -> None:
    engine = opened()
    run(engine, files.model, 0, 8, 3)
    assert gpu.trt.calls == [("target", 5), ("target", 3)]
    run(engine, files.model, 8, 8 + MAX_WIDTH, MAX_WIDTH)
    assert gpu.trt.calls[2:] == [("target", MAX_WIDTH)]


@pytest.mark.parametrize(
    ("width", "rows"), [(PREFILL_CHUNK + 2, 1), (MAX_WIDTH + 1, MAX_WIDTH + 1), (PREFILL_CHUNK + 5, 4)]
)
def test_what_exceeds_every_profile_is_refused_before_the_device_call(
    gpu: Gpu, opened: Opener, width: int, rows: int
) -> None:
    engine = opened()
    copies = len(gpu.cuda.copies)
    expected = (
        rf"{width} tokens and {rows} rows exceeds .*: decode takes 6 tokens and 6 rows; prefill takes 8 tokens and 1"
    )
    with pytest.raises(UsageError, match=expected):
        engine.forward(TEXT[:width], 0, rows)
    assert gpu.trt.calls == []
    assert len(gpu.cuda.copies) == copies


def test_a_call_on_the_device_must_be_in_one_piece(gpu: Gpu, opened: Opener) -> None:
    with pytest.raises(UsageError, match="8 tokens and 3 rows is more than one profile takes"):
        opened().queue(8, 3, {})


def test_a_call_like_the_last_one_sets_nothing_and_allocates_nothing(gpu: Gpu, opened: Opener, files: Files) -> None:
    engine = opened()
    for begin in (0, 1, 2):
        engine.forward(TEXT[begin : begin + 1], begin, 1)
        if begin == 0:
            changes, allocations = gpu.trt.changes, dict(gpu.cuda.allocations)
    assert gpu.trt.changes == changes
    assert gpu.cuda.allocations.keys() == allocations.keys()
    engine.forward(TEXT[3:5], 3, 2)
    assert gpu.trt.changes > changes  # the counter counts
    assert len(gpu.trt.configs) == 2  # a context for each profile


def test_only_the_rows_asked_for_cross_to_the_host(gpu: Gpu, opened: Opener) -> None:
    engine = opened()
    gpu.cuda.copies.clear()
    engine.forward(TEXT[:5], 0, 2)
    assert gpu.cuda.copied("out") == 2 * VOCAB * 4
    engine.fill(TEXT[5:8], 5)
    assert gpu.cuda.copied("out") == 2 * VOCAB * 4


def test_a_decoder_fills_without_logits(gpu: Gpu, opened: Opener, files: Files) -> None:
    decoder = Decoder(opened(), LIMITS)
    gpu.cuda.copies.clear()
    assert decoder.sync(TEXT[:30]).size == 6
    decoder.sync_but(2, TEXT[:31])
    assert len(decoder.cache) == 29
    assert gpu.cuda.copied("out") == 0
    np.testing.assert_allclose(
        decoder.extend(TEXT[29:31], 2), files.model.expected(TEXT[:31], 2)[:, : VOCAB - PADDING], atol=1e-4
    )


# Memory, streams and threads


def test_memory_is_reported_and_comes_back(gpu: Gpu, opened: Opener, files: Files) -> None:
    engine = opened()
    memory = engine.memory
    assert memory.kv == files.target_spec.kv_bytes()
    assert memory.weights == files.target.stat().st_size
    assert memory.scratch == 4096
    assert memory.logits == MAX_WIDTH * VOCAB * 4
    assert memory.q == MAX_WIDTH * (VOCAB - PADDING) * 4
    assert memory.total == memory.kv + memory.weights + memory.scratch + memory.logits + memory.q
    assert 0 <= gpu.cuda.used - memory.total < 16 << 10  # small tensors, each at an aligned address
    engine.close()
    engine.close()
    assert gpu.cuda.used == 0


def test_two_engines_share_stream_and_distributions(gpu: Gpu, opened: Opener) -> None:
    draft = opened("draft")
    target = opened("target", beside=draft)
    assert target.gpu is draft.gpu
    assert target.q_address == draft.q_address
    assert target.memory.q == 0
    assert len(gpu.cuda.streams) == 1
    draft.close()
    [stream] = gpu.cuda.streams.values()
    assert not stream.fake_closed
    target.close()
    assert stream.fake_closed
    assert gpu.cuda.used == 0


def test_engines_on_two_gpus_share_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, opened: Opener) -> None:
    gpu = fake_gpu(monkeypatch, tmp_path, Machine(devices=2))
    draft = opened("draft", device="cuda:1")
    target = opened("target", beside=draft)
    assert target.q_address != draft.q_address
    assert len(gpu.cuda.streams) == 2
    target.close()
    draft.close()
    assert gpu.cuda.used == 0


def test_another_thread_may_call(gpu: Gpu, opened: Opener, files: Files) -> None:
    engine = opened()
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(engine.forward(TEXT[:2], 0, 1).copy()))
    thread.start()
    thread.join()
    np.testing.assert_allclose(results[0], files.model.expected(TEXT[:2], 1), atol=1e-4)


def test_an_interrupted_call_does_not_reach_into_the_next(
    gpu: Gpu, opened: Opener, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened()

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engine.gpu, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.forward(TEXT[:4][::-1].copy(), 0, 1)
    run(engine, files.model, 0, 4, 1)


def test_contexts_share_scratch_memory_and_begin_with_general_kernels(gpu: Gpu, opened: Opener) -> None:
    engine = opened()
    for config in gpu.trt.configs:
        assert isinstance(config, RtxRuntimeConfig)
        assert config.fake_strategy == ExecutionContextAllocationStrategy.USER_MANAGED
        assert config.dynamic_shapes_kernel_specialization_strategy == Strategy.LAZY
    engine.queue(1, 1, {}, fixed="mine")
    engine.gpu.wait()
    last = gpu.trt.configs[-1]
    assert isinstance(last, RtxRuntimeConfig)
    assert last.dynamic_shapes_kernel_specialization_strategy == Strategy.EAGER
    sizes = [data.size for data in gpu.cuda.allocations.values()]
    assert sizes.count(4096) == 1


# Failures


def test_a_call_that_fails_says_why(gpu: Gpu, opened: Opener) -> None:
    engine = opened()
    gpu.trt.fail_next_execution = "IExecutionContext::enqueueV3: Error Code 1: Cuda Runtime\n(launch failed)"
    with pytest.raises(EngineError, match=r"failed on 3 tokens: .*Cuda Runtime \(launch failed\); run `draftc verify`"):
        engine.forward(TEXT[:3], 0, 1)


def test_closing_after_a_failure_on_the_device_gives_everything_back(gpu: Gpu, opened: Opener) -> None:
    engine = opened()
    gpu.cuda.fail_next["sync"] = ErrorCode.cudaErrorIllegalAddress
    with pytest.raises(EngineError, match="illegal memory access"):
        engine.forward(TEXT[:3], 0, 1)
    gpu.cuda.fail_next["sync"] = ErrorCode.cudaErrorIllegalAddress
    engine.close()
    assert gpu.cuda.used == 0


def test_a_failure_while_opening_leaves_nothing_behind(gpu: Gpu, opened: Opener) -> None:
    gpu.cuda.fail_next["cudaMalloc"] = ErrorCode.cudaErrorMemoryAllocation
    with pytest.raises(Exception, match="no room"):
        opened()
    assert gpu.cuda.used == 0
    opened().close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (DeviceOptions("cpu"), "'cpu': tensorrt-rtx runs on cuda"),
        (DeviceOptions("cuda", threads=2), "threads are of graphs on the CPU"),
        (DeviceOptions("cuda", provider_options={"a": "b"}), "provider options are ONNX Runtime's"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: DeviceOptions, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        check_options("tensorrt-rtx", options)


def test_a_gpu_that_is_not_there(gpu: Gpu, opened: Opener) -> None:
    with pytest.raises(BackendUnavailableError, match=r"there is no GPU 3 .1 found"):
        opened(device="cuda:3")


def test_standard_tensorrt_runs_the_same_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, opened: Opener, files: Files
) -> None:
    """Its module has no header check, no kernel settings and no kernel cache: nothing of them may be touched."""
    gpu = fake_gpu(monkeypatch, tmp_path / "cache", rtx=False)
    engine = opened(name="tensorrt")
    run(engine, files.model, 0, 8, 3)
    assert engine.is_capturable(3, 3, "")
    engine.close()
    assert gpu.cuda.used == 0
    assert not (tmp_path / "cache").exists()
