"""Strict JSON into frozen dataclasses, driven by their type hints. Stdlib only.

A key that is not a field is refused, a field without a default must be there, and a value of another JSON type is
refused under its path: `target.spec.inputs[3].shape[2]: expected int or str, got null`. Hints may be str, int, float,
bool, None, Literal of strings, `tuple[X, ...]` (an array), `Mapping[str, X]`, a dataclass, and unions of these; the
dataclasses of one union are told apart by their Literal field `method`.
"""

import json
import re
import sys
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from draftc.runtime.errors import UsageError

__all__ = ["CONTROL", "decode", "load", "show"]

T = TypeVar("T")

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # would break a line, a terminal or UTF-8


def show(value: object) -> str:
    """`value` as JSON on one short line of ASCII, for messages about untrusted input."""
    if isinstance(value, dict):
        return "an object"
    text = json.dumps(value, default=repr) if not isinstance(value, list) else "an array"
    return text if len(text) <= 80 else text[:77] + "..."


def load(text: str) -> object:
    """Parse JSON; a duplicate key, NaN, Infinity, or nesting beyond the recursion limit is a UsageError."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise UsageError("nested too deeply") from None
    except ValueError as error:  # JSONDecodeError, or an integer of thousands of digits
        raise UsageError(f"not valid JSON: {error}") from error


def decode(cls: type[T], document: object) -> T:
    """`document`, as `load` gives it, as an instance of the dataclass `cls`.

    Raises UsageError "path: reason" for the first thing that is wrong. A UsageError "field: reason" from a dataclass's
    own `__post_init__` is raised again under its full path.
    """
    result = _decode(cls, document, "")
    assert isinstance(result, cls)
    return result


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:  # two readers could keep different ones
            raise ValueError(f"key {show(key)} comes twice")
        result[key] = value
    return result


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def _decode(hint: Any, value: object, path: str) -> Any:
    variants = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    classes = [variant for variant in variants if is_dataclass(variant)]
    if len(classes) > 1 and isinstance(value, dict):
        return _decode_object(_chosen(classes, value.get("method"), path), value, path)
    for variant in variants:
        if _fits(variant, value):
            return _build(variant, value, path)
    raise _error(path, f"expected {' or '.join(dict.fromkeys(map(_name, variants)))}, got {show(value)}")


def _chosen(classes: list[Any], method: object, path: str) -> Any:
    """The dataclass whose `method` is `method`."""
    kinds = {get_args(get_type_hints(cls)["method"])[0]: cls for cls in classes}
    if isinstance(method, str) and method in kinds:
        return kinds[method]
    raise _error(_join(path, "method"), f"expected {' or '.join(map(show, kinds))}, got {show(method)}")


def _fits(hint: Any, value: object) -> bool:
    """Whether `value` has the JSON type that `hint` stands for. A bool is not an int; an int serves as a float."""
    if hint is float:
        return type(value) in (int, float)
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if is_dataclass(hint) or get_origin(hint) is Mapping:
        return isinstance(value, dict)
    if get_origin(hint) is tuple:
        return isinstance(value, list)
    return type(value) is hint


def _build(hint: Any, value: Any, path: str) -> Any:
    """`value` converted to `hint`, which it fits."""
    if is_dataclass(hint):
        return _decode_object(hint, value, path)
    if get_origin(hint) is tuple:
        return tuple(_decode(get_args(hint)[0], item, f"{path}[{index}]") for index, item in enumerate(value))
    if get_origin(hint) is Mapping:
        return {key: _decode(get_args(hint)[1], item, _join(path, key)) for key, item in value.items()}
    if hint is str and CONTROL.search(value):
        raise _error(path, f"expected one line of text, got {show(value)}")
    if hint is float:
        if not abs(value) <= sys.float_info.max:  # 1e999 is read as infinity; an int may exceed every float
            raise _error(path, f"expected a finite number, got {show(value)}")
        return float(value)
    return value


def _decode_object(cls: Any, value: dict[str, object], path: str) -> Any:
    known = {field.name: field for field in fields(cls)}
    for key in value:
        if key not in known:
            raise _error(_join(path, key), "unknown key")
    for name, field in known.items():
        if name not in value and field.default is MISSING and field.default_factory is MISSING:
            raise _error(_join(path, name), "missing")
    hints = get_type_hints(cls)
    built = {key: _decode(hints[key], item, _join(path, key)) for key, item in value.items()}
    try:
        return cls(**built)
    except UsageError as error:
        raise UsageError(f"{path}.{error}" if path else str(error)) from error


def _error(path: str, reason: str) -> UsageError:
    return UsageError(f"{path}: {reason}" if path else reason)


def _join(path: str, key: str) -> str:
    """`path.key`; a key that is no plain word is quoted, since it may hold anything."""
    name = key if re.fullmatch(r"[A-Za-z0-9_-]{1,60}", key) else show(key)
    return f"{path}.{name}" if path else name


def _name(hint: Any) -> str:
    """The JSON name of a type, for messages."""
    if get_origin(hint) is Literal:
        return " or ".join(map(show, get_args(hint)))
    if is_dataclass(hint) or get_origin(hint) is Mapping:
        return "object"
    if get_origin(hint) is tuple:
        return "array"
    return {float: "number", type(None): "null"}.get(hint) or str(hint.__name__)
