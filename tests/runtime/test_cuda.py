"""The layer over cuda-python, on fakes whose names and parameters are those of the installed packages."""

import importlib
import operator
import threading

import numpy as np
import pytest

from draftc.runtime.cuda import Block, Cuda, DeviceMemory, Gpu, load_cuda
from draftc.runtime.errors import BackendUnavailableError, EngineError, ResourceError
from tests.runtime.contracts import differences, enum_differences
from tests.runtime.fake_cuda_core import CUDA_CORE, FakeStream, install
from tests.runtime.fake_cuda_python import ErrorCode, FakeGpu, Machine, MemcpyKind, Runtime


def modules(gpu: FakeGpu) -> Cuda:
    return install(gpu)("tensorrt-rtx")


@pytest.fixture
def fake() -> FakeGpu:
    return FakeGpu(Machine())


@pytest.fixture
def gpu(fake: FakeGpu) -> Gpu:
    return Gpu(modules(fake), 0)


# The contract of the fakes


@pytest.mark.parametrize("name", CUDA_CORE)
def test_fakes_are_like_cuda_core(name: str) -> None:
    core = importlib.import_module("cuda.core")
    assert list(differences(CUDA_CORE[name], operator.attrgetter(name)(core))) == []


def test_the_fake_runtime_is_like_cuda_bindings() -> None:
    runtime = importlib.import_module("cuda.bindings.runtime")
    assert list(differences(Runtime, runtime)) == []
    assert list(enum_differences(ErrorCode, runtime.cudaError_t)) == []
    assert list(enum_differences(MemcpyKind, runtime.cudaMemcpyKind)) == []
    assert (runtime.cudaEventRecordDefault, runtime.cudaEventRecordExternal) == (0, 1)


def test_a_fake_that_is_not_like_the_real_thing_is_found() -> None:
    class Renamed(FakeStream):
        def synchronise(self) -> None: ...

    class OtherParameter(FakeStream):
        def sync(self, seconds: float) -> None:  # type: ignore[override]
            self.busy = seconds > 0

    core = importlib.import_module("cuda.core")
    assert list(differences(Renamed, core.Stream)) == ["synchronise does not exist"]
    assert [line.split()[0] for line in differences(OtherParameter, core.Stream)] == ["busy", "sync"]


def test_pinned_memory_of_the_installed_package_is_writable_through_numpy() -> None:
    """A driver is not needed for a buffer over memory that is there already."""
    core = importlib.import_module("cuda.core")
    memory = np.arange(8, dtype=np.uint8)

    class Host(core.MemoryResource):  # type: ignore[name-defined, misc]
        is_host_accessible = True
        is_device_accessible = False
        device_id = -1

        def deallocate(self, ptr: int, size: int, *, stream: object = None) -> None: ...

    view = np.from_dlpack(core.Buffer.from_handle(memory.ctypes.data, 8, mr=Host())).view(np.uint8)
    view[0] = 77
    assert memory[0] == 77


# The driver


def test_without_a_driver_the_message_says_what_works_here() -> None:
    with pytest.raises(BackendUnavailableError, match=r"rtx 1\.7 needs .* CUDA 13\.5, no driver .*onnxruntime"):
        modules(FakeGpu(Machine(sm=None))).check_driver("tensorrt-rtx 1.7")


def test_an_old_driver_is_named_with_what_is_needed() -> None:
    with pytest.raises(BackendUnavailableError, match=r"driver is for CUDA 12\.4, .* needs 13\.5: update"):
        modules(FakeGpu(Machine(driver=12040))).check_driver("tensorrt-rtx 1.7")


@pytest.mark.parametrize("driver", [13000, 13050, 14000])
def test_a_driver_of_the_same_major_version_will_do(driver: int) -> None:
    modules(FakeGpu(Machine(driver=driver))).check_driver("tensorrt-rtx 1.7")


def test_the_installed_packages_say_whether_there_is_a_driver() -> None:
    cuda = load_cuda("tensorrt-rtx")
    error, count = cuda.runtime.cudaGetDeviceCount()
    if int(error) == 0 and count > 0:
        cuda.check_driver("tensorrt-rtx")
        assert Gpu(cuda, 0).sm.isdigit()
    else:
        with pytest.raises(BackendUnavailableError, match="driver"):
            cuda.check_driver("tensorrt-rtx")


def test_missing_packages_are_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(importlib.sys.modules, "cuda.core", None)  # type: ignore[attr-defined]
    with pytest.raises(
        BackendUnavailableError, match=r"cuda-core and cuda-bindings .*pip install 'draftc\[tensorrt\]'"
    ):
        load_cuda("tensorrt")


@pytest.mark.parametrize(("devices", "found"), [(0, "none found"), (1, "1 found")])
def test_a_gpu_that_is_not_there(devices: int, found: str) -> None:
    with pytest.raises(BackendUnavailableError, match=f"no GPU 1 .{found}"):
        Gpu(modules(FakeGpu(Machine(devices=devices))), 1)


# Memory and copies


def test_a_gpu_says_what_it_is(gpu: Gpu, fake: FakeGpu) -> None:
    assert (gpu.sm, gpu.name) == ("89", "NVIDIA Fake")
    before = gpu.free_memory()
    memory = DeviceMemory(gpu, 1000)
    assert before - gpu.free_memory() == 1000
    memory.close()
    memory.close()
    assert gpu.free_memory() == before


def test_out_of_memory_names_what_is_needed_and_what_is_free() -> None:
    gpu = Gpu(modules(FakeGpu(Machine(memory=3 << 20))), 0)
    with pytest.raises(ResourceError, match=r"no room for 8\.0 MiB, 3\.0 MiB is free"):
        gpu.allocate(8 << 20)


def test_copies_happen_in_order_and_are_there_after_waiting(gpu: Gpu, fake: FakeGpu) -> None:
    memory, host = DeviceMemory(gpu, 16), gpu.pin(16)
    host[:] = np.arange(16)
    gpu.copy_in(memory.address, host)
    memory.zero()
    gpu.copy_in(memory.address, host[4:8])
    gpu.copy_out(host, memory.address)
    assert host.tolist() == list(range(16))
    gpu.wait()
    assert host.tolist() == [4, 5, 6, 7, *[0] * 12]
    assert (fake.copied("in"), fake.copied("out")) == (20, 16)


def test_a_block_moves_its_tensors_in_one_copy(gpu: Gpu, fake: FakeGpu) -> None:
    block = Block(gpu, {"a": ((3,), np.int64), "b": ((2, 2), np.float32), "c": ((1,), np.int64)})
    assert all(block.address(name) % 256 == 0 for name in "abc")
    assert len({block.address(name) for name in "abc"}) == 3
    block.host["a"][:] = [1, 2, 3]
    block.host["b"][:] = [[4, 5], [6, 7]]
    block.upload()
    gpu.wait()
    assert fake.device_bytes(block.address("a"), 24).view(np.int64).tolist() == [1, 2, 3]
    assert fake.device_bytes(block.address("b"), 16).view(np.float32).tolist() == [4, 5, 6, 7]
    fake.device_bytes(block.address("c"), 8).view(np.int64)[0] = -9
    block.download()
    gpu.wait()
    assert block.host["c"][0] == -9
    assert len(fake.copies) == 2
    block.close()
    assert fake.used == 0
    assert block.host["a"].tolist() == [1, 2, 3]  # a view that someone kept stays readable


def test_work_that_was_interrupted_is_awaited_before_the_next_begins(gpu: Gpu) -> None:
    memory, host = DeviceMemory(gpu, 4), gpu.pin(4)
    host[:] = 1
    gpu.copy_in(memory.address, host)  # as if KeyboardInterrupt had come instead of `wait`
    gpu.enter()
    host[:] = 2
    gpu.copy_out(host, memory.address)
    gpu.wait()
    assert host.tolist() == [1, 1, 1, 1]


def test_another_thread_may_use_the_gpu(gpu: Gpu) -> None:
    memory = DeviceMemory(gpu, 4)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            gpu.enter()
            memory.zero()
            gpu.wait()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []


# Failures, graphs and time


def test_failures_are_engine_errors_of_one_line(gpu: Gpu, fake: FakeGpu) -> None:
    memory, host = DeviceMemory(gpu, 4), gpu.pin(4)
    fake.fail_next["cudaMemcpyAsync"] = ErrorCode.cudaErrorIllegalAddress
    with pytest.raises(EngineError, match="copying to the GPU: an illegal memory access was encountered"):
        gpu.copy_in(memory.address, host)
    fake.fail_next["sync"] = ErrorCode.cudaErrorIllegalAddress
    with pytest.raises(EngineError, match="waiting for the GPU: CUDA_ERROR_ILLEGAL_ADDRESS"):
        gpu.wait()


def test_a_graph_runs_when_it_is_launched_and_only_then(gpu: Gpu, fake: FakeGpu) -> None:
    memory, host = DeviceMemory(gpu, 1), gpu.pin(1)
    begin, end = gpu.event(), gpu.event()

    def work() -> None:
        gpu.record(begin, captured=True)
        gpu.copy_in(memory.address, host)
        gpu.record(end, captured=True)

    host[0] = 1
    graph = gpu.capture(work)
    gpu.wait()
    assert fake.copies == []
    for value in (5, 6):
        host[0] = value
        gpu.launch(graph)
        gpu.wait()
        assert fake.device_bytes(memory.address, 1)[0] == value
        assert gpu.seconds(begin, end) > 0


def test_a_capture_that_fails_leaves_the_stream_usable(gpu: Gpu, fake: FakeGpu) -> None:
    memory = DeviceMemory(gpu, 1)
    fake.fail_next["end_building"] = ErrorCode.cudaErrorInvalidValue
    with pytest.raises(EngineError, match="the capture was invalidated"):
        gpu.capture(memory.zero)

    def broken() -> None:
        raise EngineError("no")

    with pytest.raises(EngineError, match="no"):
        gpu.capture(broken)
    memory.zero()
    gpu.wait()
    assert fake.device_bytes(memory.address, 1)[0] == 0


def test_events_that_have_not_happened_have_no_time(gpu: Gpu) -> None:
    begin, end = gpu.event(), gpu.event()
    gpu.record(begin)
    gpu.record(end)
    with pytest.raises(EngineError, match="reading events"):
        gpu.seconds(begin, end)
    gpu.wait()
    assert gpu.seconds(begin, end) > 0
