"""cuda-python without a GPU: the calls that the runtime makes of it, with the real names and parameters.

Device memory is host memory that only copies may touch; they are counted by direction and bytes. A stream is lazy:
nothing that is queued happens before `sync`, so a missing wait shows as old data. Capturing records what is queued, and
a launch queues it again, with the addresses of then.

`Runtime` stands for `cuda.bindings.runtime`, `fake_cuda_core` has the other half: the contract tests compare their
signatures with the installed packages.
"""

# ruff: noqa: N802, N803, N815 (the real names)

import enum
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tests.runtime.fake_cuda_core import FakeEvent, FakeStream

__all__ = ["Copy", "ErrorCode", "FakeGpu", "Machine", "MemcpyKind", "Runtime", "Work", "aligned"]

GARBAGE = 0xFF  # NaN in every float type, and -1 in int64
ALIGNMENT = 256
Work = Callable[[], None]


class ErrorCode(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorInsufficientDriver = 35
    cudaErrorIllegalAddress = 700


class MemcpyKind(enum.IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2


SUCCESS = ErrorCode.cudaSuccess
TEXTS = {2: b"out of memory", 700: b"an illegal memory access was encountered"}


@dataclass(frozen=True)
class Copy:
    """A copy that happened."""

    kind: str  # "in": host to device, "out": device to host
    size: int


@dataclass
class Machine:
    """What is installed where the tests pretend to run. `sm` None: there is no driver."""

    sm: str | None = "89"
    memory: int = 1 << 30
    driver: int = 13020
    runtime: int = 13050
    devices: int = 1


class FakeGpu:
    """The state behind one pair of fake modules, and what a test wants to know of it."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.copies: list[Copy] = []
        self.allocations: dict[int, NDArray[np.uint8]] = {}  # address → bytes
        self.pinned: dict[int, NDArray[np.uint8]] = {}
        self.freed: list[NDArray[np.uint8]] = []  # kept, so that no address comes back
        self.reserved = 0  # bytes that engines took
        self.streams: dict[int, FakeStream] = {}
        self.events: dict[int, FakeEvent] = {}
        self.launches = 0
        self.captures = 0
        self.clock = itertools.count()
        self.fail_next: dict[str, ErrorCode] = {}  # function → what its next call returns
        self.current = threading.local()

    def copied(self, kind: str) -> int:
        """Bytes that were copied in that direction."""
        return sum(copy.size for copy in self.copies if copy.kind == kind)

    @property
    def used(self) -> int:
        return self.reserved + sum(data.size for data in self.allocations.values())

    @property
    def capturing(self) -> bool:
        return any(stream.fake_recording is not None for stream in self.streams.values())

    def device_bytes(self, address: int, size: int) -> NDArray[np.uint8]:
        """`size` bytes of device memory at `address`, which must lie in one allocation."""
        return _find(self.allocations, address, size, "device memory")

    def enqueue(self, stream: int, work: Work) -> ErrorCode:
        self.require_current()
        queue = self.streams[stream]
        assert not queue.fake_closed
        if queue.fake_recording is not None:
            queue.fake_recording.append(work)
        else:
            queue.fake_queue.append(work.queued() if isinstance(work, Upload) else work)
        return SUCCESS

    def require_current(self) -> None:
        assert getattr(self.current, "device", None) is not None, "no device is current in this thread"

    def failure(self, function: str) -> ErrorCode | None:
        if self.machine.sm is None:
            return ErrorCode.cudaErrorInsufficientDriver
        return self.fail_next.pop(function, None)


@dataclass(frozen=True)
class Upload:
    """A copy to the device. What it reads must not change between being queued and being done."""

    device: NDArray[np.uint8]
    host: NDArray[np.uint8]
    done: Callable[[int], None]

    def queued(self) -> Work:
        before = self.host.copy()

        def work() -> None:
            assert (before == self.host).all(), "the host wrote into memory that the GPU had still to read"
            self.device[:] = self.host
            self.done(self.host.size)

        return work

    def __call__(self) -> None:
        raise AssertionError("never queued")


def _find(blocks: dict[int, NDArray[np.uint8]], address: int, size: int, what: str) -> NDArray[np.uint8]:
    for begin, data in blocks.items():
        if begin <= address and address + size <= begin + data.size:
            return data[address - begin : address - begin + size]
    raise AssertionError(f"{size} bytes at {address:#x} are not {what}")


def aligned(size: int) -> NDArray[np.uint8]:
    """`size` bytes of garbage at an address like cudaMalloc's."""
    memory = np.full(size + ALIGNMENT, GARBAGE, np.uint8)
    offset = -memory.ctypes.data % ALIGNMENT
    return memory[offset : offset + size]


class Runtime:
    """`cuda.bindings.runtime`: methods stand for its functions."""

    cudaMemcpyKind = MemcpyKind
    cudaEventRecordDefault = 0
    cudaEventRecordExternal = 1

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def cudaRuntimeGetVersion(self) -> tuple[ErrorCode, int]:
        return SUCCESS, self._gpu.machine.runtime

    def cudaDriverGetVersion(self) -> tuple[ErrorCode, int]:
        return SUCCESS, 0 if self._gpu.machine.sm is None else self._gpu.machine.driver

    def cudaGetErrorString(self, error: ErrorCode) -> tuple[ErrorCode, bytes]:
        return SUCCESS, TEXTS.get(error, b"an error")

    def cudaGetDeviceCount(self) -> tuple[ErrorCode, int | None]:
        error = self._gpu.failure("cudaGetDeviceCount")
        return (error, None) if error else (SUCCESS, self._gpu.machine.devices)

    def cudaSetDevice(self, device: int) -> tuple[ErrorCode]:
        if error := self._gpu.failure("cudaSetDevice"):
            return (error,)
        self._gpu.current.device = device
        return (SUCCESS,)

    def cudaMemGetInfo(self) -> tuple[ErrorCode, int, int]:
        self._gpu.require_current()
        return SUCCESS, self._gpu.machine.memory - self._gpu.used, self._gpu.machine.memory

    def cudaMalloc(self, size: int) -> tuple[ErrorCode, int | None]:
        self._gpu.require_current()
        assert not self._gpu.capturing
        assert size > 0
        if error := self._gpu.failure("cudaMalloc"):
            return error, None
        if self._gpu.used + size > self._gpu.machine.memory:
            return ErrorCode.cudaErrorMemoryAllocation, None
        data = aligned(size)
        self._gpu.allocations[data.ctypes.data] = data
        return SUCCESS, data.ctypes.data

    def cudaFree(self, devPtr: int) -> tuple[ErrorCode]:
        assert not any(stream.fake_queue for stream in self._gpu.streams.values()), "freed while work is queued"
        data = self._gpu.allocations.pop(devPtr)
        data.fill(GARBAGE)
        self._gpu.freed.append(data)
        return (SUCCESS,)

    def cudaMemsetAsync(self, devPtr: int, value: int, count: int, stream: int) -> tuple[ErrorCode]:
        target = self._gpu.device_bytes(devPtr, count)
        return (self._gpu.enqueue(stream, lambda: target.fill(value)),)

    def cudaMemcpyAsync(self, dst: int, src: int, count: int, kind: MemcpyKind, stream: int) -> tuple[ErrorCode]:
        gpu = self._gpu
        if error := gpu.failure("cudaMemcpyAsync"):
            return (error,)
        inward = kind == MemcpyKind.cudaMemcpyHostToDevice
        host = _find(gpu.pinned, src if inward else dst, count, "pinned memory")
        device = gpu.device_bytes(dst if inward else src, count)

        def download() -> None:
            host[:] = device
            gpu.copies.append(Copy("out", count))

        upload = Upload(device, host, lambda size: gpu.copies.append(Copy("in", size)))
        return (gpu.enqueue(stream, upload if inward else download),)

    def cudaEventRecordWithFlags(self, event: int, stream: int, flags: int) -> tuple[ErrorCode]:
        gpu = self._gpu
        capturing = gpu.streams[stream].fake_recording is not None
        assert capturing == (flags == self.cudaEventRecordExternal), "the external flag is for captures alone"
        target = gpu.events[event]

        def work() -> None:
            target.fake_time = float(next(gpu.clock))

        return (gpu.enqueue(stream, work),)
