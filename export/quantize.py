"""Weight-only quantization, one weight at a time: which products are rewritten, and that none is forgotten.

How a rounded weight is written down is a `WeightForm`: ONNX Runtime's MatMulNBits (`NBits`, here), or standard
dequantization for TensorRT (`qdq.Dequantize`). For the first, ONNX Runtime's own quantizer does the arithmetic. The
graph is rewritten here rather than by it, because its graph walk wants the whole model in one protobuf and leaves
`MatMul(x, Transpose(W))`, the form of every tied head, in float without a word.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import InPlacePass, PassResult
from onnx_ir.passes.common import RemoveUnusedNodesPass

from draftc.export.passes import MICROSOFT, SplitGemms, constant_weight, replace_node, traced_weight
from draftc.export.rounding import RoundedMatrix
from draftc.runtime.errors import CaptureError, UsageError
from draftc.runtime.graphio import INPUT_IDS, LOGITS
from draftc.runtime.records import Rounding

__all__ = ["NBits", "QuantizationScheme", "QuantizeWeights", "WeightForm", "new_initializer"]

TABLE_BLOCK = 32  # inputs of an embedding table that share a scale
TABLE_ROWS = 16384  # of it that are rounded at a time


@dataclass(frozen=True)
class QuantizationScheme:
    """How weights are rounded: `bits` (4 or 8) in blocks of `block_size` inputs, to nearest or by GPTQ (`gptq`).

    A `block_size` of 0 is one scale for each output. `format` "fp8" (E4M3) has that alone, and 8 bits. `accuracy_level`
    4 lets the kernel quantize activations to int8 as it multiplies. `head` says whether the output head takes part,
    `embedding` whether the embedding table is stored in 8 bits. `blocks` are (part of a weight's name, block size) of
    weights that have another one; the first that fits counts. Raises UsageError when a value is not offered.
    """

    bits: int
    block_size: int = 32
    symmetric: bool = True
    accuracy_level: int = 4
    head: bool = True
    embedding: bool = False
    format: Literal["int", "fp8"] = "int"
    rounding: Rounding = "nearest"
    blocks: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise UsageError(f"bits must be 4 or 8, got {self.bits}")
        for size in (self.block_size, *(size for _, size in self.blocks)):
            if size not in (0, 16, 32, 64, 128, 256):
                raise UsageError(f"block size must be 0 (one scale per output), 16, 32, 64, 128 or 256, got {size}")
        if not 0 <= self.accuracy_level <= 4:
            raise UsageError(f"accuracy level must be 0 to 4, got {self.accuracy_level}")
        if self.rounding == "gptq" and self.format == "fp8":
            raise UsageError("GPTQ rounds to integers: use --rounding nearest for fp8")
        if self.rounding == "stored" and (self.block_size, self.symmetric) != (32, True):
            raise UsageError("stored blocks are of 32 weights without zero points: use --block-size 32 --symmetric")
        if self.rounding == "stored" and self.blocks:
            raise UsageError("stored blocks are of 32 weights: leave out --target-blocks")

    def block_of(self, name: str) -> int:
        """The block size of the weight called `name`."""
        return next((size for part, size in self.blocks if part in name), self.block_size)


class WeightForm(Protocol):
    """How a graph says "x times this rounded weight"."""

    def round(self, graph: ir.Graph, weight: ir.Value, transposed: bool) -> list[ir.Value]:
        """The initializers that stand for a weight (K, N), or (N, K) where `transposed`."""

    def product(self, graph: ir.Graph, node: ir.Node, rounded: list[ir.Value], rows: int, columns: int) -> ir.Node:
        """A node for `node`'s first operand times the rounded weight (rows, columns); what else it needs goes before
        `node`.
        """

    def embedding(self, graph: ir.Graph, node: ir.Node) -> ir.Node:
        """A node for a Gather of token ids from a rounded table. Raises UsageError where the form has none."""


class QuantizeWeights(InPlacePass):
    """MatMul(x, W) → a product with W rounded, for every 2-D constant W; with scheme.embedding its Gathers too.

    After `call`, `quantized` counts the rewritten MatMuls, `left_in_float` names the weights that other products still
    read as floats (a head that was left out, experts that a Gather selects), and `float_share` is their part of all
    weights that are multiplied with. Raises CaptureError when there was nothing to quantize, or when a product is
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
        if self.scheme.embedding:
            self._quantize_embedding(model.graph)
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
        self._rounded.clear()  # it holds on to the float weights, whose file the caller may want to remove

    def _quantize_embedding(self, graph: ir.Graph) -> None:
        gathers = [node for node in graph if node.op_type == "Gather" and _reads_tokens(node)]
        if not gathers:
            raise UsageError("no embedding table was found behind input_ids: leave out --quantize-embedding")
        for node in gathers:
            replace_node(graph, node, self.form.embedding(graph, node))


class NBits:
    """ONNX Runtime's form: MatMulNBits(x, packed blocks, scales, zero points), and GatherBlockQuantized.

    Weights that are in `rounded`, by name and whether they are stored as (N, K), are taken as they are there; the names
    of the others, which are rounded to nearest, are in `nearest` afterwards.
    """

    def __init__(
        self, scheme: QuantizationScheme, rounded: Mapping[tuple[str, bool], RoundedMatrix] | None = None
    ) -> None:
        self.check(scheme)
        self.scheme = scheme
        self.nearest: list[str] = []
        self._given = rounded or {}
        self._forms: dict[str, tuple[int, int]] = {}  # bits and block size, by the codes' name: weights may differ

    @staticmethod
    def check(scheme: QuantizationScheme) -> None:
        """Raise UsageError for a scheme that this form cannot express."""
        if 0 in (scheme.block_size, *dict(scheme.blocks).values()) or scheme.format != "int":
            raise UsageError(
                "ONNX Runtime rounds to integers in blocks: use --precision int8 or int4 with --block-size 16 to 256"
            )

    def round(self, graph: ir.Graph, weight: ir.Value, transposed: bool) -> list[ir.Value]:
        """Packed blocks, scales, and zero points where the scheme has them."""
        assert weight.const_value is not None
        assert weight.name is not None
        dtype = weight.const_value.dtype.numpy()
        matrix = self._given.get((weight.name, transposed)) or self._round_to_nearest(weight, transposed)
        name = f"{weight.name}{'_t' if transposed else ''}_q{matrix.bits}"
        self._forms[name] = matrix.bits, matrix.block_size
        operands = [
            new_initializer(graph, name, matrix.codes),
            new_initializer(graph, f"{name}_scales", matrix.scales.astype(dtype)),  # the activations' type
        ]
        if matrix.zero_points is not None:
            operands.append(new_initializer(graph, f"{name}_zero_points", matrix.zero_points))
        return operands

    def _round_to_nearest(self, weight: ir.Value, transposed: bool) -> RoundedMatrix:
        assert weight.const_value is not None
        assert weight.name is not None
        self.nearest.append(weight.name)
        array = weight.const_value.numpy()
        matrix = np.ascontiguousarray(array.T if transposed else array, np.float32)  # (K, N)
        scheme = replace(self.scheme, block_size=self.scheme.block_of(weight.name))
        codes, scales, zero_points = _onnxruntime_quantizer(scheme).qbits_block_quant(matrix)
        zeros = None if scheme.symmetric else zero_points
        return RoundedMatrix(scheme.bits, scheme.block_size, matrix.shape[0], codes, scales, zeros)

    def product(self, graph: ir.Graph, node: ir.Node, rounded: list[ir.Value], rows: int, columns: int) -> ir.Node:
        """MatMulNBits."""
        bits, block_size = self._forms[rounded[0].name or ""]
        attributes = {
            "K": rows,
            "N": columns,
            "bits": bits,
            "block_size": block_size,
            "accuracy_level": self.scheme.accuracy_level,
        }
        return ir.node("MatMulNBits", [node.inputs[0], *rounded], attributes, domain=MICROSOFT, name=node.name)

    def embedding(self, graph: ir.Graph, node: ir.Node) -> ir.Node:
        """GatherBlockQuantized, of the table in 8 bits and blocks of TABLE_BLOCK, symmetric."""
        table = node.inputs[0]
        assert table is not None
        assert table.const_value is not None
        array = table.const_value.numpy()  # (V, d)
        starts = np.arange(0, array.shape[1], TABLE_BLOCK)
        codes = np.empty(array.shape, np.uint8)
        scales = np.empty((len(array), starts.size), array.dtype)
        for first in range(0, len(array), TABLE_ROWS):
            rows = array[first : first + TABLE_ROWS].astype(np.float32)
            largest = np.maximum.reduceat(np.abs(rows), starts, axis=1)
            part = (np.where(largest > 0, largest, 1) / 127).astype(array.dtype)
            steps = np.repeat(part.astype(np.float32), TABLE_BLOCK, axis=1)[:, : array.shape[1]]
            scales[first : first + TABLE_ROWS] = part
            codes[first : first + TABLE_ROWS] = np.clip(np.rint(rows / steps) + 128, 0, 255)
        name = f"{table.name}_gather_q8"
        inputs = [
            new_initializer(graph, name, codes),
            node.inputs[1],
            new_initializer(graph, f"{name}_scales", scales),
        ]
        attributes = {"bits": 8, "gather_axis": 0, "quantize_axis": 1, "block_size": TABLE_BLOCK}
        return ir.node("GatherBlockQuantized", inputs, attributes, domain=MICROSOFT)


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


def _onnxruntime_quantizer(scheme: QuantizationScheme) -> Any:
    """ONNX Runtime's round-to-nearest quantizer. Its module configures the root logger on import; that is undone."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        from onnxruntime.quantization import matmul_nbits_quantizer as nbits
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    config = nbits.DefaultWeightOnlyQuantConfig(
        block_size=scheme.block_size,
        is_symmetric=scheme.symmetric,
        accuracy_level=scheme.accuracy_level,
        bits=scheme.bits,
    )
    return nbits.DefaultWeightOnlyQuantizer(config)


def new_initializer(graph: ir.Graph, name: str, data: "NDArray[Any] | ir.TensorProtocol") -> ir.Value:
    """Register `data` as an initializer called `name`."""
    tensor = ir.tensor(data, name=name) if isinstance(data, np.ndarray) else data
    value = ir.Value(
        name=name, shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    graph.register_initializer(value)
    return value


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
