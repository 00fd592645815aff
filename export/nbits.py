"""ONNX Runtime's form of rounded weights: MatMulNBits, and GatherBlockQuantized for the embedding table.

ONNX Runtime's own quantizer does the arithmetic of rounding to nearest.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from draftc.export.passes import MICROSOFT, new_initializer, whole_numbers
from draftc.export.rounding import RoundedMatrix
from draftc.export.scheme import QuantizationScheme
from draftc.runtime.errors import UsageError

__all__ = ["TABLE_BLOCK", "NBits"]

TABLE_BLOCK = 32  # inputs of an embedding table in 8 bits that share a scale
TABLE_ROWS = 16384  # of it that are rounded at a time


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
        scales = scales.reshape(len(codes), -1)
        zeros = None if scheme.symmetric else zero_points.reshape(len(codes), -1)
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

    def embedding(self, graph: ir.Graph, node: ir.Node, head: list[ir.Value] | None) -> ir.Node:
        """GatherBlockQuantized: of the head's codes, or of the table in 8 bits and blocks of TABLE_BLOCK, symmetric."""
        table = node.inputs[0]
        assert table is not None
        assert table.const_value is not None
        if head is not None:
            return self._shared_embedding(graph, node, head)
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

    def _shared_embedding(self, graph: ir.Graph, node: ir.Node, head: list[ir.Value]) -> ir.Node:
        """A Gather from the head's codes (V, blocks, bytes) as a table (V, blocks · bytes): a view of the same memory,
        which `graph_file.save_graph` writes once. A last block that was filled up makes rows too long: they are cut.
        """
        codes, *scales = head
        assert codes.const_value is not None
        name = f"{codes.name}_rows"
        if name not in graph.initializers:
            array = codes.const_value.numpy()
            new_initializer(graph, name, array.reshape(len(array), -1))
        bits, block_size = self._forms[codes.name or ""]
        attributes = {"bits": bits, "gather_axis": 0, "quantize_axis": 1, "block_size": block_size}
        inputs = [graph.initializers[name], node.inputs[1], *scales]
        gather = ir.node("GatherBlockQuantized", inputs, attributes, domain=MICROSOFT)
        assert node.inputs[0] is not None
        assert node.inputs[0].shape is not None
        width = int(node.inputs[0].shape.numpy()[1])
        if width % block_size == 0:
            return gather
        graph.insert_before(node, gather)
        bounds = [
            whole_numbers(graph, f"{name}_{what}", [number])
            for what, number in (("start", 0), ("end", width), ("axis", -1))
        ]
        return ir.node("Slice", [gather.outputs[0], *bounds])


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
