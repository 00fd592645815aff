"""ONNX Runtime backend: one decoder graph, its KV buffers allocated once and written in place through IO binding."""

from dataclasses import replace
from pathlib import Path

from draftc.runtime.devices import DeviceOptions, require_kv_memory
from draftc.runtime.engine import Logits, Tokens
from draftc.runtime.errors import DraftcError, EngineError, ResourceError
from draftc.runtime.graphio import GraphSpec
from draftc.runtime.memory import format_bytes
from draftc.runtime.ort_calls import Buffers, Call
from draftc.runtime.ort_session import (
    check_io,
    check_options,
    cpu_inputs,
    load_onnxruntime,
    note_no_graphs,
    open_session,
    out_of_memory,
    reason,
)

__all__ = ["OrtEngine", "load_onnxruntime"]

DEFAULTS = DeviceOptions()
KEPT_WIDTH = 64  # wider calls are the ends of prompts, whose widths rarely come again


class OrtEngine:
    """Runs one graph for one sequence (B = 1), on the CPU or on a GPU.

    Past and present are bound to the same memory, once. A binding is made per (S, R) and kept for the widths that the
    loop alternates between and for full chunks of `max_call` tokens, so a step allocates nothing and binds nothing.

    On a GPU, widths up to `max_rows` that come a second time are captured as CUDA graphs, one per (S, R). ONNX Runtime
    keeps them per thread: whoever calls from a new thread for every request pays for the captures again, and should
    open with `cuda_graph` off. Where a capture fails, the graph is opened again without, with a warning.

    Raises BackendUnavailableError, BundleError (bytes that are no graph, or a graph with other inputs and outputs than
    `spec`), ResourceError (weights or KV buffers that do not fit into memory), UsageError (a device or option that this
    backend does not take).
    """

    def __init__(
        self, path: Path, spec: GraphSpec, *, max_call: int, max_rows: int, options: DeviceOptions = DEFAULTS
    ) -> None:
        check_options(options)
        self._path = path
        self._spec = spec
        self._options = options
        self._max_call = max_call
        self._max_rows = max_rows
        self._ort = load_onnxruntime()
        self._session, self._cuda_graph = open_session(path, spec, options)
        check_io(self._session, spec, options)
        self._on_host = cpu_inputs(self._session)
        require_kv_memory([(options, spec.kv_bytes())])
        self._buffers: Buffers | None = self._allocate()
        self._calls: dict[tuple[int, int], Call] = {}

    @property
    def spec(self) -> GraphSpec:
        """Inputs and outputs of the graph."""
        return self._spec

    @property
    def kv_addresses(self) -> dict[str, int]:
        """Address of each cache buffer; they never change while the engine is open."""
        buffers = {} if self._buffers is None else self._buffers.kv
        return {name: value.data_ptr() for name, value in buffers.items()}

    @property
    def cuda_graph(self) -> bool:
        """Whether calls whose shapes repeat are captured as CUDA graphs."""
        return self._cuda_graph

    def forward(self, tokens: Tokens, start: int, rows: int) -> Logits:
        """See Engine.forward. Raises ResourceError when the device has no memory for the call."""
        width = tokens.size
        what = f"{width} tokens at {start}"
        if start + width > self._spec.buffer_length:  # on a GPU, a write past the end is not an error but a crash
            raise EngineError(f"{what} do not fit into KV buffers of {self._spec.buffer_length}")
        try:
            call = self._call(width, rows)
            try:
                return call.run(tokens, start)
            except Exception as error:  # onnxruntime raises its own classes, which share no base but Exception
                if not call.captured:
                    raise
                refusal = reason(error)
            del call  # with the error it was the last to hold the session: there may be no room for the weights twice
            self._open_without_graphs(refusal)
            # The failed call may have written its entries, and only those: they are written again.
            return self._call(width, rows).run(tokens, start)
        except DraftcError:
            raise
        except Exception as error:
            problem = out_of_memory(error, self._options, what)
            raise problem or EngineError(f"ONNX Runtime failed on {what}: {reason(error)}") from error

    def clear(self) -> None:
        """See Engine.clear."""
        if self._buffers is not None:
            self._buffers.clear(self._spec)

    def close(self) -> None:
        """Release the session and its buffers."""
        self._calls.clear()
        self._buffers = None
        self._session = None

    def _allocate(self) -> Buffers:
        needed = f"KV buffers of {format_bytes(self._spec.kv_bytes())} and {self._max_rows} rows of logits"
        try:
            return Buffers(self._ort, self._spec, self._options, self._max_rows)
        except (MemoryError, ValueError):  # numpy raises ValueError for more bytes than an address has bits for
            raise ResourceError(
                f"no memory for {needed}: compile with a smaller --max-length and --max-width"
            ) from None
        except Exception as error:
            problem = out_of_memory(error, self._options, needed)
            raise problem or EngineError(f"ONNX Runtime cannot allocate {needed}: {reason(error)}") from error

    def _call(self, width: int, rows: int) -> Call:
        """The call of this shape, made where it is new, to be captured where it comes again."""
        call = self._calls.get((width, rows))
        if call is None:
            assert self._buffers is not None
            call = Call(
                self._ort, self._session, self._spec, self._buffers, (width, rows), self._on_host, self._cuda_graph
            )
            if width <= KEPT_WIDTH or width == self._max_call:
                self._calls[width, rows] = call
        elif self._cuda_graph and not call.captured and width <= self._max_rows:
            call.capture(1 + sum(one.captured for one in self._calls.values()))
        return call

    def _open_without_graphs(self, cause: str) -> None:
        """Replace the session, whose stream a failed capture leaves unusable. Caches and their contents stay."""
        note_no_graphs(self._path, cause)
        self._calls.clear()
        self._session = None
        options = replace(self._options, cuda_graph=False)
        self._session, self._cuda_graph = open_session(self._path, self._spec, options)
