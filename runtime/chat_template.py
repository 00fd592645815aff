"""Chat templates: messages to the prompt text that a checkpoint was trained on.

Templates are Jinja programs that come with a checkpoint, so they are foreign code: they run in Jinja's immutable
sandbox, and all they get to see is plain JSON data. The sandbox keeps a template from reaching Python; it does not
bound its running time, except that `range` is limited over a whole rendering.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from draftc.runtime.errors import BundleError, UsageError

__all__ = ["ChatTemplate", "check_messages"]

MAX_RANGE = 100_000
MAX_DEPTH = 50


class ChatTemplate:
    """One template, compiled. `source` is the file that it came from. Raises BundleError where its syntax is wrong."""

    def __init__(self, template: str, source: str) -> None:
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        environment.globals["namespace"] = _namespace
        try:
            self._template = environment.from_string(template)
        except Exception as error:  # constant expressions of the template run here
            raise BundleError(f"{source}: not a valid chat template: {_one_line(error)}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The prompt text. Raises UsageError for malformed messages, or when the template itself fails or refuses."""
        context = _plain(variables, "chat template variables")
        context |= {"messages": check_messages(messages), "range": _limited_range()}
        try:
            return self._template.render(context)
        except Exception as error:  # foreign code: whatever it raises is its refusal of these messages
            raise UsageError(
                f"the chat template failed on these messages: {_one_line(error)}; change them or use a plain prompt"
            ) from error


def check_messages(messages: object) -> list[dict[str, Any]]:
    """The messages as plain data. Raises UsageError that names the first one that is malformed.

    A message is {"role": str, "content": str or a list of parts}; `content` may be missing beside "tool_calls". Keys
    whose value is None are dropped, as transformers does.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise UsageError(f'messages must be a list of {{"role", "content"}}, got {type(messages).__name__}')
    if not messages:
        raise UsageError("messages is empty: give at least one message")
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _check_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UsageError(f'{where} must be {{"role": …, "content": …}}, got {type(message).__name__}')
    plain: dict[str, Any] = _plain({key: value for key, value in message.items() if value is not None}, where)
    if not isinstance(plain.get("role"), str):
        raise UsageError(f'{where} needs a "role" such as "user", got {plain.get("role")!r}')
    content = plain.get("content")
    if content is None and "tool_calls" in plain:
        return plain
    if not isinstance(content, str) and not (isinstance(content, list) and all(isinstance(p, dict) for p in content)):
        raise UsageError(f'{where} needs a "content" that is text or a list of parts, got {type(content).__name__}')
    return plain


def _plain(value: object, where: str, depth: int = 0) -> Any:
    """A copy made of JSON types only: a template must not be handed objects with methods of their own."""
    if depth > MAX_DEPTH:
        raise UsageError(f"{where[:80]}… is nested more than {MAX_DEPTH} levels deep")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str:
                raise UsageError(f"{where} has a key that is not a string: {key!r}")
        return {key: _plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise UsageError(f"{where} must be plain JSON data, got {type(value).__name__}")


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, but an attribute that it hides is an error at once instead of an empty string."""

    def unsafe_undefined(self, obj: object, attribute: str) -> jinja2.Undefined:
        raise jinja2.exceptions.SecurityError(f"it reaches for {attribute!r} of a {type(obj).__name__}")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the model's words for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own attribute, an instance-independent set

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that Python gives a meaning (`__html__` and the like)."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            _refuse(f"a namespace attribute may not begin with an underscore: {name!r}")
        super().__setitem__(name, value)


def _namespace(*args: Any, **attributes: Any) -> _Namespace:
    namespace = _Namespace()
    for name, value in dict(*args, **attributes).items():
        namespace[name] = value
    return namespace


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's filter, this one does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(fmt: str) -> str:
    return datetime.now().strftime(fmt)


def _limited_range() -> Callable[..., range]:
    """`range` for one rendering: nested loops draw on the same allowance."""
    left = MAX_RANGE

    def limited(*bounds: int) -> range:
        nonlocal left
        numbers = range(*bounds)
        left -= len(numbers)
        if left < 0:
            raise OverflowError(f"its loops over range() exceed {MAX_RANGE} steps")
        return numbers

    return limited


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
