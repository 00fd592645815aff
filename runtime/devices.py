"""Where a graph runs and how: what every backend is told when it opens one."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from draftc.runtime.errors import UsageError

__all__ = ["DeviceOptions"]

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
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"threads must be 1 or more, got {self.threads}")

    @property
    def kind(self) -> str:
        """The device without its number: "cpu", "cuda"."""
        return self.device.partition(":")[0]

    @property
    def index(self) -> int:
        """The device's number, 0 where none was given."""
        return int(self.device.partition(":")[2] or 0)
