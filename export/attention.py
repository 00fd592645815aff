"""Attention written out in simple operators, where a backend's own kernel has not the form that a model needs."""

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from draftc.export.passes import replace_node
from draftc.runtime.errors import CaptureError

__all__ = ["DecomposeAttention"]


class DecomposeAttention(InPlacePass):
    """Attention(q, k, v, mask) → scores, cap, mask, softmax in float32, sum; where a kernel cannot take it.

    TensorRT's takes no soft cap on the scores, no head wider than `max_head`, no keys and values of different widths,
    and no float32; ONNX Runtime's on CUDA takes all but the soft cap (`softcap_only`). Query heads that share a key
    head are one larger matrix product, so keys and values are never repeated. `decomposed` counts.
    """

    def __init__(self, max_head: int = 256, *, softcap_only: bool = False) -> None:
        super().__init__()
        self.max_head = max_head
        self.softcap_only = softcap_only
        self.decomposed = 0

    def call(self, model: ir.Model) -> PassResult:
        """Rewrite every Attention that needs it."""
        for node in list(model.graph):
            if node.op_type == "Attention" and self._needs_it(node):
                _write_out(model.graph, node)
                self.decomposed += 1
        return PassResult(model, self.decomposed > 0)

    def _needs_it(self, node: ir.Node) -> bool:
        query, key, value = node.inputs[:3]
        assert query is not None
        if len(node.inputs) != 4 or node.attributes.get_int("is_causal", 0) != 0:
            return False  # not of the capture's form; `tensorrt.check_forms` refuses it
        if node.attributes.get_float("softcap", 0.0):
            return True
        if self.softcap_only:
            return False
        widths = _dim(key, 3), _dim(value, 3)
        unlike = max(widths) > self.max_head or widths[0] != widths[1]
        return unlike or query.dtype == ir.DataType.FLOAT


def _write_out(graph: ir.Graph, node: ir.Node) -> None:
    query, key, value, mask = node.inputs  # (B, H, S, D), (B, Hkv, L, D), (B, Hkv, L, Dv), (B, 1, S, L)
    assert query is not None
    dtype = query.dtype
    assert dtype is not None
    heads, kv_heads = _dim(query, 1), _dim(key, 1)
    length = _dim(key, 2)
    scale = node.attributes.get_float("scale", _dim(query, 3) ** -0.5)
    cap = node.attributes.get_float("softcap", 0.0)

    def add(op_type: str, inputs: list[ir.Value | None], result: ir.DataType, **attributes: object) -> ir.Value:
        made = ir.node(op_type, inputs, attributes or None)  # type: ignore[arg-type]
        made.outputs[0].type = ir.TensorType(result)
        graph.insert_before(node, made)
        return made.outputs[0]

    def scalar(number: float, of: ir.DataType) -> ir.Value:
        array = np.array(number, np.float32)
        return add("Constant", [], of, value=ir.tensor(array.astype(of.numpy())))

    def shape(*dims: int) -> ir.Value:
        return add("Constant", [], ir.DataType.INT64, value=ir.tensor(np.array(dims, np.int64)))

    fp32 = ir.DataType.FLOAT

    def cast(value: ir.Value, to: ir.DataType) -> ir.Value:
        return add("Cast", [value], to, to=int(to)) if dtype != fp32 else value

    # Scaled before the product, which could leave fp16's range; in float32, because the scale is no fp16 number.
    scaled = cast(add("Mul", [cast(query, fp32), scalar(scale, fp32)], fp32), dtype)
    grouped = add("Reshape", [scaled, shape(0, kv_heads, -1, _dim(query, 3))], dtype)  # (B, Hkv, G·S, D)
    keys = add("Transpose", [key], dtype, perm=[0, 1, 3, 2])  # (B, Hkv, D, L)
    scores = cast(add("MatMul", [grouped, keys], dtype), fp32)
    if cap:
        bounded = add("Tanh", [add("Div", [scores, scalar(cap, fp32)], fp32)], fp32)
        scores = add("Mul", [bounded, scalar(cap, fp32)], fp32)
    scores = add("Reshape", [scores, shape(0, heads, -1, length)], fp32)  # (B, H, S, L)
    scores = add("Where", [mask, scores, scalar(-np.inf, fp32)], fp32)
    weights = cast(add("Softmax", [scores], fp32, axis=-1), dtype)
    weights = add("Reshape", [weights, shape(0, kv_heads, -1, length)], dtype)  # (B, Hkv, G·S, L)
    out = add("MatMul", [weights, value], dtype)  # (B, Hkv, G·S, Dv)
    last = ir.node("Reshape", [out, shape(0, heads, -1, _dim(value, 3))])  # (B, H, S, Dv)
    replace_node(graph, node, last)


def _dim(value: ir.Value | None, axis: int) -> int:
    dim = value.shape[axis] if value is not None and value.shape is not None else None
    if not isinstance(dim, int):
        raise CaptureError(f"attention with an unknown dimension {axis}: this model cannot be lowered for TensorRT")
    return dim
