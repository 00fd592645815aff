"""The packed layout is what ONNX Runtime's kernels read."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from draftc.export.nbits import NBits
from draftc.export.rounding import RoundedMatrix, pack_matrix
from draftc.export.scheme import QuantizationScheme

RNG = np.random.default_rng(5)
OUTPUTS = 24


def matrix(bits: int, symmetric: bool, columns: int, block_size: int = 32) -> tuple[RoundedMatrix, np.ndarray]:
    """A packed matrix, and its values (N, K) by the definition."""
    blocks = -(-columns // block_size)
    codes = RNG.integers(0, 2**bits, (OUTPUTS, columns), dtype=np.uint8)
    scales = RNG.uniform(-1, 1, (OUTPUTS, blocks)).astype(np.float32)
    zeros = None if symmetric else RNG.integers(0, 2**bits, (OUTPUTS, blocks), dtype=np.uint8)
    of_column = np.arange(columns) // block_size
    zero = 2.0 ** (bits - 1) if zeros is None else zeros[:, of_column].astype(np.float32)
    values = (codes.astype(np.float32) - zero) * scales[:, of_column]
    return pack_matrix(codes, scales, zeros, bits=bits, block_size=block_size), values


CASES = pytest.mark.parametrize(
    ("bits", "symmetric", "columns"),
    [(bits, symmetric, columns) for bits in (4, 8) for symmetric in (True, False) for columns in (64, 96, 80)],
)


@CASES
def test_unpacking_gives_back_what_was_packed(bits: int, symmetric: bool, columns: int) -> None:
    packed, values = matrix(bits, symmetric, columns)
    np.testing.assert_array_equal(packed.dequantize(), values)
    rows = np.array([3, 0, 17])
    np.testing.assert_array_equal(packed.take(rows).dequantize(), values[rows])


@CASES
def test_onnxruntime_multiplies_with_the_values_of_the_codes(
    tmp_path: Path, bits: int, symmetric: bool, columns: int
) -> None:
    packed, values = matrix(bits, symmetric, columns)
    weight = ir.Value(name="w", const_value=ir.tensor(np.zeros((OUTPUTS, columns), np.float32), name="w"))
    x = ir.Value(name="x", shape=ir.Shape(["S", columns]), type=ir.TensorType(ir.DataType.FLOAT))
    product = ir.node("MatMul", [x, weight])
    y = product.outputs[0]
    y.name, y.shape, y.type = "y", ir.Shape(["S", OUTPUTS]), ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph([x], [y], nodes=[product], opset_imports={"": 24, "com.microsoft": 1}, name="g")
    scheme = QuantizationScheme(bits, 32, symmetric, accuracy_level=1)  # fp32 arithmetic
    form = NBits(scheme, {("w", True): packed})
    node = form.product(graph, product, form.round(graph, weight, True), columns, OUTPUTS)
    assert form.nearest == []
    graph.append(node)
    z = node.outputs[0]
    z.name, z.shape, z.type = "z", y.shape, y.type
    graph.outputs[0] = z
    graph.remove(product)
    ir.save(ir.Model(graph, ir_version=10), tmp_path / "m.onnx")
    session = ort.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    rows = np.eye(columns, dtype=np.float32)  # each picks one column of the weight: no sums, so no error
    np.testing.assert_array_equal(session.run(["z"], {"x": rows})[0].T, values)
