"""What this machine is called, and which versions run on it."""

import importlib.metadata
import os
import platform
import re
from pathlib import Path

__all__ = ["backend_version", "installed_version", "physical_cores", "processor"]


def backend_version(backend: str) -> str:
    """A backend's name with the version of its package here: "onnxruntime 1.32.0"."""
    packages = ("onnxruntime", "onnxruntime-gpu") if backend == "onnxruntime" else (backend,)
    return f"{backend} {installed_version(*packages)}"


def installed_version(*distributions: str) -> str:
    """The version of the first of `distributions` that is installed."""
    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def processor() -> str:
    """The processor's name; Linux tells it in /proc alone."""
    names = _cpuinfo("model name")
    return names[0] if names else platform.processor() or platform.machine() or "unknown"


def physical_cores() -> int:
    """Cores that this process may run on, those that share one counted once; at least 1."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    packages, cores, numbers = _cpuinfo("physical id"), _cpuinfo("core id"), _cpuinfo("processor")
    if allowed is not None and len(packages) == len(cores) == len(numbers) > 0:
        pairs = {
            (package, core)
            for package, core, number in zip(packages, cores, numbers, strict=True)
            if number.isdigit() and int(number) in allowed
        }
        return max(1, len(pairs))
    return max(1, len(allowed) if allowed is not None else os.cpu_count() or 1)


def _cpuinfo(name: str) -> list[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [value.strip() for value in re.findall(rf"^{re.escape(name)}\s*:(.*)$", text, re.MULTILINE)]
