"""Attention layers drawn by hand, fused: the numbers stay, and what is not exactly of the form stays too."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from draftc.export.group_query import FuseGroupQueryAttention
from draftc.export.lowering import lower
from tests.export.sketch import Sketch, count, run

FLOAT, FLOAT16, INT64 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.INT64
LENGTH, VOCAB = 40, 8
RNG = np.random.default_rng(0)
CALLS = (([0], 7), ([7], 1), ([5], 4), ([0], LENGTH), ([LENGTH - 3], 3), ([3, 20], 5), ([0, 9], 1))  # (write_index, S)

Array = NDArray[Any]
Mask = Callable[[Sketch, ir.Value, ir.Value, ir.Value], ir.Value]  # of places (B, 1, S, 1), slots (L,) and token ids


def causal(sketch: Sketch, places: ir.Value, slots: ir.Value, ids: ir.Value) -> ir.Value:
    return compare(sketch, "LessOrEqual", slots, places)


def sliding(window: int) -> Mask:
    def mask(sketch: Sketch, places: ir.Value, slots: ir.Value, ids: ir.Value) -> ir.Value:
        near = compare(sketch, "Greater", slots, sketch("Sub", places, [window]))
        return sketch("And", near, causal(sketch, places, slots, ids))

    return mask


def compare(sketch: Sketch, op: str, *operands: ir.Value) -> ir.Value:
    value = sketch(op, *operands)
    value.dtype = ir.DataType.BOOL
    return value


@dataclass(frozen=True)
class Layer:
    """One layer over a cache: x (B, S, W) → projections → [rotation] → cache → attention → (B, S, H · D)."""

    heads: int = 4
    kv_heads: int = 2
    size: int = 16
    value: int | None = None
    scale: float | None = 0.3
    softcap: float | None = None
    mask: Mask = causal
    rotary: int = 0  # channels that are rotated
    interleaved: bool = False
    before: bool = False  # rotated before heads and positions change places
    strength: float = 1.0  # of the rotated keys' and queries' tables
    key_strength: float = 1.0
    dtype: ir.DataType = FLOAT
    joined: bool = True  # the heads are joined behind the attention

    def model(self) -> ir.Model:
        sketch = Sketch()
        ids = sketch.input("input_ids", INT64, ["B", "S"])
        index = sketch.input("write_index", INT64, ["B"])
        width = self.value or self.size
        pasts = [
            sketch.input(f"past_key_values.0.{name}", self.dtype, ["B", self.kv_heads, LENGTH, size])
            for name, size in (("key", self.size), ("value", width))
        ]
        hidden = sketch("Gather", sketch.weight(weight(VOCAB, 24, self.dtype)), ids)
        hidden.dtype = self.dtype
        arange = sketch(
            "Range",
            sketch.weight(np.array(0)),
            sketch("Squeeze", sketch("Shape", ids, start=1, end=2)),
            sketch.weight(np.array(1)),
        )
        places = sketch("Add", sketch("Unsqueeze", index, [1]), arange)  # (B, S)
        mask = self.mask(sketch, sketch("Unsqueeze", places, [1, 3]), sketch.weight(np.arange(LENGTH)), ids)
        parts = []
        for heads, size, strength in (
            (self.heads, self.size, self.strength),
            (self.kv_heads, self.size, self.strength * self.key_strength),
            (self.kv_heads, width, 0.0),
        ):
            part = sketch("MatMul", hidden, sketch.weight(weight(24, heads * size, self.dtype)))
            part = sketch("Reshape", part, [0, 0, heads, size])
            turned = self.rotary and strength
            if turned and self.before:
                part = self._rotate(sketch, part, places, strength, 2)
            part = sketch("Transpose", part, perm=[0, 2, 1, 3])
            if turned and not self.before:
                part = self._rotate(sketch, part, places, strength, 1)
            parts.append(part)
        buffers = [
            sketch("TensorScatter", past, part, index, axis=2) for past, part in zip(pasts, parts[1:], strict=True)
        ]
        numbers = {"scale": self.scale, "softcap": self.softcap}
        y = sketch("Attention", parts[0], *buffers, mask, **{key: x for key, x in numbers.items() if x is not None})
        if self.joined:
            y = sketch("Reshape", sketch("Transpose", y, perm=[0, 2, 1, 3]), [0, 0, self.heads * width])
        outputs = {"y": y, "present_key": buffers[0], "present_value": buffers[1]}
        return sketch.model(**outputs)

    def _rotate(self, sketch: Sketch, x: ir.Value, places: ir.Value, strength: float, heads_axis: int) -> ir.Value:
        half = self.rotary // 2
        angles = sketch(
            "Mul",
            sketch("Cast", sketch("Unsqueeze", places, [2]), to=int(FLOAT)),
            sketch.weight(1.5 ** -np.arange(half, dtype=np.float32)),
        )  # (B, S, half)
        tables = []
        for function in ("Cos", "Sin"):
            table = sketch("Mul", sketch(function, angles), strength)
            tables.append(sketch("Unsqueeze", table, [heads_axis]))
        cos, sin = tables
        step, ends = (2, self.rotary) if self.interleaved else (1, half)
        first = sketch("Slice", x, [0], [ends], [3], [step])
        second = sketch("Slice", x, [1 if self.interleaved else half], [self.rotary], [3], [step])
        turned = [
            sketch("Sub", sketch("Mul", first, cos), sketch("Mul", second, sin)),
            sketch("Add", sketch("Mul", second, cos), sketch("Mul", first, sin)),
        ]
        if self.interleaved:
            pairs = sketch("Concat", *(sketch("Unsqueeze", part, [4]) for part in turned), axis=4)
            turned = [sketch("Reshape", pairs, [0, 0, 0, self.rotary])]
            turned[0].dtype = self.dtype
        if self.rotary < self.size:
            turned.append(sketch("Slice", x, [self.rotary], [self.size], [3]))
        return sketch("Concat", *turned, axis=3) if len(turned) > 1 else turned[0]


def weight(rows: int, columns: int, dtype: ir.DataType) -> Array:
    numbers: Array = np.random.default_rng(rows + columns).normal(size=(rows, columns)) * 0.4
    return numbers.astype(dtype.numpy())


def feeds(layer: Layer, start: list[int], width: int) -> dict[str, Array]:
    caches = {
        name: RNG.normal(size=(len(start), layer.kv_heads, LENGTH, size)).astype(layer.dtype.numpy())
        for name, size in (("key", layer.size), ("value", layer.value or layer.size))
    }
    return {
        "input_ids": RNG.integers(0, VOCAB, (len(start), width)),
        "write_index": np.array(start),
    } | {f"past_key_values.0.{name}": cache for name, cache in caches.items()}


def fuse(model: ir.Model) -> FuseGroupQueryAttention:
    rewrite = FuseGroupQueryAttention()
    assert rewrite(model).modified == bool(rewrite.fused)
    return rewrite


def assert_same(layer: Layer, rotary: int) -> ir.Model:
    """Fused, with as many rotations inside, the layer gives what it gave; what it did not write, it left alone."""
    model, fused = layer.model(), layer.model()
    rewrite = fuse(fused)
    assert (rewrite.fused, rewrite.rotary, rewrite.left) == (1, rotary, [])
    assert [count(fused, op) for op in ("GroupQueryAttention", "Attention", "TensorScatter")] == [1, 0, 0]
    for start, width in CALLS:
        given = feeds(layer, start, width)
        for name, actual, expected in zip(("y", "key", "value"), run(fused, given), run(model, given), strict=True):
            for row, first in enumerate(start):
                kept = slice(None) if name == "y" else slice(first + width)  # entries behind are never read
                a, b = ((part[row] if name == "y" else part[row][:, kept]) for part in (actual, expected))
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-5, err_msg=f"{name} {start} {width}")
    return fused


PLAIN = Layer()
CASES = {
    "plain": PLAIN,
    "one key head": replace(PLAIN, kv_heads=1),
    "as many key heads": replace(PLAIN, kv_heads=4),
    "default scale": replace(PLAIN, scale=None),
    "soft cap": replace(PLAIN, softcap=0.7),
    "window of 1": replace(PLAIN, mask=sliding(1)),
    "window of 2": replace(PLAIN, mask=sliding(2)),
    "window of 5, capped": replace(PLAIN, mask=sliding(5), softcap=0.7),
    "window of L - 1": replace(PLAIN, mask=sliding(LENGTH - 1)),
    "window as long as the buffer": replace(PLAIN, mask=sliding(LENGTH)),
    "heads that are not joined": replace(PLAIN, joined=False),
    "narrow heads": replace(PLAIN, size=8),
    "wide heads": replace(PLAIN, size=272),
}
ROTATED = replace(PLAIN, rotary=16)
INSIDE = {
    "halves": ROTATED,
    "pairs": replace(ROTATED, interleaved=True),
    "scaled": replace(ROTATED, strength=1.25),
    "before the transpose": replace(ROTATED, before=True),
    "pairs before the transpose": replace(ROTATED, before=True, interleaved=True),
    "a part": replace(ROTATED, size=32),
    "a part in pairs": replace(ROTATED, rotary=6, interleaved=True),
    "heads as many as slots": replace(ROTATED, heads=LENGTH, kv_heads=LENGTH // 2),
    "sliding": replace(ROTATED, mask=sliding(4)),
}
OUTSIDE = {
    "keys by another strength": replace(ROTATED, key_strength=0.5),
    "keys not at all": replace(ROTATED, key_strength=0.0),
    "a part too narrow for the kernel": replace(ROTATED, rotary=8),
    "heads too narrow for the kernel": replace(ROTATED, rotary=8, size=8),
}


@pytest.mark.parametrize("name", CASES)
def test_a_layer(name: str) -> None:
    fused = assert_same(CASES[name], 0)
    expected = 0 if CASES[name].joined else 1
    assert count(fused, "Transpose") == expected  # those of the heads are gone


@pytest.mark.parametrize("name", INSIDE)
def test_a_rotation_that_goes_inside(name: str) -> None:
    fused = assert_same(INSIDE[name], 1)
    assert [count(fused, op) for op in ("Cos", "Sin", "Transpose")] == [0, 0, 0]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_rotation_that_stays_in_front(name: str) -> None:
    assert count(assert_same(OUTSIDE[name], 0), "Cos") >= 1


def test_tables_are_those_of_every_position() -> None:
    fused = ROTATED.model()
    fuse(fused)
    tables = [value for name, value in fused.graph.initializers.items() if name and name.startswith("rotary_")]
    angles = np.arange(LENGTH)[:, None] * 1.5 ** -np.arange(8.0)  # (L, D / 2)
    for value, function in zip(tables, (np.cos, np.sin), strict=True):
        assert value.const_value is not None
        np.testing.assert_allclose(value.const_value.numpy(), function(angles), rtol=0, atol=1e-5)


def test_layers_share_their_tables() -> None:
    """Two copies of a layer in one graph: tables and lengths are made once."""
    sketch_model = two_layers()
    rewrite = fuse(sketch_model)
    assert (rewrite.fused, rewrite.rotary) == (2, 2)
    first, second = (node for node in sketch_model.graph if node.op_type == "GroupQueryAttention")
    assert first.inputs[5:9] == second.inputs[5:9]
    assert first.inputs[16] is second.inputs[16]


def two_layers() -> ir.Model:
    model, other = ROTATED.model(), ROTATED.model()
    names = {value.name: value for value in model.graph.inputs}
    graph = other.graph
    for value in list(graph.inputs):
        if value.name in ("input_ids", "write_index"):
            value.replace_all_uses_with(names[value.name])
        else:
            assert value.name is not None
            value.name = value.name.replace(".0.", ".1.")
            graph.inputs.remove(value)
            model.graph.inputs.append(value)
    for value in list(graph.inputs):
        graph.inputs.remove(value)
    outputs = list(graph.outputs)
    graph.outputs.clear()
    for name in list(graph.initializers):
        value = graph.initializers.pop(name)
        value.name = f"second_{name}"
        model.graph.register_initializer(value)
    for node in list(graph):
        graph.remove(node)
        model.graph.append(node)
        for output in node.outputs:
            output.name = f"second_{output.name}"
    model.graph.outputs.extend(outputs)
    return model


# What stays


def seen_from_below(sketch: Sketch, places: ir.Value, slots: ir.Value, ids: ir.Value) -> ir.Value:
    return compare(sketch, "Less", slots, places)


def two_ahead(sketch: Sketch, places: ir.Value, slots: ir.Value, ids: ir.Value) -> ir.Value:
    return compare(sketch, "LessOrEqual", slots, sketch("Add", places, [2]))


def everything(sketch: Sketch, places: ir.Value, slots: ir.Value, ids: ir.Value) -> ir.Value:
    return compare(sketch, "GreaterOrEqual", sketch("Add", slots, places), [0])  # type: ignore[arg-type]


def chunked(sketch: Sketch, places: ir.Value, slots: ir.Value, ids: ir.Value) -> ir.Value:
    """Blocks of eight, as llama4 has them: causal inside a block, and as wide as a window at the end of one."""
    same = compare(sketch, "Equal", sketch("Div", slots, [8]), sketch("Div", places, [8]))
    return sketch("And", same, causal(sketch, places, slots, ids))


def late(sketch: Sketch, places: ir.Value, slots: ir.Value, ids: ir.Value) -> ir.Value:
    """Causal but at one position, which no first call sees."""
    odd = compare(sketch, "Equal", sketch("Add", sketch("Mul", slots, [0]), places), [33])  # type: ignore[arg-type]
    hidden = sketch("And", odd, compare(sketch, "Equal", slots, [2]))  # type: ignore[arg-type]
    return sketch("And", sketch("Not", hidden), causal(sketch, places, slots, ids))


def of_the_text(sketch: Sketch, places: ir.Value, slots: ir.Value, ids: ir.Value) -> ir.Value:
    """A padding mask: whether a token sees anything depends on what it is."""
    real = compare(sketch, "Greater", sketch("Unsqueeze", ids, [1, 3]), [0])  # type: ignore[arg-type]
    return sketch("And", real, causal(sketch, places, slots, ids))


def of_the_first_row(sketch: Sketch, places: ir.Value, slots: ir.Value, ids: ir.Value) -> ir.Value:
    """Right at B = 1: every row of a batch gets the mask of the first."""
    first = sketch("Slice", places, [0], [1], [0])
    return causal(sketch, sketch("Add", first, sketch("Mul", places, [0])), slots, ids)


MASK = "its mask is neither causal nor a sliding window"
STAYS: dict[str, tuple[Layer, str]] = {
    "a token does not see itself": (replace(PLAIN, mask=seen_from_below), MASK),
    "a token sees the next": (replace(PLAIN, mask=two_ahead), MASK),
    "no mask": (replace(PLAIN, mask=everything), MASK),
    "blocks": (replace(PLAIN, mask=chunked), MASK),
    "one slot at one position": (replace(PLAIN, mask=late), MASK),
    "the text": (replace(PLAIN, mask=of_the_text), MASK),
    "the first row's": (replace(PLAIN, mask=of_the_first_row), MASK),
    "narrower values": (replace(PLAIN, value=8), "keys and values differ in width"),
    "fp16": (replace(PLAIN, dtype=FLOAT16), "it is not in float32"),
    "heads of 12": (replace(PLAIN, size=12), "the kernel takes no heads of 12"),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_is_not_of_the_form_stays(name: str) -> None:
    layer, reason = STAYS[name]
    model = layer.model()
    run(model, feeds(layer, [3, 5], 4))  # it is a graph that runs
    assert unchanged(model) == [reason]


def unchanged(model: ir.Model) -> list[str]:
    before = ir.to_proto(model).SerializeToString()
    rewrite = fuse(model)
    assert (rewrite.fused, rewrite.rotary) == (0, 0)
    assert ir.to_proto(model).SerializeToString() == before
    return rewrite.left


def node_of(model: ir.Model, op_type: str) -> ir.Node:
    return next(node for node in model.graph if node.op_type == op_type)


def test_a_cache_that_is_not_written_at_write_index_stays() -> None:
    model = PLAIN.model()
    shifted = ir.node("Add", [model.graph.inputs[1], model.graph.inputs[1]])
    model.graph.insert_before(model.graph[0], shifted)
    node_of(model, "TensorScatter").replace_input_with(2, shifted.outputs[0])
    assert unchanged(model) == ["its cache is not written at write_index"]


@pytest.mark.parametrize("reader", ["past", "present"])
def test_a_cache_that_others_read_stays(reader: str) -> None:
    """Layers that share a cache, or a model that looks at the entries before the call."""
    model = PLAIN.model()
    scatter = node_of(model, "TensorScatter")
    source = scatter.inputs[0] if reader == "past" else scatter.outputs[0]
    model.graph.append(ir.node("Neg", [source]))
    assert unchanged(model) == ["its cache is read by others"]


@pytest.mark.parametrize("form", ["no mask", "causal"])
def test_an_attention_of_another_form_stays(form: str) -> None:
    model = PLAIN.model()
    node = node_of(model, "Attention")
    if form == "causal":
        node.attributes["is_causal"] = ir.AttrInt64("is_causal", 1)
    else:
        node.resize_inputs(3)
    assert unchanged(model) == ["it is not of the capture's form"]


def test_an_attention_without_a_cache_stays() -> None:
    model = PLAIN.model()
    node = node_of(model, "Attention")
    past = node_of(model, "TensorScatter").inputs[0]
    node.replace_input_with(1, past)
    assert unchanged(model) == ["it does not read a cache"]


def test_a_layer_that_stays_does_not_keep_another_from_being_fused() -> None:
    model = two_layers()
    last = [node for node in model.graph if node.op_type == "Attention"][1]
    last.attributes["is_causal"] = ir.AttrInt64("is_causal", 1)
    rewrite = fuse(model)
    assert (rewrite.fused, rewrite.left) == (1, ["it is not of the capture's form"])
    assert [count(model, op) for op in ("GroupQueryAttention", "Attention", "TensorScatter")] == [1, 1, 2]


def test_a_user_hears_which_layers_stay() -> None:
    model = two_layers()
    for node in [node for node in model.graph if node.op_type == "Attention"]:
        node.attributes["is_causal"] = ir.AttrInt64("is_causal", 1)
    notes: list[str] = []
    lower(model, "onnxruntime", "cpu", notes.append)
    assert notes == ["2 attention layers keep the portable, slower form: it is not of the capture's form"]
