"""Projections of one value by several rounded weights as one product: a narrow one cannot keep all cores busy."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult
from onnx_ir.passes.common import RemoveUnusedNodesPass

from draftc.export.passes import MICROSOFT, new_initializer

__all__ = ["PackQueryKeyValue"]

SAME = ("K", "bits", "block_size", "accuracy_level")


class PackQueryKeyValue(InPlacePass):
    """MatMulNBits × 3 in front of a GroupQueryAttention → one, whose result the node takes as it is.

    Legal where the three multiply the same value, with weights that are rounded in the same way, and where nothing but
    a bias lies between. The rounded blocks are put side by side, so not a bit of them changes. Float weights stay where
    they are: the lowered graph refers to the captured one's weight file. `packed` counts layers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.packed = 0

    def call(self, model: ir.Model) -> PassResult:
        """Rewrite every layer of that form."""
        for node in list(model.graph):
            if node.op_type == "GroupQueryAttention" and node.inputs[1] is not None:
                self.packed += _pack_attention(model.graph, node)
        if self.packed:
            RemoveUnusedNodesPass()(model)
        return PassResult(model, self.packed > 0)


def _pack_attention(graph: ir.Graph, attention: ir.Node) -> bool:
    products, biases = [], []
    for operand in attention.inputs[:3]:
        found = _projection(operand)
        if found is None:
            return False
        products.append(found[0])
        biases.append(found[1])
    with_bias = [bias for bias in biases if bias is not None]
    if not _alike(products) or len(with_bias) not in (0, 3):
        return False
    product = _side_by_side(graph, products)
    graph.insert_before(attention, product)
    packed = product.outputs[0]
    packed.type = products[0].outputs[0].type
    if with_bias:
        add = ir.node("Add", [packed, _concatenated(graph, with_bias)])
        graph.insert_before(attention, add)
        packed = add.outputs[0]
        packed.type = products[0].outputs[0].type
    for index, value in enumerate((packed, None, None)):
        attention.replace_input_with(index, value)
    return True


def _projection(value: ir.Value | None) -> tuple[ir.Node, ir.Value | None] | None:
    """(MatMulNBits, bias or None) that `value` is, and nobody else reads."""
    node, bias = _own_producer(value), None
    if node is not None and node.op_type == "Add":
        for product, other in (node.inputs, node.inputs[::-1]):
            if other is not None and other.const_value is not None and len(other.const_value.shape) == 1:
                node, bias = _own_producer(product), other
                break
    return (node, bias) if node is not None and node.op_type == "MatMulNBits" else None


def _own_producer(value: ir.Value | None) -> ir.Node | None:
    return value.producer() if value is not None and len(value.uses()) == 1 and not value.is_graph_output() else None


def _alike(nodes: Sequence[ir.Node]) -> bool:
    """Whether all multiply the same value, and have the same form but for their outputs."""
    first = nodes[0]
    for node in nodes:
        same = all(node.attributes.get_int(name, 0) == first.attributes.get_int(name, 0) for name in SAME)
        if node.inputs[0] is not first.inputs[0] or len(node.inputs) != len(first.inputs) or not same:
            return False
        for operand in node.inputs[1:]:
            if operand is None or operand.const_value is None or len(operand.uses()) != 1:
                return False
    return len(first.inputs) in (3, 4)  # codes and scales, and zero points where the scheme has them


def _side_by_side(graph: ir.Graph, nodes: Sequence[ir.Node]) -> ir.Node:
    operands = [
        _concatenated(graph, [node.inputs[index] for node in nodes])  # type: ignore[misc]
        for index in range(1, len(nodes[0].inputs))
    ]
    attributes = {name: nodes[0].attributes.get_int(name, 0) for name in SAME}
    attributes["N"] = sum(node.attributes.get_int("N", 0) for node in nodes)
    product = ir.node("MatMulNBits", [nodes[0].inputs[0], *operands], attributes, domain=MICROSOFT, name=nodes[0].name)
    product.outputs[0].type = nodes[0].outputs[0].type
    return product


def _concatenated(graph: ir.Graph, values: Sequence[ir.Value]) -> ir.Value:
    arrays = [value.const_value.numpy() for value in values if value.const_value is not None]
    return new_initializer(graph, f"{values[0].name}_packed", np.concatenate(arrays))
