"""Weights as codes and scales in standard ONNX: closed forms, numbers of the graph, and that TensorRT builds them."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftc.export.qdq import Dequantize, round_blocks
from draftc.export.quantize import QuantizeWeights
from draftc.export.scheme import QuantizationScheme
from draftc.export.tensorrt import Built, build_engine
from draftc.runtime.errors import UsageError
from draftc.runtime.graphio import GraphSpec, TensorSpec
from draftc.runtime.records import Profile, Range
from tests.export.sketch import Sketch, count, run

Array = NDArray[Any]
FLOAT, FLOAT16 = ir.DataType.FLOAT, ir.DataType.FLOAT16
RNG = np.random.default_rng(0)
VOCAB, WIDTH, INNER = 48, 64, 96
IDS = np.arange(12, dtype=np.int64)[None] * 5 % VOCAB  # (1, 12)
DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
SMALLEST = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}  # above zero


def dequantized(codes: Array, scales: Array) -> Array:
    """codes · scale in float64, whatever the blocks."""
    wide = codes.astype(np.float64)
    if scales.ndim == 2:
        return wide * np.repeat(scales.astype(np.float64), codes.shape[0] // scales.shape[0], axis=0)
    return wide * scales.astype(np.float64)


# Closed forms


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [0, 16, 32])
@pytest.mark.parametrize("bits", [4, 8])
def test_no_entry_is_off_by_more_than_half_a_step(bits: int, block: int, dtype: Any) -> None:
    matrix = RNG.normal(size=(64, 5)).astype(dtype)
    codes, scales = round_blocks(matrix, bits, block)
    assert scales.dtype == matrix.dtype
    assert codes.dtype == (ml_dtypes.int4 if bits == 4 else np.int8)
    assert codes.shape == matrix.shape
    assert scales.shape == ((64 // block, 5) if block else (5,))
    steps = np.broadcast_to(np.repeat(np.atleast_2d(scales), block or 64, axis=0), matrix.shape).astype(np.float64)
    error = np.abs(dequantized(codes, scales) - matrix.astype(np.float64))
    # The largest entry of a block may be past the last code by what rounding the scale to its type took from it.
    slack = 2 ** (bits - 1) * EPS[np.dtype(dtype).name] / 2
    assert (error <= steps * (0.5 + slack) * (1 + 1e-6)).all()
    inner = np.abs(codes.astype(np.int64)) < 2 ** (bits - 1) - 1
    assert (error <= steps * (0.5 + 1e-6))[inner].all()


@pytest.mark.parametrize("bits", [4, 8])
def test_every_code_is_used_the_most_negative_one_too(bits: int) -> None:
    """Whole numbers from -2^(b-1) to 2^(b-1) - 1 times a step come back exactly, at the smallest possible scale."""
    top = 2 ** (bits - 1)
    column = np.arange(-top, top, dtype=np.float32)[:, None] * np.float32(0.25)
    codes, scales = round_blocks(column, bits, 0)
    np.testing.assert_array_equal(codes.astype(np.int64)[:, 0], np.arange(-top, top))
    np.testing.assert_array_equal(scales, [0.25])
    codes, scales = round_blocks(-column, bits, 0)  # here the extreme is positive, and one code is left
    np.testing.assert_allclose(scales, [0.25 * top / (top - 1)], rtol=1e-6)
    assert codes.astype(np.int64).max() == top - 1


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_numbers_too_small_for_a_scale_are_zeros(fp8: bool, dtype: Any) -> None:
    matrix = np.zeros((32, 3), dtype)
    matrix[0, 1] = SMALLEST[np.dtype(dtype).name]
    matrix[:, 2] = 1
    codes, scales = round_blocks(matrix, 8, 0, fp8)
    assert np.isfinite(scales.astype(np.float32)).all()
    assert not codes.astype(np.float32)[:, :2].any()
    assert (dequantized(codes, scales)[:, 2] == 1).all() or abs(dequantized(codes, scales)[0, 2] - 1) < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_is_the_nearest_e4m3_number_of_the_scaled_weight(dtype: Any) -> None:
    matrix = RNG.normal(size=(64, 7)).astype(dtype)
    codes, scales = round_blocks(matrix, 8, 0, fp8=True)
    assert codes.dtype == ml_dtypes.float8_e4m3fn
    assert scales.dtype == matrix.dtype
    np.testing.assert_array_equal(
        scales.astype(np.float32), (np.abs(matrix.astype(np.float32)).max(0) / 448).astype(dtype).astype(np.float32)
    )
    everyone = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    everyone = everyone[np.isfinite(everyone)]
    scaled = matrix.astype(np.float64) / scales.astype(np.float64)
    best = np.abs(scaled[..., None] - everyone).min(-1)
    chosen = np.abs(scaled - codes.astype(np.float64))
    np.testing.assert_allclose(chosen, best, rtol=0, atol=448 * 2**-24)  # float32's quotient may move a tie


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 16, 32]), st.sampled_from([4, 8]), st.floats(-6, 3))
def test_a_power_of_two_changes_scales_and_no_code(seed: int, block: int, bits: int, exponent: float) -> None:
    matrix = np.random.default_rng(seed).normal(size=(32, 4)).astype(np.float32)
    factor = np.float32(2.0 ** round(exponent))
    codes, scales = round_blocks(matrix, bits, block)
    same, larger = round_blocks(matrix * factor, bits, block)
    np.testing.assert_array_equal(codes.astype(np.int8), same.astype(np.int8))
    np.testing.assert_array_equal(scales * factor, larger)


# In a graph


def decoder(dtype: ir.DataType = FLOAT, *, rows: int = WIDTH) -> tuple[ir.Model, dict[str, Array]]:
    """input_ids → table → Gemm (K, N) + bias → MatMul by a transposed weight → head tied to the table → logits.

    `rows` is the K of the first product. Returns the weights, too.
    """
    rng = np.random.default_rng(1)
    sketch = Sketch()
    ids = sketch.input("input_ids", ir.DataType.INT64, ["B", "S"])
    shapes = {"table": (VOCAB, rows), "up": (rows, INNER), "down": (rows, INNER), "bias": (INNER,)}
    arrays = {name: (rng.normal(size=shape) / 8).astype(dtype.numpy()) for name, shape in shapes.items()}
    table, up, down, bias = (sketch.weight(arrays[name]) for name in shapes)
    flat = sketch("Reshape", sketch("Gather", table, ids), [-1, rows])  # (S, d)
    inner = sketch("Gemm", flat, up, bias)
    back = sketch("MatMul", inner, sketch("Transpose", down, perm=[1, 0]))
    logits = sketch("MatMul", back, sketch("Transpose", table, perm=[1, 0]))
    return sketch.model(logits=sketch("Cast", logits, to=int(FLOAT))), arrays


def scheme_of(precision: str, block: int) -> QuantizationScheme:
    bits = 4 if precision == "int4" else 8
    return QuantizationScheme(bits, block, format="fp8" if precision == "fp8" else "int")


def expected(arrays: dict[str, Array], scheme: QuantizationScheme) -> Array:
    def rounded(matrix: Array) -> Array:
        return dequantized(*round_blocks(matrix, scheme.bits, scheme.block_size, scheme.format == "fp8"))

    inner = arrays["table"][IDS[0]] @ rounded(arrays["up"]) + arrays["bias"]
    result: Array = inner @ rounded(arrays["down"].T) @ rounded(arrays["table"].T)
    return result


FORMS = [("int8", 0), ("int8", 32), ("int4", 0), ("int4", 16), ("int4", 32), ("fp8", 0)]


@pytest.mark.parametrize(("precision", "block"), FORMS)
def test_every_product_has_the_dequantized_weight(precision: str, block: int) -> None:
    model, arrays = decoder()
    scheme = scheme_of(precision, block)
    plain = run(model, {"input_ids": IDS})[0]
    rewrite = QuantizeWeights(scheme, form=Dequantize(scheme))
    rewrite(model)
    assert (rewrite.quantized, rewrite.left_in_float, rewrite.float_share) == (3, [], 0)
    assert count(model, "DequantizeLinear") == count(model, "MatMul") == 3
    assert {node.domain for node in model.graph} == {""}
    codes = {v.dtype for node in model.graph if node.op_type == "DequantizeLinear" for v in node.inputs[:1] if v}
    assert codes == {{"int4": ir.DataType.INT4, "int8": ir.DataType.INT8, "fp8": ir.DataType.FLOAT8E4M3FN}[precision]}
    (actual,) = run(model, {"input_ids": IDS})
    np.testing.assert_allclose(actual, expected(arrays, scheme), rtol=0, atol=1e-5)
    assert np.abs(actual - plain).max() > 1e-3  # rounding shows, so a float weight would


def test_a_half_typed_graph_has_half_typed_scales_and_the_same_numbers() -> None:
    model, arrays = decoder(FLOAT16)
    scheme = scheme_of("int4", 32)
    QuantizeWeights(scheme, form=Dequantize(scheme))(model)
    wide = [v for node in model.graph if node.op_type == "DequantizeLinear" for v in (*node.inputs[1:], *node.outputs)]
    assert {value.dtype for value in wide if value} == {FLOAT16}
    (actual,) = run(model, {"input_ids": IDS})
    np.testing.assert_allclose(actual, expected(arrays, scheme), rtol=0, atol=0.02 * np.abs(actual).max())


def test_a_weight_that_does_not_divide_into_blocks_has_one_scale_per_output() -> None:
    """72 inputs and blocks of 32: not the product with 96 inputs, but the others."""
    model, arrays = decoder(rows=72)
    scheme = scheme_of("int4", 32)
    rewrite = QuantizeWeights(scheme, form=Dequantize(scheme))
    rewrite(model)
    assert rewrite.quantized == 3
    forms = [dict(node.attributes) for node in model.graph if node.op_type == "DequantizeLinear"]
    blocks = [form["block_size"].as_int() if "block_size" in form else 0 for form in forms]
    assert sorted(blocks) == [0, 0, 32]
    assert {form["axis"].as_int() for form in forms if "block_size" not in form} == {1}
    (actual,) = run(model, {"input_ids": IDS})
    inner = arrays["table"][IDS[0]] @ dequantized(*round_blocks(arrays["up"], 4, 0)) + arrays["bias"]
    inner = inner @ dequantized(*round_blocks(arrays["down"].T, 4, 32))
    closed = inner @ dequantized(*round_blocks(arrays["table"].T, 4, 0))
    np.testing.assert_allclose(actual, closed, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        (QuantizationScheme(4, 32, symmetric=False), "no zero points: use --symmetric"),
        (QuantizationScheme(4, 32, embedding="int8"), "leave out --embedding"),
        (QuantizationScheme(8, 256), "16 to 128 weights, got 256"),
        (QuantizationScheme(8, 32, format="fp8"), "one scale per output: use --block-size 0"),
    ],
)
def test_what_the_form_lacks_is_refused(scheme: QuantizationScheme, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Dequantize(scheme)


# In TensorRT


def engine(folder: Path, width: int, scheme: QuantizationScheme | None) -> Built:
    """Two square products, of which one has a transposed weight, as linear layers come out of PyTorch."""
    rng = np.random.default_rng(2)
    sketch = Sketch()
    hidden = sketch.input("x", FLOAT16, ["B", width])
    for transposed in (True, False):
        weight = sketch.weight((rng.normal(size=(width, width)) / 16).astype(np.float16))
        hidden = sketch("MatMul", hidden, sketch("Transpose", weight, perm=[1, 0]) if transposed else weight)
    model = sketch.model(logits=hidden)
    if scheme is not None:
        QuantizeWeights(scheme, form=Dequantize(scheme))(model)
    ir.save(model, folder / "model.onnx", external_data="model.onnx.data")
    tensors = [TensorSpec(name, "float16", ("B", width)) for name in ("x", "logits")]
    spec = GraphSpec((tensors[0],), (tensors[1],))
    rows, one = Range(min=1, opt=1, max=8), Range(min=1, opt=1, max=1)
    profile = Profile(name="decode", batch=rows, tokens=one, rows=one)
    paths = folder / "model.onnx", folder / "engine", folder / "log"
    return build_engine("tensorrt-rtx", paths[0], spec, (profile,), ("89",), paths[1], paths[2])


@pytest.mark.parametrize(
    ("precision", "block", "fused"),
    [
        ("int8", 0, True),
        ("int8", 32, False),
        ("int8", 128, False),
        ("int4", 0, False),
        ("int4", 16, True),
        ("int4", 32, True),
        ("int4", 128, True),
        ("fp8", 0, True),
    ],
)
def test_tensorrt_rtx_builds_it(tmp_path: Path, precision: str, block: int, fused: bool) -> None:
    """The engine holds codes and scales. Where the product is not fused with them, a widened weight is an activation;
    int8 in blocks, and int4 without them, are therefore no default of ours.
    """
    pytest.importorskip("tensorrt_rtx")
    width = 512
    plain = engine(tmp_path, width, None)
    built = engine(tmp_path, width, scheme_of(precision, block))
    assert plain.weights_bytes == pytest.approx(2 * 2 * width**2, abs=4096)
    codes = width**2 // 2 if precision == "int4" else width**2
    scales = 2 * width * (width // block if block else 1)
    assert built.weights_bytes == pytest.approx(2 * (codes + scales), abs=4096)
    widened = built.activation_bytes[0] - plain.activation_bytes[0]
    assert widened == (0 if fused else 2 * width**2)


@pytest.mark.parametrize(("bits", "block", "fp8"), [(8, 0, False), (8, 0, True), (4, 16, False)])
def test_an_output_of_zeros_has_a_scale_above_zero(bits: int, block: int, fp8: bool) -> None:
    """As the head has for a padding token whose embedding is zero: TensorRT's parser refuses a scale of 0."""
    matrix = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float16)
    matrix[:, 1] = 0
    matrix[:, 2] = 1e-7  # whose scale is no fp16 number above 0
    codes, scales = round_blocks(matrix, bits, block, fp8)
    assert (scales > 0).all()
    assert (codes[:, 1:].astype(np.float32) == 0).all()
