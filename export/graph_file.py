"""Write a graph and its weights, each weight once."""

from pathlib import Path

import numpy as np
import onnx_ir as ir

__all__ = ["save_graph"]

INSIDE = 256  # bytes up to which a tensor stays in the graph's own file


def save_graph(model: ir.Model, path: Path) -> None:
    """Write `model` to `path`, and its weights to a file beside it, `path` with ".data" behind, which it reads then.

    Initializers over the same memory, such as the codes of a head and of the embedding that is tied to it, get one
    place in that file, under two names and shapes.
    """
    owners: dict[tuple[int, int], ir.Value] = {}
    views: list[tuple[ir.Value, ir.TensorProtocol, ir.Value]] = []
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if not isinstance(tensor, ir.Tensor) or not isinstance(tensor.raw, np.ndarray) or tensor.nbytes <= INSIDE:
            continue
        owner = owners.setdefault((tensor.raw.ctypes.data, tensor.raw.nbytes), value)
        if owner is not value:
            views.append((value, tensor, owner))
            value.const_value = None
    ir.external_data.unload_from_model(model, path.parent, f"{path.name}.data", size_threshold_bytes=INSIDE)
    for value, tensor, owner in views:
        stored = owner.const_value
        assert isinstance(stored, ir.ExternalTensor)
        value.const_value = ir.ExternalTensor(
            stored.location,
            stored.offset,
            stored.length,
            tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=value.name or "",
            base_dir=stored.base_dir,
        )
    ir.save(model, path)
