"""Small ONNX graphs by hand, and what ONNX Runtime computes with them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray
from onnx_ir.passes.common import ShapeInferencePass

__all__ = ["Sketch", "count", "run"]

Array = NDArray[Any]


class Sketch:
    """Grows a graph one operator at a time: `sketch("Mul", x, 2.0)`. Numbers and arrays become initializers."""

    def __init__(self) -> None:
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": 24}, name="sketch")

    def input(self, name: str, dtype: ir.DataType, shape: list[int | str]) -> ir.Value:
        """A graph input."""
        value = ir.val(name, dtype, shape)
        self.graph.inputs.append(value)
        return value

    def weight(self, array: "Array | float | list[int]", like: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
        """An initializer. A number becomes one of type `like`, a list int64."""
        if isinstance(array, list):
            array = np.array(array, np.int64)
        elif isinstance(array, float):
            array = np.array(array, like.numpy())
        name = f"w{len(self.graph.initializers)}"
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def __call__(self, op_type: str, *inputs: "ir.Value | Array | float | list[int]", **attributes: Any) -> ir.Value:
        """The first output of a new node."""
        known = [value.dtype for value in inputs if isinstance(value, ir.Value) and value.dtype is not None]
        like = known[0] if known else ir.DataType.FLOAT
        values = [value if isinstance(value, ir.Value) else self.weight(value, like) for value in inputs]
        node = ir.node(op_type, values, attributes or None)
        if op_type == "Cast":
            node.outputs[0].dtype = ir.DataType(attributes["to"])
        elif known:
            node.outputs[0].dtype = known[0]
        self.graph.append(node)
        return node.outputs[0]

    def model(self, **outputs: ir.Value) -> ir.Model:
        """The finished graph, with types and shapes as the exporter would know them."""
        for name, value in outputs.items():
            value.name = name
            self.graph.outputs.append(value)
        model = ir.Model(self.graph, ir_version=10)
        ShapeInferencePass(strict_mode=True)(model)
        return model


def run(model: ir.Model, feeds: Mapping[str, Array]) -> list[Array]:
    """The outputs, from ONNX Runtime on the CPU with its own rewriting switched off."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    results: list[Array] = session.run(None, dict(feeds))
    return results


def count(model: ir.Model, op_type: str) -> int:
    """How many nodes there are of a type."""
    return sum(node.op_type == op_type for node in model.graph)
