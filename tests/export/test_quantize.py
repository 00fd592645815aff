"""Every constant MatMul is quantized or named; the numbers are ONNX Runtime's own rounding of the weight."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from draftc.export.graph_file import save_graph
from draftc.export.nbits import NBits
from draftc.export.passes import new_initializer
from draftc.export.quantize import QuantizeWeights
from draftc.export.scheme import QuantizationScheme
from draftc.runtime.errors import CaptureError, UsageError

VOCAB, WIDTH, INNER = 48, 64, 96
RNG = np.random.default_rng(0)
TABLE, UP, DOWN, BIAS = (
    RNG.normal(size=shape).astype(np.float32) for shape in ((VOCAB, WIDTH), (WIDTH, INNER), (WIDTH, INNER), (INNER,))
)
IDS = np.arange(12, dtype=np.int64)[None] * 5 % VOCAB  # (1, 12)


EXPERTS = RNG.normal(size=(3, WIDTH, WIDTH)).astype(np.float32)


def decoder(*, dynamic: bool = False, experts: bool = False, shared: bool = False) -> ir.Model:
    """input_ids → table → Gemm (K, N) + bias → MatMul by a transposed weight → head tied to the table → logits."""
    ids = ir.Value(name="input_ids", shape=ir.Shape(["B", "S"]), type=ir.TensorType(ir.DataType.INT64))
    tensors = {"table": TABLE, "up": UP, "bias": BIAS, "down": DOWN, "flat": np.array([-1, WIDTH])}
    if experts:
        tensors |= {"experts": EXPERTS, "one": np.array([1]), "angles": np.ones((1, WIDTH, 1), np.float32)}
    w = {name: ir.Value(name=name, const_value=ir.tensor(array, name=name)) for name, array in tensors.items()}
    for value in w.values():
        assert value.const_value is not None
        value.shape, value.type = ir.Shape(value.const_value.shape.numpy()), ir.TensorType(value.const_value.dtype)
    nodes: list[ir.Node] = []

    def add(op: str, inputs: list[Any], **attributes: Any) -> ir.Value:
        nodes.append(ir.node(op, inputs, attributes, name=f"{op}_{len(nodes)}"))
        return nodes[-1].outputs[0]

    flat = add("Reshape", [add("Gather", [w["table"], ids]), w["flat"]])  # (S, d)
    inner = add("Gemm", [flat, w["up"], w["bias"]])
    back = add("MatMul", [inner, add("Transpose", [w["down"]], perm=[1, 0])])
    if dynamic:
        back = add("MatMul", [add("MatMul", [back, add("Transpose", [back], perm=[1, 0])]), back])
    if experts:  # one expert's weight, selected and turned as a mixture of experts does; and a vector, as rotary does
        chosen = add("Transpose", [add("Gather", [w["experts"], w["one"]])], perm=[0, 2, 1])
        back = add("MatMul", [back, chosen])
        back = add("Add", [back, add("ReduceMean", [add("MatMul", [w["angles"], add("Unsqueeze", [back, w["one"]])])])])
    if shared:
        inner = add("MatMul", [back, w["up"]])
        back = add("MatMul", [inner, add("Transpose", [w["up"]], perm=[1, 0])])
    logits = add("Identity", [add("MatMul", [back, add("Transpose", [w["table"]], perm=[1, 0])])])
    logits.name, logits.shape, logits.type = "logits", ir.Shape(["S", VOCAB]), ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph([ids], [logits], nodes=nodes, initializers=list(w.values()), opset_imports={"": 24}, name="g")
    return ir.Model(graph, ir_version=10)


def run(model: ir.Model, folder: Path) -> NDArray[np.float32]:
    ir.save(model, folder / "model.onnx", external_data="model.onnx.data")
    session = ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    result: NDArray[np.float32] = session.run(["logits"], {"input_ids": IDS})[0]
    return result


def rounded(matrix: NDArray[np.float32], scheme: QuantizationScheme, axis: int) -> NDArray[np.float32]:
    """Round to nearest in blocks along `axis`, as ONNX Runtime defines it.

    Symmetric: scale = extreme / -2^(bits-1). With zero points: the range from min(0, least) to max(0, largest) in
    2^bits - 1 steps, zero being one of them.
    """
    along = np.moveaxis(matrix, axis, -1)
    blocks = along.reshape(-1, matrix.shape[axis] // scheme.block_size, scheme.block_size)
    top = 2**scheme.bits - 1
    if scheme.symmetric:
        extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
        scale, zero = extreme / -(2 ** (scheme.bits - 1)), np.float32(2 ** (scheme.bits - 1))
    else:
        least = np.minimum(blocks.min(-1, keepdims=True), 0)
        scale = (np.maximum(blocks.max(-1, keepdims=True), 0) - least) / top
        zero = np.round(-least / scale)
    values = (np.clip(np.round(blocks / scale + zero), 0, top) - zero) * scale
    result: NDArray[np.float32] = np.moveaxis(values.reshape(along.shape), -1, axis)
    return result


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("symmetric", [True, False])
def test_every_matmul_is_quantized_and_computes_with_the_rounded_weights(
    tmp_path: Path, bits: int, block_size: int, symmetric: bool
) -> None:
    model = decoder()
    scheme = QuantizationScheme(bits, block_size, symmetric, accuracy_level=1)  # fp32 arithmetic
    rewrite = QuantizeWeights(scheme)
    rewrite(model)
    assert (rewrite.quantized, rewrite.left_in_float) == (3, [])
    assert [node.op_type for node in model.graph].count("MatMulNBits") == 3
    inner = TABLE[IDS[0]] @ rounded(UP, scheme, 0) + BIAS
    expected = inner @ rounded(DOWN, scheme, 1).T @ rounded(TABLE, scheme, 1).T
    actual = run(model, tmp_path)
    # A value that lies on a rounding boundary may fall to either side; a wrong axis, block or scale is far outside.
    assert np.abs(actual - expected).max() < 0.02 * np.abs(expected).max()
    np.testing.assert_array_equal(actual.argmax(-1), expected.argmax(-1))


def test_weights_with_part_of_a_name_have_blocks_of_another_size(tmp_path: Path) -> None:
    scheme = QuantizationScheme(4, 16, symmetric=False, accuracy_level=1, blocks=(("do", 32), ("down", 64)))
    model = decoder()
    QuantizeWeights(scheme)(model)
    sizes = [node.attributes.get_int("block_size", 0) for node in model.graph if node.op_type == "MatMulNBits"]
    assert sizes == [16, 32, 16]
    wide = replace(scheme, block_size=32)
    expected = (TABLE[IDS[0]] @ rounded(UP, scheme, 0) + BIAS) @ rounded(DOWN, wide, 1).T @ rounded(TABLE, scheme, 1).T
    assert np.abs(run(model, tmp_path) - expected).max() < 0.02 * np.abs(expected).max()


def test_the_head_can_stay_in_float_and_is_named() -> None:
    model = decoder()
    rewrite = QuantizeWeights(QuantizationScheme(4, head=False))
    rewrite(model)
    assert (rewrite.quantized, rewrite.left_in_float) == (2, ["table"])


def test_weights_that_a_gather_selects_are_named_with_their_share() -> None:
    model = decoder(experts=True)
    rewrite = QuantizeWeights(QuantizationScheme(4))
    rewrite(model)
    assert (rewrite.quantized, rewrite.left_in_float) == (3, ["experts"])
    rounded_values = TABLE.size + UP.size + DOWN.size
    assert rewrite.float_share == pytest.approx(EXPERTS.size / (EXPERTS.size + rounded_values))


def test_a_weight_of_several_products_is_stored_once_for_each_direction(tmp_path: Path) -> None:
    scheme = QuantizationScheme(8, accuracy_level=1)
    model = decoder(shared=True)
    rewrite = QuantizeWeights(scheme)
    rewrite(model)
    assert (rewrite.quantized, rewrite.left_in_float, rewrite.float_share) == (5, [], 0)
    packed = {name for name in model.graph.initializers if name.startswith("up") and not name.endswith("scales")}
    assert len(packed) == 2
    inner = (TABLE[IDS[0]] @ rounded(UP, scheme, 0) + BIAS) @ rounded(DOWN, scheme, 1).T
    expected = inner @ rounded(UP, scheme, 0) @ rounded(UP, scheme, 1).T @ rounded(TABLE, scheme, 1).T
    assert np.abs(run(model, tmp_path) - expected).max() < 0.02 * np.abs(expected).max()


def test_a_product_that_was_lost_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QuantizeWeights, "_quantize_matmul", lambda self, *_: setattr(self, "quantized", 7))
    with pytest.raises(CaptureError, match="of 3 products with constant weights 7 were quantized and 3 are left"):
        QuantizeWeights(QuantizationScheme(4))(decoder())


def test_products_of_activations_are_not_weights() -> None:
    model = decoder(dynamic=True)
    rewrite = QuantizeWeights(QuantizationScheme(4))
    rewrite(model)
    assert (rewrite.quantized, rewrite.left_in_float) == (3, [])
    assert [node.op_type for node in model.graph].count("MatMul") == 2


@pytest.mark.parametrize("bits", [4, 8])
def test_the_embedding_can_be_stored_in_8_bits(tmp_path: Path, bits: int) -> None:
    model = decoder()
    QuantizeWeights(QuantizationScheme(bits, 16, accuracy_level=1, embedding="int8"))(model)
    assert "table" not in model.graph.initializers
    gather = next(node for node in model.graph if node.op_type == "GatherBlockQuantized")
    rows = gather.outputs[0]
    rows.name, rows.shape, rows.type = "rows", ir.Shape(["B", "S", WIDTH]), ir.TensorType(ir.DataType.FLOAT)
    model.graph.outputs.append(rows)
    ir.save(model, tmp_path / "model.onnx")
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    blocks = TABLE.reshape(VOCAB, -1, 32)
    scale = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    expected = (np.rint(blocks / scale) * scale).reshape(TABLE.shape)
    np.testing.assert_allclose(session.run(["rows"], {"input_ids": IDS})[0], expected[IDS], rtol=1e-6)


def embedded(model: ir.Model, path: Path) -> NDArray[np.float32]:
    """What the model looks up for IDS, saved with its weights as a compile saves them."""
    gather = next(node for node in model.graph if node.inputs[1] is not None and node.inputs[1].name == "input_ids")
    (used,) = gather.outputs[0].consumers()
    rows = used.outputs[0] if used.op_type == "Slice" else gather.outputs[0]
    rows.name, rows.shape, rows.type = "rows", ir.Shape(["B", "S", WIDTH]), ir.TensorType(ir.DataType.FLOAT)
    model.graph.outputs.append(rows)
    save_graph(model, path)
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    result: NDArray[np.float32] = session.run(["rows"], {"input_ids": IDS})[0]
    return result


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("block_size", [16, 64, 128])  # the last is longer than a row
def test_a_shared_embedding_is_the_rows_of_the_quantized_head(
    tmp_path: Path, bits: int, symmetric: bool, block_size: int
) -> None:
    model = decoder()
    scheme = QuantizationScheme(bits, block_size, symmetric, accuracy_level=1, embedding="shared")
    rewrite = QuantizeWeights(scheme)
    rewrite(model)
    assert rewrite.embedding == "shared"
    assert "table" not in model.graph.initializers
    expected = rounded(TABLE, replace(scheme, block_size=min(block_size, WIDTH)), 1)[IDS]
    np.testing.assert_allclose(embedded(model, tmp_path / "model.onnx"), expected, rtol=1e-5, atol=1e-6)


def test_a_shared_embedding_is_stored_once(tmp_path: Path) -> None:
    """A graph saved by ONNX IR alone has the codes twice, and computes the same."""
    models = {name: decoder() for name in ("shared", "float", "twice")}
    for name, model in models.items():
        QuantizeWeights(
            QuantizationScheme(4, 16, accuracy_level=1, embedding="float" if name == "float" else "shared")
        )(model)
    twice = run(models["twice"], tmp_path)
    for name in ("shared", "float"):
        save_graph(models[name], tmp_path / f"{name}.onnx")
    sizes = {name: (tmp_path / f"{name}.onnx.data").stat().st_size for name in ("shared", "float", "model")}
    assert sizes["float"] - sizes["shared"] == TABLE.nbytes
    assert sizes["model"] - sizes["shared"] == TABLE.size // 2
    session = ort.InferenceSession(tmp_path / "shared.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(["logits"], {"input_ids": IDS})[0], twice)


def test_an_embedding_of_its_own_stays_in_float() -> None:
    model = decoder(shared=True)
    (gather,) = (node for node in model.graph if node.op_type == "Gather")
    other = TABLE + 1
    gather.replace_input_with(0, new_initializer(model.graph, "other", other))
    rewrite = QuantizeWeights(QuantizationScheme(4, embedding="shared"))
    rewrite(model)
    assert rewrite.embedding == "float"
    np.testing.assert_array_equal(model.graph.initializers["other"].const_value, other)


def test_progress_counts_every_weight() -> None:
    seen: list[tuple[int, int]] = []
    QuantizeWeights(QuantizationScheme(4), lambda done, total: seen.append((done, total)))(decoder())
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_a_graph_without_weights_is_refused() -> None:
    model = decoder()
    for node in list(model.graph):
        if node.op_type in ("MatMul", "Gemm"):
            node.op_type = "Elsewhere"
    with pytest.raises(CaptureError, match="no MatMul"):
        QuantizeWeights(QuantizationScheme(4))(model)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"bits": 3}, "bits must be 4 or 8"),
        ({"bits": 4, "block_size": 48}, "block size must be"),
        ({"bits": 4, "accuracy_level": 5}, "accuracy level must be 0 to 4, got 5"),
        ({"bits": 4, "accuracy_level": -1}, "accuracy level"),
        ({"bits": 4, "head": False, "embedding": "shared"}, "leave out --no-quantize-head, or --embedding"),
    ],
)
def test_a_scheme_that_is_not_offered_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        QuantizationScheme(**arguments)


@pytest.mark.parametrize("scheme", [QuantizationScheme(8, 0), QuantizationScheme(8, 32, format="fp8")])
def test_what_onnxruntime_has_no_kernel_for_is_refused(scheme: QuantizationScheme) -> None:
    with pytest.raises(UsageError, match="integers in blocks"):
        NBits(scheme)


def test_the_root_logger_stays_as_it_was() -> None:
    before = (list(logging.getLogger().handlers), logging.getLogger().level)
    QuantizeWeights(QuantizationScheme(4))
    assert (list(logging.getLogger().handlers), logging.getLogger().level) == before
