"""The TensorRT builder: what it refuses, what the parser may not do unseen, and what a build leaves behind."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from draftc.export import tensorrt
from draftc.export.passes import replace_node
from draftc.export.tails import DraftTail, VerifyTail
from draftc.export.tensorrt import Built, build_engine, check_forms, check_sms, known_sms, load_tensorrt
from draftc.runtime.engine_file import MODULES
from draftc.runtime.errors import BackendUnavailableError, CaptureError, ResourceError, UsageError
from draftc.runtime.graphio import GraphSpec, TensorSpec
from draftc.runtime.records import Profile, Range
from tests.export.sketch import Sketch

trt = pytest.importorskip("tensorrt_rtx")

FLOAT, FLOAT16, BFLOAT16, INT64 = (getattr(ir.DataType, name) for name in ("FLOAT", "FLOAT16", "BFLOAT16", "INT64"))
VOCAB, WIDTH, HEADS, LENGTH = 48, 16, 2, 32
BATCH, TOKENS = Range(min=1, opt=2, max=4), Range(min=1, opt=5, max=8)
PROFILES = (
    Profile(name="decode", batch=BATCH, tokens=TOKENS, rows=TOKENS),
    Profile(name="prefill", batch=BATCH, tokens=Range(min=1, opt=16, max=16), rows=Range(min=1, opt=1, max=1)),
)
Edit = Callable[[Sketch, dict[str, ir.Value]], ir.Value]


def masked(sketch: Sketch, of: dict[str, ir.Value], **attributes: Any) -> ir.Value:
    """Attention with a mask: slot <= position."""
    tokens = sketch("Squeeze", sketch("Shape", of["ids"], start=1, end=2))
    place = sketch("Range", sketch.weight(np.array(0)), tokens, sketch.weight(np.array(1)))
    place = sketch("Add", sketch("Unsqueeze", of["index"], [1]), sketch("Unsqueeze", place, [0]))  # (B, S)
    slots = sketch.weight(np.arange(LENGTH).reshape(1, 1, 1, LENGTH))
    mask = sketch("LessOrEqual", slots, sketch("Unsqueeze", place, [1, 3]))
    mask.dtype = ir.DataType.BOOL
    return sketch("Attention", of["query"], of["key"], of["value"], mask, scale=0.25, **attributes)


def attention(*more: str, **attributes: Any) -> Edit:
    """An Attention node whose inputs behind the value are named; "" leaves one out."""

    def make(sketch: Sketch, of: dict[str, ir.Value]) -> ir.Value:
        past = partial(sketch.input, dtype=FLOAT16, shape=["B", HEADS, LENGTH, WIDTH])
        lengths = partial(sketch.input, dtype=INT64, shape=["B"])
        extra = [(lengths if name == "lengths" else past)(name) if name else None for name in more]
        node = ir.node("Attention", [of["query"], of["key"], of["value"], *extra], attributes)
        node.outputs[0].dtype = FLOAT16
        sketch.graph.append(node)
        return node.outputs[0]

    return make


def decoder(attend: Edit = masked, dtype: ir.DataType = FLOAT16, **scatter: Any) -> tuple[ir.Model, GraphSpec]:
    """A decoder of one layer, of the tensor contract; `attend` makes its attention, `scatter` alters its cache."""
    rng = np.random.default_rng(0)
    sketch = Sketch()
    ids = sketch.input("input_ids", INT64, ["B", "S"])
    index = sketch.input("write_index", INT64, ["B"])
    positions = sketch.input("logit_positions", INT64, ["B", "R"])
    past = [sketch.input(f"past_key_values.0.{part}", dtype, ["B", HEADS, LENGTH, WIDTH]) for part in ("key", "value")]

    def weight(*shape: int) -> ir.Value:
        return sketch.weight((rng.normal(size=shape) / 4).astype(dtype.numpy()))

    hidden = sketch("Gather", weight(VOCAB, HEADS * WIDTH), ids)
    hidden.dtype = dtype
    query, key, value = (
        sketch(
            "Transpose",
            sketch("Reshape", sketch("MatMul", hidden, weight(HEADS * WIDTH, HEADS * WIDTH)), [0, 0, HEADS, WIDTH]),
            perm=[0, 2, 1, 3],
        )
        for _ in range(3)
    )
    present = [
        sketch("TensorScatter", *pair, index, **({"axis": 2} | scatter))
        for pair in zip(past, (key, value), strict=True)
    ]
    out = attend(sketch, {"ids": ids, "index": index, "query": query, "key": present[0], "value": present[1]})
    flat = sketch("Reshape", sketch("Transpose", out, perm=[0, 2, 1, 3]), [0, 0, HEADS * WIDTH])
    places = sketch("Concat", sketch("Shape", positions), [HEADS * WIDTH], axis=0)
    rows = sketch("GatherElements", flat, sketch("Expand", sketch("Unsqueeze", positions, [2]), places), axis=1)
    logits = sketch("Cast", sketch("MatMul", rows, weight(HEADS * WIDTH, VOCAB)), to=int(FLOAT))
    model = sketch.model(logits=logits, **{"present.0.key": present[0], "present.0.value": present[1]})
    return model, GraphSpec.decoder([(HEADS, WIDTH, WIDTH)], LENGTH, VOCAB, dtype.name.lower())


def build(model: ir.Model, spec: GraphSpec, folder: Path, sms: tuple[str, ...] = ("89",), **more: Any) -> Built:
    folder.mkdir(exist_ok=True)
    ir.save(model, folder / "model.onnx", external_data="model.onnx.data")
    paths = folder / "model.engine", folder / "build.log"
    return build_engine("tensorrt-rtx", folder / "model.onnx", spec, PROFILES, sms, *paths, **more)


# The package


@pytest.mark.parametrize(("flavour", "name"), MODULES.items())
def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch, flavour: Any, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        BackendUnavailableError, match=rf"{flavour} is not installed .* 'draftc\[{flavour}\]'"
    ) as caught:
        load_tensorrt(flavour)
    assert ("NVIDIA's own package index" in str(caught.value)) == (flavour == "tensorrt")
    assert "\n" not in str(caught.value)


def test_a_package_without_its_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the registry has under TensorRT's name, without NVIDIA's index, imports and holds nothing."""
    monkeypatch.setitem(sys.modules, "tensorrt", ModuleType("tensorrt"))
    with pytest.raises(BackendUnavailableError, match="tensorrt is installed without its libraries"):
        load_tensorrt("tensorrt")


# GPUs


def test_known_sms_are_those_that_can_be_set() -> None:
    sms = known_sms(trt)
    assert {"75", "86", "89", "120"} <= set(sms)
    assert list(sms) == sorted(sms, key=int)
    assert check_sms("tensorrt-rtx", trt, sms, ("fp16", "fp16")) == sms
    assert known_sms(SimpleNamespace()) == ()


@pytest.mark.parametrize(
    ("sms", "types", "said"),
    [
        ((), (), "--sm is missing: name the GPUs to build for, of 75, .*89"),
        (("90",), (), r"tensorrt-rtx [\d.]+ does not build for SM 90: it knows 75, "),
        (("89", "8.6"), (), "SM 8.6: it knows"),
        (("",), (), "does not build for SM : it knows"),
        (("89", "120", "89"), (), "names a GPU twice: 89, 120, 89"),
        (("89", "75"), ("bf16",), "SM 75 cannot run bf16: it needs SM 80 or later"),
        (("75",), ("fp16", "int4"), "SM 75 cannot run int4: it needs SM 80"),
        (("89", "86"), ("fp16", "fp8"), "SM 86 cannot run fp8: it needs SM 89"),
    ],
)
def test_a_gpu_that_cannot_be_built_for_is_refused(sms: tuple[str, ...], types: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_sms("tensorrt-rtx", trt, sms, types)


def test_the_limits_of_a_type_are_tensorrts_own(tmp_path: Path) -> None:
    """SM 75 without bf16: past our check, the builder refuses too, and its reason is told."""
    model, spec = decoder(dtype=BFLOAT16)
    with pytest.raises(ResourceError, match=r"could not build model\.onnx: .*sm75") as caught:
        build(model, spec, tmp_path, sms=("75",))
    assert "\n" not in str(caught.value)


def test_tensorrt_builds_for_the_gpu_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="leave out --sm"):
        check_sms("tensorrt", SimpleNamespace(), ("90",), ())

    def device(ordinal: int) -> SimpleNamespace:
        assert ordinal == 0
        return SimpleNamespace(compute_capability=(8, 6))

    monkeypatch.setitem(sys.modules, "cuda.core", SimpleNamespace(Device=device))
    assert check_sms("tensorrt", SimpleNamespace(), (), ("fp16", "int4")) == ("86",)
    with pytest.raises(UsageError, match="SM 86 cannot run fp8"):
        check_sms("tensorrt", SimpleNamespace(), (), ("fp8",))

    def broken(ordinal: int) -> SimpleNamespace:
        raise RuntimeError("no driver\nat all")

    monkeypatch.setitem(sys.modules, "cuda.core", SimpleNamespace(Device=broken))
    with pytest.raises(
        BackendUnavailableError, match=r"there is none \(no driver at all\): use --backend tensorrt-rtx"
    ):
        check_sms("tensorrt", SimpleNamespace(), (), ())
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'draftc\[tensorrt\]'"):
        check_sms("tensorrt", SimpleNamespace(), (), ())


# Forms


def contrib(sketch: Sketch, of: dict[str, ir.Value]) -> ir.Value:
    node = ir.node("FastGelu", [masked(sketch, of)], domain="com.microsoft", name="gelu")
    node.outputs[0].dtype = FLOAT16
    sketch.graph.append(node)
    sketch.graph.opset_imports["com.microsoft"] = 1
    return node.outputs[0]


FORBIDDEN: dict[str, tuple[Edit, dict[str, Any], str]] = {
    "contrib": (contrib, {}, r"node gelu \(FastGelu\) .* operator of com\.microsoft"),
    "lengths": (attention("", "", "", "lengths", is_causal=1), {}, r"\(Attention\) .* past, present or length inputs"),
    "past": (attention("", "past_k", "past_v"), {}, "past, present or length inputs"),
    "causal": (attention(is_causal=1), {}, "is_causal counts from the upper left corner"),
    "causal with a mask": (partial(masked, is_causal=1), {}, "is_causal"),
    "no mask": (attention(), {}, "it has no mask"),
    "soft cap": (partial(masked, softcap=2.0), {}, "DecomposeAttention must have written it out"),
    "other axis": (masked, {"axis": 1}, r"\(TensorScatter\) .* along another axis"),
    "wraps": (masked, {"mode": "circular"}, r"\(TensorScatter\) .* it wraps around"),
}


@pytest.mark.parametrize("form", FORBIDDEN)
def test_a_forbidden_form_is_named(form: str) -> None:
    attend, scatter, said = FORBIDDEN[form]
    model, _ = decoder(attend, **scatter)
    with pytest.raises(CaptureError, match=said):
        check_forms(model)


@pytest.mark.parametrize("end", ["past", "present"])
def test_a_cache_that_is_no_input_or_no_output_is_named(end: str) -> None:
    model, _ = decoder()
    scatter = next(node for node in model.graph if node.op_type == "TensorScatter")
    if end == "past":
        copy = ir.node("Identity", [scatter.inputs[0]])
        model.graph.insert_before(scatter, copy)
        scatter.replace_input_with(0, copy.outputs[0])
    else:
        model.graph.outputs.remove(scatter.outputs[0])
    with pytest.raises(CaptureError, match="must be an input of the graph, and its result an output"):
        check_forms(model)


def test_the_form_that_the_compiler_makes_passes() -> None:
    check_forms(decoder()[0])


# What the parser makes


def test_an_input_that_the_parser_drops_is_found(tmp_path: Path) -> None:
    """It takes a length and is_causal, drops the length, and would compute something else: check_forms left out."""
    model, spec = decoder(FORBIDDEN["lengths"][0])
    spec = GraphSpec((*spec.inputs, TensorSpec("lengths", "int64", ("B",))), spec.outputs)
    with pytest.raises(CaptureError, match="parser dropped the input lengths"):
        build(model, spec, tmp_path)
    assert not (tmp_path / "model.engine").exists()


def test_a_cache_that_is_not_written_in_place_is_found(tmp_path: Path) -> None:
    """Another operator in TensorScatter's place builds, but the engine would need a second buffer."""
    model, spec = decoder()
    for node in [node for node in model.graph if node.op_type == "TensorScatter"]:
        mean = ir.node("ReduceMean", [node.inputs[1]], {"keepdims": 0})
        model.graph.insert_before(node, mean)
        replace_node(model.graph, node, ir.node("Add", [node.inputs[0], mean.outputs[0]]))
    with pytest.raises(CaptureError, match="made 1 attention and 0 cache layers of 1 and 2"):
        build(model, spec, tmp_path)


def culprit(sketch: Sketch, of: dict[str, ir.Value]) -> ir.Value:
    node = ir.node("NonZero", [of["index"]], name="culprit")
    node.outputs[0].dtype = INT64
    sketch.graph.append(node)
    number = sketch("ReduceSum", sketch("Cast", node.outputs[0], to=int(FLOAT16)), keepdims=0)
    return sketch("Add", masked(sketch, of), number)


@pytest.mark.parametrize(
    ("attend", "said"),
    [
        (culprit, r"parser refuses node culprit \(NonZero\).*: .*; it needs a lowering pass"),
        (partial(masked, softcap=2.0), r"parser refuses node \S+ \(Attention\).*the pass DecomposeAttention"),
    ],
)
def test_a_node_that_the_parser_refuses_is_named(tmp_path: Path, attend: Edit, said: str) -> None:
    with pytest.raises(CaptureError, match=said) as caught:
        build(*decoder(attend), tmp_path)
    assert str(caught.value).endswith("compile with --backend onnxruntime")
    assert "\n" not in str(caught.value)
    assert str(tmp_path) not in (tmp_path / "build.log").read_text()
    assert not (tmp_path / "model.engine").exists()


# Builds


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Built, Path, list[tuple[int, int]]]:
    """A finished build, its folder, and what was told of its progress."""
    folder = tmp_path_factory.mktemp("built")
    model, spec = decoder()
    steps: list[tuple[int, int]] = []
    return build(model, spec, folder, progress=lambda done, total: steps.append((done, total))), folder, steps


def test_a_build_tells_its_layers_and_memory(built: tuple[Built, Path, list[tuple[int, int]]]) -> None:
    result, folder, steps = built
    assert (result.attention, result.cache) == (1, 2)
    weights = 2 * (2 * VOCAB * HEADS * WIDTH + 3 * (HEADS * WIDTH) ** 2)
    assert weights <= result.weights_bytes < weights + 4096
    assert len(result.activation_bytes) == 2
    assert min(result.activation_bytes) > 0
    assert steps == [(done, steps[0][1]) for done in range(1, len(steps) + 1)]
    assert 2 < len(steps) <= steps[0][1]
    assert (folder / "model.engine").read_bytes()[:4] == b"vtrt"


def test_the_log_names_no_folder(built: tuple[Built, Path, list[tuple[int, int]]]) -> None:
    _, folder, _ = built
    log = (folder / "build.log").read_text()
    assert "Total Weights Memory" in log
    assert "model.onnx" in log
    assert str(folder) not in log
    assert "/tmp" not in log
    assert "ERROR" not in log


def test_two_builds_in_two_folders_differ_in_nothing_that_counts(
    built: tuple[Built, Path, list[tuple[int, int]]], tmp_path: Path
) -> None:
    """Memory and size; not bytes, of which TensorRT writes some in an order that changes. No path is in them."""
    model, spec = decoder()
    folder = tmp_path / "another-folder"
    assert build(model, spec, folder) == built[0]
    engine = (folder / "model.engine").read_bytes()
    assert len(engine) == (built[1] / "model.engine").stat().st_size
    assert b"another-folder" not in engine


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("a broken progress bar")])
def test_what_progress_raises_ends_the_build(tmp_path: Path, error: BaseException) -> None:
    calls = []

    def stop(done: int, total: int) -> None:
        calls.append(done)
        raise error

    with pytest.raises(type(error)) as caught:
        build(*decoder(), tmp_path, progress=stop)
    assert caught.value is error
    assert calls == [1]
    build(*decoder(), tmp_path)  # while the traceback of the first is still held
    assert "The logger passed into createInferBuilder differs" not in (tmp_path / "build.log").read_text()


@pytest.mark.parametrize("tail", ["draft", "verify"])
def test_profiles_give_every_dynamic_dimension_its_range(tmp_path: Path, tail: str) -> None:
    model, spec = decoder()
    slots, vocabulary = 8, VOCAB - 1
    (DraftTail if tail == "draft" else VerifyTail)(slots, vocabulary)(model)
    spec = spec.with_tail("draft" if tail == "draft" else "verify", slots, vocabulary)
    ir.save(model, tmp_path / "model.onnx")
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, trt.Logger(trt.Logger.ERROR))
    assert parser.parse_from_file(str(tmp_path / "model.onnx"))
    ranges = {"decode": ((1, 2, 4), (1, 5, 8), (1, 5, 8)), "prefill": ((1, 2, 4), (1, 16, 16), (1, 1, 1))}
    for profile in PROFILES:
        made = tensorrt._profile(builder, network, spec, profile)
        assert made  # TensorRT's own check: min <= opt <= max everywhere
        batch, tokens, rows = ranges[profile.name]
        proposal = (2, 5 if profile.name == "decode" else slots, slots)
        symbols = {"B": batch, "S": tokens, "R": rows, "P": proposal}
        for tensor in spec.inputs:
            shapes = [tuple(shape) for shape in made.get_shape(tensor.name)]
            expected = [
                tuple(dim if isinstance(dim, int) else symbols[dim][bound] for dim in tensor.shape)
                for bound in range(3)
            ]
            assert shapes == expected, tensor.name
