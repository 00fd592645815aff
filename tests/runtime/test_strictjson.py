"""The decoder alone, on small classes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftc.runtime.errors import UsageError
from draftc.runtime.strictjson import decode, load, show


@dataclass(frozen=True)
class Cat:
    method: Literal["cat"]
    lives: int = 9

    def __post_init__(self) -> None:
        if self.lives > 9:
            raise UsageError(f"lives: at most 9, got {self.lives}")


@dataclass(frozen=True)
class Dog:
    method: Literal["dog"]
    weight: float | None


@dataclass(frozen=True)
class House:
    pets: tuple[Cat | Dog, ...]
    rooms: Mapping[str, int | str]
    owner: bool = True


def test_decodes_into_classes() -> None:
    document = load('{"pets": [{"method": "dog", "weight": 7}, {"method": "cat"}], "rooms": {"hall": 1, "attic": "?"}}')
    house = decode(House, document)
    assert house == House(pets=(Dog("dog", 7.0), Cat("cat", 9)), rooms={"hall": 1, "attic": "?"})
    assert isinstance(house.pets[0], Dog)
    assert type(house.pets[0].weight) is float


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "expected object, got an array"),
        ({"rooms": {}}, "pets: missing"),
        ({"pets": [], "rooms": {}, "owner": 1}, "owner: expected bool, got 1"),
        ({"pets": [], "rooms": {"hall": True}}, "rooms.hall: expected int or str, got true"),
        ({"pets": [], "rooms": {"a b\n": 1.5}}, r'rooms."a b\n": expected int or str, got 1.5'),
        ({"pets": [3], "rooms": {}}, "pets[0]: expected object, got 3"),
        ({"pets": [{"method": "cow"}], "rooms": {}}, 'pets[0].method: expected "cat" or "dog", got "cow"'),
        ({"pets": [{"method": "cat", "weight": 1}], "rooms": {}}, "pets[0].weight: unknown key"),
        ({"pets": [{"method": "cat", "lives": 10}], "rooms": {}}, "pets[0].lives: at most 9, got 10"),
        ({"pets": [{"method": "dog", "weight": "1"}], "rooms": {}}, 'pets[0].weight: expected number or null, got "1"'),
        ({"pets": [{"method": "dog"}], "rooms": {}}, "pets[0].weight: missing"),
    ],
)
def test_refusals(document: object, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        decode(House, document)
    assert str(caught.value) == message


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(value=json_values)
def test_load_reads_what_json_writes(value: object) -> None:
    assert load(json.dumps(value)) == value


@given(value=json_values)
def test_show_is_one_short_printable_line(value: object) -> None:
    text = show(value)
    assert len(text) <= 80
    assert text.replace("\x7f", "").isprintable()
    assert text.isascii()
