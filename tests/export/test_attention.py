"""Attention written out, against ONNX Runtime's own kernel and against the formula in float64."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from draftc.export.attention import DecomposeAttention
from draftc.export.lowering import lower
from draftc.runtime.errors import CaptureError
from tests.export.sketch import Sketch, count, run

FLOAT, FLOAT16, BOOL = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BOOL
TOKENS, LENGTH = 5, 24  # S, L

Array = NDArray[Any]


@dataclass(frozen=True)
class Case:
    """One Attention node over a cache of LENGTH slots, and a batch of two rows that hold 3 and 11 tokens."""

    heads: int = 4
    kv_heads: int = 4
    key: int = 16
    value: int = 16
    softcap: float | None = None
    scale: float | None = 0.3
    window: int = LENGTH
    dtype: ir.DataType = FLOAT
    size: float = 1.0  # of queries and keys

    def model(self) -> ir.Model:
        sketch = Sketch()
        q = sketch.input("q", self.dtype, ["B", self.heads, "S", self.key])
        k = sketch.input("k", self.dtype, ["B", self.kv_heads, LENGTH, self.key])
        v = sketch.input("v", self.dtype, ["B", self.kv_heads, LENGTH, self.value])
        mask = sketch.input("mask", BOOL, ["B", 1, "S", LENGTH])
        numbers = {"scale": self.scale, "softcap": self.softcap}
        y = sketch("Attention", q, k, v, mask, **{name: x for name, x in numbers.items() if x is not None})
        return sketch.model(y=y)

    def feeds(self) -> dict[str, Array]:
        rng = np.random.default_rng(0)
        dtype = self.dtype.numpy()
        shapes = {"q": (self.heads, TOKENS), "k": (self.kv_heads, LENGTH), "v": (self.kv_heads, LENGTH)}
        widths, sizes = {"q": self.key, "k": self.key, "v": self.value}, {"q": self.size, "k": self.size, "v": 1.0}
        given: dict[str, Array] = {
            name: (rng.normal(size=(2, *shape, widths[name])) * sizes[name]).astype(dtype)
            for name, shape in shapes.items()
        }
        place = np.array([3, 11])[:, None, None, None] + np.arange(TOKENS)[:, None]  # (B, 1, S, 1)
        slot = np.arange(LENGTH)
        return given | {"mask": (slot <= place) & (slot > place - self.window)}

    def expected(self) -> Array:
        """softmax(cap · tanh(q kᵀ · scale / cap), where the mask allows) v, in float64."""
        q, k, v, mask = (self.feeds()[name] for name in ("q", "k", "v", "mask"))
        group = self.heads // self.kv_heads
        k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
        scores = q.astype(np.float64) @ k.swapaxes(2, 3) * (self.key**-0.5 if self.scale is None else self.scale)
        if self.softcap is not None:
            scores = self.softcap * np.tanh(scores / self.softcap)
        scores = np.where(mask, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        result: Array = weights / weights.sum(-1, keepdims=True) @ v
        return result


CASES = {
    "plain": Case(),
    "grouped": Case(kv_heads=2),
    "one key head": Case(kv_heads=1),
    "soft cap": Case(kv_heads=2, softcap=0.7),
    "values narrower than keys": Case(key=24, value=8),
    "values wider than keys, capped": Case(kv_heads=2, key=8, value=24, softcap=0.7),
    "sliding": Case(kv_heads=2, window=4),
    "sliding and capped": Case(kv_heads=2, window=4, softcap=0.7),
    "default scale": Case(scale=None),
    "wide head": Case(heads=2, kv_heads=2, key=272, value=272, scale=0.06),
}


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_those_of_the_kernel(name: str, dtype: ir.DataType) -> None:
    case = Case(**(vars(CASES[name]) | {"dtype": dtype}))
    model = case.model()
    (kernel,) = run(model, case.feeds())
    rewrite = DecomposeAttention(max_head=7)  # so that every case is written out
    assert rewrite(model).modified
    assert (rewrite.decomposed, count(model, "Attention")) == (1, 0)
    (actual,) = run(model, case.feeds())
    assert actual.shape == (2, case.heads, TOKENS, case.value)
    assert actual.dtype == kernel.dtype
    tolerance = 1e-5 if dtype == FLOAT else 4e-3
    np.testing.assert_allclose(actual, case.expected(), rtol=0, atol=tolerance)
    np.testing.assert_allclose(actual, kernel, rtol=0, atol=tolerance)


@pytest.mark.parametrize("changes", [{"kv_heads": 4}, {"softcap": None}, {"window": LENGTH}, {"scale": 0.25}], ids=str)
def test_every_part_of_a_case_shows(changes: dict[str, Any]) -> None:
    """Grouping, cap, window and scale change the result by far more than the tolerance."""
    case = Case(kv_heads=2, softcap=0.7, window=4)
    other = Case(**(vars(case) | changes))
    feeds = case.feeds()
    if "kv_heads" in changes:  # the same keys, given to other heads
        feeds |= {name: np.concatenate([feeds[name]] * 2, axis=1) for name in ("k", "v")}
        assert np.abs(run(other.model(), feeds)[0] - case.expected()).max() > 0.1
    else:
        assert np.abs(other.expected() - case.expected()).max() > 0.01


def test_scores_are_scaled_before_fp16_overflows() -> None:
    """A query times a key is past 65504 here, and below it once scaled."""
    case = Case(key=64, value=64, scale=0.125, dtype=FLOAT16, size=60.0, softcap=20_000.0)
    feeds = case.feeds()
    products = feeds["q"].astype(np.float64) @ feeds["k"].astype(np.float64).swapaxes(2, 3)
    assert np.abs(products).max() > 65504
    model = case.model()
    DecomposeAttention()(model)
    (actual,) = run(model, feeds)
    np.testing.assert_allclose(actual, case.expected(), rtol=0, atol=4e-3)


@pytest.mark.parametrize(
    ("case", "softcap_only", "written_out"),
    [
        (Case(dtype=FLOAT16), False, 0),
        (Case(dtype=FLOAT16, kv_heads=1, key=256, value=256), False, 0),
        (Case(dtype=FLOAT16, key=264, value=264), False, 1),
        (Case(dtype=FLOAT16, key=16, value=8), False, 1),
        (Case(dtype=FLOAT16, softcap=2.0), False, 1),
        (Case(dtype=FLOAT), False, 1),
        (Case(dtype=FLOAT16, softcap=2.0), True, 1),
        (Case(dtype=FLOAT, key=264, value=8), True, 0),
    ],
)
def test_what_the_kernel_takes_stays(case: Case, softcap_only: bool, written_out: int) -> None:
    model = case.model()
    before = ir.to_proto(model).SerializeToString()
    rewrite = DecomposeAttention(softcap_only=softcap_only)
    assert rewrite(model).modified == bool(written_out)
    assert rewrite.decomposed == written_out
    assert (ir.to_proto(model).SerializeToString() == before) == (not written_out)


@pytest.mark.parametrize("form", ["no mask", "past", "causal"])
def test_a_form_that_the_capture_does_not_make_stays(form: str) -> None:
    """`tensorrt.check_forms` refuses these, by what is wrong with them."""
    model = Case(softcap=2.0).model()
    (node,) = model.graph
    if form == "causal":
        node.attributes["is_causal"] = ir.AttrInt64("is_causal", 1)
    else:
        extra = [] if form == "no mask" else [*node.inputs[3:], None, None, model.graph.inputs[3]]
        changed = ir.node("Attention", [*node.inputs[:3], *extra], dict(node.attributes))
        node.outputs[0].replace_all_uses_with(changed.outputs[0], replace_graph_outputs=True)
        model.graph.insert_before(node, changed)
        model.graph.remove(node, safe=True)
    assert not DecomposeAttention()(model).modified
    assert count(model, "Attention") == 1


def test_an_unknown_dimension_is_an_error() -> None:
    model = Case(softcap=2.0).model()
    model.graph.inputs[1].shape = ir.Shape(["B", "H", LENGTH, 16])
    with pytest.raises(CaptureError, match="attention with an unknown dimension 1"):
        DecomposeAttention()(model)


@pytest.mark.parametrize(
    ("backend", "device", "capped", "wide"),
    [
        ("onnxruntime", "cpu", 1, 1),
        ("onnxruntime", "cuda", 0, 1),
        ("tensorrt-rtx", "cuda", 0, 0),
        ("tensorrt", "cuda", 0, 0),
    ],
)
def test_each_backend_keeps_the_kernels_that_it_has(backend: Any, device: Any, capped: int, wide: int) -> None:
    """ONNX Runtime's on the CPU take every form, on CUDA all but a soft cap."""
    for case, kept in ((Case(softcap=2.0, dtype=FLOAT16), capped), (Case(key=264, value=264, dtype=FLOAT16), wide)):
        model = case.model()
        lower(model, backend, device)
        assert count(model, "Attention") == kept
