"""Each fusion alone, on graphs built by hand: the numbers stay, and what is not exactly of the form stays too."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from draftc.export.fusions import FuseRMSNormalization, FuseRotaryEmbedding
from tests.export.sketch import Sketch, count, run

FLOAT, FLOAT16 = ir.DataType.FLOAT, ir.DataType.FLOAT16
RNG = np.random.default_rng(0)
WIDTH = 16
EPSILON = 0.25  # large enough to be noticed where it is lost
WEIGHT = RNG.normal(size=WIDTH).astype(np.float32)
HIDDEN = RNG.normal(size=(2, 5, WIDTH)).astype(np.float32)

Array = NDArray[Any]


def unchanged(model: ir.Model, rewrite: FuseRMSNormalization | FuseRotaryEmbedding) -> bool:
    before = ir.to_proto(model).SerializeToString()
    modified = rewrite(model).modified
    return not modified and rewrite.fused == 0 and ir.to_proto(model).SerializeToString() == before


# Root-mean-square norms


def norm(
    x: ir.Value,
    sketch: Sketch,
    *,
    axes: tuple[int, ...] = (-1,),
    power: float = 2.0,
    squared: ir.Value | None = None,
    keepdims: int = 1,
    epsilon: "Array | float" = EPSILON,
    swap: bool = False,
) -> ir.Value:
    """x · 1/√(mean(x²) + ε), as the exporter writes it; `swap` turns the factors round."""
    square = sketch("Pow", squared if squared is not None else x, power)
    mean = sketch("ReduceMean", square, list(axes), keepdims=keepdims)
    inverse = sketch("Reciprocal", sketch("Sqrt", sketch("Add", mean, epsilon)))
    return sketch("Mul", inverse, x) if swap else sketch("Mul", x, inverse)


@pytest.mark.parametrize("swap", [False, True])
def test_a_float32_norm(swap: bool) -> None:
    sketch = Sketch()
    x = sketch.input("x", FLOAT, ["B", "S", WIDTH])
    normalized, weight = norm(x, sketch, swap=swap), sketch.weight(WEIGHT)
    model = sketch.model(y=sketch("Mul", *((normalized, weight) if swap else (weight, normalized))))
    (expected,) = run(model, {"x": HIDDEN})
    rewrite = FuseRMSNormalization()
    assert rewrite(model).modified
    assert ([node.op_type for node in model.graph], rewrite.fused) == (["RMSNormalization"], 1)
    (actual,) = run(model, {"x": HIDDEN})
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    closed = HIDDEN / np.sqrt((HIDDEN**2).mean(-1, keepdims=True) + EPSILON) * WEIGHT
    np.testing.assert_allclose(actual, closed, rtol=1e-5, atol=1e-6)


def half_norm(form: str, scale: float = 1.0) -> tuple[ir.Model, Array]:
    """fp16 in and out. "before": back in fp16 before a weight in fp16; "behind": behind a weight in float32."""
    sketch = Sketch()
    x = sketch.input("x", FLOAT16, ["B", "S", WIDTH])
    normalized = norm(sketch("Cast", x, to=int(FLOAT)), sketch)
    if form == "before":
        y = sketch("Mul", sketch.weight(WEIGHT.astype(np.float16)), sketch("Cast", normalized, to=int(FLOAT16)))
    else:
        y = sketch("Cast", sketch("Mul", normalized, sketch.weight(WEIGHT)), to=int(FLOAT16))
    return sketch.model(y=y), (HIDDEN * scale).astype(np.float16)


@pytest.mark.parametrize(("form", "left"), [("before", []), ("behind", ["Cast", "Cast"])])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 300.0])
def test_a_half_typed_norm_is_rounded_where_it_was(form: str, left: list[str], scale: float) -> None:
    """At 300, a mean of squares in fp16 would be infinite; at 1e-3, zero."""
    model, x = half_norm(form, scale)
    (expected,) = run(model, {"x": x})
    rewrite = FuseRMSNormalization()
    rewrite(model)
    assert rewrite.fused == 1
    assert sorted(node.op_type for node in model.graph) == [*left, "RMSNormalization"]
    (fused,) = (node for node in model.graph if node.op_type == "RMSNormalization")
    types = FLOAT16 if form == "before" else FLOAT
    assert {value.dtype for value in (*fused.inputs, *fused.outputs) if value} == {types}
    assert fused.attributes.get_int("stash_type", 0) == FLOAT
    (actual,) = run(model, {"x": x})
    assert actual.dtype == np.float16
    assert np.isfinite(actual).all()
    # A float32 sum in another order may fall on the other side of one rounding: one unit in the last place.
    unit = np.spacing(np.abs(expected))
    assert (np.abs(actual.astype(np.float64) - expected) <= unit).all()
    assert (actual == expected).mean() > 0.95


def test_norms_that_share_their_input_and_an_inner_value_that_is_also_an_output() -> None:
    sketch = Sketch()
    x = sketch.input("x", FLOAT, ["B", "S", WIDTH])
    normalized = norm(x, sketch)
    first = sketch("Mul", sketch.weight(WEIGHT), normalized)
    second = sketch("Mul", sketch.weight(WEIGHT + 1), norm(x, sketch))
    model = sketch.model(y=first, z=second, kept=normalized)
    expected = run(model, {"x": HIDDEN})
    rewrite = FuseRMSNormalization()
    rewrite(model)
    assert rewrite.fused == 2
    assert count(model, "ReduceMean") == 1  # of `kept`
    for actual, wanted in zip(run(model, {"x": HIDDEN}), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6)


SQUARE = 5  # B and S are as large here, so that wrong axes still have fitting shapes
CUBE = RNG.normal(size=(SQUARE, SQUARE, SQUARE)).astype(np.float32)
NOT_A_NORM: dict[str, Callable[[Sketch, ir.Value], ir.Value]] = {
    "other axis": lambda s, x: s("Mul", s.weight(WEIGHT[:SQUARE]), norm(x, s, axes=(-2,))),
    "two axes": lambda s, x: s("Mul", s.weight(WEIGHT[:SQUARE]), norm(x, s, axes=(-2, -1))),
    "dimension dropped": lambda s, x: s("Mul", s.weight(WEIGHT[:SQUARE]), norm(x, s, keepdims=0)),
    "third power": lambda s, x: s("Mul", s.weight(WEIGHT[:SQUARE]), norm(x, s, power=3.0)),
    "squares of another value": lambda s, x: s("Mul", s.weight(WEIGHT[:SQUARE]), norm(x, s, squared=s("Abs", x))),
    "an epsilon for each channel": lambda s, x: s(
        "Mul", s.weight(WEIGHT[:SQUARE]), norm(x, s, epsilon=np.full(SQUARE, EPSILON, np.float32))
    ),
    "epsilon outside the root": lambda s, x: s(
        "Mul",
        s.weight(WEIGHT[:SQUARE]),
        s("Mul", x, s("Reciprocal", s("Add", s("Sqrt", s("ReduceMean", s("Pow", x, 2.0), [-1])), EPSILON))),
    ),
    "no weight": lambda s, x: norm(x, s),
    "a weight for each position": lambda s, x: s("Mul", s.weight(np.ones((SQUARE, SQUARE), np.float32)), norm(x, s)),
    "sum": lambda s, x: s(
        "Mul",
        s.weight(WEIGHT[:SQUARE]),
        s("Mul", x, s("Reciprocal", s("Sqrt", s("Add", s("ReduceSum", s("Pow", x, 2.0), [-1]), EPSILON)))),
    ),
}


@pytest.mark.parametrize("form", NOT_A_NORM)
def test_what_is_no_norm_stays(form: str) -> None:
    sketch = Sketch()
    x = sketch.input("x", FLOAT, [SQUARE, SQUARE, SQUARE])
    model = sketch.model(y=NOT_A_NORM[form](sketch, x))
    run(model, {"x": CUBE})  # it is a graph that runs
    assert unchanged(model, FuseRMSNormalization())


def test_the_sketch_of_what_is_no_norm_differs_from_a_norm_in_one_thing() -> None:
    """So that the cases above are refused for what they name."""
    sketch = Sketch()
    x = sketch.input("x", FLOAT, [SQUARE, SQUARE, SQUARE])
    model = sketch.model(y=sketch("Mul", sketch.weight(WEIGHT[:SQUARE]), norm(x, sketch)))
    rewrite = FuseRMSNormalization()
    rewrite(model)
    assert rewrite.fused == 1


@pytest.mark.parametrize("source", ["bfloat16", "float32"])
def test_a_norm_that_changes_the_type_stays(source: str) -> None:
    """bf16 or float32 in, fp16 out: RMSNormalization has one type."""
    sketch = Sketch()
    dtype = ir.DataType.BFLOAT16 if source == "bfloat16" else FLOAT
    x = sketch.input("x", dtype, ["B", "S", WIDTH])
    wide = sketch("Cast", x, to=int(FLOAT)) if source == "bfloat16" else x
    narrow = sketch("Cast", norm(wide, sketch), to=int(FLOAT16))
    model = sketch.model(y=sketch("Mul", sketch.weight(WEIGHT.astype(np.float16)), narrow))
    assert unchanged(model, FuseRMSNormalization())


# Rotary embeddings

HEADS, LENGTH, DIM = 4, 4, 8  # as many heads as positions: axes that are mixed up still have fitting shapes
QUERY = RNG.normal(size=(2, HEADS, LENGTH, DIM)).astype(np.float32)
ANGLES = RNG.uniform(0, 6, size=(2, LENGTH, DIM // 2)).astype(np.float32)
OTHERS = ANGLES[..., ::-1].copy()
Rotate = Callable[[Sketch, ir.Value], ir.Value]


def part(sketch: Sketch, x: ir.Value, start: int, end: int, step: int = 1) -> ir.Value:
    return sketch("Slice", x, [start], [end], [3], [step])


def rotate_half(sketch: Sketch, x: ir.Value) -> ir.Value:
    second = part(sketch, x, DIM // 2, 2**63 - 1)
    return sketch("Concat", sketch("Neg", second), part(sketch, x, 0, DIM // 2), axis=-1)


def rotate_pairs(sketch: Sketch, x: ir.Value) -> ir.Value:
    """(x1, x2, x3, x4) → (-x2, x1, -x4, x3)."""
    even, odd = part(sketch, x, 0, DIM, 2), sketch("Neg", part(sketch, x, 1, DIM, 2))
    pairs = [sketch("Unsqueeze", values, [-1]) for values in (odd, even)]
    return sketch("Reshape", sketch("Concat", *pairs, axis=-1), [0, 0, 0, DIM])


def rotate_other_way(sketch: Sketch, x: ir.Value) -> ir.Value:
    return sketch("Concat", part(sketch, x, DIM // 2, DIM), sketch("Neg", part(sketch, x, 0, DIM // 2)), axis=-1)


def rotate_one_half_twice(sketch: Sketch, x: ir.Value) -> ir.Value:
    half = part(sketch, x, DIM // 2, DIM)
    return sketch("Concat", sketch("Neg", half), half, axis=-1)


def rotate_quarters(sketch: Sketch, x: ir.Value) -> ir.Value:
    return sketch("Concat", sketch("Neg", part(sketch, x, DIM // 4, DIM)), part(sketch, x, 0, DIM // 4), axis=-1)


def rotation(
    *,
    rotate: Rotate = rotate_half,
    same: bool = True,
    table_axis: int = -1,
    heads_axis: int = 1,
    scale: float = 1.0,
    combine: str = "Add",
    half: bool = False,
    swap: bool = False,
    tables: int | str = "B",
    of: Callable[[Sketch, ir.Value], ir.Value] = lambda sketch, x: x,
) -> ir.Model:
    """x · cos + rotate(x) · sin, with tables cos([a, a]), sin([a, a]) of the angles a, or of [a, b] if not `same`."""
    sketch = Sketch()
    dtype = FLOAT16 if half else FLOAT
    x = sketch.input("x", dtype, ["B", HEADS, LENGTH, DIM])
    a = sketch.input("a", FLOAT, [tables, LENGTH, DIM // 2])
    b = a if same else sketch.input("b", FLOAT, ["B", LENGTH, DIM // 2])
    if table_axis == 1:  # a table that repeats along the positions instead
        a = b = sketch("Reshape", a, [0, LENGTH // 2, DIM])
    angles = sketch("Concat", a, b, axis=table_axis)
    factors = []
    for function in ("Cos", "Sin"):
        table = sketch("Mul", sketch(function, angles), scale)
        if half:
            table = sketch("Cast", table, to=int(FLOAT16))
        factors.append(sketch("Unsqueeze", table, [heads_axis]))
    pairs = (x, factors[0]), (rotate(sketch, of(sketch, x)), factors[1])
    products = [sketch("Mul", *(pair[::-1] if swap else pair)) for pair in pairs]
    return sketch.model(y=sketch(combine, *(products[::-1] if swap else products)))


def feeds(model: ir.Model) -> dict[str, Array]:
    x = QUERY.astype(np.float16 if model.graph.inputs[0].dtype == FLOAT16 else np.float32)
    rows = 1 if model.graph.inputs[1].shape[0] == 1 else 2  # type: ignore[index]
    given = {"x": x, "a": ANGLES[:rows], "b": OTHERS}
    return {value.name: given[value.name] for value in model.graph.inputs if value.name}


@pytest.mark.parametrize(
    "form", [{}, {"swap": True}, {"scale": 1.25}, {"half": True}, {"half": True, "scale": 1.25}], ids=str
)
def test_a_rotation(form: dict[str, Any]) -> None:
    model = rotation(**form)
    (expected,) = run(model, feeds(model))
    rewrite = FuseRotaryEmbedding()
    assert rewrite(model).modified
    assert rewrite.fused == count(model, "RotaryEmbedding") == 1
    assert not count(model, "Neg")
    (actual,) = run(model, feeds(model))
    tolerance = 4e-3 if form.get("half") else 1e-6  # fp16 rounds both products and their sum, or only the result
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)
    turned = np.concatenate((-QUERY[..., DIM // 2 :], QUERY[..., : DIM // 2]), -1)
    angles = np.concatenate((ANGLES, ANGLES), -1)[:, None]
    closed = (QUERY * np.cos(angles) + turned * np.sin(angles)) * form.get("scale", 1.0)
    np.testing.assert_allclose(actual, closed, rtol=0, atol=8e-3 if form.get("half") else 1e-6)


def test_query_and_key_share_the_halves_of_their_tables() -> None:
    sketch = Sketch()
    query = sketch.input("q", FLOAT, ["B", HEADS, LENGTH, DIM])
    key = sketch.input("k", FLOAT, ["B", 1, LENGTH, DIM])
    a = sketch.input("a", FLOAT, ["B", LENGTH, DIM // 2])
    angles = sketch("Concat", a, a, axis=-1)
    cos, sin = (sketch("Unsqueeze", sketch(function, angles), [1]) for function in ("Cos", "Sin"))
    rotated = {
        name: sketch("Add", sketch("Mul", x, cos), sketch("Mul", rotate_half(sketch, x), sin))
        for name, x in (("y", query), ("z", key))
    }
    model = sketch.model(**rotated)
    given = {"q": QUERY, "k": QUERY[:, :1], "a": ANGLES}
    expected = run(model, given)
    rewrite = FuseRotaryEmbedding()
    rewrite(model)
    assert rewrite.fused == 2
    assert count(model, "Slice") == 2
    for actual, wanted in zip(run(model, given), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "form",
    [
        {"rotate": rotate_pairs},
        {"rotate": rotate_other_way},
        {"rotate": rotate_quarters},
        {"rotate": rotate_one_half_twice},
        {"same": False},
        {"combine": "Sub"},
        {"table_axis": 1},
        {"heads_axis": 2},
        {"tables": 1},
        {"of": lambda sketch, x: sketch("Abs", x)},
    ],
    ids=[
        *(
            "interleaved pairs",
            "the other way round",
            "quarters",
            "one half twice",
            "halves that differ",
            "a difference",
        ),
        *("a table that repeats along positions", "heads on another axis", "a table for all rows", "two different x"),
    ],
)
def test_what_is_no_rotation_of_halves_stays(form: dict[str, Any]) -> None:
    model = rotation(**form)
    run(model, feeds(model))  # it is a graph that runs
    assert unchanged(model, FuseRotaryEmbedding())


def test_an_unknown_head_width_stays() -> None:
    model = rotation()
    model.graph.inputs[0].shape = ir.Shape(["B", HEADS, LENGTH, "D"])
    assert unchanged(model, FuseRotaryEmbedding())
