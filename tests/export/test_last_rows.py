"""The selection of rows moves up through what computes each row by itself, and stops in front of what does not."""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from draftc.export.last_rows import SelectRowsEarly
from draftc.runtime.graphio import LOGIT_POSITIONS
from tests.export.sketch import Array, Sketch, count, run

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64
SIZE, WIDE, VOCAB = 6, 10, 7
RNG = np.random.default_rng(0)
Body = Callable[[Sketch, ir.Value], ir.Value]


def matrix(rows: int, columns: int) -> Array:
    return RNG.normal(size=(rows, columns)).astype(np.float32)


def decoder(body: Body, *shown: str) -> ir.Model:
    """x (B, S, SIZE) → `body` → the rows that are asked for → a head. `shown` values are outputs as well."""
    sketch = Sketch()
    x = sketch.input("x", FLOAT, ["B", "S", SIZE])
    positions = sketch.input(LOGIT_POSITIONS, INT64, ["B", "R"])
    y = body(sketch, x)
    rows = sketch("Unsqueeze", positions, [-1])
    rows = sketch("GatherElements", y, sketch("Expand", rows, [1, 1, SIZE]), axis=1)
    outputs = {"logits": sketch("MatMul", rows, matrix(SIZE, VOCAB))}
    named = {value.name: value for node in sketch.graph for value in node.outputs}
    return sketch.model(**outputs, **{name: named[name] for name in shown})


def gated(sketch: Sketch, x: ir.Value) -> ir.Value:
    """A layer behind its attention: a norm, gate and up, a bias, down, and the sum that bypasses them."""
    norm = sketch("RMSNormalization", x, np.ones(SIZE, np.float32), axis=-1)
    gate = sketch("Add", sketch("MatMul", norm, matrix(SIZE, WIDE)), RNG.normal(size=WIDE).astype(np.float32))
    product = sketch("Mul", sketch("Sigmoid", gate), sketch("MatMul", norm, matrix(SIZE, WIDE)))
    return sketch("Add", x, sketch("MatMul", product, matrix(WIDE, SIZE)))


def tokens_mixed(sketch: Sketch, x: ir.Value) -> ir.Value:
    """Each row plus the sum of all rows before it, and a product."""
    return sketch("MatMul", sketch("Add", x, sketch("CumSum", x, np.array(1, np.int64))), matrix(SIZE, SIZE))


def feeds(batch: int = 2, width: int = 5, rows: int = 3) -> dict[str, Array]:
    x = RNG.normal(size=(batch, width, SIZE)).astype(np.float32)
    return {"x": x, LOGIT_POSITIONS: RNG.integers(0, width, (batch, rows))}


@pytest.mark.parametrize(("body", "moved"), [(gated, 3), (tokens_mixed, 1)])
def test_the_logits_stay_and_the_products_see_only_the_rows_that_are_asked_for(body: Body, moved: int) -> None:
    model = decoder(body)
    call = feeds()
    before = run(model, call)[0]
    rewrite = SelectRowsEarly()
    rewrite(model)
    assert rewrite.moved == moved
    np.testing.assert_allclose(run(model, call)[0], before, rtol=0, atol=1e-5)
    selections = [node for node in model.graph if node.op_type == "GatherElements"]
    assert len(selections) == (1 if body is gated else 2)  # x alone; the sum is of rows, its second term is not
    products = [node for node in model.graph if node.op_type == "MatMul"]
    assert min(map(list(model.graph).index, products)) > max(map(list(model.graph).index, selections))


def test_what_someone_else_reads_stays_whole() -> None:
    def body(sketch: Sketch, x: ir.Value) -> ir.Value:
        hidden = sketch("MatMul", x, matrix(SIZE, SIZE))
        hidden.name = "hidden"
        return sketch("MatMul", sketch("Tanh", hidden), matrix(SIZE, SIZE))

    model = decoder(body, "hidden")
    call = feeds()
    before = run(model, call)
    rewrite = SelectRowsEarly()
    rewrite(model)
    assert rewrite.moved == 1
    for got, want in zip(run(model, call), before, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "stop",
    [
        lambda s, x: s("Softmax", x, axis=1),
        lambda s, x: s("LayerNormalization", x, np.ones((5, SIZE), np.float32), axis=1),
        lambda s, x: s("Add", x, RNG.normal(size=(1, 5, SIZE)).astype(np.float32)),
        lambda s, x: s("ReduceMean", x, [1]),
        lambda s, x: s("MatMul", RNG.normal(size=(5, 5)).astype(np.float32), x),
        lambda s, x: s("Transpose", s("Transpose", x, perm=[0, 2, 1]), perm=[0, 2, 1]),
    ],
    ids=["softmax over rows", "norm over rows", "constant by row", "mean over rows", "product from the left", "turned"],
)
def test_it_stops_in_front_of_what_mixes_or_tells_rows_apart(stop: Body) -> None:
    def body(sketch: Sketch, x: ir.Value) -> ir.Value:
        return sketch("MatMul", sketch("Add", x, stop(sketch, sketch("Relu", x))), matrix(SIZE, SIZE))

    model = decoder(body)
    call = feeds()
    before = run(model, call)[0]
    SelectRowsEarly()(model)
    np.testing.assert_allclose(run(model, call)[0], before, rtol=0, atol=1e-5)


def test_without_a_product_to_save_nothing_changes() -> None:
    model = decoder(lambda sketch, x: sketch("Relu", x))
    rewrite = SelectRowsEarly()
    assert not rewrite(model).modified
    assert (rewrite.moved, count(model, "GatherElements")) == (0, 1)
