"""Opening a graph on a GPU: what is missing is named, and nothing falls back to the CPU in silence."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest
from onnx import TensorProto

from draftc.runtime import ort_session
from draftc.runtime.devices import DeviceOptions
from draftc.runtime.errors import (
    BackendUnavailableError,
    BundleError,
    DraftcError,
    DraftcWarning,
    ResourceError,
    UsageError,
)
from draftc.runtime.graphio import GraphSpec
from draftc.runtime.ort import OrtEngine
from draftc.runtime.ort_session import check_options, load_library, reason
from tests.runtime.fake_ort_gpu import FakeOnnxRuntime, cuda_failure, install
from tests.runtime.fakes import tokens
from tests.runtime.tiny_model import DIM, TinyModel

LENGTH, VOCAB = 12, 5
SPEC = GraphSpec.decoder([(1, DIM, DIM)], LENGTH, VOCAB, "float32")
TINY = TinyModel(LENGTH, VOCAB)


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "target"
    folder.mkdir()
    return TINY.save(folder / "model.onnx")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeOnnxRuntime:
    return install(monkeypatch)


def open_engine(path: Path, spec: GraphSpec = SPEC, **options: Any) -> OrtEngine:
    chosen = DeviceOptions(**{"device": "cuda", "threads": 1, **options})
    return OrtEngine(path, spec, max_call=8, max_rows=4, options=chosen)


def refusal(kind: type[DraftcError], path: Path, spec: GraphSpec = SPEC, **options: Any) -> str:
    """The message of the error, of class `kind`, that opening raises."""
    with pytest.raises(kind) as caught:
        open_engine(path, spec, **options)
    assert caught.type is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- what is missing -------------------------------------------------------------------------------------------------


def test_the_package_for_the_cpu(monkeypatch: pytest.MonkeyPatch, graph: Path) -> None:
    """With what is installed here; a machine of onnxruntime-gpu's would come to the next piece."""
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("onnxruntime-gpu is installed")
    said = refusal(BackendUnavailableError, graph)
    assert f"device cuda needs onnxruntime-gpu, and the installed onnxruntime {onnxruntime.__version__} has" in said
    assert "pip uninstall -y onnxruntime, then pip install 'draftc[gpu]'" in said
    assert said.endswith("device cpu works here")


def test_a_driver(monkeypatch: pytest.MonkeyPatch, gpu: FakeOnnxRuntime, graph: Path) -> None:
    monkeypatch.setattr("draftc.runtime.ort_session.load_library", lambda name: f"{name}: cannot open shared object")
    monkeypatch.setattr("sys.platform", "linux")
    said = refusal(BackendUnavailableError, graph)
    assert said.startswith(
        "device cuda needs an NVIDIA driver, and libcuda.so.1 is not found: install a driver for CUDA"
    )
    assert said.endswith("; device cpu works here")


def test_a_library_of_cuda(monkeypatch: pytest.MonkeyPatch, gpu: FakeOnnxRuntime, graph: Path) -> None:
    """onnxruntime-gpu logs it, leaves its provider out and runs on the CPU."""
    gpu.missing_libraries = True
    asked = []

    def library(name: str) -> str | None:
        asked.append(name)
        missing = "libcublasLt.so.13: cannot open shared object file: No such file or directory"
        return missing if name.endswith("libonnxruntime_providers_cuda.so") else None

    monkeypatch.setattr("draftc.runtime.ort_session.load_library", library)
    said = refusal(BackendUnavailableError, graph)
    assert "cannot start its CUDA provider (libcublasLt.so.13 is not found): it needs CUDA 13.0" in said
    assert "pip install 'onnxruntime-gpu[cuda,cudnn]'" in said
    assert asked[-1] == "/nowhere/onnxruntime/capi/libonnxruntime_providers_cuda.so"


def test_a_gpu(gpu: FakeOnnxRuntime, graph: Path) -> None:
    gpu.gpus = 0
    said = refusal(BackendUnavailableError, graph)
    expected = (
        "device cuda cannot be used (CUDA failure 100: no CUDA-capable device is detected); device cpu works here"
    )
    assert said == expected
    gpu.gpus = 1
    said = refusal(BackendUnavailableError, graph, device="cuda:3")
    assert said.startswith("there is no cuda:3 here (")
    assert "Invalid device ID: 3, must be between 0 (inclusive) and 1 (exclusive)" in said


def test_cpu_is_offered_only_where_it_would_work(gpu: FakeOnnxRuntime, tmp_path: Path) -> None:
    gpu.gpus = 0
    half = GraphSpec.decoder([(1, DIM, DIM)], LENGTH, VOCAB, "bfloat16")
    path = TINY.save(tmp_path / "half.onnx", kv_type=TensorProto.BFLOAT16)
    assert refusal(BackendUnavailableError, path, half).endswith("; device cpu has no kernels for bfloat16")
    assert "on cpu has no kernels for bfloat16" in refusal(BackendUnavailableError, path, half, device="cpu")


def test_kernels_for_the_caches(gpu: FakeOnnxRuntime, graph: Path) -> None:
    """The binding would copy such a cache to the CPU, once, and no write would be seen again."""
    gpu.on_host = frozenset({"past_key_values.0.key"})
    gpu.cpu_operators = frozenset({"TensorScatter"})
    said = refusal(BackendUnavailableError, graph, cuda_graph=False)
    assert "has no CUDA kernel that writes float32 caches (on the CPU: TensorScatter)" in said


def test_memory_for_the_weights(monkeypatch: pytest.MonkeyPatch, graph: Path) -> None:
    install(monkeypatch, free=1 << 20, memory=1 << 20, weights=1 << 30)
    said = refusal(ResourceError, graph)
    assert said.startswith("cuda has no memory for the weights of model.onnx (1.0 MiB is free): close other programs")


def test_bytes_that_are_no_graph(gpu: FakeOnnxRuntime, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"not a graph")
    assert "cannot load model.onnx: " in refusal(BundleError, tmp_path / "model.onnx")


def test_a_graph_with_a_tail(gpu: FakeOnnxRuntime, graph: Path) -> None:
    assert "has a draft tail" in refusal(BundleError, graph, SPEC.with_tail("draft", 4, VOCAB))


# --- options ---------------------------------------------------------------------------------------------------------


def test_provider_options_reach_the_provider(gpu: FakeOnnxRuntime, graph: Path) -> None:
    open_engine(graph, provider_options={"gpu_mem_limit": "1000000", "arena_extend_strategy": "kSameAsRequested"})
    open_engine(graph, device="cpu")
    said = refusal(UsageError, graph, provider_options={"gpu_memory": "1"})
    assert said == "provider option 'gpu_memory' is unknown to ONNX Runtime 1.99.0's CUDA provider"
    said = refusal(UsageError, graph, provider_options={"gpu_mem_limit": "8 GB"})
    assert said == "provider option gpu_mem_limit: ONNX Runtime cannot read '8 GB'"


@pytest.mark.parametrize("name", ["device_id", "enable_cuda_graph", "user_compute_stream", "gpu_external_alloc"])
def test_provider_options_that_are_not_the_users(name: str) -> None:
    with pytest.raises(UsageError, match=f"provider option {name} is not taken: "):
        check_options(DeviceOptions("cuda", provider_options={name: "1"}))


def test_devices_that_this_backend_serves() -> None:
    for device in ("cpu", "cuda", "cuda:0", "cuda:7"):
        check_options(DeviceOptions(device))
    for device in ("tpu", "rocm:1", "cpu:0"):
        with pytest.raises(UsageError, match=f"unknown device '{device}': this backend serves cpu, cuda"):
            check_options(DeviceOptions(device))
    with pytest.raises(UsageError, match="provider option gpu_mem_limit: device cpu takes none, cuda does"):
        check_options(DeviceOptions("cpu", provider_options={"gpu_mem_limit": "1"}))


def test_each_gpu_has_its_own_memory(monkeypatch: pytest.MonkeyPatch, graph: Path) -> None:
    gpu = install(monkeypatch, gpus=2)
    engine = open_engine(graph, device="cuda:1")
    assert engine._buffers is not None
    assert {value.device for value in engine._buffers.kv.values()} == {("cuda", 1)}
    engine.forward(tokens(1), 0, 1)
    assert gpu.runs == [("cuda", "run", -1)]


def test_cuda_from_pip_is_loaded_and_stdout_stays_clean(
    monkeypatch: pytest.MonkeyPatch, gpu: FakeOnnxRuntime, graph: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for found, calls in ((None, 0), (SimpleNamespace(), 1)):
        monkeypatch.setattr("draftc.runtime.ort_session.importlib.util.find_spec", lambda name, found=found: found)
        open_engine(graph)
        assert gpu.preloaded == calls
    assert capsys.readouterr().out == ""


# --- graphs that ONNX Runtime does not capture -----------------------------------------------------------------------


def test_operators_on_the_cpu_rule_out_cuda_graphs(gpu: FakeOnnxRuntime, graph: Path) -> None:
    gpu.cpu_operators = frozenset({"Gather", "Range"})
    with pytest.warns(DraftcWarning) as noted:
        engine = open_engine(graph)
    [message] = [str(warning.message) for warning in noted]
    assert message.startswith(
        "target/model.onnx runs without CUDA graphs, so each call costs more: This session cannot"
    )
    assert message.endswith("(on the CPU: Gather, Range)")
    for start in range(4):
        engine.forward(tokens(1), start, 1)
    assert [kind for _, kind, _ in gpu.runs] == ["run"] * 4


def test_an_input_that_is_read_on_the_cpu_rules_out_cuda_graphs(gpu: FakeOnnxRuntime, graph: Path) -> None:
    """A replay would see the position of the capture for ever: a wrong text, and no error."""
    gpu.on_host = frozenset({"write_index"})
    gpu.weights = 1000
    gpu.memory = 1900  # not for the weights twice
    with pytest.warns(DraftcWarning, match="ONNX Runtime reads write_index on the CPU"):
        engine = open_engine(graph)
    assert not engine.cuda_graph
    text = tokens(1, 2, 3, 4, 0, 1)
    for start in range(text.size):
        logits = engine.forward(text[start : start + 1], start, 1)
    assert logits == pytest.approx(TINY.expected(text, 1), rel=1e-4, abs=1e-4)
    assert {copy.size for copy in gpu.copies if copy.source == "cpu"} == {LENGTH * DIM * 4, 8}


def test_graphs_that_are_not_wanted_are_not_tried(
    gpu: FakeOnnxRuntime, graph: Path, recwarn: pytest.WarningsRecorder
) -> None:
    gpu.cpu_operators = frozenset({"Gather"})
    assert not open_engine(graph, cuda_graph=False).cuda_graph
    assert recwarn.list == []


# --- the pieces ------------------------------------------------------------------------------------------------------


def test_the_reason_in_what_onnxruntime_says() -> None:
    assert reason(RuntimeError(cuda_failure(2, "out of memory"))) == "CUDA failure 2: out of memory"
    assert (
        reason(RuntimeError("a.cc:1 f() [ONNXRuntimeError] : 1 : FAIL : no such thing\nat line 3")) == "no such thing"
    )
    assert reason(RuntimeError("plain\nmore")) == "plain"
    assert reason(RuntimeError("")) == "RuntimeError"


def test_loading_a_library() -> None:
    missing = load_library("libdraftc_is_not_there.so.9")
    assert missing is not None
    found = ort_session.MISSING_LIBRARY.match(missing)
    assert found is not None
    assert found[1] == "libdraftc_is_not_there.so.9"
    assert load_library("libc.so.6") is None


def test_the_real_package_takes_what_the_fake_takes(graph: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What no signature shows: keywords that go through **kwargs, names of settings, attributes of native objects."""
    with pytest.raises(ValueError, match="provider"):
        onnxruntime.InferenceSession(str(graph), providers=[("CPUExecutionProvider", {}, 1)], enable_fallback=0)
    assert capsys.readouterr().out == "", "without it, a banner"
    settings = onnxruntime.SessionOptions()
    settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = onnxruntime.InferenceSession(str(graph), settings, providers=["CPUExecutionProvider"], enable_fallback=0)
    parts = session.get_provider_graph_assignment_info()
    assert {part.ep_name for part in parts} == {"CPUExecutionProvider"}
    assert "TensorScatter" in {node.op_type for part in parts for node in part.get_nodes()}
    assert {info.name for info in (*session.get_input_memory_infos(), *session.get_output_memory_infos())} == {"Cpu"}
    run = onnxruntime.RunOptions()
    run.add_run_config_entry("gpu_graph_id", "-1")
    assert hasattr(onnxruntime, "cuda_version")
    assert callable(onnxruntime.preload_dlls)
