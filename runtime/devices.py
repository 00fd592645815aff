"""Where a graph runs and how: what every backend is told when it opens one, and whether its caches fit there."""

import importlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from draftc.runtime.errors import ResourceError, UsageError
from draftc.runtime.memory import available_memory, format_bytes, require_memory

__all__ = ["DeviceOptions", "Role", "assign_devices", "free_device_memory", "require_kv_memory"]

Role = Literal["target", "draft"]

DEVICE = re.compile(r"[a-z]+(:(0|[1-9]\d{0,2}))?")


@dataclass(frozen=True)
class DeviceOptions:
    """One graph's device and settings; which of them a backend serves, `backends.check_options` says.

    `device`: "cpu", "cuda", or "cuda:1" for the second GPU. `threads` per graph on the CPU, None is the backend's
    choice. `cuda_graph`: whether calls whose shapes repeat are captured and replayed as CUDA graphs. `provider_options`
    go to ONNX Runtime's execution provider under its own names. Raises UsageError for values out of range.
    """

    device: str = "cpu"
    threads: int | None = None
    cuda_graph: bool = True
    provider_options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        if not isinstance(self.device, str) or not DEVICE.fullmatch(self.device):
            raise UsageError(f"unknown device {self.device!r}: a device is cpu, cuda, or cuda:1 for the second GPU")
        threads = self.threads
        if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
            raise UsageError(f"threads must be 1 or more, got {threads!r}")
        for name, value in self.provider_options.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise UsageError(f"provider option {name}: its name and value are texts, got {value!r}")

    @property
    def kind(self) -> str:
        """The device without its number: "cpu", "cuda"."""
        return self.device.partition(":")[0]

    @property
    def index(self) -> int:
        """The device's number, 0 where none was given."""
        return int(self.device.partition(":")[2] or 0)


def assign_devices(
    roles: Iterable[Role],
    default: str,
    *,
    device: str | None = None,
    target_device: str | None = None,
    draft_device: str | None = None,
    threads: int | None = None,
    cuda_graph: bool = True,
    provider_options: Mapping[str, str] | None = None,
) -> dict[Role, DeviceOptions]:
    """Options of each of a bundle's graphs: its own device, else `device`, else the bundle's `default`.

    `provider_options` are for the graphs on a GPU. Raises UsageError.
    """
    own: dict[Role, str | None] = {"target": target_device, "draft": draft_device}
    general = default if device is None else device
    chosen: dict[Role, DeviceOptions] = {}
    for role in roles:
        place = own.pop(role)
        chosen[role] = DeviceOptions(general if place is None else place, threads, cuda_graph)
    for role, place in own.items():
        if place is not None:
            raise UsageError(f"{role}_device is {place!r}, and this bundle has no {role} model: leave it out")
    if provider_options:
        on_gpu = [role for role, options in chosen.items() if options.kind != "cpu"]
        for role in on_gpu or chosen:  # where none is on a GPU, the backend will refuse them
            chosen[role] = replace(chosen[role], provider_options=provider_options)
    return chosen


def require_kv_memory(needs: Iterable[tuple[DeviceOptions, int]]) -> None:
    """Raise ResourceError, which names both numbers, unless each device has room for the KV buffers that it is to hold.

    `needs` has (where, bytes) of each graph. Unknown free memory (no Linux, no cuda-bindings) is no reason to refuse.
    """
    totals: Counter[tuple[str, int]] = Counter()
    for options, kv_bytes in needs:
        totals[options.kind, options.index] += kv_bytes
    for (kind, index), kv_bytes in totals.items():
        if kind == "cpu":
            require_memory(kv_bytes)
            continue
        free = free_device_memory(index)
        if free is not None and kv_bytes > free:
            raise ResourceError(
                f"the KV buffers need {format_bytes(kv_bytes)} of device memory, {format_bytes(free)} is free on "
                f"{kind}:{index}: close other programs, or compile with a smaller --max-length"
            )


def free_device_memory(index: int) -> int | None:
    """Bytes that are free on CUDA device `index`; None where that cannot be known (no cuda-bindings, driver or GPU).

    A GPU that shares the host's memory gives what the host can still take: the driver counts cached files as used.
    """
    try:
        driver: Any = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return None
    try:
        _ask(driver.cuInit(0))
        [device] = _ask(driver.cuDeviceGet(index))
        if _ask(driver.cuDeviceGetAttribute(driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED, device))[0]:
            return available_memory()
        [context] = _ask(driver.cuDevicePrimaryCtxRetain(device))
        try:
            _ask(driver.cuCtxPushCurrent(context))
            try:
                free, _ = _ask(driver.cuMemGetInfo())
            finally:
                driver.cuCtxPopCurrent()
        finally:
            driver.cuDevicePrimaryCtxRelease(device)
    except RuntimeError:  # also how cuda-bindings says that there is no driver
        return None
    return int(free)


def _ask(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a driver call returned behind its error code. Raises RuntimeError unless that is CUDA_SUCCESS."""
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"CUDA driver error {int(error)}")
    return tuple(values)
