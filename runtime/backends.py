"""Which backend runs a bundle's graphs, by the name in its manifest: the one place that knows them all.

A new backend is a class with Engine's methods in a module of its own, and a `case` in each function here. Its module is
imported only where a bundle asks for it, so that nobody needs the packages of a backend that they don't use.
"""

from pathlib import Path

from draftc.runtime.devices import DeviceOptions
from draftc.runtime.engine import Engine
from draftc.runtime.errors import BackendUnavailableError
from draftc.runtime.graphio import GraphSpec
from draftc.runtime.loop import LoopMaker
from draftc.runtime.records import Backend, EngineInfo

__all__ = ["check_device_options", "open_engine", "open_loops"]

DEFAULTS = DeviceOptions()


def check_device_options(backend: str, options: DeviceOptions) -> None:
    """Raise UsageError unless `backend` serves the device and takes the options; nothing is loaded.

    Raises BackendUnavailableError for a backend that is unknown.
    """
    match backend:
        case "onnxruntime":
            from draftc.runtime import ort_session

            ort_session.check_options(options)
        case "tensorrt-rtx" | "tensorrt":
            from draftc.runtime import tensorrt

            tensorrt.check_options(backend, options)
        case _:
            raise _unknown(backend)


def open_engine(
    backend: str,
    path: Path,
    spec: GraphSpec,
    *,
    max_call: int,
    max_rows: int,
    options: DeviceOptions = DEFAULTS,
    built: Backend | None = None,
    info: EngineInfo | None = None,
    beside: Engine | None = None,
) -> Engine:
    """Load the graph at `path`, whose tensors are `spec`, for calls of `max_call` tokens and `max_rows` rows of logits.

    `built` and `info` are what the bundle says of an engine, None for a graph. `beside` is an engine of the same
    session, which may share its stream and buffers. Raises BackendUnavailableError, also for a backend that is unknown;
    BundleError, ResourceError, UsageError.
    """
    match backend:
        case "onnxruntime":
            from draftc.runtime.ort import OrtEngine

            return OrtEngine(path, spec, max_call=max_call, max_rows=max_rows, options=options)
        case "tensorrt-rtx" | "tensorrt":
            from draftc.runtime.tensorrt import TensorRtEngine

            assert built is not None
            assert info is not None
            return TensorRtEngine(
                path, spec, built=built, info=info, max_call=max_call, max_rows=max_rows, options=options, beside=beside
            )
        case _:
            raise _unknown(backend)


def open_loops(backend: str, target: Engine, draft: Engine | None, *, max_call: int) -> LoopMaker | None:
    """The backend's own loops over the engines of a session; None where it has none. Raises ResourceError."""
    match backend:
        case "tensorrt-rtx" | "tensorrt":
            from draftc.runtime.device_loop import open_device_loops

            return open_device_loops(target, draft, max_call)
        case _:
            return None


def _unknown(backend: str) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"unknown backend {backend!r}: this draftc has onnxruntime, tensorrt-rtx and tensorrt; pip install -U draftc"
    )
