"""Half precision is what PyTorch computes with the same weights: types, numbers, and the graph back in float32."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftc.export.half import (
    HALF_TYPES,
    Float32Scalars,
    Half,
    WidenFloats,
    cast_parameters,
    round_parameters,
    widened_spec,
)
from tests.export.family_cases import (
    FAMILIES,
    capture_tiny,
    eager_logits,
    rewind_run,
    text,
    tiny_model,
    tolerance,
)

if TYPE_CHECKING:
    from tests.export.conftest import GraphRunner

HALVES: list[Half] = ["fp16", "bf16"]
NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def family(model_type: str) -> PreTrainedModel:
    (config,) = (family.config for family in FAMILIES if family.model_type == model_type)
    return tiny_model(model_type, **config)


# Weights


@pytest.mark.parametrize("half", HALVES)
def test_rounding_keeps_the_type_and_casting_keeps_the_value(half: Half) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    before = {name: value.clone() for name, value in model.named_parameters()}
    round_parameters(model, half)
    rounded = {name: value.clone() for name, value in model.named_parameters()}
    assert all(torch.equal(rounded[name], before[name].to(HALF_TYPES[half]).float()) for name in before)
    assert any(not torch.equal(rounded[name], before[name]) for name in before)
    cast_parameters(model, half)
    for name, value in model.named_parameters():
        assert value.dtype == HALF_TYPES[half]
        assert torch.equal(value.float(), rounded[name])


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3", "gpt2"])
def test_types_are_those_of_from_pretrained(tmp_path: Path, half: Half, model_type: str) -> None:
    """Rotary frequencies stay in float32 everywhere, and deepseek_v3's router does."""
    model = family(model_type)
    model.save_pretrained(tmp_path)
    cast_parameters(model, half)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=HALF_TYPES[half])
    expected = {name: value.dtype for name, value in (*loaded.named_parameters(), *loaded.named_buffers())}
    assert {name: value.dtype for name, value in (*model.named_parameters(), *model.named_buffers())} == expected
    kept = {name for name, dtype in expected.items() if dtype == torch.float32}
    assert any("inv_freq" in name for name in kept) == (model_type != "gpt2")
    assert any("mlp.gate.weight" in name for name in kept) == (model_type == "deepseek_v3")


@pytest.mark.parametrize(("half", "kept"), [("fp16", {"strict", "loose"}), ("bf16", {"strict"})])
@pytest.mark.parametrize("prepare", [round_parameters, cast_parameters])
def test_what_a_class_wants_in_float32_stays(
    half: Half, kept: set[str], prepare: Callable[[PreTrainedModel, Half], None]
) -> None:
    """transformers' two lists: one for fp16 alone, one for both types."""
    model = tiny_model("llama", num_hidden_layers=1)
    model._keep_in_fp32_modules = {"input_layernorm"}
    model._keep_in_fp32_modules_strict = {"post_attention_layernorm"}
    before = {name: value.clone() for name, value in model.named_parameters()}
    prepare(model, half)
    names = {"input_layernorm": "loose", "post_attention_layernorm": "strict"}
    for name, value in model.named_parameters():
        which = next((kind for part, kind in names.items() if part in name), "other")
        unchanged = value.dtype == torch.float32 and torch.equal(value, before[name])
        assert unchanged == (which in kept), name


# Numbers in the graph


Maps = dict[str, Callable[[Tensor], Tensor]]

# What ATen computes here as it does on CUDA: widened, multiplied, rounded once.
LIKE_THE_KERNEL: Maps = {
    "x * 0.4": lambda x: x * 0.4,
    "0.4 * x": lambda x: 0.4 * x,
    "x / 0.3": lambda x: x / 0.3,
    "mul by name": lambda x: torch.mul(x, other=0.4),
}
# Here its CPU kernels differ: sums round the number first, 0.3 / x rounds the reciprocal.
IN_FLOAT32: Maps = {
    "x + 0.1": lambda x: x + 0.1,
    "0.1 - x": lambda x: 0.1 - x,
    "x - 0.1": lambda x: x - 0.1,
    "0.3 / x": lambda x: 0.3 / x,
    "add with alpha": lambda x: torch.add(x, torch.ones_like(x), alpha=0.3),
}
GELUS: Maps = {
    "erf": functional.gelu,
    "tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
EXACT: Maps = {"halves and twos": lambda x: (x * 0.5 + 2) * x}


class Functions(torch.nn.Module):
    def __init__(self, maps: Maps) -> None:
        super().__init__()
        self.maps = maps

    def forward(self, x: Tensor) -> list[Tensor]:
        return [function(x) for function in self.maps.values()]


def exported(maps: Maps, x: Tensor, *, scalars: bool) -> onnx.ModelProto:
    """The functions of `maps` as one graph, traced as `capture` does it, or without Float32Scalars."""
    with torch.no_grad(), Float32Scalars() if scalars else nullcontext():
        program = torch.export.export(Functions(maps).eval(), (x,), strict=False)
    converted = torch.onnx.export(program, dynamo=True, opset_version=23, verbose=False)
    assert converted is not None
    proto: onnx.ModelProto = converted.model_proto
    return proto


def evaluate(maps: Maps, x: Tensor, *, scalars: bool) -> dict[str, Tensor]:
    """What the graph gives by ONNX's own reference, which rounds each operator's result to its type; also in bf16."""
    graph = exported(maps, x, scalars=scalars)
    (given,) = graph.graph.input
    dtype = ir.DataType(given.type.tensor_type.elem_type).numpy()
    results = ReferenceEvaluator(graph).run(None, {given.name: x.float().numpy().astype(dtype)})
    tensors = (torch.from_numpy(np.asarray(result).astype(np.float32)).to(x.dtype) for result in results)
    return dict(zip(maps, tensors, strict=True))


@pytest.mark.parametrize("half", HALVES)
def test_arithmetic_with_a_number_is_rounded_once(half: Half) -> None:
    x = torch.linspace(0.1, 7, 501).to(HALF_TYPES[half])
    expected = {name: function(x) for name, function in LIKE_THE_KERNEL.items()}
    expected |= {name: function(x.float()).to(x.dtype) for name, function in IN_FLOAT32.items()}
    actual = evaluate(LIKE_THE_KERNEL | IN_FLOAT32, x, scalars=True)
    without = evaluate(LIKE_THE_KERNEL | IN_FLOAT32, x, scalars=False)
    for name, values in expected.items():
        assert torch.equal(actual[name], values), name
        assert not torch.equal(without[name], values), f"{name} needs no Float32Scalars"


@pytest.mark.parametrize("half", HALVES)
def test_gelu_is_that_of_torchs_kernel(half: Half) -> None:
    """To the last place: float32's erf and tanh are not the same everywhere."""
    x = torch.linspace(-3, 4, 501).to(HALF_TYPES[half])

    def worst(scalars: bool) -> dict[str, float]:
        """In units of the last place."""
        found = {}
        for name, values in evaluate(GELUS, x, scalars=scalars).items():
            expected = GELUS[name](x).float()
            unit = torch.finfo(x.dtype).eps * torch.exp2(expected.abs().clamp(min=1e-6).log2().floor())
            found[name] = float(((values.float() - expected).abs() / unit).max())
        return found

    assert max(worst(scalars=True).values()) <= 1
    assert min(worst(scalars=False).values()) > 2


@pytest.mark.parametrize("half", HALVES)
def test_numbers_that_the_type_holds_stay_in_it(half: Half) -> None:
    graph = exported(EXACT, torch.ones(3, dtype=HALF_TYPES[half]), scalars=True)
    assert "Cast" not in {node.op_type for node in graph.graph.node}


def test_float32_and_mixed_arithmetic_are_left_alone() -> None:
    """A float32 capture is the same with it and without it."""
    wide, narrow, whole = torch.ones(2), torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.int64)
    maps = LIKE_THE_KERNEL | IN_FLOAT32 | GELUS
    plain = torch.export.export(Functions(maps), (wide,), strict=False)
    with Float32Scalars():
        same = torch.export.export(Functions(maps), (wide,), strict=False)
        assert (wide * narrow).dtype == torch.float32
        assert (whole * 0.4).dtype == torch.float32
        assert (narrow * 0.4).dtype == torch.float16
    assert str(same.graph) == str(plain.graph)


# Back in float32


def all_types(model: ir.Model) -> set[ir.DataType]:
    """Of every value, weight, constant and cast."""
    graph = model.graph
    found = {value.dtype for value in (*graph.inputs, *graph.outputs, *graph.initializers.values())}
    found |= {value.const_value.dtype for value in graph.initializers.values() if value.const_value is not None}
    for node in graph.all_nodes():
        found |= {value.dtype for value in node.outputs}
        found |= {a.as_tensor().dtype for a in node.attributes.values() if a.type == ir.AttributeType.TENSOR}
        if node.op_type == "Cast":
            found.add(ir.DataType(node.attributes["to"].as_int()))
    return {dtype for dtype in found if dtype is not None}


@pytest.mark.parametrize(("model_type", "half"), [("gemma2", "bf16"), ("cohere", "fp16")])
def test_a_widened_graph_is_eager_pytorch_with_rounded_weights(
    tmp_path: Path, model_type: str, half: Half, graph_runner: type["GraphRunner"]
) -> None:
    """At the tolerance of a float32 capture. gemma2 has its numbers in many places, cohere scales logits by 0.4."""
    model = family(model_type)
    round_parameters(model, half)
    reference = eager_logits(model, text())
    cast_parameters(model, half)
    captured = capture_tiny(model, tmp_path)
    graph = ir.load(captured.path)
    assert all_types(graph) & set(NARROW)
    assert {tensor.dtype for tensor in captured.spec.inputs} == {"int64", {"fp16": "float16"}.get(half, "bfloat16")}
    WidenFloats()(graph)
    assert not all_types(graph) & set(NARROW)
    ir.save(graph, tmp_path / "wide.onnx", external_data="wide.onnx.data")
    onnx.checker.check_model(str(tmp_path / "wide.onnx"), full_check=True)
    spec = widened_spec(captured.spec)
    assert {tensor.dtype for tensor in (*spec.inputs, *spec.outputs)} == {"int64", "float32"}
    assert [tensor.shape for tensor in spec.inputs] == [tensor.shape for tensor in captured.spec.inputs]
    for positions, logits in rewind_run(graph_runner(tmp_path / "wide.onnx", spec), text()):
        np.testing.assert_allclose(logits, reference[:, positions], rtol=0, atol=tolerance(reference))


def test_widening_converts_every_kind_of_value() -> None:
    """Weights, Constant attributes, casts, inputs and outputs; other types stay."""
    x = ir.val("x", ir.DataType.BFLOAT16, [3])
    weight = ir.Value(name="w", const_value=ir.tensor(np.array([1, 2, 3], np.float16), name="w"))
    weight.type, weight.shape = ir.TensorType(ir.DataType.FLOAT16), ir.Shape([3])
    constant = ir.node("Constant", [], {"value": ir.tensor(np.array(0.5, np.float16))})
    whole = ir.node("Constant", [], {"value": ir.tensor(np.array(4, np.int64))})
    narrow = ir.node("Cast", [x], {"to": int(ir.DataType.FLOAT16)})
    product = ir.node("Mul", [ir.node("Mul", [narrow.outputs[0], weight]).outputs[0], constant.outputs[0]])
    inner = product.inputs[0]
    assert inner is not None
    first = inner.producer()
    assert first is not None
    last = ir.node("Cast", [whole.outputs[0]], {"to": int(ir.DataType.INT32)})
    y = product.outputs[0]
    y.name, y.type, y.shape = "y", ir.TensorType(ir.DataType.FLOAT16), ir.Shape([3])
    nodes = [constant, whole, narrow, first, product, last]
    graph = ir.Graph([x], [y], nodes=nodes, initializers=[weight], opset_imports={"": 24}, name="g")
    model = ir.Model(graph, ir_version=10)
    WidenFloats()(model)
    assert all_types(model) == {ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.INT32}
    (result,) = ReferenceEvaluator(ir.to_proto(model)).run(["y"], {"x": np.array([1, 10, 0.1], np.float32)})
    np.testing.assert_array_equal(result, np.array([0.5, 10, 1.5 * np.float32(0.1)], np.float32))
