"""The output head with fewer rows: the draft of a pair need not be able to propose every token."""

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import InPlacePass, PassResult
from onnx_ir.passes.common import RemoveUnusedNodesPass

from draftc.export.passes import constant_weight, cut_name, new_initializer
from draftc.runtime.errors import CaptureError
from draftc.runtime.graphio import LOGITS

__all__ = ["CutHead"]

ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div", "Tanh", "Neg", "Cast", "Identity", "Clip", "Min", "Max"})


class CutHead(InPlacePass):
    """Logits (B, R, V) → the columns `token_ids` (N,) of them, by taking those rows of the head's weight and bias.

    Legal for a captured graph (`capture`) whose head is one product with a constant weight, followed by nothing but
    elementwise arithmetic: scalings and caps stay, constants along the vocabulary are cut too. A table that is also the
    embedding keeps all its rows there. Raises CaptureError for any other graph.
    """

    def __init__(self, token_ids: NDArray[np.int64]) -> None:
        super().__init__()
        self.token_ids = token_ids

    def call(self, model: ir.Model) -> PassResult:
        """Cut the head."""
        graph = model.graph
        (logits,) = (output for output in graph.outputs if output.name == LOGITS)
        rows = logits.shape[2] if logits.shape is not None and len(logits.shape) == 3 else None
        if not isinstance(rows, int) or self.token_ids.size == 0 or int(self.token_ids.max()) >= rows:
            raise CaptureError(f"a head of {rows} rows cannot be cut to ids up to {self.token_ids.max(initial=-1)}")
        value: ir.Value | None = logits
        while value is not None:
            node = value.producer()
            if value is not logits and len(value.uses()) != 1:
                raise _uncuttable(f"{value.name} is read by more than one node")
            if node is None:
                raise _uncuttable("it is no product with a constant weight")
            if node.op_type in ("MatMul", "Gemm"):
                self._cut_product(graph, node, rows)
                following = None
            elif node.op_type in ELEMENTWISE:
                following = self._cut_elementwise(graph, node, rows)
            else:
                raise _uncuttable(f"it goes through {node.op_type}")
            if value.shape is not None:
                value.shape = ir.Shape([*value.shape[:-1], int(self.token_ids.size)])
            value = following
        RemoveUnusedNodesPass()(model)
        return PassResult(model, True)

    def _cut_product(self, graph: ir.Graph, node: ir.Node, rows: int) -> None:
        """MatMul(x, W or Wᵀ), or Gemm(x, W, b)."""
        if node.op_type == "MatMul":
            if (found := constant_weight(node)) is None:
                raise _uncuttable("its weight is no constant matrix")
            weight, transposed = found
        else:
            operand = node.inputs[1]
            if operand is None or operand.const_value is None:
                raise _uncuttable("its weight is no constant matrix")
            weight, transposed = operand, bool(node.attributes.get_int("transB"))
            if len(node.inputs) > 2 and node.inputs[2] is not None:
                self._cut_constant(graph, node, 2, rows)
        assert weight.const_value is not None
        if weight.const_value.shape[0 if transposed else 1] != rows:
            raise _uncuttable(f"its weight {weight.name} has no side of {rows}")
        array = weight.const_value.numpy()
        kept = array[self.token_ids] if transposed else array[:, self.token_ids]  # (N, d) or (d, N)
        cut = new_initializer(graph, cut_name(weight.name or "head"), np.ascontiguousarray(kept))
        if node.op_type == "MatMul" and transposed:
            transpose = ir.node("Transpose", [cut], {"perm": [1, 0]})  # the other may have more readers
            graph.insert_before(node, transpose)
            cut = transpose.outputs[0]
        node.replace_input_with(1, cut)

    def _cut_elementwise(self, graph: ir.Graph, node: ir.Node, rows: int) -> ir.Value:
        """Cut the node's constants; return the operand that comes from the head."""
        sources = []
        for index, operand in enumerate(node.inputs):
            if operand is None:
                continue
            if ir.convenience.get_const_tensor(operand) is not None:
                self._cut_constant(graph, node, index, rows)
            elif _last(operand) != 1:  # one number for all tokens of a row needs no cut
                sources.append(operand)
        if len(sources) != 1:
            raise _uncuttable(f"{node.op_type} combines {len(sources)} values that may run along the vocabulary")
        return sources[0]

    def _cut_constant(self, graph: ir.Graph, node: ir.Node, index: int, rows: int) -> None:
        operand = node.inputs[index]
        assert operand is not None
        tensor = ir.convenience.get_const_tensor(operand)
        shape = () if tensor is None else tensor.shape.numpy()
        if tensor is None or (shape and shape[-1] not in (1, rows)):
            raise _uncuttable(f"{operand.name} of shape {list(shape)} does not run along the vocabulary")
        if shape and shape[-1] == rows:
            kept = np.ascontiguousarray(tensor.numpy()[..., self.token_ids])
            node.replace_input_with(index, new_initializer(graph, f"{operand.name}.cut", kept))


def _last(value: ir.Value) -> int | None:
    """The last dimension where it is known."""
    size = value.shape[-1] if value.shape else None
    return size if isinstance(size, int) else None


def _uncuttable(why: str) -> CaptureError:
    return CaptureError(f"the draft's output head cannot be cut, {why}: leave out --draft-vocab")
