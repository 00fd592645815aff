"""Fusions to standard operators: what the model's code spells out becomes one node that a backend has a kernel for.

Each is exact up to the order of roundings, and leaves alone what is not of its form; `fused` counts what it rewrote.
"""

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult
from onnx_ir.passes.common import RemoveUnusedNodesPass

from draftc.export.passes import replace_node, whole_numbers

__all__ = ["FuseRMSNormalization", "FuseRotaryEmbedding"]


class FuseRMSNormalization(InPlacePass):
    """x · 1/√(mean(x²) + ε) · weight → RMSNormalization(x, weight), mean and product in float32.

    Legal where the mean is over the last axis and `weight` is (D,). Two forms differ in where a half-typed model goes
    back to its own type: before the weight (llama: x and the result have the weight's type), or behind it (gemma: the
    weight is float32, and so are the operator's x and result).
    """

    def __init__(self) -> None:
        super().__init__()
        self.fused = 0

    def call(self, model: ir.Model) -> PassResult:
        """Rewrite every norm of that form."""
        for node in list(model.graph):
            found = _rms_norm(node) if node.op_type == "Mul" else None
            if found is None:
                continue
            x, weight, epsilon = found
            attributes = {"axis": -1, "epsilon": epsilon, "stash_type": int(ir.DataType.FLOAT)}
            replace_node(model.graph, node, ir.node("RMSNormalization", [x, weight], attributes, name=node.name))
            self.fused += 1
        RemoveUnusedNodesPass()(model)
        return PassResult(model, self.fused > 0)


class FuseRotaryEmbedding(InPlacePass):
    """x · cos + rotate_half(x) · sin → RotaryEmbedding(x, cos, sin), for x (B, H, S, D) and its two halves.

    cos and sin (B, S, D) must each repeat their first half, as transformers' "rotate half" models make them; those that
    interleave pairs are left alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fused = 0

    def call(self, model: ir.Model) -> PassResult:
        """Rewrite every rotation of that form."""
        halves: dict[ir.Value, ir.Value] = {}
        for node in list(model.graph):
            found = _rotation(node) if node.op_type == "Add" else None
            if found is None:
                continue
            x, cos, sin = found
            size = _static(x, 3)
            tables = [self._half(model.graph, table, size // 2, halves) for table in (cos, sin)]
            replace_node(model.graph, node, ir.node("RotaryEmbedding", [x, *tables], name=node.name))
            self.fused += 1
        RemoveUnusedNodesPass()(model)
        return PassResult(model, self.fused > 0)

    def _half(self, graph: ir.Graph, table: ir.Value, half: int, known: dict[ir.Value, ir.Value]) -> ir.Value:
        """The first half of a table (B, S, D), made once, right behind the table."""
        if table not in known:
            bounds = [
                whole_numbers(graph, f"rotary_{name}_{number}", [number])
                for name, number in (("start", 0), ("end", half), ("axis", 2))
            ]
            slices = ir.node("Slice", [table, *bounds])
            slices.outputs[0].type = table.type
            producer = table.producer()
            assert producer is not None
            graph.insert_after(producer, slices)
            known[table] = slices.outputs[0]
        return known[table]


def _rms_norm(node: ir.Node) -> tuple[ir.Value, ir.Value, float] | None:
    """(x, weight, epsilon) where `node` multiplies a root-mean-square norm of x with a weight."""
    for normalized, weight in _factors(node.outputs[0]):
        if weight.shape is None or len(weight.shape) != 1 or weight.dtype is None:
            continue
        cast = _made_by(normalized, "Cast")
        if cast is not None and cast.inputs[0] is not None:
            normalized = cast.inputs[0]
        for x, factor in _factors(normalized):
            epsilon = _inverse_rms(factor, of=x)
            if epsilon is None or x.dtype != ir.DataType.FLOAT:
                continue
            if cast is None:
                return (x, weight, epsilon) if weight.dtype == x.dtype else None
            narrow = _made_by(x, "Cast")
            source = narrow.inputs[0] if narrow is not None else None
            return (source, weight, epsilon) if source is not None and source.dtype == weight.dtype else None
    return None


def _inverse_rms(value: ir.Value, of: ir.Value) -> float | None:
    """Epsilon, where `value` is 1/√(mean(of², last axis) + epsilon)."""
    inverse = _made_by(value, "Reciprocal")
    root = _made_by(inverse.inputs[0], "Sqrt") if inverse else None
    shifted = _made_by(root.inputs[0], "Add") if root else None
    mean = _made_by(shifted.inputs[0], "ReduceMean") if shifted else None
    if shifted is None or mean is None or len(mean.inputs) < 2:
        return None
    square = _made_by(mean.inputs[0], "Pow")
    is_square = square is not None and square.inputs[0] is of and _constant(square.inputs[1]) == 2.0
    if not is_square or _number(mean.inputs[1]) != -1 or mean.attributes.get_int("keepdims", 1) != 1:
        return None
    return _constant(shifted.inputs[1])


def _rotation(add: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """(x, cos, sin) with tables (B, S, D), where `add` is x · cos + rotate_half(x) · sin."""
    for straight, rotated in (add.inputs, add.inputs[::-1]):
        for x, cos in _factors(straight):
            for turned, sin in _factors(rotated):
                tables = _table(cos), _table(sin)
                if _is_rotate_half(turned, x) and tables[0] is not None and tables[1] is not None:
                    return x, *tables  # type: ignore[return-value]
    return None


def _factors(value: ir.Value | None) -> list[tuple[ir.Value, ir.Value]]:
    """Both orders of the factors of a product."""
    node = _made_by(value, "Mul")
    if node is None or node.inputs[0] is None or node.inputs[1] is None:
        return []
    return [(node.inputs[0], node.inputs[1]), (node.inputs[1], node.inputs[0])]


def _is_rotate_half(value: ir.Value, x: ir.Value) -> bool:
    """Whether `value` is Concat(-x[…, D/2:], x[…, :D/2])."""
    concat = _made_by(value, "Concat")
    size = _static(x, 3)
    if concat is None or len(concat.inputs) != 2 or concat.attributes.get_int("axis", 0) not in (3, -1):
        return False
    if size == 0 or size % 2:
        return False
    negated, first = concat.inputs
    negation = _made_by(negated, "Neg")
    second = negation.inputs[0] if negation else None
    return _is_slice(first, x, 0, size // 2) and _is_slice(second, x, size // 2, size)


def _is_slice(value: ir.Value | None, x: ir.Value, start: int, end: int) -> bool:
    node = _made_by(value, "Slice")
    if node is None or node.inputs[0] is not x:
        return False
    numbers = [_number(operand) for operand in node.inputs[1:]]
    size = _static(x, 3)
    return (
        numbers[0] == start
        and numbers[1] is not None
        and min(numbers[1], size) == end
        and numbers[2] in (3, -1)
        and numbers[3:] in ([], [1])
    )


def _table(value: ir.Value) -> ir.Value | None:
    """The table (B, S, D) that `value` is with an axis for heads, if it repeats its first half; None otherwise."""
    node = _made_by(value, "Unsqueeze")
    if node is None or _number(node.inputs[1]) != 1:
        return None
    table = source = node.inputs[0]
    if table is not None and table.shape is not None and table.shape[0] == 1:
        return None  # one table for all rows of a batch, where the operator wants one for each
    while source is not None:
        producer = source.producer()
        if producer is None:
            return None
        if producer.op_type == "Concat":
            halves = producer.inputs
            repeats = len(halves) == 2 and halves[0] is halves[1]
            return table if repeats and producer.attributes.get_int("axis", 0) in (2, -1) else None
        if producer.op_type == "Mul" and producer.inputs[1] is not None and _is_scalar(producer.inputs[1]):
            source = producer.inputs[0]  # a scaling of the angles' cosines (yarn, longrope) repeats as they do
        elif producer.op_type in ("Cast", "Cos", "Sin"):
            source = producer.inputs[0]
        else:
            return None
    return None


def _made_by(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type else None


def _number(value: ir.Value | None) -> int | None:
    if value is None or value.const_value is None or value.const_value.size != 1:
        return None
    return int(value.const_value.numpy().item())


def _constant(value: ir.Value | None) -> float | None:
    if value is None or value.const_value is None or value.const_value.size != 1:
        return None
    return float(value.const_value.numpy().item())


def _is_scalar(value: ir.Value) -> bool:
    return value.const_value is not None and value.const_value.size == 1


def _static(value: ir.Value, axis: int) -> int:
    """A dimension of a 4-D value, 0 where it is not known."""
    shape = value.shape
    if shape is None or len(shape) != 4:
        return 0
    dim = shape[axis]
    return dim if isinstance(dim, int) else 0
