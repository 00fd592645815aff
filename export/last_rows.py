"""Rows whose logits nobody asks for end before the last layer's products instead of behind them.

A prompt's call of S tokens asks for one row of logits. Behind the last attention nothing mixes tokens any more, so the
selection of rows may stand in front of everything that follows it.
"""

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult
from onnx_ir.passes.common import RemoveUnusedNodesPass

from draftc.export.passes import MICROSOFT, new_initializer
from draftc.runtime.graphio import LOGIT_POSITIONS

__all__ = ["SelectRowsEarly"]

# Operators of one result that compute each element from those at its place, or where the others are constants.
ELEMENTWISE = frozenset(
    {"Add", "Cast", "Clip", "Div", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Max", "Min"}
    | {"Mul", "Neg", "Pow", "Reciprocal", "Relu", "Sigmoid", "Softplus", "Sqrt", "Sub", "Tanh"}
)
PRODUCTS = frozenset({"MatMul", "FusedMatMul", "MatMulNBits"})
ACROSS = frozenset({"LayerNormalization", "ReduceMean", "RMSNormalization", "Split"})  # along one axis


class SelectRowsEarly(InPlacePass):
    """GatherElements(f(x), rows) → f(GatherElements(x, rows)), where f computes each token's row by itself.

    x (B, S, K) may be several values: what attention gives, and the sum that bypasses it. Nothing is moved that someone
    else reads too, and nothing at all where no product would become smaller. `moved` counts products.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def call(self, model: ir.Model) -> PassResult:
        """Move the selection in front of the output head as far up as it goes."""
        graph = model.graph
        found = [node for node in graph if _selected_rows(node) is not None]
        if len(found) != 1:
            return PassResult(model, False)
        selection = found[0]
        rows = _selected_rows(selection)
        source = selection.inputs[0]
        assert rows is not None
        assert source is not None
        moved = _rowwise_before(graph, selection)
        self.moved = sum(node.op_type in PRODUCTS for node in moved)
        if not self.moved:
            return PassResult(model, False)
        selected: dict[ir.Value, ir.Value] = {}
        for node in moved:
            for index, operand in enumerate(node.inputs):
                if operand is None or operand.producer() in moved or _is_constant(operand):
                    continue
                if operand not in selected:
                    selected[operand] = _select(graph, operand, rows, selection)
                node.replace_input_with(index, selected[operand])
            for output in node.outputs:
                if output.shape is not None:
                    output.shape = ir.Shape([output.shape[0], None, output.shape[2]])
        selection.outputs[0].replace_all_uses_with(source)
        graph.remove(selection, safe=True)
        graph.sort()
        RemoveUnusedNodesPass()(model)
        return PassResult(model, True)


def _selected_rows(node: ir.Node) -> ir.Value | None:
    """(B, R, 1) where `node` selects those rows of its input (B, S, K) that `logit_positions` asks for."""
    if node.op_type != "GatherElements" or node.attributes.get_int("axis", 0) not in (1, -2):
        return None
    expand = node.inputs[1].producer() if node.inputs[1] is not None else None
    rows = expand.inputs[0] if expand is not None and expand.op_type == "Expand" else None
    unsqueeze = rows.producer() if rows is not None else None
    if unsqueeze is None or unsqueeze.op_type != "Unsqueeze" or unsqueeze.inputs[0] is None:
        return None
    return rows if unsqueeze.inputs[0].name == LOGIT_POSITIONS and node.inputs[0] is not None else None


def _rowwise_before(graph: ir.Graph, selection: ir.Node) -> set[ir.Node]:
    """The nodes whose results reach nothing but `selection`, each row from the same row of what it reads."""
    region = {selection}
    for node in reversed(list(graph)):
        readers = [use.node for value in node.outputs for use in value.uses()]
        if not readers or any(value.is_graph_output() for value in node.outputs):
            continue
        if region.issuperset(readers) and _is_rowwise(node):
            region.add(node)
    region.discard(selection)
    return region


def _is_rowwise(node: ir.Node) -> bool:
    """Whether `node` maps rows (B, S, K) to rows (B, S, N) one by one."""
    if any(value.shape is None or len(value.shape) != 3 for value in node.outputs if value.uses()):
        return False
    first, *others = node.inputs
    constants = all(map(_is_constant, others))
    if node.op_type in PRODUCTS and node.domain in ("", MICROSOFT):
        return _is_rows(first) and constants and _multiplies_rows(node)
    if node.domain:
        return False
    if node.op_type in ACROSS:
        return _is_rows(first) and constants and _axis(node) in (-1, 2)
    return node.op_type in ELEMENTWISE and all(_is_rows(one) or _is_vector(one) for one in node.inputs)


def _axis(node: ir.Node) -> int:
    """The axis that an operator of ACROSS works along."""
    if node.op_type == "ReduceMean":
        axes = node.inputs[1].const_value if len(node.inputs) > 1 and node.inputs[1] is not None else None
        return int(axes.numpy().item()) if axes is not None and axes.size == 1 else 0
    return node.attributes.get_int("axis", 0 if node.op_type == "Split" else -1)


def _multiplies_rows(node: ir.Node) -> bool:
    """Whether a product with a constant is one with a matrix, and of the rows as they lie."""
    if node.op_type == "MatMulNBits":
        return True
    weight = node.inputs[1]
    assert weight is not None
    assert weight.const_value is not None
    turned = any(node.attributes.get_int(name, 0) for name in ("transA", "transBatchA", "transBatchB"))
    return len(weight.const_value.shape) == 2 and not turned


def _is_rows(value: ir.Value | None) -> bool:
    """Whether `value` is (B, S, K) for the graph's B and S, and K known; nothing that is the same for rows or texts."""
    if value is None or value.shape is None or len(value.shape) != 3 or _is_constant(value):
        return False
    return [isinstance(size, int) for size in value.shape] == [False, False, True]


def _is_vector(value: ir.Value | None) -> bool:
    """Whether `value` is a constant that is the same for every row, or left out."""
    if value is None:
        return True
    return _is_constant(value) and value.shape is not None and all(size == 1 for size in value.shape[:-1])


def _is_constant(value: ir.Value | None) -> bool:
    """Whether `value` is computed from constants alone, or left out."""
    if value is None or value.const_value is not None:
        return True
    producer = value.producer()
    return producer is not None and all(map(_is_constant, producer.inputs))


def _select(graph: ir.Graph, value: ir.Value, rows: ir.Value, before: ir.Node) -> ir.Value:
    """The `rows` (B, R, 1) of `value` (B, S, K)."""
    assert value.shape is not None
    size = value.shape[2]
    assert isinstance(size, int)
    name = f"row_of_{size}"
    shape = graph.initializers.get(name)
    if shape is None:
        shape = new_initializer(graph, name, np.array([1, 1, size], np.int64))
    expand = ir.node("Expand", [rows, shape])
    gather = ir.node("GatherElements", [value, expand.outputs[0]], {"axis": 1})
    expand.outputs[0].type = ir.TensorType(ir.DataType.INT64)
    gather.outputs[0].type = value.type
    gather.outputs[0].shape = ir.Shape([value.shape[0], None, size])
    graph.insert_before(before, [expand, gather])
    return gather.outputs[0]
