"""What is checked when a TensorRT engine file is opened, in order, and what each refusal says."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftc.runtime.devices import DeviceOptions
from draftc.runtime.engine_file import EngineFile, KernelCache, load_tensorrt
from draftc.runtime.errors import BackendUnavailableError, BundleError, BundleVersionError, DraftcError, ResourceError
from draftc.runtime.records import Backend, EngineInfo, Range
from draftc.runtime.tensorrt import TensorRtEngine
from tests.runtime.contracts import differences, enum_differences
from tests.runtime.fake_cuda_python import Machine
from tests.runtime.fake_tensorrt import CLASSES
from tests.runtime.fake_tensorrt_api import ENUMS, VERSION, EngineInvalidityDiagnostics, RtxRuntimeConfig
from tests.runtime.sessions import MAX_WIDTH, PREFILL_CHUNK
from tests.runtime.tiny_engines import BUILT, INFO, LENGTH, Gpu, fake_gpu, plain_spec, save_graph, write_engine
from tests.runtime.tiny_model import TinyModel

VOCAB, PADDING = 40, 3
SPEC = plain_spec(VOCAB).with_tail("verify", MAX_WIDTH, VOCAB - PADDING)
Opener = Callable[..., TensorRtEngine]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gpu:
    return fake_gpu(monkeypatch, tmp_path / "cache")


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graph") / "target.onnx"
    assert save_graph(path, TinyModel(LENGTH, VOCAB), "verify", VOCAB - PADDING) == SPEC
    return path


@pytest.fixture
def opened(graph: Path, tmp_path: Path) -> Opener:
    def opener(built: Backend = BUILT, info: EngineInfo = INFO, **lies: Any) -> TensorRtEngine:
        return TensorRtEngine(
            write_engine(tmp_path / "model.engine", graph, SPEC, **lies),
            SPEC,
            built=built,
            info=info,
            max_call=PREFILL_CHUNK,
            max_rows=MAX_WIDTH,
            options=DeviceOptions("cuda"),
        )

    return opener


def tensors_of_the_engine() -> list[list[Any]]:
    return [
        [tensor.name, mode, tensor.dtype, list(tensor.shape)]
        for mode, group in (("INPUT", SPEC.inputs), ("OUTPUT", SPEC.outputs))
        for tensor in group
    ]


# The contract of the fakes


@pytest.mark.parametrize("name", CLASSES)
def test_fakes_are_like_tensorrt_rtx(name: str) -> None:
    real = getattr(importlib.import_module("tensorrt_rtx"), name)
    assert list(differences(CLASSES[name], real)) == []


@pytest.mark.parametrize("fake", ENUMS, ids=lambda fake: fake.__name__)
def test_fake_enums_have_the_real_members(fake: Any) -> None:
    assert list(enum_differences(fake, getattr(importlib.import_module("tensorrt_rtx"), fake.__name__))) == []


def test_settings_of_a_context_can_be_set() -> None:
    config = importlib.import_module("tensorrt_rtx").IRuntimeConfig
    assert config.cuda_graph_strategy.fset
    assert config.dynamic_shapes_kernel_specialization_strategy.fset


# Nothing but files


@pytest.mark.parametrize("flavour", ["tensorrt-rtx", "tensorrt"])
def test_a_missing_package_is_named_with_its_extra(flavour: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx" if flavour == "tensorrt-rtx" else "tensorrt", None)
    with pytest.raises(BackendUnavailableError, match=rf"pip install 'draftc\[{flavour}\]'"):
        load_tensorrt(flavour)


def test_an_engine_of_another_version_names_both(gpu: Gpu, tmp_path: Path, opened: Opener) -> None:
    with pytest.raises(BundleVersionError, match=rf"tensorrt-rtx 1\.6\.0\.5, {VERSION} is installed: pip install"):
        opened(built=replace(BUILT, version="1.6.0.5"))
    assert gpu.cuda.streams == {}


def test_version_and_format_are_checked_where_there_is_no_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, graph: Path, opened: Opener
) -> None:
    fake_gpu(monkeypatch, tmp_path, Machine(sm=None))
    path = write_engine(tmp_path / "model.engine", graph, SPEC)
    path.write_bytes(b"junk" + path.read_bytes()[4:])
    with pytest.raises(BundleError, match=r"model\.engine is no engine of tensorrt-rtx"):
        EngineFile(path, BUILT)
    with pytest.raises(BackendUnavailableError, match=rf"tensorrt-rtx {VERSION} needs an NVIDIA GPU with a driver"):
        opened()


def test_the_real_package_tells_an_engine_from_other_files_without_a_driver(tmp_path: Path, opened: Opener) -> None:
    trt = importlib.import_module("tensorrt_rtx")
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    output = network.add_identity(network.add_input("x", trt.float32, (2, 2))).get_output(0)
    network.mark_output(output)
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    plan = bytes(builder.build_serialized_network(network, config))
    built = replace(BUILT, version=trt.__version__)
    path = tmp_path / "model.engine"
    path.write_bytes(plan)
    assert EngineFile(path, built).built == built
    for damaged in (plan[:40], b"\0" + plan[1:], b""):
        path.write_bytes(damaged)
        with pytest.raises(BundleError, match="no engine of tensorrt-rtx"):
            EngineFile(path, built)
    with pytest.raises(BundleVersionError, match=r"0\.9, [0-9.]+ is installed"):
        EngineFile(path, replace(BUILT, version="0.9"))


# The GPU


def test_an_engine_for_another_gpu_names_both(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, opened: Opener) -> None:
    fake_gpu(monkeypatch, tmp_path, Machine(sm="90"))
    with pytest.raises(BackendUnavailableError, match=r"built for SM 89, 120, NVIDIA Fake has SM 90: .* --sm 90"):
        opened()


@pytest.mark.parametrize(
    ("found", "error", "text"),
    [
        (EngineInvalidityDiagnostics.VERSION_MISMATCH, BundleVersionError, "compile the bundle again"),
        (EngineInvalidityDiagnostics.UNSUPPORTED_CC, BackendUnavailableError, "for this GPU"),
        (EngineInvalidityDiagnostics.OLD_CUDA_DRIVER, BackendUnavailableError, "update the driver"),
        (EngineInvalidityDiagnostics.INSUFFICIENT_GPU_MEMORY, ResourceError, "close other programs"),
    ],
)
def test_what_tensorrt_finds_in_the_header_is_passed_on(
    gpu: Gpu, tmp_path: Path, opened: Opener, found: EngineInvalidityDiagnostics, error: type[DraftcError], text: str
) -> None:
    gpu.trt.diagnostics = found.value
    with pytest.raises(error, match=rf"refuses model\.engine: The engine cannot run here\.; .*{text}"):
        opened()
    assert gpu.cuda.used == 0
    assert all(stream.fake_closed for stream in gpu.cuda.streams.values())


def test_memory_is_compared_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, opened: Opener
) -> None:
    gpu = fake_gpu(monkeypatch, tmp_path, Machine(memory=4000))
    with pytest.raises(
        ResourceError,
        match=r"model\.engine needs 6\.\d KiB more of NVIDIA Fake's memory \(weights .*, KV 2\.1 KiB, .*3\.9",
    ):
        opened()
    assert gpu.cuda.used == 0


def test_memory_that_the_manifest_knows_of_is_compared_before_the_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, opened: Opener
) -> None:
    gpu = fake_gpu(monkeypatch, tmp_path)
    decode, prefill = INFO.profiles
    large = replace(INFO, weights_bytes=1 << 29, profiles=(decode, replace(prefill, activation_bytes=1 << 29)))
    with pytest.raises(ResourceError, match=r"weights 512\.0 MiB, KV 2\.1 KiB, scratch 512\.0 MiB, .*1\.0 GiB is free"):
        opened(info=large)
    assert gpu.cuda.used == 0
    fitting = replace(INFO, weights_bytes=1 << 20)
    assert opened(info=fitting).memory.weights == 1 << 20


def test_scratch_memory_is_compared_when_it_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, opened: Opener
) -> None:
    gpu = fake_gpu(monkeypatch, tmp_path, Machine(memory=9000))
    with pytest.raises(ResourceError, match=r"more of .* \(KV 2\.1 KiB, scratch 4\.0 KiB, logits .*free: close"):
        opened()
    assert gpu.cuda.used == 0


def test_weights_that_do_not_fit_after_all(gpu: Gpu, tmp_path: Path, opened: Opener) -> None:
    gpu.trt.extra_memory = 1 << 40
    with pytest.raises(ResourceError, match=r"no room on the GPU for model\.engine, .*OutOfMemory"):
        opened()


# The engine


def test_an_engine_that_was_cut(gpu: Gpu, tmp_path: Path, opened: Opener) -> None:
    opened().close()
    path = tmp_path / "model.engine"
    path.write_bytes(path.read_bytes()[:-1])
    file = EngineFile(path, BUILT)
    with pytest.raises(BundleError, match=r"model\.engine cannot be read .*blobSize failed.*copy the bundle again"):
        file.deserialize()


def test_what_the_engine_says_is_compared_with_the_manifest(gpu: Gpu, tmp_path: Path, opened: Opener) -> None:
    tensors = tensors_of_the_engine()

    def changed(name: str, at: int, value: object) -> list[list[Any]]:
        return [[*row[:at], value, *row[at + 1 :]] if row[0] == name else row for row in tensors]

    kv = "past_key_values.0.key"
    for lies, text in (
        ({"tensors": changed("top_p", 0, "top")}, "the inputs of model.engine are not those"),
        ({"tensors": [row for row in tensors if row[0] != "accepted"]}, "the outputs of model.engine are not those"),
        ({"tensors": changed(kv, 2, "float16")}, rf"input {kv} of model.engine is float16 .* says float32"),
        ({"tensors": changed("logits", 3, ["B", "R", 7])}, r"output logits .*\[-1, -1, 7\], bundle.json says"),
        ({"tensors": changed("logits", 3, ["B", "R", "V"])}, "output logits"),
        ({"host": ["write_index"]}, "write_index of model.engine must be in host memory"),
        ({"aliases": {}}, "does not write present.0.key in place"),
        ({"profiles": [{}]}, "profiles of model.engine are not those"),
    ):
        with pytest.raises(BundleError, match=text):
            opened(**lies)
        assert gpu.cuda.used == 0


def test_a_batch_of_one_may_be_a_fixed_dimension(gpu: Gpu, tmp_path: Path, opened: Opener) -> None:
    fixed = [[*row[:3], [1 if dim == "B" else dim for dim in row[3]]] for row in tensors_of_the_engine()]
    opened(tensors=fixed).close()


def test_profiles_of_other_sizes_are_refused(gpu: Gpu, tmp_path: Path, opened: Opener) -> None:
    decode, prefill = INFO.profiles
    other = replace(INFO, profiles=(decode, replace(prefill, tokens=Range(min=1, opt=8, max=9))))
    with pytest.raises(BundleError, match=r"profile prefill of model.engine takes input_ids of .*8\).*9\)"):
        opened(info=other)
    narrow = replace(INFO, profiles=(replace(decode, rows=Range(min=1, opt=1, max=MAX_WIDTH - 1)), prefill))
    with pytest.raises(BundleError, match=rf"do not take the bundle's calls of {MAX_WIDTH} rows and 8 tokens"):
        opened(info=narrow)
    assert gpu.cuda.used == 0


def test_a_prefill_chunk_narrower_than_a_verification(gpu: Gpu, graph: Path, tmp_path: Path) -> None:
    """The decode profile takes what is wider."""
    decode, prefill = INFO.profiles
    info = replace(INFO, profiles=(decode, replace(prefill, tokens=Range(min=1, opt=4, max=4))))
    engine = TensorRtEngine(
        write_engine(tmp_path / "model.engine", graph, SPEC, info),
        SPEC,
        built=BUILT,
        info=info,
        max_call=MAX_WIDTH,
        max_rows=MAX_WIDTH,
        options=DeviceOptions("cuda"),
    )
    assert engine.forward(np.arange(MAX_WIDTH), 0, 1).shape == (1, SPEC.vocab_rows)


def test_an_engine_for_more_rows_than_one(gpu: Gpu, opened: Opener) -> None:
    four = Range(min=4, opt=4, max=4)
    info = replace(INFO, profiles=tuple(replace(profile, batch=four) for profile in INFO.profiles))
    with pytest.raises(BundleError, match=r"takes 4 rows or more at once, and this runtime decodes one: compile with"):
        opened(info=info)


# Kernels that were finished on this GPU


def test_kernels_are_kept_between_runs(gpu: Gpu, tmp_path: Path, opened: Opener) -> None:
    opened().close()
    [file] = (tmp_path / "cache" / "draftc" / "tensorrt-rtx").iterdir()
    assert file.read_bytes() == b"kernels:"  # nothing was run
    file.write_bytes(b"kernels:1:1x8 0:1x1")
    gpu.trt.configs.clear()
    engine = opened()
    caches = [config.fake_cache for config in gpu.trt.configs if isinstance(config, RtxRuntimeConfig)]
    assert len(caches) == 2
    assert caches[0] is caches[1]
    assert caches[0] is not None
    assert caches[0].fake_kernels == {"1:1x8", "0:1x1"}
    engine.close()


def test_a_cache_file_that_does_not_fit_is_replaced(gpu: Gpu, tmp_path: Path, opened: Opener) -> None:
    opened().close()
    [file] = (tmp_path / "cache" / "draftc" / "tensorrt-rtx").iterdir()
    file.write_bytes(b"of another driver")
    opened().close()
    assert file.read_bytes() == b"kernels:"
    assert [*file.parent.iterdir()] == [file]


def test_a_cache_folder_that_cannot_be_written_does_no_harm(gpu: Gpu, tmp_path: Path, opened: Opener) -> None:
    (tmp_path / "cache").write_text("a file")
    opened().close()
    assert (tmp_path / "cache").read_text() == "a file"


def test_each_engine_has_a_cache_of_its_own(gpu: Gpu, tmp_path: Path, opened: Opener) -> None:
    paths = set()
    for name, content in (("a", b"x" * 100_000), ("b", b"x" * 100_001), ("c", b"y" * 100_000), ("d", b"x" * 100_000)):
        (tmp_path / name).write_bytes(content)
        paths.add(KernelCache(tmp_path / name).path)
    assert len(paths) == 3
