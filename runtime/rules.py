"""Rules that the manifest's dataclasses check themselves with. Stdlib only."""

import re

from draftc.runtime.errors import UsageError
from draftc.runtime.strictjson import CONTROL, show

__all__ = ["HEX64", "fingerprint", "inside", "is_relative_path", "need", "texts", "within"]

HEX64 = re.compile(r"[0-9a-f]{64}")


def is_relative_path(path: str) -> bool:
    """Whether `path` names something inside the bundle on every system.

    Components are separated by `/`; none is empty, `.` or `..`, so the path is neither absolute nor leaves the
    folder. Backslashes, colons (a drive, a stream) and control characters are refused.
    """
    return not (CONTROL.search(path) or set(path) & {"\\", ":"} or set(path.split("/")) & {"", ".", ".."})


def need(ok: bool, field: str, rule: str, value: object) -> None:
    """Raise UsageError "field: must be rule, got value" unless `ok`."""
    if not ok:
        raise UsageError(f"{field}: must be {rule}, got {show(value)}")


def within(owner: object, low: int, high: int, *names: str) -> None:
    """Require `low` ≤ attribute ≤ `high` of each name."""
    for name in names:
        value = getattr(owner, name)
        need(low <= value <= high, name, f"from {low} to {high}", value)


def texts(owner: object, *names: str) -> None:
    """Require a non-empty string in each name."""
    for name in names:
        need(getattr(owner, name) != "", name, "a non-empty string", "")


def inside(owner: object, name: str) -> None:
    """Require a path that stays inside the bundle."""
    path = getattr(owner, name)
    need(is_relative_path(path), name, "a relative path inside the bundle (a/b; no .., no drive, no backslash)", path)


def fingerprint(owner: object, name: str = "fingerprint") -> None:
    """Require "sha256:" and a digest."""
    value = getattr(owner, name)
    ok = value.startswith("sha256:") and HEX64.fullmatch(value.removeprefix("sha256:")) is not None
    need(ok, name, '"sha256:" and 64 hexadecimal digits', value)
