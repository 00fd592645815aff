"""What a device is called, who gets which options, and how much memory a GPU has left."""

import importlib
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from draftc.runtime.devices import DeviceOptions, assign_devices, free_device_memory, require_kv_memory
from draftc.runtime.errors import ResourceError, UsageError

GIB = 1 << 30


def test_names_of_devices() -> None:
    assert (DeviceOptions().kind, DeviceOptions().index) == ("cpu", 0)
    assert (DeviceOptions("cuda").kind, DeviceOptions("cuda").index) == ("cuda", 0)
    assert (DeviceOptions("cuda:12").kind, DeviceOptions("cuda:12").index) == ("cuda", 12)
    for name in ("", "CPU", "cuda:", "cuda:-1", "cuda:01", "cuda:1000", "cuda:1 ", "cuda\n", "gpu 0", None, 0):
        with pytest.raises(UsageError, match="a device is cpu, cuda, or cuda:1 for the second GPU") as caught:
            DeviceOptions(name)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


def test_other_options_are_checked() -> None:
    for threads in (0, -1, "2", 2.0, True):
        with pytest.raises(UsageError, match=f"threads must be 1 or more, got {threads!r}"):
            DeviceOptions(threads=threads)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="provider option gpu_mem_limit: its name and value are texts, got 8"):
        DeviceOptions("cuda", provider_options={"gpu_mem_limit": 8})  # type: ignore[dict-item]


def test_who_runs_where() -> None:
    def places(**given: Any) -> list[str]:
        return [options.device for options in assign_devices(("target", "draft"), "cpu", **given).values()]

    assert places() == ["cpu", "cpu"]
    assert places(device="cuda") == ["cuda", "cuda"]
    assert places(device="cuda", draft_device="cpu") == ["cuda", "cpu"]
    assert places(target_device="cuda") == ["cuda", "cpu"]
    assert places(target_device="cuda", draft_device="cuda:1") == ["cuda", "cuda:1"]
    with pytest.raises(UsageError, match="draft_device is 'cpu', and this bundle has no draft model"):
        assign_devices(("target",), "cpu", draft_device="cpu")


def test_provider_options_go_to_the_gpus() -> None:
    own = {"use_tf32": "0"}
    given = assign_devices(("target", "draft"), "cpu", target_device="cuda", threads=2, provider_options=own)
    assert given["target"] == DeviceOptions("cuda", 2, True, own)
    assert given["draft"] == DeviceOptions("cpu", 2)
    nowhere = assign_devices(("target", "draft"), "cpu", provider_options=own)
    assert nowhere["target"].provider_options == own, "for the backend to refuse"


def test_caches_are_summed_per_device(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {0: 3 * GIB, 1: GIB}
    monkeypatch.setattr("draftc.runtime.devices.free_device_memory", free.get)
    monkeypatch.setattr("draftc.runtime.memory.available_memory", lambda: 2 * GIB)
    cpu, first, second = (DeviceOptions(name) for name in ("cpu", "cuda", "cuda:1"))
    require_kv_memory([(cpu, 2 * GIB), (first, 3 * GIB), (second, GIB)])
    with pytest.raises(ResourceError, match=r"need 4\.0 GiB of device memory, 3\.0 GiB is free on cuda:0"):
        require_kv_memory([(first, 2 * GIB), (cpu, GIB), (DeviceOptions("cuda:0"), 2 * GIB)])
    with pytest.raises(ResourceError, match=r"need 2\.0 GiB of device memory, 1\.0 GiB is free on cuda:1"):
        require_kv_memory([(second, 2 * GIB)])
    with pytest.raises(ResourceError, match=r"need 4\.0 GiB of memory, 2\.0 GiB is available"):
        require_kv_memory([(cpu, 2 * GIB), (cpu, 2 * GIB)])
    require_kv_memory([(DeviceOptions("cuda:2"), 1 << 60)])  # unknown


class FakeDriver:
    """`cuda.bindings.driver`, with `free` bytes on GPU 1 and no GPU 2; `depth` counts contexts on the stack."""

    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_INTEGRATED="integrated")

    def __init__(self, free: int | None, integrated: int = 0) -> None:
        self.free = free
        self.integrated = integrated
        self.depth = 0
        self.retained = 0

    def cuInit(self, flags: int) -> tuple[Any, ...]:  # noqa: N802
        return (0,)

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:  # noqa: N802
        return (0, f"device {ordinal}") if ordinal < 2 else (101, None)

    def cuDeviceGetAttribute(self, attrib: Any, dev: Any) -> tuple[Any, ...]:  # noqa: N802
        assert attrib == "integrated"
        return 0, self.integrated

    def cuDevicePrimaryCtxRetain(self, dev: Any) -> tuple[Any, ...]:  # noqa: N802
        self.retained += 1
        return 0, f"context of {dev}"

    def cuDevicePrimaryCtxRelease(self, dev: Any) -> tuple[Any, ...]:  # noqa: N802
        self.retained -= 1
        return (0,)

    def cuCtxPushCurrent(self, ctx: Any) -> tuple[Any, ...]:  # noqa: N802
        assert ctx == "context of device 1"
        self.depth += 1
        return (0,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:  # noqa: N802
        self.depth -= 1
        return 0, None

    def cuMemGetInfo(self) -> tuple[Any, ...]:  # noqa: N802
        assert self.depth == 1
        return (0, self.free, 8 * GIB) if self.free is not None else (2, None, None)


def install(monkeypatch: pytest.MonkeyPatch, driver: Any) -> None:
    real: Callable[[str], Any] = importlib.import_module

    def load(name: str) -> Any:
        if name != "cuda.bindings.driver":
            return real(name)
        if isinstance(driver, ImportError):
            raise driver
        return driver

    monkeypatch.setattr("draftc.runtime.devices.importlib.import_module", load)


def test_free_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for free in (5 * GIB, None):
        driver = FakeDriver(free)
        install(monkeypatch, driver)
        assert free_device_memory(1) == free
        assert (driver.depth, driver.retained) == (0, 0), "the thread's context is its own again"
    assert free_device_memory(2) is None


def test_a_gpu_in_the_hosts_memory_can_have_what_the_host_can_take(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeDriver(GIB, integrated=1))
    monkeypatch.setattr("draftc.runtime.devices.available_memory", lambda: 6 * GIB)
    assert free_device_memory(1) == 6 * GIB


def test_without_cuda_bindings_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ImportError("no cuda"))
    assert free_device_memory(0) is None


def test_the_real_driver_module_has_these_functions() -> None:
    """Without a driver, its functions raise RuntimeError: nothing is known then either."""
    driver = pytest.importorskip("cuda.bindings.driver")
    assert hasattr(driver.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_INTEGRATED")
    assert int(driver.CUresult.CUDA_SUCCESS) == 0
    for name, fake in inspect.getmembers(FakeDriver, inspect.isfunction):
        if name.startswith("cu"):
            described = driver.__dict__[name].__doc__.splitlines()[0]  # "cuInit(unsigned int Flags)"
            arguments = described.partition("(")[2].rstrip(")").split(",")
            assert len(inspect.signature(fake).parameters) - 1 == len([one for one in arguments if one]), described
    free = free_device_memory(0)
    assert free is None or free > 0
