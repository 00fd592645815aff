"""Attention over a cache as ONNX Runtime's GroupQueryAttention: one node that writes the cache, rotates and attends.

Its cost follows the tokens that a cache holds, while Attention's follows the buffer's length; its caches are bound as
past and present at once, as TensorScatter's are.
"""

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import InPlacePass, PassResult
from onnx_ir.passes.common import RemoveUnusedNodesPass

from draftc.export.by_value import Sources
from draftc.export.passes import MICROSOFT, new_initializer
from draftc.export.positions import Rotation, find_rotation, visible_window
from draftc.runtime.errors import CaptureError
from draftc.runtime.graphio import INPUT_IDS, WRITE_INDEX

__all__ = ["FuseGroupQueryAttention"]

SWAP_HEADS = (0, 2, 1, 3)


@dataclass(frozen=True, eq=False)
class _Layer:
    """One attention layer of the form that can be fused. query, key, value: (B, H or Hkv, S, D)."""

    node: ir.Node
    query: ir.Value
    scatters: tuple[ir.Node, ir.Node]
    heads: int
    kv_heads: int
    size: int
    length: int

    @property
    def key(self) -> ir.Value:
        key = self.scatters[0].inputs[1]
        assert key is not None
        return key

    @property
    def value(self) -> ir.Value:
        value = self.scatters[1].inputs[1]
        assert value is not None
        return value


@dataclass
class _Shared:
    """What the layers of a graph have in common: made once."""

    windows: dict[int, int | None] = field(default_factory=dict)
    rotations: dict[int, Rotation | None] = field(default_factory=dict)
    tables: dict[bytes, ir.Value] = field(default_factory=dict)
    lengths: tuple[ir.Value, ir.Value, ir.Value] | None = None


class FuseGroupQueryAttention(InPlacePass):
    """TensorScatter × 2 + Attention → com.microsoft GroupQueryAttention, the rotary embedding inside where it fits.

    Legal where the mask is causal, or causal within a sliding window, at every position; where keys and values are as
    wide; and where nobody else reads the buffers. Rotary angles are taken in as tables if queries and keys are rotated
    by the same ones, in a form that the kernel has; else the rotation stays in front. `fused` counts layers, `rotary`
    those that rotate inside, `left` says why the others were not fused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fused = 0
        self.rotary = 0
        self.left: list[str] = []

    def call(self, model: ir.Model) -> PassResult:
        """Rewrite every layer of that form."""
        graph = model.graph
        sources = Sources(graph)
        shared = _Shared()
        plans = []
        for node in graph:
            if node.op_type != "Attention":
                continue
            try:
                plan = self._plan(sources, node, shared)
            except CaptureError as error:
                plan = str(error)
            if isinstance(plan, str):
                self.left.append(plan)
            else:
                plans.append(plan)
        for layer, window, rotation in plans:  # from here on, `sources` is out of date
            _replace(graph, layer, window, rotation, shared)
        self.fused = len(plans)
        self.rotary = sum(rotation is not None for _, _, rotation in plans)
        if plans:
            model.opset_imports[MICROSOFT] = 1
            RemoveUnusedNodesPass()(model)
        return PassResult(model, self.fused > 0)

    def _plan(self, sources: Sources, node: ir.Node, shared: _Shared) -> "tuple[_Layer, int, _Rotated | None] | str":
        """(layer, window, what is rotated inside), or why the layer stays."""
        layer = _layer(sources.graph, node)
        if isinstance(layer, str):
            return layer
        mask = node.inputs[3]
        assert mask is not None
        number = sources.number(mask)
        if number not in shared.windows:
            shared.windows[number] = visible_window(sources, mask, layer.length)
        window = shared.windows[number]
        if window is None:
            return "its mask is neither causal nor a sliding window"
        return layer, window, _rotated(sources, layer, shared)


@dataclass(frozen=True, eq=False)
class _Rotated:
    """Queries and keys before their rotation."""

    query: ir.Value
    key: ir.Value
    rotation: Rotation


def _layer(graph: ir.Graph, node: ir.Node) -> "_Layer | str":
    query, key, value, *rest = node.inputs
    if query is None or len(rest) != 1 or rest[0] is None or node.attributes.get_int("is_causal", 0) != 0:
        return "it is not of the capture's form"
    scatters = []
    for buffer in (key, value):
        scatter = buffer.producer() if buffer is not None else None
        if buffer is None or scatter is None or scatter.op_type != "TensorScatter":
            return "it does not read a cache"
        past, index = scatter.inputs[0], scatter.inputs[2]
        known = past in graph.inputs and index is not None and index.name == WRITE_INDEX
        if not known or scatter.attributes.get_int("axis", -2) not in (2, -2):
            return "its cache is not written at write_index"
        readers = [reader for reader in past.consumers() if reader.op_type != "Shape"] if past is not None else []
        if (
            scatter.attributes.get_string("mode", "linear") != "linear"
            or readers != [scatter]
            or len(buffer.uses()) != 1
        ):
            return "its cache is read by others"
        scatters.append(scatter)
    queries, keys, values = (_dims(one) for one in (query, key, value))
    if queries is None or keys is None or values is None:
        return "its sizes are not known"
    if query.dtype != ir.DataType.FLOAT:
        return "it is not in float32"
    heads, size = queries[0], queries[2]
    kv_heads, length, width = keys
    if heads is None or kv_heads is None or length is None or size is None:
        return "its sizes are not known"
    if keys != values or width != size:
        return "keys and values differ in width"
    if heads % kv_heads:
        return f"{heads} heads do not share {kv_heads} evenly"
    if size % 8:
        return f"the kernel takes no heads of {size}"
    return _Layer(node, query, (scatters[0], scatters[1]), heads, kv_heads, size, length)


def _dims(value: ir.Value | None) -> tuple[int | None, int | None, int | None] | None:
    if value is None or value.shape is None or len(value.shape) != 4:
        return None
    _, heads, length, size = (dim if isinstance(dim, int) else None for dim in value.shape)
    return heads, length, size


def _rotated(sources: Sources, layer: _Layer, shared: _Shared) -> _Rotated | None:
    """What is rotated where queries and keys are rotated alike, in a form that the kernel has."""
    if layer.size % 16:
        return None
    query = find_rotation(sources, layer.query, layer.length, shared.rotations)
    key = find_rotation(sources, layer.key, layer.length, shared.rotations) if query else None
    if query is None or key is None:
        return None
    one, other = query[1], key[1]
    alike = one.interleaved == other.interleaved and all(
        np.array_equal(mine, its) for mine, its in ((one.cos, other.cos), (one.sin, other.sin))
    )
    return _Rotated(query[0], key[0], one) if alike and one.cos.shape[1] % 8 == 0 else None


def _replace(graph: ir.Graph, layer: _Layer, window: int, rotated: _Rotated | None, shared: _Shared) -> None:
    node = layer.node
    if shared.lengths is None:
        shared.lengths = _lengths(graph, layer.length)
    seqlens, total, widths = shared.lengths
    query = rotated.query if rotated else layer.query
    key = rotated.key if rotated else layer.key
    flat = [
        _flat(node, value, heads, layer.size)
        for value, heads in ((query, layer.heads), (key, layer.kv_heads), (layer.value, layer.kv_heads))
    ]
    tables: list[ir.Value | None] = [None, None]
    if rotated:
        tables = [
            _table(graph, array, name, shared)
            for name, array in (("cos", rotated.rotation.cos), ("sin", rotated.rotation.sin))
        ]
    attributes: dict[str, int | float] = {
        "num_heads": layer.heads,
        "kv_num_heads": layer.kv_heads,
        "scale": node.attributes.get_float("scale", layer.size**-0.5),
        "softcap": node.attributes.get_float("softcap", 0.0),
        "local_window_size": window or -1,
        "do_rotary": int(rotated is not None),
        "rotary_interleaved": int(rotated is not None and rotated.rotation.interleaved),
    }
    past = [scatter.inputs[0] for scatter in layer.scatters]
    unused = [None] * 7  # position ids, bias, sink, scales of the cache, norms of queries and keys
    inputs = [*flat, *past, seqlens, total, *tables, *unused, widths]
    fused = ir.node("GroupQueryAttention", inputs, attributes, domain=MICROSOFT, num_outputs=3, name=node.name)
    fused.outputs[0].type = node.outputs[0].type
    fused.outputs[0].shape = ir.Shape([None, None, layer.heads * layer.size])
    graph.insert_before(node, fused)
    for scatter, present in zip(layer.scatters, fused.outputs[1:], strict=True):
        present.type, present.shape = scatter.outputs[0].type, scatter.outputs[0].shape
        _take_over(scatter.outputs[0], present)
    _give_back(graph, layer, fused)


def _give_back(graph: ir.Graph, layer: _Layer, fused: ir.Node) -> None:
    """Put the result (B, S, H · D) where (B, H, S, D) was read: behind transpose and reshape where those follow."""
    node, result = layer.node, fused.outputs[0]
    width = layer.heads * layer.size
    for transpose in list(node.outputs[0].consumers()):
        if not _swaps_heads(transpose):
            continue
        for reshape in list(transpose.outputs[0].consumers()):
            joined = reshape.outputs[0].shape
            if reshape.op_type == "Reshape" and joined is not None and len(joined) == 3 and joined[2] == width:
                _take_over(reshape.outputs[0], result)
    split = ir.node("Reshape", [result, _constant(fused, [0, 0, layer.heads, layer.size])])
    swapped = ir.node("Transpose", [split.outputs[0]], {"perm": SWAP_HEADS})
    for made in (split, swapped):
        made.outputs[0].type = node.outputs[0].type
    swapped.outputs[0].shape = node.outputs[0].shape
    graph.insert_after(fused, [split, swapped])
    _take_over(node.outputs[0], swapped.outputs[0])


def _take_over(old: ir.Value, new: ir.Value) -> None:
    """Put `new` where `old` is read, under its name."""
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    name, old.name = old.name, None
    new.name = name


def _lengths(graph: ir.Graph, length: int) -> tuple[ir.Value, ir.Value, ir.Value]:
    """(index of each row's last token (B,), L, the width S of each row (B,)), in int32.

    The widths are no news to the kernel, but with them it takes batches of several rows, and never mistakes a call that
    fills the whole buffer for a first prompt.
    """
    inputs = {value.name: value for value in graph.inputs}
    first = graph[0]
    start = inputs[WRITE_INDEX]
    width = ir.node("Shape", [inputs[INPUT_IDS]], {"start": 1, "end": 2})  # (1,)
    last = ir.node("Add", [start, width.outputs[0]])  # (B,)
    rows = ir.node("Shape", [start])  # (1,)
    graph.insert_before(first, [width, last, rows])
    before = ir.node("Sub", [last.outputs[0], _constant(first, [1])])
    seqlens = ir.node("Cast", [before.outputs[0]], {"to": int(ir.DataType.INT32)})
    narrow = ir.node("Cast", [width.outputs[0]], {"to": int(ir.DataType.INT32)})
    widths = ir.node("Expand", [narrow.outputs[0], rows.outputs[0]])
    graph.insert_before(first, [before, seqlens, narrow, widths])
    total = ir.node("Constant", [], {"value": ir.tensor(np.array(length, np.int32))})
    graph.insert_before(first, total)
    for node in (seqlens, widths, total):
        node.outputs[0].type = ir.TensorType(ir.DataType.INT32)
    return seqlens.outputs[0], total.outputs[0], widths.outputs[0]


def _table(graph: ir.Graph, array: NDArray[np.float32], name: str, shared: _Shared) -> ir.Value:
    """The initializer that holds a table (L, D' / 2)."""
    key = array.tobytes()
    if key not in shared.tables:
        shared.tables[key] = new_initializer(graph, f"rotary_{name}_{len(shared.tables)}", array)
    return shared.tables[key]


def _flat(before: ir.Node, value: ir.Value, heads: int, size: int) -> ir.Value:
    """(B, S, H · D) of a value (B, H, S, D) or (B, S, H, D), from before its reshape and transpose if it has them."""
    graph = before.graph
    assert graph is not None
    producer = value.producer()
    assert value.shape is not None
    if value.shape[1] == heads:  # (B, H, S, D)
        if producer is not None and _swaps_heads(producer):
            source = producer.inputs[0]
            assert source is not None
        else:
            transpose = ir.node("Transpose", [value], {"perm": SWAP_HEADS})
            transpose.outputs[0].type = value.type
            graph.insert_before(before, transpose)
            source = transpose.outputs[0]
    else:
        source = value
    producer = source.producer()
    joined = producer.inputs[0] if producer is not None and producer.op_type == "Reshape" else None
    if joined is not None and joined.shape is not None and len(joined.shape) == 3 and joined.shape[2] == heads * size:
        return joined
    reshape = ir.node("Reshape", [source, _constant(before, [0, 0, heads * size])])
    reshape.outputs[0].type = value.type
    reshape.outputs[0].shape = ir.Shape([None, None, heads * size])
    graph.insert_before(before, reshape)
    return reshape.outputs[0]


def _swaps_heads(node: ir.Node) -> bool:
    return node.op_type == "Transpose" and tuple(node.attributes.get_ints("perm", ())) == SWAP_HEADS


def _constant(before: ir.Node, numbers: list[int]) -> ir.Value:
    graph = before.graph
    assert graph is not None
    node = ir.node("Constant", [], {"value": ir.tensor(np.array(numbers, np.int64))})
    node.outputs[0].type = ir.TensorType(ir.DataType.INT64)
    graph.insert_before(before, node)
    return node.outputs[0]
