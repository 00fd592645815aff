"""Whether a GraphSpec that was read from somewhere is one of a decoder graph. Stdlib only."""

import json
from collections.abc import Mapping

from draftc.runtime.errors import UsageError
from draftc.runtime.graphio import DRAFT_Q, LOGITS, PAST_Q, Dim, GraphSpec, Tail, TensorSpec, past_name
from draftc.runtime.strictjson import show

__all__ = ["check_spec"]

DIM_MAX = 2**31 - 1  # so that a C++ reader may keep a dimension in an int
KV_DTYPES = ("float32", "float16", "bfloat16")


def check_spec(spec: GraphSpec, where: str, buffer_length: int) -> None:
    """Raise UsageError unless `spec` is, in any order, `GraphSpec.decoder` of its own layers, heads and dimensions,
    with at most one tail.

    `where` begins the message. `buffer_length` is L, in tokens. A spec that passes answers all of GraphSpec's
    properties.
    """
    inputs = {tensor.name: tensor for tensor in spec.inputs}
    outputs = {tensor.name: tensor for tensor in spec.outputs}
    layers = max(1, sum(name.startswith("past_key_values.") for name in inputs) // 2)
    kv = []
    for layer in range(layers):
        _, heads, _, key_dim = _shape(
            inputs, past_name(layer, "key"), ("B", None, buffer_length, None), f"{where}.inputs"
        )
        *_, value_dim = _shape(inputs, past_name(layer, "value"), ("B", heads, buffer_length, None), f"{where}.inputs")
        kv.append((heads, key_dim, value_dim))
    kv_dtype = inputs[past_name(0, "key")].dtype
    if kv_dtype not in KV_DTYPES:
        raise UsageError(f"{where}.inputs: caches are of type {' or '.join(KV_DTYPES)}, got {show(kv_dtype)}")
    *_, rows = _shape(outputs, LOGITS, ("B", "R", None), f"{where}.outputs")
    expected = GraphSpec.decoder(kv, buffer_length, rows, kv_dtype)
    tails: tuple[tuple[str, Tail], ...] = ((PAST_Q, "draft"), (DRAFT_Q, "verify"))
    for name, tail in tails:
        if name in inputs:
            *_, slots, vocabulary = _shape(inputs, name, ("B", 1, None, None), f"{where}.inputs")
            expected = expected.with_tail(tail, slots, vocabulary)
    _compare(spec.inputs, expected.inputs, f"{where}.inputs")
    _compare(spec.outputs, expected.outputs, f"{where}.outputs")


def _shape(tensors: Mapping[str, TensorSpec], name: str, expected: tuple[Dim | None, ...], where: str) -> list[int]:
    """The shape of tensor `name`; None in `expected` is any positive number. Symbolic dimensions count as 0."""
    if name not in tensors:
        raise UsageError(f'{where}: "{name}" is missing')
    shape = tensors[name].shape
    fits = len(shape) == len(expected) and all(
        dim == want if want is not None else isinstance(dim, int) and 1 <= dim <= DIM_MAX
        for dim, want in zip(shape, expected, strict=True)
    )
    if not fits:
        pattern = ", ".join("n" if want is None else json.dumps(want) for want in expected)
        raise UsageError(f'{where}: "{name}" must have shape [{pattern}], got {_list(shape)}')
    return [dim if isinstance(dim, int) else 0 for dim in shape]


def _compare(actual: tuple[TensorSpec, ...], expected: tuple[TensorSpec, ...], where: str) -> None:
    """By name: backends bind by name, so the order in the graph is free."""
    missing = {tensor.name: tensor for tensor in expected}
    for index, tensor in enumerate(actual):
        known = missing.pop(tensor.name, None)
        if known is None:
            raise UsageError(f"{where}[{index}]: {show(tensor.name)} comes twice or is no tensor of a decoder graph")
        if (tensor.dtype, tensor.shape) != (known.dtype, known.shape):
            wanted, got = (f"{show(t.dtype)} {_list(t.shape)}" for t in (known, tensor))
            raise UsageError(f'{where}[{index}]: "{tensor.name}" must be {wanted}, got {got}')
    if missing:
        raise UsageError(f'{where}: "{next(iter(missing))}" is missing')


def _list(shape: tuple[Dim, ...]) -> str:
    return f"[{', '.join(map(show, shape[:8]))}{', ...' if len(shape) > 8 else ''}]"
