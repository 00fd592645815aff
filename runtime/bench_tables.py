"""A bench report as two tables for a person: what was won, and where the time went."""

import math

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from draftc.runtime.bench import BenchReport

__all__ = ["render"]


def render(report: BenchReport) -> RenderableType:
    """The totals for a person, as two tables of at most 80 columns."""
    speed = _table("mode", "tokens/s", "speedup", "worst", "best", "with prefill", "identical")
    spent = _table("mode", "tok/call", "accepted", "draft", "verify", "accept", "other", "no engine")
    fastest = max(row.speedup for row in report.totals)
    for row in report.totals:
        style = "bold" if row.mode != "plain" and row.speedup == fastest else None
        speed.add_row(
            row.mode,
            f"{row.decode_tokens_per_s:.1f}",
            *(f"{speedup:.2f}x" for speedup in (row.speedup, row.worst_speedup, row.best_speedup)),
            f"{row.end_to_end_tokens_per_s:.1f} ({row.end_to_end_speedup:.2f}x)",
            f"{row.identical_to_plain}/{row.prompts}",
            style=style,
        )
        shares = row.draft_share, row.verify_share, row.accept_share, row.other_share, row.non_engine_share
        spent.add_row(
            row.mode,
            f"{row.mean_acceptance_length:.2f}",
            "-" if math.isnan(row.acceptance_rate) else f"{row.acceptance_rate:.1%}",
            *(f"{share:.1%}" for share in shares),
            style=style,
        )
    how = "greedy" if report.sampling.greedy else f"temperature {report.sampling.temperature:g}, seed {report.seed}"
    head = (
        f"{report.bundle} ({report.precision}): {report.totals[0].prompts} prompts, up to {report.max_new_tokens} "
        f"tokens, {how}, medians of {report.repeats}"
    )
    machine = report.machine
    threads = "default threads" if machine.threads is None else f"{machine.threads} threads"
    where = f"{machine.processor}, {machine.cpu_count} CPUs, {threads}, {machine.backend}"
    if on_gpu := [f"{role} on {device}" for role, device in machine.devices.items() if device != "cpu"]:
        graphs = "with CUDA graphs" if machine.cuda_graph else "without CUDA graphs"
        where = f"{', '.join(on_gpu)}, {graphs}, {machine.backend}; {machine.processor}"
    lines: list[RenderableType] = [Text(head, style="bold"), Text(where, style="dim"), speed]
    lines += [Text("\nWhere the decode time goes", style="bold"), spent]
    unsteady = sorted({record.mode for record in report.records if not record.repeatable})
    if unsteady:
        lines.append(Text(f"warning: repeats wrote different tokens in {', '.join(unsteady)}", style="yellow"))
    return Group(*lines)


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, justify="left" if column == "mode" else "right", no_wrap=True)
    return table
