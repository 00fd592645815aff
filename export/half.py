"""Half precision: weights in fp16 or bf16 before a model is traced, and a graph back in fp32 for judging it.

The checkpoint is traced with half weights, so that upstream's own casts decide what stays in float32 (norms, rotary
angles, the softmax of a router): those islands are in the graph because they are in the model's code. Whether the graph
computes what the checkpoint computes is then asked of the same graph with every value cast to float32, against eager
PyTorch with the same rounded weights: there, only the order of float32 sums may differ.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes import InPlacePass, PassResult
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from draftc.runtime.graphio import GraphSpec

__all__ = ["HALF_TYPES", "Float32Scalars", "Half", "WidenFloats", "cast_parameters", "round_parameters", "widened_spec"]

Half = Literal["fp16", "bf16"]
HALF_TYPES: dict[Half, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
WITH_NUMBERS = frozenset(
    {"add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "rsub", "__rsub__", "__rdiv__"}
)
NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def round_parameters(model: PreTrainedModel, half: Half) -> None:
    """Round every parameter to a value of the half type, in place; it keeps its own type."""
    for parameter in _halved(model, half):
        parameter.data = parameter.data.to(HALF_TYPES[half]).to(parameter.dtype)


def cast_parameters(model: PreTrainedModel, half: Half) -> None:
    """Give every parameter the half type, in place. Buffers (rotary frequencies) stay as the model made them."""
    for parameter in _halved(model, half):
        parameter.data = parameter.data.to(HALF_TYPES[half])


def _halved(model: PreTrainedModel, half: Half) -> Iterator[torch.nn.Parameter]:
    """All parameters but those that the model's class wants in float32, as `from_pretrained` treats them."""
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if half == "fp16":
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not any(part in name for part in kept):
            yield parameter


class Float32Scalars(TorchFunctionMode):
    """While a half-typed model is traced: arithmetic with a Python number is done in float32 and rounded once.

    So do ATen's kernels on CUDA, which widen both operands inside; the exporter would round the number to the half type
    instead (0.044715, of the tanh GELU, by 0.1 % in bf16).
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`; in float32 and back where it is such an operation."""
        kwargs = kwargs or {}
        operands = [*args, *kwargs.values()]
        tensors = [value for value in operands if isinstance(value, torch.Tensor)]
        if not tensors or any(tensor.dtype not in HALF_TYPES.values() for tensor in tensors):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        numbers = [value for value in operands if isinstance(value, float)]
        rounds = name in WITH_NUMBERS and any(_is_rounded(number, tensors[0].dtype) for number in numbers)
        if not rounds and name != "gelu":
            return func(*args, **kwargs)
        wide = [_float(value) for value in args]
        return func(*wide, **{name: _float(value) for name, value in kwargs.items()}).to(tensors[0].dtype)


def _float(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) else value


def _is_rounded(number: float, dtype: torch.dtype) -> bool:
    return torch.tensor(number, dtype=dtype).item() != number


def widened_spec(spec: GraphSpec) -> GraphSpec:
    """`spec` with float32 in place of the half types."""

    def wide(dtype: str) -> str:
        return "float32" if dtype in ("float16", "bfloat16") else dtype

    return GraphSpec(
        tuple(replace(tensor, dtype=wide(tensor.dtype)) for tensor in spec.inputs),
        tuple(replace(tensor, dtype=wide(tensor.dtype)) for tensor in spec.outputs),
    )


class WidenFloats(InPlacePass):
    """The same graph with float32 in place of float16 and bfloat16: weights, casts, constants, inputs and outputs.

    Weights are converted one by one as the graph is saved; nothing is copied before.
    """

    def call(self, model: ir.Model) -> PassResult:
        """Rewrite every half-typed value."""
        graph = model.graph
        values = [*graph.inputs, *graph.initializers.values()]
        for node in graph.all_nodes():
            for name, attribute in list(node.attributes.items()):
                if node.op_type == "Cast" and name == "to" and attribute.as_int() in NARROW:
                    node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.FLOAT))
                elif attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in NARROW:
                    node.attributes[name] = ir.AttrTensor(name, _widen(attribute.as_tensor()))
            values.extend(node.outputs)
        for value in values:
            if value.dtype in NARROW:
                value.dtype = ir.DataType.FLOAT
            if value.const_value is not None and value.const_value.dtype in NARROW:
                value.const_value = _widen(value.const_value)
        return PassResult(model, True)


def _widen(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.LazyTensor(
        lambda: ir.Tensor(tensor.numpy().astype(np.float32), name=tensor.name),
        dtype=ir.DataType.FLOAT,
        shape=ir.Shape(tensor.shape.numpy()),
        name=tensor.name,
    )
