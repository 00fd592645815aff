"""Passes over weights, and what passes share; `result.modified` tells if one did anything.

Other passes have modules of their own: `fusions`, `attention`, `quantize`, `tails`. Which of them a backend's graphs go
through is said in `lowering`.
"""

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import InPlacePass, PassResult
from onnx_ir.passes.common import RemoveUnusedNodesPass

from draftc.runtime.graphio import INPUT_IDS

__all__ = [
    "MICROSOFT",
    "FuseTransposedWeights",
    "SplitGemms",
    "constant_weight",
    "cut_name",
    "new_initializer",
    "replace_node",
    "traced_weight",
    "whole_numbers",
]

MICROSOFT = "com.microsoft"
MOVES = frozenset({"Gather", "GatherND", "Transpose", "Reshape", "Unsqueeze", "Squeeze", "Slice", "Cast", "Identity"})
FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


def constant_weight(node: ir.Node) -> tuple[ir.Value, bool] | None:
    """(weight, transposed) of a MatMul whose second operand is a 2-D constant or the Transpose of one, else None.

    The weight is (K, N), or (N, K) where transposed.
    """
    operand = node.inputs[1]
    if node.op_type != "MatMul" or operand is None:
        return None
    producer = operand.producer()
    transposed = producer is not None and producer.op_type == "Transpose"
    if transposed:
        assert producer is not None
        operand = producer.inputs[0]
    if operand is None or operand.const_value is None or len(operand.const_value.shape) != 2:
        return None
    return operand, transposed


def traced_weight(operand: ir.Value | None) -> ir.Value | None:
    """The float weight that `operand` is, or is taken from by nodes that only select or rearrange; None otherwise.

    A weight is a matrix, or has two dimensions or more that are larger than one: others (rotary frequencies, scales)
    are not worth rounding. Rows that are looked up by token id are activations.
    """
    while operand is not None and operand.const_value is None:
        producer = operand.producer()
        if producer is None or producer.op_type not in MOVES or any(v and v.name == INPUT_IDS for v in producer.inputs):
            return None
        operand = producer.inputs[0]
    if operand is None or operand.const_value is None or operand.const_value.dtype not in FLOATS:
        return None
    shape = operand.const_value.shape.numpy()
    return operand if len(shape) == 2 or sum(size > 1 for size in shape) > 1 else None


def new_initializer(graph: ir.Graph, name: str, data: "NDArray[Any] | ir.TensorProtocol") -> ir.Value:
    """Register `data` as an initializer called `name`."""
    tensor = ir.tensor(data, name=name) if isinstance(data, np.ndarray) else data
    value = ir.Value(
        name=name, shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    graph.register_initializer(value)
    return value


def cut_name(name: str) -> str:
    """What the weight `name` of an output head is called where some of its rows were taken (`head`)."""
    return f"{name}.cut"


def replace_node(graph: ir.Graph, old: ir.Node, new: ir.Node) -> None:
    """Put `new`, which has one output, where `old` was, under `old`'s output name."""
    output, replacement = old.outputs[0], new.outputs[0]
    replacement.shape, replacement.type = output.shape, output.type
    graph.insert_before(old, new)
    output.replace_all_uses_with(replacement, replace_graph_outputs=True)
    name, output.name = output.name, None
    replacement.name = name
    graph.remove(old, safe=True)


def whole_numbers(graph: ir.Graph, name: str, numbers: list[int]) -> ir.Value:
    """An int64 initializer of `numbers`, shared by everyone who asks under the same name."""
    if name not in graph.initializers:
        new_initializer(graph, name, np.array(numbers, np.int64))
    return graph.initializers[name]


class SplitGemms(InPlacePass):
    """Gemm(x, W, b) → MatMul(x, W) + b, so that the passes over MatMuls see every weight.

    Legal where alpha = beta = 1 and x is not transposed. A transposed W becomes Transpose(W).
    """

    def call(self, model: ir.Model) -> PassResult:
        """Rewrite every legal Gemm."""
        modified = False
        for node in list(model.graph):
            if node.op_type != "Gemm" or node.attributes.get_float("alpha", 1.0) != 1.0:
                continue
            if node.attributes.get_float("beta", 1.0) != 1.0 or node.attributes.get_int("transA"):
                continue
            x, weight, *bias = node.inputs
            if node.attributes.get_int("transB"):
                transpose = ir.node("Transpose", [weight], {"perm": [1, 0]})
                model.graph.insert_before(node, transpose)
                weight = transpose.outputs[0]
            product = ir.node("MatMul", [x, weight], name=node.name)
            if bias and bias[0] is not None:
                model.graph.insert_before(node, product)
                product.outputs[0].type = node.outputs[0].type
                replace_node(model.graph, node, ir.node("Add", [product.outputs[0], bias[0]]))
            else:
                replace_node(model.graph, node, product)
            modified = True
        return PassResult(model, modified)


class FuseTransposedWeights(InPlacePass):
    """MatMul(x, Transpose(W)) → com.microsoft.FusedMatMul(x, W, transB=1), for ONNX Runtime.

    Left alone, ONNX Runtime folds Transpose(W) into a second tensor when it loads the graph: loading holds the weights
    twice, and a head that is tied to the embedding stays in memory twice for good.
    """

    def call(self, model: ir.Model) -> PassResult:
        """Rewrite every MatMul whose weight is a transposed constant."""
        modified = False
        for node in list(model.graph):
            weight = constant_weight(node) if node.op_type == "MatMul" else None
            if weight is None or not weight[1]:
                continue
            attributes = {"transB": 1}
            fused = ir.node("FusedMatMul", [node.inputs[0], weight[0]], attributes, domain=MICROSOFT, name=node.name)
            replace_node(model.graph, node, fused)
            modified = True
        if modified:
            model.opset_imports[MICROSOFT] = 1
            RemoveUnusedNodesPass()(model)
        return PassResult(model, modified)
