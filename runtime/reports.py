"""What reports and records share: progress, and values that JSON can carry."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Progress", "jsonable"]

Progress = Callable[[str, float], None]
"""Called with what runs now and how much of it is done, 0 to 1."""


def jsonable(value: Any) -> Any:
    """Dataclasses and mappings as dictionaries, sequences as lists; numbers that JSON lacks (NaN, infinity) as None."""
    if dataclasses.is_dataclass(value):
        return {item.name: jsonable(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
