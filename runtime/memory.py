"""How much memory this process can still take, and the refusal of what does not fit. Stdlib only."""

from collections.abc import Iterator
from pathlib import Path

from draftc.runtime.errors import ResourceError

__all__ = ["available_memory", "format_bytes", "require_memory"]

CGROUP_FILES = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def require_memory(kv_bytes: int) -> None:
    """Raise ResourceError, which names both numbers, unless KV buffers of `kv_bytes` fit into the memory at hand.

    Asked before they are allocated: a system that overcommits would grant them, and end the process when they fill up.
    """
    available = available_memory()
    if available is not None and kv_bytes > available:
        raise ResourceError(
            f"the KV buffers need {format_bytes(kv_bytes)} of memory, {format_bytes(available)} is available: close "
            "other programs, or compile with a smaller --max-length"
        )


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process can still take: MemAvailable, or less where its cgroup (v2 or v1) limits it.

    None where the system does not say (not Linux).
    """
    limits = [*_meminfo(proc / "meminfo"), *_cgroup_room(proc, cgroup)]
    return min(limits, default=None)


def _meminfo(path: Path) -> Iterator[int]:
    for line in _lines(path):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _cgroup_room(proc: Path, root: Path) -> Iterator[int]:
    """Room below every limit from the process's own group up to the root."""
    groups = {"/"}
    for line in _lines(proc / "self/cgroup"):
        own = Path(line.split(":", 2)[-1])
        groups |= {str(group) for group in (own, *own.parents)}
    for group in groups:
        for limit_file, usage_file in CGROUP_FILES:
            *controller, name = limit_file.split("/")
            folder = root.joinpath(*controller, group.lstrip("/"))
            limit, usage = _number(folder / name), _number(folder / Path(usage_file).name)
            if limit is not None and usage is not None:
                yield max(0, limit - usage + _reclaimable(folder / "memory.stat"))


def _reclaimable(path: Path) -> int:
    """Cached file pages that count as usage, but are given back under pressure."""
    counters = ("inactive_file ", "total_inactive_file ")  # the second is v1's, for the group and those below it
    return max((int(line.split()[1]) for line in _lines(path) if line.startswith(counters)), default=0)


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None  # "max" means no limit


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:  # not there, or not ours to read: no limit known from it
        return []


def format_bytes(count: float) -> str:
    """Readable size in powers of 1024, as "1.5 GiB"."""
    units = ["B", "KiB", "MiB", "GiB"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        units.pop(0)
    return f"{count:.0f} B" if units[0] == "B" else f"{count:.1f} {units[0]}"
