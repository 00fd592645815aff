"""Which backend runs a bundle's graphs, by the name in its manifest: the one place that knows them all.

A new backend is a class with Engine's methods in a module of its own, and a `case` in each function here. Its module is
imported only where a bundle asks for it, so that nobody needs the packages of a backend that they don't use.
"""

from pathlib import Path

from draftc.runtime.engine import Engine
from draftc.runtime.errors import BackendUnavailableError
from draftc.runtime.graphio import GraphSpec

__all__ = ["check_device", "open_engine"]


def check_device(backend: str, device: str) -> None:
    """Raise UsageError unless `backend` serves `device`, BackendUnavailableError for a backend that is unknown."""
    match backend:
        case "onnxruntime":
            from draftc.runtime import ort

            ort.check_device(device)
        case _:
            raise _unknown(backend)


def open_engine(
    backend: str,
    path: Path,
    spec: GraphSpec,
    *,
    max_call: int,
    max_rows: int,
    device: str = "cpu",
    threads: int | None = None,
) -> Engine:
    """Load the graph at `path`, whose tensors are `spec`, for calls of `max_call` tokens and `max_rows` rows of logits.

    `threads` None is the backend's choice. Raises BackendUnavailableError, also for a backend that is unknown;
    BundleError, ResourceError, UsageError.
    """
    match backend:
        case "onnxruntime":
            from draftc.runtime.ort import OrtEngine

            return OrtEngine(path, spec, max_call=max_call, max_rows=max_rows, device=device, threads=threads)
        case _:
            raise _unknown(backend)


def _unknown(backend: str) -> BackendUnavailableError:
    return BackendUnavailableError(f"unknown backend {backend!r}: this draftc has onnxruntime; pip install -U draftc")
