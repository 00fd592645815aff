"""A profile for a person: every number of it is in the table, every curve in the picture."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from draftc.runtime.cost_tables import draw, record, render, require_plots
from draftc.runtime.costs import CostProfile, parse_costs
from draftc.runtime.errors import UsageError
from tests.runtime.cost_fakes import graph_costs, make_costs, make_machine

COSTS = make_costs(
    lambda width: 1.0,
    target=graph_costs(lambda width: 20.0 + 5 * width, widths=(1, 2, 8), fills=(128, 1024)),
    draft=graph_costs(lambda width: 2.0 * width, widths=(1, 3), fills=(0, 64)),
    ngram_ms=0.0123,
)
PNG = b"\x89PNG\r\n\x1a\n"


def shown(costs: CostProfile, name: str = "tiny") -> list[str]:
    """The words of each line."""
    stream = io.StringIO()
    Console(file=stream, width=160).print(render(costs, name))
    return [" ".join(line.split()) for line in stream.getvalue().splitlines()]


def test_the_table_has_every_number_and_its_multiple() -> None:
    lines = shown(COSTS)
    assert lines[0] == "tiny: what a call costs"
    assert lines[1] == "a processor, 2 cores, default threads, onnxruntime 1.32.0, medians of 3"
    begin = lines.index("target, ms (× a call of one token)")
    assert lines[begin + 1 : begin + 5] == [
        "tokens at 128 at 1,024",
        "1 25.00 (1.00×) 25.00 (1.00×)",
        "2 30.00 (1.20×) 30.00 (1.20×)",
        "8 60.00 (2.40×) 60.00 (2.40×)",
    ]
    begin = lines.index("draft, ms (× a call of one token)")
    assert lines[begin + 1 : begin + 4] == [
        "tokens at 0 at 64",
        "1 2.00 (1.00×) 2.00 (1.00×)",
        "3 6.00 (3.00×) 6.00 (3.00×)",
    ]
    assert lines[-1] == "n-gram lookup: 0.012 ms a token"


def test_without_a_draft_there_is_one_table() -> None:
    lines = shown(replace(COSTS, draft=None, machine=make_machine(threads=3)))
    assert not [line for line in lines if line.startswith("draft")]
    assert "3 threads" in lines[1]


def test_names_are_not_markup() -> None:
    lines = shown(replace(COSTS, machine=make_machine(processor="[bold]x[/]")), name="[red]a[/red]")
    assert lines[0].startswith("[red]a[/red]: ")
    assert lines[1].startswith("[bold]x[/], ")


def test_the_record_is_the_file() -> None:
    assert parse_costs(json.dumps(record(COSTS))) == COSTS


def test_drawing_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for act in (require_plots, lambda: draw(COSTS, "tiny", tmp_path / "a.png")):
        with pytest.raises(UsageError, match=r"matplotlib, which is not installed: pip install 'draftc\[plot\]'"):
            act()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("costs", [COSTS, replace(COSTS, draft=None)], ids=["pair", "target"])
def test_a_picture(costs: CostProfile, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs the extra plot")
    path = tmp_path / "costs"  # whatever it is called
    draw(costs, "tiny $x_1", path)
    assert path.read_bytes().startswith(PNG)


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs the extra plot")
    with pytest.raises(UsageError, match="No such file or directory: name a file that can be written"):
        draw(COSTS, "tiny", tmp_path / "nowhere" / "costs.png")
