"""Weight-only quantization, one weight at a time: which products are rewritten, and that none is forgotten.

How a rounded weight is written down is a `WeightForm`: ONNX Runtime's MatMulNBits (`nbits.NBits`), or standard
dequantization for TensorRT (`qdq.Dequantize`). The graph is rewritten here rather than by ONNX Runtime's quantizer,
because its graph walk wants the whole model in one protobuf and leaves `MatMul(x, Transpose(W))`, the form of every
tied head, in float without a word.
"""

from collections.abc import Callable
from typing import Protocol

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult
from onnx_ir.passes.common import RemoveUnusedNodesPass

from draftc.export.nbits import NBits
from draftc.export.passes import MICROSOFT, SplitGemms, constant_weight, cut_name, replace_node, traced_weight
from draftc.export.scheme import QuantizationScheme
from draftc.runtime.errors import CaptureError, UsageError
from draftc.runtime.graphio import INPUT_IDS, LOGITS
from draftc.runtime.records import Embedding

__all__ = ["QuantizeWeights", "WeightForm"]


class WeightForm(Protocol):
    """How a graph says "x times this rounded weight"."""

    def round(self, graph: ir.Graph, weight: ir.Value, transposed: bool) -> list[ir.Value]:
        """The initializers that stand for a weight (K, N), or (N, K) where `transposed`."""

    def product(self, graph: ir.Graph, node: ir.Node, rounded: list[ir.Value], rows: int, columns: int) -> ir.Node:
        """A node for `node`'s first operand times the rounded weight (rows, columns); what else it needs goes before
        `node`.
        """

    def embedding(self, graph: ir.Graph, node: ir.Node, head: list[ir.Value] | None) -> ir.Node:
        """A node for a Gather of token ids from a rounded table: what stands for the `head`, which is the same matrix,
        or the table in 8 bits. What else it needs goes before `node`. Raises UsageError where the form has none.
        """


class QuantizeWeights(InPlacePass):
    """MatMul(x, W) → a product with W rounded, for every 2-D constant W; the embedding's Gather as the scheme says.

    A table is "shared" if a quantized head is the same matrix, or was cut from it. After `call`, `embedding` is how the
    table is stored, `quantized` counts the rewritten MatMuls, `left_in_float` names the weights that other products
    still read as floats (a head that was left out, experts that a Gather selects), and `float_share` is their part of
    all weights that are multiplied with. Raises CaptureError when there was nothing to quantize, or when a product is
    neither quantized nor named: an earlier stage then changed its form.
    """

    def __init__(
        self,
        scheme: QuantizationScheme,
        on_weight: Callable[[int, int], None] | None = None,
        form: WeightForm | None = None,
    ) -> None:
        super().__init__()
        self.scheme = scheme
        self.form = NBits(scheme) if form is None else form
        self.quantized = 0
        self.embedding: Embedding = "float"
        self.left_in_float: list[str] = []
        self.float_share = 0.0
        self._on_weight = on_weight or (lambda done, total: None)
        self._rounded: dict[tuple[ir.Value, bool], list[ir.Value]] = {}  # (weight, transposed) → operands

    def call(self, model: ir.Model) -> PassResult:
        """Quantize the model in place."""
        SplitGemms()(model)
        matmuls = [node for node in model.graph if node.op_type == "MatMul"]
        weights = [(node, *found) for node in matmuls if (found := constant_weight(node)) is not None]
        head = _head(model)
        products = len(_float_products(model))
        for done, (node, weight, transposed) in enumerate(weights):
            self._on_weight(done, len(weights))
            if node is not head or self.scheme.head:
                self._quantize_matmul(model.graph, node, weight, transposed)
        self._on_weight(len(weights), len(weights))
        if not self.quantized:
            raise CaptureError("no MatMul with a constant weight was found to quantize: compile with --precision fp32")
        self._account(model, products)
        self._quantize_embedding(model.graph)
        self._rounded.clear()  # it holds on to the float weights, whose file the caller may want to remove
        if any(node.domain == MICROSOFT for node in model.graph):
            model.opset_imports[MICROSOFT] = 1
        RemoveUnusedNodesPass()(model)
        return PassResult(model, True)

    def _quantize_matmul(self, graph: ir.Graph, node: ir.Node, weight: ir.Value, transposed: bool) -> None:
        if (weight, transposed) not in self._rounded:
            self._rounded[weight, transposed] = self.form.round(graph, weight, transposed)
        assert weight.const_value is not None
        rows, columns = weight.const_value.shape.numpy()
        if transposed:
            rows, columns = columns, rows
        replace_node(graph, node, self.form.product(graph, node, self._rounded[weight, transposed], rows, columns))
        self.quantized += 1

    def _account(self, model: ir.Model, products: int) -> None:
        """Name what stays in float; of the `products` that there were, none may be missing."""
        left = _float_products(model)
        if self.quantized + len(left) != products:
            raise CaptureError(
                f"of {products} products with constant weights {self.quantized} were quantized and {len(left)} are "
                "left: compile with --precision fp32"
            )
        weights = {weight.name or "?": weight for node_weights in left for weight in node_weights}
        self.left_in_float = sorted(weights)
        floats = sum(map(_size, weights.values()))
        self.float_share = floats / (floats + sum(_size(weight) for weight, _ in self._rounded))

    def _quantize_embedding(self, graph: ir.Graph) -> None:
        wanted = self.scheme.embedding
        if wanted == "float":
            return
        gathers = [node for node in graph if node.op_type == "Gather" and _reads_tokens(node)]
        if not gathers and wanted == "int8":
            raise UsageError("no embedding table was found behind input_ids: leave out --embedding int8")
        for node in gathers:
            head = self._as_head(graph, node.inputs[0]) if wanted == "shared" else None
            if wanted == "int8" or head is not None:
                replace_node(graph, node, self.form.embedding(graph, node, head))
                self.embedding = wanted

    def _as_head(self, graph: ir.Graph, table: ir.Value | None) -> list[ir.Value] | None:
        """What stands for the embedding `table` (V, d) as an output head; None where no head is the same matrix."""
        assert table is not None
        if (table, True) in self._rounded:
            return self._rounded[table, True]
        if any(weight.name == cut_name(table.name or "") for weight, _ in self._rounded):
            return self.form.round(graph, table, True)
        return None


def _float_products(model: ir.Model) -> list[list[ir.Value]]:
    """The float weights of every MatMul and Gemm that has any, node by node."""
    found = []
    for node in model.graph.all_nodes():
        if node.op_type in ("MatMul", "Gemm"):
            operands = (traced_weight(operand) for operand in node.inputs[:2])
            found.append([weight for weight in operands if weight is not None])
    return [weights for weights in found if weights]


def _size(weight: ir.Value) -> int:
    assert weight.const_value is not None
    return int(weight.const_value.size)


def _head(model: ir.Model) -> ir.Node | None:
    """The MatMul closest to the logits: the output head."""
    (logits,) = (output for output in model.graph.outputs if output.name == LOGITS)
    node = logits.producer()
    while node is not None and node.op_type != "MatMul":
        operand = node.inputs[0]
        node = operand.producer() if operand is not None else None
    return node


def _reads_tokens(node: ir.Node) -> bool:
    """Whether a Gather looks rows of a 2-D constant up by token id."""
    table, ids = node.inputs[0], node.inputs[1]
    is_table = table is not None and table.const_value is not None and len(table.const_value.shape) == 2
    return is_table and ids is not None and ids.name == INPUT_IDS
