"""Each pass alone, on graphs built by hand: the numbers stay, and what is not legal stays as it was."""

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from draftc.export.lowering import lower
from draftc.export.passes import FuseTransposedWeights, SplitGemms, constant_weight

K, N = 8, 6
WEIGHT = np.random.default_rng(0).normal(size=(N, K)).astype(np.float32)
BIAS = np.random.default_rng(1).normal(size=N).astype(np.float32)
X = np.random.default_rng(2).normal(size=(3, K)).astype(np.float32)


def model_of(op: str, attributes: dict[str, Any], *, transpose: bool, bias: bool = False, rank: int = 2) -> ir.Model:
    """x (…, K) → `op` with WEIGHT → y, as the exporter writes it."""
    weight = WEIGHT if transpose or attributes.get("transB") else np.ascontiguousarray(WEIGHT.T)
    shape: list[int | str] = ["S", K] if rank == 2 else ["B", "S", K]
    x = ir.Value(name="x", shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
    values = [ir.Value(name="w", const_value=ir.tensor(weight, name="w"))]
    if bias:
        values.append(ir.Value(name="b", const_value=ir.tensor(BIAS, name="b")))
    for value in values:
        assert value.const_value is not None
        value.shape, value.type = ir.Shape(value.const_value.shape.numpy()), ir.TensorType(ir.DataType.FLOAT)
    nodes, operands = [], list(values)
    if transpose:
        nodes.append(ir.node("Transpose", [operands[0]], {"perm": [1, 0]}))
        operands[0] = nodes[0].outputs[0]
    nodes.append(ir.node(op, [x, *operands], attributes))
    y = nodes[-1].outputs[0]
    y.name, y.shape, y.type = "y", ir.Shape([*shape[:-1], N]), ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph([x], [y], nodes=nodes, initializers=values, opset_imports={"": 24}, name="g")
    return ir.Model(graph, ir_version=10)


def run(model: ir.Model, x: NDArray[np.float32] = X) -> NDArray[np.float32]:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == ["y"]
    result: NDArray[np.float32] = session.run(["y"], {"x": x})[0]
    return result


def ops(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


@pytest.mark.parametrize("rank", [2, 3])
def test_a_transposed_weight_is_fused_and_its_transpose_goes(rank: int) -> None:
    model = model_of("MatMul", {}, transpose=True, rank=rank)
    x = X if rank == 2 else X[None]
    assert FuseTransposedWeights()(model).modified
    assert ops(model) == ["FusedMatMul"]
    np.testing.assert_allclose(run(model, x), x @ WEIGHT.T, rtol=1e-5, atol=1e-6)


def test_a_weight_that_is_not_transposed_stays() -> None:
    model = model_of("MatMul", {}, transpose=False)
    assert not FuseTransposedWeights()(model).modified
    assert ops(model) == ["MatMul"]


def test_a_tied_table_stays_one_initializer() -> None:
    """The transposed use goes; another reader of the same table keeps reading it."""
    model = model_of("MatMul", {}, transpose=True)
    table = model.graph.initializers["w"]
    gather = ir.node("Gather", [table, model.graph.inputs[0]])
    model.graph.append(gather)
    model.graph.outputs.append(gather.outputs[0])
    lower(model, "onnxruntime", "cpu")
    assert ops(model) == ["FusedMatMul", "Gather"]
    assert list(model.graph.initializers) == ["w"]
    assert [node.inputs[i] for node, i in zip(model.graph, (1, 0), strict=True)] == [table, table]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [0, 1])
def test_gemm_splits_into_matmul_and_add(bias: bool, transposed: int) -> None:
    model = model_of("Gemm", {"transB": transposed}, transpose=False, bias=bias)
    assert SplitGemms()(model).modified
    assert ops(model) == ["Transpose"] * transposed + ["MatMul"] + ["Add"] * bias
    np.testing.assert_allclose(run(model), X @ WEIGHT.T + (BIAS if bias else 0), rtol=1e-5, atol=1e-6)
    (matmul,) = (node for node in model.graph if node.op_type == "MatMul")
    found = constant_weight(matmul)
    assert found is not None
    assert found[1] == bool(transposed)


@pytest.mark.parametrize("attributes", [{"alpha": 0.5}, {"beta": 2.0}, {"transA": 1}])
def test_a_gemm_that_scales_or_transposes_x_stays(attributes: dict[str, Any]) -> None:
    model = model_of("Gemm", {"transB": 1, **attributes}, transpose=False, bias=True)
    assert not SplitGemms()(model).modified
    assert ops(model) == ["Gemm"]
