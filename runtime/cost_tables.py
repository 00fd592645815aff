"""A cost profile for a person: a table of what calls cost, and the curves as a picture."""

from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from draftc.runtime.costs import CostProfile, GraphCosts
from draftc.runtime.errors import UsageError
from draftc.runtime.reports import jsonable

__all__ = ["draw", "record", "render", "require_plots"]


def render(costs: CostProfile, name: str) -> RenderableType:
    """Milliseconds by width and fill, and each as a multiple of a call of one token."""
    machine = costs.machine
    threads = f"{machine.threads} threads" if machine.threads else "default threads"
    where = f"{machine.processor}, {machine.cores} cores, {threads}, {machine.backend}, medians of {costs.rounds}"
    lines: list[RenderableType] = [Text(f"{name}: what a call costs", style="bold"), Text(where, style="dim")]
    for title, graph in _graphs(costs):
        lines += [Text(f"\n{title}, ms (× a call of one token)", style="bold"), _table(graph)]
    lines.append(Text(f"\nn-gram lookup: {costs.ngram_ms:.3f} ms a token"))
    return Group(*lines)


def record(costs: CostProfile) -> Any:
    """As JSON-ready values: what profile.json holds."""
    return jsonable(costs)


def require_plots() -> None:
    """Raise UsageError where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("drawing needs matplotlib, which is not installed: pip install 'draftc[plot]'") from None


def draw(costs: CostProfile, name: str, path: Path) -> None:
    """Draw milliseconds against the width of a call, a line for each graph and fill. Raises UsageError."""
    require_plots()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for (title, graph), style in zip(_graphs(costs), ("o-", "s--"), strict=False):
        for fill, row in zip(graph.fills, graph.ms, strict=True):
            axes.plot(graph.widths, row, style, markersize=3, label=f"{title}, {fill:,} tokens in the cache")
    axes.set(xlabel="tokens in the call", ylabel="milliseconds", title=f"{name} on {costs.machine.processor}", ylim=0)
    axes.set_xlim(0, max(costs.target.widths) + 1)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}: name a file that can be written") from error


def _graphs(costs: CostProfile) -> list[tuple[str, GraphCosts]]:
    return [("target", costs.target), *([("draft", costs.draft)] if costs.draft else [])]


def _table(graph: GraphCosts) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("tokens", *(f"at {fill:,}" for fill in graph.fills)):
        table.add_column(column, justify="right", no_wrap=True)
    for j, width in enumerate(graph.widths):
        table.add_row(str(width), *(f"{row[j]:.2f} ({row[j] / row[0]:.2f}×)" for row in graph.ms))
    return table
