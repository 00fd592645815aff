"""CUDA as this project uses it: one GPU with one stream; memory, copies, events and captured graphs on it.

A thin layer over cuda-python: `cuda.core` for devices, streams, events, pinned memory and graph capture, and
`cuda.bindings.runtime` for what that lacks: plain allocations (memory of a pool stays with the process when it is given
back, and the next session's memory check would not see it), copies of a part of a buffer, and events in captured
graphs. Everything is queued on the stream; `Gpu.wait` is the only place where the host waits.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftc.runtime.errors import BackendUnavailableError, DraftcError, EngineError, ResourceError
from draftc.runtime.memory import format_bytes

__all__ = ["Block", "Cuda", "DeviceMemory", "Gpu", "load_cuda"]

ALIGNMENT = 256  # bytes: what cudaMalloc aligns to, and TensorRT asks of the memory it is given
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


@dataclass(frozen=True)
class Cuda:
    """The two modules of cuda-python: `cuda.core` and `cuda.bindings.runtime`."""

    core: Any
    runtime: Any

    def check_driver(self, needs: str) -> None:
        """Raise BackendUnavailableError, which says what does work here, unless the driver can serve `needs`."""
        wanted, driver = self._version("cudaRuntimeGetVersion"), self._version("cudaDriverGetVersion")
        instead = "on this machine, bundles compiled with --backend onnxruntime run on the CPU"
        if driver == 0:
            raise BackendUnavailableError(
                f"{needs} needs an NVIDIA GPU with a driver for CUDA {_dotted(wanted)}, no driver was found: install "
                f"it, or use another backend: {instead}"
            )
        if driver // 1000 < wanted // 1000:
            raise BackendUnavailableError(
                f"the NVIDIA driver is for CUDA {_dotted(driver)}, {needs} needs {_dotted(wanted)}: update the driver, "
                f"or use another backend: {instead}"
            )

    def _version(self, function: str) -> int:
        error, version = getattr(self.runtime, function)()
        return int(version) if int(error) == 0 else 0


def load_cuda(extra: str) -> Cuda:
    """cuda-python's modules; `extra` is what installs them. Raises BackendUnavailableError where they are missing."""
    try:
        return Cuda(importlib.import_module("cuda.core"), importlib.import_module("cuda.bindings.runtime"))
    except ImportError as error:
        raise BackendUnavailableError(
            f"this bundle needs cuda-core and cuda-bindings ({error}): pip install 'draftc[{extra}]'"
        ) from None


def _dotted(version: int) -> str:
    """13050 → "13.5"."""
    return f"{version // 1000}.{version % 1000 // 10}"


class DeviceMemory:
    """`size` bytes on the device at `address`, until `close`."""

    def __init__(self, gpu: "Gpu", size: int) -> None:
        self._gpu = gpu
        self.size = size
        self.address = gpu.allocate(max(size, 1))  # an address even for nothing

    def zero(self) -> None:
        """Queue filling it with zeros."""
        self._gpu.zero(self.address, self.size)

    def close(self) -> None:
        """Give the memory back. Calling it twice is allowed."""
        if self.address:
            self._gpu.free(self.address)
            self.address = 0


class Gpu:
    """One device and one stream on it, for the engines of one session.

    A thread calls `enter` before anything else. `users` counts the engines: the last one to leave closes the stream.
    Methods raise EngineError when CUDA does, ResourceError when it has no memory left; the constructor raises
    BackendUnavailableError for a device that is not there.
    """

    def __init__(self, cuda: Cuda, index: int) -> None:
        self._cuda = cuda
        self.index = index
        error, count = cuda.runtime.cudaGetDeviceCount()
        count = int(count) if int(error) == 0 else 0
        if index >= count:
            found = f"{count} found" if count else "none found"
            raise BackendUnavailableError(f"there is no GPU {index} ({found}): name another with --device")
        self._busy = False
        self._open = True
        self.users = 0
        with _cuda_errors("opening the GPU"):
            self._make_current()
            device = cuda.core.Device(index)
            device.set_current()
            self.name = str(device.name)
            self.sm = str(device.arch)
            self._device = device
            self._stream = device.create_stream()
            self.stream = int(self._stream.handle)
            self._pinned = cuda.core.LegacyPinnedMemoryResource()
            self._timing = cuda.core.EventOptions(timing_enabled=True)

    # --- threads and waiting ------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Make the device current in this thread, and wait for what an interrupted call left running."""
        self._make_current()
        if self._busy:
            self.wait()

    def wait(self) -> None:
        """Wait until everything queued is done."""
        with _cuda_errors("waiting for the GPU"):
            self._stream.sync()
        self._busy = False

    def close(self) -> None:
        """Close the stream. Calling it twice is allowed."""
        if self._open:
            self._open = False
            self._stream.close()

    def _make_current(self) -> None:
        self._check(self._cuda.runtime.cudaSetDevice(self.index), "making the GPU current")

    # --- memory -------------------------------------------------------------------------------------------------------

    def free_memory(self) -> int:
        """Bytes of device memory that are free now."""
        error, free, _ = self._cuda.runtime.cudaMemGetInfo()
        self._check((error,), "asking for free memory")
        return int(free)

    def allocate(self, size: int) -> int:
        """Address of `size` new bytes on the device. Raises ResourceError, which names needed and free."""
        error, address = self._cuda.runtime.cudaMalloc(size)
        if int(error) == OUT_OF_MEMORY:
            raise ResourceError(
                f"{self.name} has no room for {format_bytes(size)}, {format_bytes(self.free_memory())} is free: close "
                "other programs, or compile with a smaller --max-length"
            )
        self._check((error,), f"allocating {format_bytes(size)}")
        return int(address)

    def free(self, address: int) -> None:
        """Give back what `allocate` returned. After a failure on the device nothing can be given back: not an error."""
        self._cuda.runtime.cudaFree(address)

    def pin(self, size: int) -> NDArray[np.uint8]:
        """`size` bytes of host memory that the device can copy to and from, given back when the last view is gone."""
        with _cuda_errors(f"allocating {format_bytes(size)} of pinned memory"):
            return np.from_dlpack(self._pinned.allocate(size)).view(np.uint8)

    # --- what is queued -----------------------------------------------------------------------------------------------

    def queued(self) -> int:
        """The stream's handle, for someone else who queues work on it."""
        self._busy = True
        return self.stream

    def zero(self, address: int, size: int) -> None:
        """Queue filling `size` bytes with zeros."""
        self._check(self._cuda.runtime.cudaMemsetAsync(address, 0, size, self.queued()), "clearing memory")

    def copy_in(self, address: int, host: NDArray[Any]) -> None:
        """Queue a copy of pinned `host` memory to the device; it must not change before `wait`."""
        kind = self._cuda.runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._check(
            self._cuda.runtime.cudaMemcpyAsync(address, host.ctypes.data, host.nbytes, kind, self.queued()),
            "copying to the GPU",
        )

    def copy_out(self, host: NDArray[Any], address: int) -> None:
        """Queue a copy from the device into pinned `host` memory; it is there after `wait`."""
        kind = self._cuda.runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._check(
            self._cuda.runtime.cudaMemcpyAsync(host.ctypes.data, address, host.nbytes, kind, self.queued()),
            "copying from the GPU",
        )

    # --- events and graphs --------------------------------------------------------------------------------------------

    def event(self) -> Any:
        """A new event that records time."""
        with _cuda_errors("creating an event"):
            return self._device.create_event(self._timing)

    def record(self, event: Any, *, captured: bool = False) -> None:
        """Queue recording `event`. `captured`: as a part of the graph, so that each replay records it again."""
        runtime = self._cuda.runtime
        flags = runtime.cudaEventRecordExternal if captured else runtime.cudaEventRecordDefault
        error = runtime.cudaEventRecordWithFlags(int(event.handle), self.queued(), flags)
        self._check(error, "recording an event")

    def seconds(self, begin: Any, end: Any) -> float:
        """Device time between two events that have happened."""
        with _cuda_errors("reading events"):
            return float(end - begin) / 1e3

    def capture(self, work: Callable[[], None]) -> Any:
        """What `work` queues, as a graph for `launch`; nothing is run. The memory that it uses must outlive it."""
        with _cuda_errors("capturing a CUDA graph"):
            builder = self._stream.create_graph_builder()
            builder.begin_building()
            try:
                work()
            finally:
                builder.end_building()
            graph = builder.complete()
            builder.close()
        return graph

    def launch(self, graph: Any) -> None:
        """Queue a replay of a captured graph."""
        self.queued()
        with _cuda_errors("launching a CUDA graph"):
            graph.launch(self._stream)

    def _check(self, result: tuple[Any, ...], action: str) -> None:
        error = result[0]
        if int(error) != 0:
            _, text = self._cuda.runtime.cudaGetErrorString(error)
            raise EngineError(f"CUDA failed at {action}: {text.decode(errors='replace')}; open the bundle again")


@contextmanager
def _cuda_errors(action: str) -> Iterator[None]:
    """cuda.core raises a class of its own that it does not export, and RuntimeError: both become EngineError."""
    try:
        yield
    except DraftcError:
        raise
    except Exception as error:
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise EngineError(f"CUDA failed at {action}: {first}; open the bundle again") from error


class Block:
    """Small tensors side by side, in pinned host memory and on the device: one copy moves them all.

    `host[name]` is a view of the host's side; `address(name)` is where the tensor is on the device.
    """

    def __init__(self, gpu: Gpu, fields: Mapping[str, tuple[tuple[int, ...], type[np.generic]]]) -> None:
        self._gpu = gpu
        self._offsets: dict[str, int] = {}
        size = 0
        for name, (shape, dtype) in fields.items():
            self._offsets[name] = size
            size += -(-max(1, int(np.prod(shape)) * np.dtype(dtype).itemsize) // ALIGNMENT) * ALIGNMENT
        self._device = DeviceMemory(gpu, size)
        try:
            self._bytes = gpu.pin(size)
        except DraftcError:
            self._device.close()
            raise
        self._bytes.fill(0)
        self.host: dict[str, NDArray[Any]] = {
            name: np.ndarray(shape, dtype, self._bytes, self._offsets[name]) for name, (shape, dtype) in fields.items()
        }

    @property
    def size(self) -> int:
        """Bytes on the device."""
        return self._device.size

    def address(self, name: str) -> int:
        """Where tensor `name` is on the device."""
        return self._device.address + self._offsets[name]

    def upload(self) -> None:
        """Queue the copy from the host to the device."""
        self._gpu.copy_in(self._device.address, self._bytes)

    def download(self) -> None:
        """Queue the copy from the device to the host."""
        self._gpu.copy_out(self._bytes, self._device.address)

    def close(self) -> None:
        """Give the device's side back; the host's goes with its last view. Calling it twice is allowed."""
        self._device.close()
