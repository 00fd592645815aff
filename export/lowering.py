"""Lowering: which passes turn the portable graph into what a backend runs best on a device, in this order.

The quantizer is not among them (`quantize`): it is a choice of the user, not of the backend. A new pass is a class in
a module of its own, with a test of its own, and a line here.
"""

from collections.abc import Callable
from functools import partial

import onnx_ir as ir
from onnx_ir.passes import InPlacePass

from draftc.export.attention import DecomposeAttention
from draftc.export.fusions import FuseRMSNormalization, FuseRotaryEmbedding
from draftc.export.group_query import FuseGroupQueryAttention
from draftc.export.last_rows import SelectRowsEarly
from draftc.export.packing import PackQueryKeyValue
from draftc.export.passes import FuseTransposedWeights
from draftc.runtime.records import BackendName, Device

__all__ = ["LOWERINGS", "lower"]

Passes = tuple[Callable[[], InPlacePass], ...]

_TENSORRT: Passes = (FuseRMSNormalization, FuseRotaryEmbedding, DecomposeAttention)
LOWERINGS: dict[tuple[BackendName, Device], Passes] = {
    ("onnxruntime", "cpu"): (
        FuseTransposedWeights,
        FuseGroupQueryAttention,
        PackQueryKeyValue,
        FuseRMSNormalization,
        SelectRowsEarly,
    ),
    ("onnxruntime", "cuda"): (FuseTransposedWeights, partial(DecomposeAttention, softcap_only=True)),
    ("tensorrt-rtx", "cuda"): _TENSORRT,
    ("tensorrt", "cuda"): _TENSORRT,
}


def lower(
    model: ir.Model, backend: BackendName, device: Device, note: Callable[[str], None] = lambda message: None
) -> ir.Model:
    """Apply the passes of a backend on a device to `model`, in place. `note` is told what stays slower than need be."""
    for make in LOWERINGS[backend, device]:
        rewrite = make()
        rewrite(model)
        if isinstance(rewrite, FuseGroupQueryAttention) and rewrite.left:
            reasons = "; ".join(sorted(set(rewrite.left)))
            note(f"{len(rewrite.left)} attention layers keep the portable, slower form: {reasons}")
    return model
