"""`cuda.core` without a GPU; see fake_cuda_python. `CUDA_CORE` has the fake for each real class."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftc.runtime.cuda import Cuda
from tests.runtime.fake_cuda_python import FakeGpu, Runtime, Work, aligned

__all__ = ["CUDA_CORE", "FakeEvent", "FakeStream", "install"]


class CUDAError(Exception):
    """What cuda.core raises."""


@dataclass
class EventOptions:
    """`cuda.core.EventOptions`."""

    timing_enabled: bool | None = False


class FakeEvent:
    """`cuda.core.Event`. Everything on the device takes a millisecond."""

    def __init__(self, gpu: FakeGpu, timed: bool) -> None:
        self._timed = timed
        self.fake_time: float | None = None
        self.handle = 0x7000 + len(gpu.events)
        gpu.events[self.handle] = self

    def __sub__(self, other: "FakeEvent") -> float:
        if not (self._timed and other._timed) or self.fake_time is None or other.fake_time is None:
            raise CUDAError("CUDA_ERROR_NOT_READY")
        return self.fake_time - other.fake_time


class FakeStream:
    """`cuda.core.Stream`."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.fake_queue: list[Work] = []
        self.fake_recording: list[Work] | None = None
        self.fake_closed = False
        self.handle = 0x5000 + len(gpu.streams)
        gpu.streams[self.handle] = self

    def sync(self) -> None:
        self._gpu.require_current()
        if self.fake_recording is not None:
            raise CUDAError("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
        if self._gpu.failure("sync"):
            self.fake_queue.clear()
            raise CUDAError("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")
        while self.fake_queue:
            next(self._gpu.clock)
            self.fake_queue.pop(0)()

    def create_graph_builder(self) -> "FakeGraphBuilder":
        return FakeGraphBuilder(self._gpu, self)

    def close(self) -> None:
        assert not self.fake_queue
        self.fake_closed = True


class FakeGraphBuilder:
    """`cuda.core.graph.GraphBuilder`."""

    def __init__(self, gpu: FakeGpu, stream: FakeStream) -> None:
        self._gpu = gpu
        self._stream = stream
        self._recorded: list[Work] = []

    def begin_building(self, mode: str | None = "relaxed") -> "FakeGraphBuilder":
        assert self._stream.fake_recording is None
        self._stream.fake_recording = self._recorded
        return self

    def end_building(self) -> "FakeGraphBuilder":
        assert self._stream.fake_recording is self._recorded
        self._stream.fake_recording = None
        if self._gpu.failure("end_building"):
            raise CUDAError("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED: the capture was invalidated")
        return self

    def complete(self, options: object = None) -> "FakeGraph":
        self._gpu.captures += 1
        return FakeGraph(self._gpu, list(self._recorded))

    def close(self) -> None:
        self._recorded = []


class FakeGraph:
    """`cuda.core.graph.Graph`."""

    def __init__(self, gpu: FakeGpu, works: list[Work]) -> None:
        self._gpu = gpu
        self._works = works
        self._closed = False

    def launch(self, stream: FakeStream) -> None:
        assert not self._closed
        self._gpu.launches += 1
        for work in self._works:
            self._gpu.enqueue(stream.handle, work)

    def close(self) -> None:
        self._closed = True


class FakeBuffer:
    """`cuda.core.Buffer`, of pinned memory."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data = data

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        return self._data.view(np.int8).__dlpack__(max_version=max_version, dl_device=dl_device, copy=copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._data.__dlpack_device__()


class PinnedMemoryResource:
    """`cuda.core.LegacyPinnedMemoryResource`."""

    fake_gpu: FakeGpu

    def allocate(self, size: int, *, stream: object = None) -> FakeBuffer:
        self.fake_gpu.require_current()
        data = aligned(size)
        self.fake_gpu.pinned[data.ctypes.data] = data
        return FakeBuffer(data)


class FakeDevice:
    """`cuda.core.Device`."""

    fake_gpu: FakeGpu

    def __init__(self, device_id: int) -> None:
        if self.fake_gpu.machine.sm is None:
            raise RuntimeError("the driver library was not found")
        self._index = device_id
        self.name = "NVIDIA Fake"
        self.arch = self.fake_gpu.machine.sm

    def set_current(self, ctx: object = None) -> None:
        self.fake_gpu.current.device = self._index

    def create_stream(self, obj: object = None, options: object = None) -> FakeStream:
        self.fake_gpu.require_current()
        return FakeStream(self.fake_gpu)

    def create_event(self, options: EventOptions | None = None) -> FakeEvent:
        self.fake_gpu.require_current()
        return FakeEvent(self.fake_gpu, bool(options and options.timing_enabled))


# Real name → the fake that stands for it.
CUDA_CORE: dict[str, type] = {
    "Device": FakeDevice,
    "Stream": FakeStream,
    "Event": FakeEvent,
    "EventOptions": EventOptions,
    "Buffer": FakeBuffer,
    "LegacyPinnedMemoryResource": PinnedMemoryResource,
    "graph.GraphBuilder": FakeGraphBuilder,
    "graph.Graph": FakeGraph,
}


def install(gpu: FakeGpu) -> Callable[[str], Cuda]:
    """A `load_cuda` that gives the fake modules of `gpu`."""

    def bound(fake: type) -> type:
        return type(fake.__name__, (fake,), {"fake_gpu": gpu})

    core: Any = SimpleNamespace(
        Device=bound(FakeDevice),
        EventOptions=EventOptions,
        LegacyPinnedMemoryResource=bound(PinnedMemoryResource),
    )
    return lambda extra: Cuda(core, Runtime(gpu))
