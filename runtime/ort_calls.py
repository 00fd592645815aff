"""Memory of an ONNX Runtime engine: KV and logits, allocated once, and the calls that are bound to them.

On a GPU a call copies its token ids and its position in, and its rows of logits out; caches stay where they are. A
binding copies, once, what is not on the device that reads it: whatever changes from call to call must therefore be
bound where it is read.
"""

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftc.runtime.devices import DeviceOptions
from draftc.runtime.engine import Logits, Tokens
from draftc.runtime.graphio import INPUT_IDS, LOGIT_POSITIONS, LOGITS, WRITE_INDEX, GraphSpec, TensorSpec

__all__ = ["Buffers", "Call"]

# numpy's type of the same bytes, and what ONNX Runtime calls the elements: numpy has no bfloat16, ONNX counts it as 16.
NUMPY_DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
ELEMENT_TYPES: dict[str, Any] = NUMPY_DTYPES | {"bfloat16": 16}

GRAPH_ID = "gpu_graph_id"  # a run's CUDA graph: captured by the first run of this number, replayed by the others
UNCAPTURED = "-1"


class Buffers:
    """KV caches in zeros, and room for `max_rows` rows of logits on the host and, for a GPU, on the device.

    Their addresses never change. Raises MemoryError or ValueError where the host has no memory, and what ONNX Runtime
    raises where the device has none.
    """

    def __init__(self, ort: Any, spec: GraphSpec, options: DeviceOptions, max_rows: int) -> None:
        self.device = (options.kind, options.index)
        self.kv: dict[str, Any] = {  # (1, Hkv, L, D) each; zeros, because masked entries still enter the arithmetic
            past.name: self._zeros(ort, past) for past, _ in spec.cache_pairs
        }
        self.logits: Logits = np.empty((max_rows, spec.vocab_rows), np.float32)  # (R, V)
        self.device_logits: Any = None
        if options.kind != "cpu":
            shape = self.logits.shape
            self.device_logits = ort.OrtValue.ortvalue_from_shape_and_type(shape, np.float32, *self.device)

    def _zeros(self, ort: Any, cache: TensorSpec) -> Any:
        kind, _ = self.device
        zeros = _zeros(cache)
        if kind == "cpu":
            return ort.OrtValue.ortvalue_from_numpy(zeros)
        value = ort.OrtValue.ortvalue_from_shape_and_type(zeros.shape, ELEMENT_TYPES[cache.dtype], *self.device)
        value.update_inplace(zeros)
        return value

    def clear(self, spec: GraphSpec) -> None:
        """Fill the caches with zeros, in place."""
        for past, _ in spec.cache_pairs:
            self.kv[past.name].update_inplace(_zeros(past))


class Call:
    """Calls of one shape (S, R): the inputs, and the binding that joins them with the engine's buffers.

    `on_host` names the inputs that the graph reads from the host's memory. `captured` makes the session capture this
    shape as a CUDA graph, from then on replayed: such a graph keeps the addresses that it was captured with, so a call
    lives as long as its session.
    """

    def __init__(
        self,
        ort: Any,
        session: Any,
        spec: GraphSpec,
        buffers: Buffers,
        shape: tuple[int, int],
        on_host: Collection[str],
        graphs: bool,
    ) -> None:
        width, rows = shape
        self._session = session
        self._ort = ort
        self._tokens = np.zeros((1, width), np.int64)
        self._write_index = np.zeros(1, np.int64)
        self._positions = np.arange(width - rows, width, dtype=np.int64)[None]  # (1, R)
        self._logits = buffers.logits[:rows]
        self._uploads: list[tuple[Any, Any]] = []  # (on the device, on the host): what changes from call to call
        self._download: tuple[Any, Any] | None = None  # logits (on the device, on the host)
        self._options: Any = None
        self.captured = False
        if graphs:
            self._run_as(UNCAPTURED)
        self._binding = session.io_binding()
        for name, array in (
            (INPUT_IDS, self._tokens),
            (WRITE_INDEX, self._write_index),
            (LOGIT_POSITIONS, self._positions),
        ):
            self._bind_input(name, array, buffers, on_host)
        self._bind_logits(spec, buffers)
        for past, present in spec.cache_pairs:
            self._binding.bind_ortvalue_input(past.name, buffers.kv[past.name])
            self._binding.bind_ortvalue_output(present.name, buffers.kv[past.name])

    def run(self, tokens: Tokens, start: int) -> Logits:
        """Run `tokens` (S,) from position `start` and return the logits (R, V) of the last R, in the shared buffer."""
        self._tokens[0] = tokens
        self._write_index[0] = start
        for device, host in self._uploads:
            device.update_inplace(host)
        self._session.run_with_iobinding(self._binding, self._options)
        if self._download is not None:
            device, host = self._download
            host.update_inplace(device)
        return self._logits

    def capture(self, number: int) -> None:
        """Let the next run capture this shape as CUDA graph `number` (1 or more) of the session."""
        self._run_as(str(number))
        self.captured = True

    def _run_as(self, graph: str) -> None:
        self._options = self._ort.RunOptions()
        self._options.add_run_config_entry(GRAPH_ID, graph)

    def _bind_input(self, name: str, array: NDArray[np.int64], buffers: Buffers, on_host: Collection[str]) -> None:
        kind, index = buffers.device
        if kind == "cpu" or name in on_host:
            self._binding.bind_input(name, "cpu", 0, np.int64, array.shape, array.ctypes.data)
            return
        host = self._ort.OrtValue.ortvalue_from_numpy(array)
        device = self._ort.OrtValue.ortvalue_from_shape_and_type(array.shape, np.int64, kind, index)
        self._binding.bind_ortvalue_input(name, device)
        if name == LOGIT_POSITIONS:
            device.update_inplace(host)  # the same for every call of this shape
        else:
            self._uploads.append((device, host))

    def _bind_logits(self, spec: GraphSpec, buffers: Buffers) -> None:
        """Bind the logits, as the first of the outputs."""
        kind, index = buffers.device
        shape = (1, *self._logits.shape)
        target = buffers.device_logits
        address = self._logits.ctypes.data if target is None else target.data_ptr()
        self._binding.bind_output(LOGITS, kind, index, np.float32, shape, address)
        if target is not None:
            # ONNX Runtime has no view of a part of a buffer, except as what is bound.
            [device] = self._binding.get_outputs()
            self._download = device, self._ort.OrtValue.ortvalue_from_numpy(self._logits[None])


def _zeros(cache: TensorSpec) -> NDArray[Any]:
    shape = tuple(1 if isinstance(dim, str) else dim for dim in cache.shape)  # B = 1
    return np.zeros(shape, NUMPY_DTYPES[cache.dtype])
