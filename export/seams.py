"""The two seams of capture: what stands in for a model's cache, masks and attention function while it is traced.

Everything else of the traced graph is the model's own code. Both seams are public extension points of transformers:
the *cache* (`ScatterCache`: every layer's update becomes ONNX `TensorScatter`, an in-place write into a preallocated
buffer) and the *attention function* with its *mask function* (becomes ONNX `Attention` with an explicit bool mask).
Which layers slide, cap or scale is never looked up: the model's own code passes it to these functions.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.onnx import ops
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel

from draftc.runtime.errors import UnsupportedModelError

__all__ = ["OPSET", "ProbeCache", "ScatterCache", "cache_argument", "draftc_attention", "draftc_mask", "seams_in_place"]

OPSET = 24
NAME = "draftc"


class ScatterCache(Cache):
    """Static buffers that a call writes into from `write_index` on; a rejected token is simply overwritten later.

    buffers: (key, value) of each layer, (B, Hkv, L, D). write_index: (B,), tokens that each row already holds.
    """

    is_compileable = True

    def __init__(self, buffers: list[tuple[Tensor, Tensor]], write_index: Tensor) -> None:
        super().__init__(layers=[])
        self.buffers = list(buffers)
        self.write_index = write_index

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write (B, Hkv, S, D) at `write_index`; return whole buffers (B, Hkv, L, D), new entries included."""
        key, value = self.buffers[layer_idx]
        written = (self._scatter(key, key_states), self._scatter(value, value_states))
        self.buffers[layer_idx] = written
        return written

    def _scatter(self, buffer: Tensor, states: Tensor) -> Tensor:
        return ops.symbolic(
            "TensorScatter",
            (buffer, states, self.write_index),
            {"axis": 2, "mode": "linear"},
            dtype=buffer.dtype,
            shape=buffer.shape,
            version=OPSET,
        )

    def get_query_offset(self, layer_idx: int = 0) -> Tensor:  # type: ignore[override]
        """Per row (B,), unlike transformers' own caches: `draftc_mask` is the only reader."""
        return self.write_index

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions are always passed explicitly, so nothing may be derived from a length here."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """All L slots, whatever is filled: the mask decides what is visible."""
        return self.buffers[layer_idx][0].shape[2], 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """L in tokens."""
        return self.buffers[0][0].shape[2]


class ProbeCache(Cache):
    """Keeps nothing; records the (kv_heads, key_dim, value_dim) that each layer passes to the cache."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, tuple[int, int, int]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Record the shapes and return what came in."""
        self.shapes[layer_idx] = (key_states.shape[1], key_states.shape[3], value_states.shape[3])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: the probe is the first and only call."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """The call's own tokens."""
        return query_length, 0


def draftc_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: Tensor,
    mask_function: Callable[[int, int, Tensor, Tensor], Tensor],
    **_: Any,
) -> Tensor:
    """Bool mask (B, 1, S, L) of the model's own index-based `mask_function`; True where a query may look.

    Slots at or past a row's `write_index + S` hold rejected or no tokens; every causal function hides them.
    """
    slots = torch.arange(kv_length)  # (L,)
    queries = q_offset[:, None, None, None] + torch.arange(q_length)[:, None]  # (B, 1, S, 1)
    return mask_function(0, 0, queries, slots)


def draftc_attention(
    module: torch.nn.Module,
    query: Tensor,  # (B, H, S, D)
    key: Tensor,  # (B, Hkv, L, D)
    value: Tensor,  # (B, Hkv, L, Dv)
    attention_mask: Tensor,  # (B, 1, S, L) bool
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """ONNX `Attention` over the whole buffer; returns (B, S, H, Dv), as transformers' attention functions do.

    Raises UnsupportedModelError where the model asks for something that the ONNX operator cannot express.
    """
    for extra in ("s_aux", "position_bias"):
        if kwargs.get(extra) is not None:
            name = getattr(getattr(module, "config", None), "model_type", "this model")
            raise UnsupportedModelError(
                f"{name}: its attention uses {extra!r}, which the ONNX Attention operator lacks"
            )
    attributes: dict[str, Any] = {"scale": query.shape[-1] ** -0.5 if scaling is None else float(scaling)}
    if softcap is not None:
        attributes["softcap"] = float(softcap)
    out = ops.symbolic(
        "Attention",
        (query, key, value, attention_mask),
        attributes,
        dtype=query.dtype,
        shape=(*query.shape[:3], value.shape[3]),
        version=OPSET,
    )
    return out.transpose(1, 2), None


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which this model's forward takes its cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@contextmanager
def seams_in_place(model: PreTrainedModel) -> Iterator[None]:
    """Run `model` on the two seams inside the block; its own attention and experts are back afterwards.

    Raises UnsupportedModelError for a model whose attention does not go through transformers' interface.
    """
    AttentionInterface.register(NAME, draftc_attention)
    AttentionMaskInterface.register(NAME, draftc_mask)
    attention = model.config._attn_implementation
    experts = model.config._experts_implementation
    try:
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:
            raise UnsupportedModelError(
                f"{model.config.model_type}: its attention does not go through transformers' attention interface"
            )
        if model._can_set_experts_implementation():
            # The one form without data-dependent control flow: each token gathers the weights of its own experts. In
            # ONNX Runtime that gather is a copy per (token, expert) pair, so memory grows with the width of a call
            # (`preflight` counts it), and the gathered weights cannot be quantized.
            model.set_experts_implementation("batched_mm")
        yield
    finally:
        model.set_attn_implementation(attention)
        if model._can_set_experts_implementation():
            model.set_experts_implementation(experts)
