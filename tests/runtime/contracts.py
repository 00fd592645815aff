"""Whether a fake offers nothing that the real thing does not: names, parameters and members, by introspection."""

import enum
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["differences", "enum_differences", "public_names", "pybind_signatures"]

Parameters = list[tuple[str, bool]]  # name, and whether it may be left out


def public_names(fake: type) -> list[str]:
    """What code under test can use of a fake: neither private nor marked as the tests' own with `fake_`."""
    sources = [inspect.getsource(base) for base in fake.__mro__ if base.__module__.startswith("tests.")]
    assigned = re.findall(r"\bself\.(\w+)(?:: [^=\n]+)? = ", "\n".join(sources))
    return sorted(name for name in {*dir(fake), *assigned} if not name.startswith(("_", "fake_")))


def differences(fake: type, real: Any) -> Iterator[str]:
    """What the fake has and the real class or module has not, or takes otherwise."""
    for name in public_names(fake):
        if not hasattr(real, name):
            yield f"{name} does not exist"
            continue
        mine, theirs = getattr(fake, name, None), getattr(real, name)
        if inspect.isfunction(mine):
            wanted = _parameters(inspect.signature(mine))
            offered = [*_signatures(theirs, name)]
            if not any(_fits(wanted, parameters) for parameters in offered):
                yield f"{name} takes {offered}, not {wanted}"
        elif inspect.isroutine(theirs):
            yield f"{name} is a method"


def enum_differences(fake: type[enum.Enum], real: Any) -> Iterator[str]:
    """Members that the real enum has not, or with other numbers."""
    for member in fake:
        theirs = real.__members__.get(member.name)
        if theirs is None or int(theirs.value) != int(member.value):
            yield f"{fake.__name__}.{member.name}"


def _parameters(signature: inspect.Signature) -> Parameters:
    return [
        (parameter.name, parameter.default is not inspect.Parameter.empty)
        for parameter in signature.parameters.values()
        if parameter.name != "self" and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def _signatures(function: Callable[..., Any], name: str) -> Iterator[Parameters]:
    """pybind11 writes its signatures, one for each overload, into the docstring; Cython's can be inspected."""
    found = list(pybind_signatures(function.__doc__ or "", name))
    if found:
        yield from found
    else:
        yield _parameters(inspect.signature(function))


def pybind_signatures(text: str, name: str) -> Iterator[Parameters]:
    """The parameters in each line like `name(self: T, a: A, b: B = 0) -> R` of a docstring."""
    for match in re.finditer(rf"^(?:\d+\. )?{name}\(self: [^\n]*", text, re.MULTILINE):
        inside = match[0].partition("(")[2].rpartition(") ->")[0]
        yield [(part.partition(":")[0].strip(), "=" in part) for part in _split(inside) if not part.startswith("self:")]


def _split(text: str) -> Iterator[str]:
    """`text` at its commas outside brackets."""
    depth, begin = 0, 0
    for at, character in enumerate(text):
        depth += (character in "[(<") - (character in "])>")
        if character == "," and depth == 0:
            yield text[begin:at].strip()
            begin = at + 1
    if text[begin:].strip():
        yield text[begin:].strip()


def _fits(mine: Parameters, theirs: Parameters) -> bool:
    """The same names in the same order; what the fake leaves out may be left out, and so may its own optional ones."""
    if len(mine) > len(theirs):
        return False
    same = all(
        ours == name and (optional or not ours_optional)
        for (ours, ours_optional), (name, optional) in zip(mine, theirs[: len(mine)], strict=True)
    )
    return same and all(optional for _, optional in theirs[len(mine) :])
