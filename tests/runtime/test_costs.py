"""The cost model: curves against numpy's interpolation, and profile.json as a hostile document."""

import copy
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from draftc.runtime.costs import (
    COSTS_VERSION,
    CostProfile,
    GraphCosts,
    MachineId,
    fingerprint_graphs,
    parse_costs,
    to_json,
)
from draftc.runtime.errors import BundleVersionError, UsageError
from draftc.runtime.graphio import GraphSpec
from draftc.runtime.manifest import FileEntry
from tests.runtime.cost_fakes import FLAT, graph_costs, make_costs, make_machine, profiles
from tests.runtime.sessions import make_manifest

DOCUMENT: dict[str, Any] = json.loads(to_json(FLAT))


@st.composite
def grids(draw: st.DrawFn) -> GraphCosts:
    """At least two widths and two fills."""
    widths = (1, *sorted(draw(st.sets(st.integers(2, 40), min_size=1, max_size=5))))
    fills = tuple(sorted(draw(st.sets(st.integers(0, 5000), min_size=2, max_size=4))))
    row = st.lists(st.floats(0.1, 100.0), min_size=len(widths), max_size=len(widths)).map(tuple)
    return GraphCosts(widths=widths, fills=fills, ms=tuple(draw(row) for _ in fills))


# --- curves ----------------------------------------------------------------------------------------------------------


@given(grid=grids(), data=st.data())
@settings(deadline=None)
def test_between_measured_points_a_curve_is_linear_in_both(grid: GraphCosts, data: st.DataObject) -> None:
    fill = data.draw(st.integers(grid.fills[0], grid.fills[-1]))
    at_fill = [np.interp(fill, grid.fills, column) for column in zip(*grid.ms, strict=True)]
    expected = np.interp(range(1, grid.widths[-1] + 1), grid.widths, at_fill)
    np.testing.assert_allclose(grid.curve(fill, grid.widths[-1]), [0.0, *expected], rtol=1e-9)


@given(grid=grids(), widest=st.integers(1, 80), fill=st.integers(0, 20_000))
@settings(deadline=None)
def test_beyond_them_it_follows_the_nearest_two(grid: GraphCosts, widest: int, fill: int) -> None:
    curve = grid.curve(fill, widest)
    assert len(curve) == widest + 1
    assert curve[0] == 0
    if fill < grid.fills[0] or fill > grid.fills[-1]:
        i = 0 if fill < grid.fills[0] else len(grid.fills) - 2
        slope = (np.array(grid.ms[i + 1]) - np.array(grid.ms[i])) / (grid.fills[i + 1] - grid.fills[i])
        row = np.array(grid.ms[i]) + slope * (fill - grid.fills[i])
        row = np.maximum.accumulate(np.maximum(row, np.min(grid.ms) / 2))
    else:
        row = np.array(grid.curve(fill, grid.widths[-1]))[list(grid.widths)]
    slope = max(0.0, (row[-1] - row[-2]) / (grid.widths[-1] - grid.widths[-2]))
    for width in range(1, widest + 1):
        beyond = max(0, width - grid.widths[-1])
        expected = np.interp(width, grid.widths, row) + slope * beyond
        assert curve[width] == pytest.approx(expected, rel=1e-9)


@given(costs=profiles(), widest=st.integers(1, 300), fill=st.integers(0, 1 << 31))
@settings(deadline=None)
def test_whatever_is_extrapolated_stays_above_half_of_the_cheapest_call(
    costs: CostProfile, widest: int, fill: int
) -> None:
    cheapest = min(min(row) for row in costs.target.ms)
    curve = costs.target.curve(fill, widest)
    assert min(curve[1:]) >= cheapest / 2
    measured = costs.target.fills[0] <= fill <= costs.target.fills[-1]
    extrapolated = curve[costs.target.widths[-1] if measured else 0 :]
    assert extrapolated == sorted(extrapolated), "no cheaper, the wider it is"


def test_one_fill_and_one_width() -> None:
    assert graph_costs(lambda w: 3.0 * w, fills=[100]).curve(7, 3) == [0, 3, 6, 9]
    assert graph_costs(lambda w: 3.0 * w, widths=[1]).curve(40, 3) == [0, 3, 3, 3]
    falling = GraphCosts(widths=(1, 2), fills=(5,), ms=((4.0, 3.0),))
    assert falling.curve(5, 4) == [0, 4, 3, 3, 3], "what falls stays there"


# --- profile.json ----------------------------------------------------------------------------------------------------


def edited(path: str, value: object) -> str:
    """The document with `value` at `path`, or without it for `...`."""
    document = copy.deepcopy(DOCUMENT)
    *parents, last = path.split(".")
    place = document
    for key in parents:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return json.dumps(document)


def refusal(text: str) -> str:
    with pytest.raises(UsageError) as error:
        parse_costs(text)
    message = str(error.value)
    assert "\n" not in message
    return message


@given(costs=profiles())
def test_a_file_says_what_was_written(costs: CostProfile) -> None:
    assert parse_costs(to_json(costs)) == costs


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("target.widths", [], "target.widths: must be rising numbers from 1, got an array"),
        ("target.widths", [1, 2, 2, 8], "target.widths: must be rising"),
        ("target.widths", [1, 4, 2, 8], "target.widths: must be rising"),
        ("target.widths", [2, 3, 4, 8], "target.widths: must be rising numbers from 1"),
        ("target.widths", [0, 1, 4, 8], "target.widths: must be rising numbers from 1"),
        ("target.widths", [1, 2, 4, 257], "target.widths: must be at most 256, got 257"),
        ("target.widths", [1, 2, 4, 8.5], "target.widths[3]: expected int, got 8.5"),
        ("target.widths", [True, 2, 4, 8], "target.widths[0]: expected int, got true"),
        ("target.widths", [1, 2, 4], "target.ms: must be a row for each fill with a number for each width"),
        ("target.fills", [], "target.fills: must be rising numbers from 0"),
        ("target.fills", [-1, 5], "target.fills: must be rising numbers from 0"),
        ("target.fills", [5, 5], "target.fills: must be rising"),
        ("target.fills", [16], "target.ms: must be a row for each fill"),
        ("target.fills", [5, 10**400], "target.fills: must be at most 2147483648"),
        ("target.ms", [], "target.ms: must be a row for each fill"),
        ("target.ms", [[1.0] * 4], "target.ms: must be a row for each fill"),
        ("target.ms", [[1.0] * 4, [1.0] * 3], "target.ms: must be a row for each fill with a number for each width"),
        ("target.ms", [[1.0] * 4, [1.0, 0.0, 1.0, 1.0]], "target.ms: must be numbers from 1e-06 to 1e+09, got 0.0"),
        ("target.ms", [[1.0] * 4, [1.0, -1.0, 1.0, 1.0]], "target.ms: must be numbers from 1e-06 to 1e+09, got -1.0"),
        ("target.ms", [[1.0] * 4, [1.0, 1e300, 1.0, 1.0]], "target.ms: must be numbers from"),
        ("target.ms", [[1.0] * 4, [1.0, 5e-324, 1.0, 1.0]], "target.ms: must be numbers from"),
        ("target.ms", [[1.0] * 4, [1.0, 10**400, 1.0, 1.0]], "target.ms[1][1]: expected a finite number"),
        ("target.ms", [[1.0] * 4, [1.0, None, 1.0, 1.0]], "target.ms[1][1]: expected number, got null"),
        ("target.ms", {"0": 1}, "target.ms: expected array, got an object"),
        ("target", None, "target: expected object, got null"),
        ("draft", [], "draft: expected object or null, got an array"),
        ("draft.widths", "1", 'draft.widths: expected array, got "1"'),
        ("ngram_ms", -0.1, "ngram_ms: must be from 0"),
        ("ngram_ms", 1e300, "ngram_ms: must be from 0"),
        ("ngram_ms", ..., "ngram_ms: missing"),
        ("rounds", 0, "rounds: must be from 1"),
        ("profile_version", 0, "profile_version: must be 1, got 0"),
        ("profile_version", "1", 'profile_version: expected int, got "1"'),
        ("draftc_version", "", "draftc_version: must be a non-empty string"),
        ("created", "a\nb", "created: expected one line of text"),
        ("machine", ..., "machine: missing"),
        ("machine.graphs", "0" * 63, "machine.graphs: must be 64 hexadecimal digits"),
        ("machine.graphs", "0" * 64 + "\n", "machine.graphs: expected one line of text"),
        ("machine.devices", ["cpu"], "machine.devices: expected object"),
        ("machine.devices", {"target": 0}, "machine.devices.target: expected str, got 0"),
        ("machine.processor", "\x1b[2J", "machine.processor: expected one line of text"),
        ("machine.cores", 0, "machine.cores: must be from 1"),
        ("machine.cores", True, "machine.cores: expected int, got true"),
        ("machine.threads", -1, "machine.threads: must be from 0"),
        ("note", "hello", "note: unknown key"),
    ],
)
def test_refusals_name_the_place(path: str, value: object, message: str) -> None:
    assert refusal(edited(path, value)).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("[]", "expected object, got an array"),
        ("null", "expected object, got null"),
        (to_json(FLAT).replace("10.001", "NaN", 1), "not valid JSON: NaN is not a JSON number"),
        (to_json(FLAT).replace("10.001", "-Infinity", 1), "not valid JSON: -Infinity is not a JSON number"),
        (to_json(FLAT).replace("10.001", "1e999", 1), "target.ms[0][0]: expected a finite number, got Infinity"),
        (to_json(FLAT).replace('"rounds": 3', '"rounds": 3, "rounds": 4'), 'not valid JSON: key "rounds" comes twice'),
        ("[" * 100_000, "nested too deeply"),
        (to_json(FLAT) + "{}", "not valid JSON: Extra data"),
    ],
)
def test_text_that_is_no_profile(text: str, message: str) -> None:
    assert refusal(text).startswith(message)


def test_a_profile_of_a_newer_draftc_is_called_that() -> None:
    newer = {**DOCUMENT, "profile_version": COSTS_VERSION + 1, "hitherto": "unknown"}
    with pytest.raises(BundleVersionError, match=r"made by a newer draftc \(profile 2, this reads 1\)"):
        parse_costs(json.dumps(newer))


def test_no_draft_may_be_left_out() -> None:
    assert parse_costs(edited("draft", ...)).draft is None
    assert parse_costs(edited("draft", None)).draft is None


Place = tuple[str | int, ...]


def places(document: Any, prefix: Place = ()) -> list[Place]:
    """Paths of all values inside `document`."""
    items: Any = document.items() if isinstance(document, dict) else enumerate(document)
    found: list[Place] = []
    for key, value in items:
        found.append((*prefix, key))
        if isinstance(value, dict | list):
            found += places(value, (*prefix, key))
    return found


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 300),
    st.sampled_from([2**31, 2**31 + 1, 2**63, -(2**70), 10**30, 1e300, 1e-300, 1e9, 1e-6, 0.0, -1.0]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.sampled_from([[], {}, [1], [1, 2, 4, 8], [[1.0] * 4], [[]], ["a"], {"target": "cpu"}]).map(copy.deepcopy),
)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whatever_is_accepted_can_be_decided_by(data: st.DataObject) -> None:
    """A mutated document is refused, or what it says is kept, and its curves are numbers above 0."""
    document = copy.deepcopy(DOCUMENT)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places(document)))
        place = document
        for key in path[:-1]:
            place = place[key]  # type: ignore[index]
        action = data.draw(st.sampled_from(["replace", "replace", "remove", "add"]))
        if action == "replace":
            place[path[-1]] = data.draw(values)  # type: ignore[index]
        elif action == "remove":
            del place[path[-1]]  # type: ignore[arg-type]
        elif isinstance(place, dict):
            place[data.draw(st.text(max_size=4))] = data.draw(values)
        else:
            place.append(data.draw(values))
        assume(places(document))
    try:
        costs = parse_costs(json.dumps(document))
    except (UsageError, BundleVersionError):
        return
    assert parse_costs(to_json(costs)) == costs
    for graph in (costs.target, costs.draft or costs.target):
        for fill in (0, 17, 4096, 1 << 31):
            curve = np.array(graph.curve(fill, 40))
            assert np.isfinite(curve).all()
            assert (curve[1:] > 0).all()


@settings(deadline=None)
@given(text=st.text(max_size=40))
def test_text_is_refused_as_nothing_worse_than_usage(text: str) -> None:
    refusal(text)


# --- what a profile belongs to ---------------------------------------------------------------------------------------


DIFFERENCES: dict[str, Any] = {
    "graphs": "f" * 64,
    "backend": "onnxruntime 1.33.0",
    "devices": {"target": "cuda", "draft": "cpu"},
    "processor": "another",
    "cores": 3,
    "threads": 1,
}


def test_every_field_is_compared() -> None:
    assert DIFFERENCES.keys() == MachineId.__annotations__.keys()
    assert make_machine().differs(make_machine()) == ""
    assert make_machine().digest == make_machine().digest


@pytest.mark.parametrize("field", DIFFERENCES)
def test_a_difference_is_named_and_has_a_name_of_its_own(field: str) -> None:
    one, other = make_machine(), make_machine(**{field: DIFFERENCES[field]})
    said = one.differs(other)
    assert said.startswith(f"{field} ")
    assert "there" in said
    assert "here" in said
    assert "\n" not in said
    assert one.digest != other.digest


def test_a_draft_on_no_device_differs() -> None:
    one, other = make_machine(), make_machine(devices={"target": "cpu"})
    assert one.differs(other) == "devices target cpu, draft cpu there, target cpu here"


def test_the_fingerprint_is_of_the_graphs_and_what_lies_beside_them() -> None:
    spec = GraphSpec.decoder([(1, 2, 2)], 66, 30, "float32")
    sha = "0123456789abcdef" * 4
    names = ("target/model.onnx", "target/model.onnx.data", "draft/model.onnx", "tokenizer/tokenizer.json")
    manifest = replace(make_manifest(spec, 30), files=tuple(FileEntry(path=name, size=1, sha256=sha) for name in names))
    one = fingerprint_graphs(manifest)
    assert one == fingerprint_graphs(
        replace(manifest, files=manifest.files[::-1], name="other", num_speculative_tokens=2)
    )
    for i, name in enumerate(names):
        files = list(manifest.files)
        files[i] = replace(files[i], sha256="f" * 64)
        changed = fingerprint_graphs(replace(manifest, files=tuple(files))) != one
        assert changed == (not name.startswith("tokenizer/"))


def test_costs_are_checked_wherever_they_come_from() -> None:
    with pytest.raises(UsageError, match="ms: must be numbers from"):
        graph_costs(lambda width: float("nan"))
    with pytest.raises(UsageError, match="ngram_ms: must be from"):
        make_costs(lambda width: 1.0, ngram_ms=float("inf"))
