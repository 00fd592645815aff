"""Pieces of a captured graph, run by themselves: what a pass may rely on is asked of the numbers, not of the spelling.

Masks and rotary angles are functions of positions alone, and every family writes them down in its own way. A piece is
cut out of the graph and run on ONNX Runtime over every position that a call may have.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from draftc.runtime.errors import CaptureError
from draftc.runtime.graphio import INPUT_IDS, WRITE_INDEX
from draftc.runtime.ort_session import load_onnxruntime, reason

__all__ = ["Piece", "Sources"]

SMALL = 4096  # elements of a constant that is compared by its content
LIGHT = frozenset(
    {"Add", "Cast", "Concat", "Div", "Expand", "Gather", "Identity", "Mul", "Neg", "Pad", "Reshape", "RotaryEmbedding"}
    | {"ScatterND", "Slice", "Split", "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where"}
)  # what rotations and changes of layout are made of


class Sources:
    """What the values of a graph are computed from. Made for a graph that does not change while it is asked.

    `positional` values are functions of `write_index` and of the sizes of the graph's inputs; all others but constants
    carry activations.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self._order = {node: index for index, node in enumerate(graph)}
        self._activations = {value for value in graph.inputs if value.name != WRITE_INDEX}
        inputs = set(graph.inputs)
        for node in graph:
            if node.op_type == "Shape" and node.inputs[0] in inputs:
                continue
            opaque = any(attribute.type == ir.AttributeType.GRAPH for attribute in node.attributes.values())
            if opaque or any(value in self._activations for value in node.inputs):
                self._activations.update(node.outputs)
        self._numbers: dict[Any, int] = {}

    def positional(self, value: ir.Value) -> bool:
        """Whether `value` depends on positions alone; a constant does."""
        return value not in self._activations

    def origins(self, value: ir.Value) -> Iterator[ir.Value]:
        """The values x, nearest first, for which `value` is a function of x and of positions, by LIGHT operators."""
        frontier = {value}
        while True:
            node = max(
                (made for one in frontier if (made := one.producer())), key=self._order.__getitem__, default=None
            )
            if node is None or node.op_type not in LIGHT or any(one.producer() is None for one in frontier):
                return
            frontier = {one for one in frontier if one.producer() is not node}
            frontier |= {one for one in node.inputs if one is not None and one in self._activations}
            if len(frontier) == 1:
                yield next(iter(frontier))

    def leaves(self, value: ir.Value, cut: ir.Value | None = None) -> list[ir.Value]:
        """The graph inputs that `value` is computed from where `cut` is given, itself excluded."""
        found: dict[ir.Value, None] = {}
        pending, seen = [value], {value}
        while pending:
            one = pending.pop()
            producer = one.producer()
            if one is cut:
                continue
            if producer is None:
                if one.const_value is None:
                    found[one] = None
                continue
            new = [other for other in producer.inputs if other is not None and other not in seen]
            seen.update(new)
            pending.extend(new)
        return list(found)

    def number(self, value: ir.Value, cut: ir.Value | None = None) -> int:
        """A number that two values share if they are computed in the same way, from `cut` values of equal shape."""
        return self._number(value, cut, {})

    def _number(self, value: ir.Value | None, cut: ir.Value | None, known: dict[ir.Value | None, int]) -> int:
        if value not in known:
            known[value] = self._numbers.setdefault(self._key(value, cut, known), len(self._numbers))
        return known[value]

    def _key(self, value: ir.Value | None, cut: ir.Value | None, known: dict[ir.Value | None, int]) -> Any:
        if value is None:
            return None
        if value is cut:
            return "cut", value.dtype, str(value.shape)
        producer = value.producer()
        if producer is None:
            tensor = value.const_value
            if tensor is None or tensor.size > SMALL:
                return "input", value.name
            return "constant", tensor.dtype, tuple(tensor.shape.numpy()), tensor.tobytes()
        attributes = tuple(sorted((name, _attribute(attribute)) for name, attribute in producer.attributes.items()))
        operands = tuple(self._number(operand, cut, known) for operand in producer.inputs)
        return producer.op_identifier(), producer.outputs.index(value), attributes, operands


class Piece:
    """The part of a graph between `cut` (nothing but positions where it is None) and `value`.

    Making and calling one raise CaptureError where ONNX Runtime cannot run it.
    """

    def __init__(self, sources: Sources, value: ir.Value, cut: ir.Value | None = None) -> None:
        self._inputs = sources.leaves(value, cut)
        self._cut = cut
        inputs = self._inputs if cut is None else [cut, *self._inputs]
        model = ir.Model(ir.convenience.extract(sources.graph, inputs, [value]), ir_version=10)
        ir.external_data.load_to_model(model)
        ort = load_onnxruntime()
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        try:
            self._session = ort.InferenceSession(
                ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise _cannot_run(error) from error

    def __call__(self, start: Sequence[int], width: int, x: NDArray[np.float32] | None = None) -> NDArray[Any]:
        """The value in a call of `width` tokens at write_index `start` (B,), with `x` in the place of `cut`."""
        feeds: dict[str, NDArray[Any]] = {}
        for value in self._inputs:
            assert value.name is not None
            assert value.shape is not None
            if value.name == WRITE_INDEX:
                feeds[value.name] = np.array(start, np.int64)
            elif value.name == INPUT_IDS:
                feeds[value.name] = np.zeros((len(start), width), np.int64)
            else:  # of a cache, only the sizes count
                shape = [dim if isinstance(dim, int) else len(start) for dim in value.shape]
                feeds[value.name] = np.zeros(shape, np.float32)
        if self._cut is not None:
            assert self._cut.name is not None
            assert x is not None
            feeds[self._cut.name] = x
        try:
            result: NDArray[Any] = self._session.run(None, feeds)[0]
        except Exception as error:
            raise _cannot_run(error) from error
        return result


def _cannot_run(error: Exception) -> CaptureError:
    return CaptureError(f"a part of the graph cannot be run by itself: {reason(error)}")


def _attribute(attribute: ir.Attr) -> str:
    if attribute.type == ir.AttributeType.TENSOR:
        tensor = attribute.as_tensor()
        return f"{tensor.dtype} {tensor.shape} {tensor.tobytes()!r}"
    return str(attribute.value)
