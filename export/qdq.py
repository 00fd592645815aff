"""Weight-only quantization in standard ONNX: MatMul(x, DequantizeLinear(codes, scales)), the form that TensorRT fuses.

Symmetric, without zero points: integers of 4 or 8 bits in blocks along the inputs or with one scale per output, or E4M3
floats of 8 bits with one scale per output.
"""

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from draftc.export.passes import new_initializer
from draftc.export.scheme import QuantizationScheme
from draftc.runtime.errors import UsageError

__all__ = ["Dequantize", "round_blocks"]

E4M3_MAX = 448.0
CODES = {(4, "int"): ir.DataType.INT4, (8, "int"): ir.DataType.INT8, (8, "fp8"): ir.DataType.FLOAT8E4M3FN}


class Dequantize:
    """A WeightForm: each weight is codes (K, N) and scales (K / block, N) or (N,), of the weight's own float type."""

    def __init__(self, scheme: QuantizationScheme) -> None:
        self.check(scheme)
        self.scheme = scheme

    @staticmethod
    def check(scheme: QuantizationScheme) -> None:
        """Raise UsageError for a scheme that this form cannot express."""
        if scheme.rounding != "nearest":
            raise UsageError(f"--rounding {scheme.rounding} is for ONNX Runtime: use --rounding nearest")
        if not scheme.symmetric:
            raise UsageError("TensorRT's dequantization has no zero points: use --symmetric")
        if scheme.embedding != "float":
            raise UsageError("TensorRT reads the embedding table in half precision: leave out --embedding")
        if scheme.format == "fp8" and scheme.block_size:
            raise UsageError("fp8 weights have one scale per output: use --block-size 0")
        if scheme.blocks:
            raise UsageError("TensorRT's blocks are of one size: leave out --target-blocks")
        if scheme.block_size > 128:
            raise UsageError(f"TensorRT's blocks have 16 to 128 weights, got {scheme.block_size}")

    def round(self, graph: ir.Graph, weight: ir.Value, transposed: bool) -> list[ir.Value]:
        """Codes and scales. A weight whose inputs do not divide into blocks gets one scale per output."""
        assert weight.const_value is not None
        array = weight.const_value.numpy()
        matrix = array.T if transposed else array  # (K, N)
        block = self.scheme.block_size if matrix.shape[0] % max(1, self.scheme.block_size) == 0 else 0
        codes, scales = round_blocks(matrix, self.scheme.bits, block, self.scheme.format == "fp8")
        name = f"{weight.name}{'_t' if transposed else ''}_{self.scheme.format}{self.scheme.bits}"
        dtype = CODES[self.scheme.bits, self.scheme.format]
        tensor: ir.TensorProtocol = ir.Tensor(codes, dtype, shape=ir.Shape(codes.shape), name=name)
        if self.scheme.bits == 4:  # two codes in a byte, from here on
            packed = np.frombuffer(tensor.tobytes(), np.uint8)
            tensor = ir.PackedTensor(packed, dtype, shape=ir.Shape(codes.shape), name=name)
        return [new_initializer(graph, name, tensor), new_initializer(graph, f"{name}_scales", scales)]

    def product(self, graph: ir.Graph, node: ir.Node, rounded: list[ir.Value], rows: int, columns: int) -> ir.Node:
        """MatMul with the dequantized weight. A weight that two products share is dequantized in both, and fused."""
        scales = rounded[1]
        assert scales.const_value is not None
        count, *per_output = scales.const_value.shape.numpy()
        attributes = {"axis": 0, "block_size": rows // count} if per_output else {"axis": 1}
        wide = ir.node("DequantizeLinear", rounded, attributes)
        wide.outputs[0].type, wide.outputs[0].shape = scales.type, ir.Shape([rows, columns])
        graph.insert_before(node, wide)
        return ir.node("MatMul", [node.inputs[0], wide.outputs[0]], name=node.name)

    def embedding(self, graph: ir.Graph, node: ir.Node, head: list[ir.Value] | None) -> ir.Node:
        """Not offered: the constructor refuses such a scheme."""
        raise UsageError("TensorRT reads the embedding table in half precision: leave out --embedding")


def round_blocks(
    matrix: NDArray[np.floating], bits: int, block: int, fp8: bool = False
) -> tuple[NDArray[np.generic], NDArray[np.floating]]:
    """Codes (K, N) and scales (K / block, N), or (N,) for block 0, such that codes · scale ≈ matrix (K, N).

    A scale makes the block's largest number the largest code, -2^(bits-1) included: max(-min / 2^(bits-1),
    max / (2^(bits-1) - 1)). It is rounded to the matrix's own type first, and codes are chosen for the rounded scale.
    """
    rows, columns = matrix.shape
    size = block or rows
    blocks = np.ascontiguousarray(matrix, np.float32).reshape(rows // size, size, columns)
    if fp8:
        scale = np.abs(blocks).max(axis=1) / E4M3_MAX
    else:
        top = 2 ** (bits - 1)
        scale = np.maximum(-blocks.min(axis=1) / top, blocks.max(axis=1) / (top - 1))
    scales = scale.astype(matrix.dtype)  # (K / block, N)
    # A block of zeros, or one so small that its scale is zero in this type: TensorRT wants scales above 0; codes are 0.
    scales[scales == 0] = 1
    scaled = blocks / scales.astype(np.float32)[:, None]
    codes: NDArray[np.generic]
    if fp8:
        codes = np.clip(scaled, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
    else:
        codes = np.clip(np.rint(scaled), -top, top - 1).astype(ml_dtypes.int4 if bits == 4 else np.int8)
    return codes.reshape(rows, columns), scales if block else scales[0]
