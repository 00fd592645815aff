"""What bench_peers.py makes of its records: rates, ratios, tables and a chart. No system is needed here.

Rates are sums: all tokens of a class over all their time, so a long answer weighs more than a short one. Systems that
did not fit into memory together run in groups, and draftc runs again in every group: a ratio always compares runs of
one group, which were interleaved prompt by prompt.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Best", "Record", "Total", "best_peers", "chart", "medians", "render", "totals"]

OURS = "draftc"
DEFAULT = "default"
PLAIN = "plain"


@dataclass(frozen=True)
class Record:
    """One run of one prompt. Times are seconds; `decode_tokens` of the `new_tokens` were made in `decode_s`.

    `prefill_s` runs from the call to the first token (onnxruntime-genai: to the filled cache). `target_calls` after the
    prefill, `proposed` and `accepted` are None where the system does not tell. `token_ids` are without an end token.
    `others_cpu_s` is what the waiting processes burnt meanwhile. `peak_rss` is in bytes.
    """

    group: int
    kind: str
    id: str
    system: str
    mode: str
    repeat: int
    prompt_tokens: int
    new_tokens: int
    decode_tokens: int
    prefill_s: float
    decode_s: float
    target_calls: int | None
    proposed: int | None
    accepted: int | None
    peak_rss: int
    others_cpu_s: float
    token_ids: tuple[int, ...]

    @property
    def setting(self) -> tuple[str, str]:
        """(system, mode)."""
        return self.system, self.mode


@dataclass(frozen=True)
class Total:
    """One setting over the prompts of one class. NaN where a system does not tell, or nothing can be compared.

    `*_vs_plain` divide by the system's own plain decoding, `worst_*` over single prompts. `default_*` are draftc's
    default ÷ this setting. `identical` counts prompts whose every run wrote what the system's plain decoding wrote.
    """

    kind: str
    system: str
    mode: str
    prompts: int
    new_tokens: int
    prefill_s: float
    decode_tokens_per_s: float
    end_to_end_tokens_per_s: float
    tokens_per_call: float
    acceptance_rate: float
    identical: int | None
    peak_rss: int
    decode_vs_plain: float
    end_to_end_vs_plain: float
    worst_decode_vs_plain: float
    worst_end_to_end_vs_plain: float
    default_vs_this_decode: float
    default_vs_this_end_to_end: float

    @property
    def name(self) -> str:
        return f"{self.system} {self.mode}"


@dataclass(frozen=True)
class Best:
    """A class's fastest setting of another system, and draftc's default ÷ it, measured in the same group."""

    kind: str
    by: str
    setting: str
    tokens_per_s: float
    default_tokens_per_s: float
    ratio: float


def medians(records: Iterable[Record]) -> list[Record]:
    """One record per group, prompt and setting: median prefill, and the repeat with the median decode time."""
    runs: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        runs.setdefault((record.group, record.kind, record.id, *record.setting), []).append(record)
    return [_median(repeats) for repeats in runs.values()]


def _median(runs: Sequence[Record]) -> Record:
    middle = sorted(runs, key=lambda run: run.decode_s)[(len(runs) - 1) // 2]
    changed = {
        "prefill_s": statistics.median(run.prefill_s for run in runs),
        "peak_rss": max(run.peak_rss for run in runs),
        "others_cpu_s": max(run.others_cpu_s for run in runs),
    }
    return Record(**(vars(middle) | changed))


def totals(records: Iterable[Record]) -> list[Total]:
    """Every class of the records (all repeats) and, in it, every setting, both in order of appearance."""
    repeats = list(records)
    middle = medians(repeats)
    settings = dict.fromkeys(record.setting for record in middle)
    there = {(record.kind, record.setting) for record in middle}
    kinds = dict.fromkeys(record.kind for record in middle)
    pairs = ((kind, setting) for kind in kinds for setting in settings if (kind, setting) in there)
    return [_total(kind, setting, middle, repeats) for kind, setting in pairs]


def _total(kind: str, setting: tuple[str, str], middle: Sequence[Record], repeats: Sequence[Record]) -> Total:
    def of(wanted: tuple[str, str], source: Sequence[Record] = middle) -> list[Record]:
        return [record for record in source if record.kind == kind and record.setting == wanted]

    own, plain = of(setting), of((setting[0], PLAIN))
    groups = {record.group for record in own}
    default = [record for record in of((OURS, DEFAULT)) if record.group in groups]
    calls = [record for record in own if record.target_calls is not None]
    proposals = [record for record in own if record.proposed is not None and record.accepted is not None]
    texts = {(record.group, record.id, record.repeat): record.token_ids for record in of((setting[0], PLAIN), repeats)}
    same: dict[str, bool] = {}
    for record in of(setting, repeats):
        equal = texts.get((record.group, record.id, record.repeat)) == record.token_ids
        same[record.id] = same.get(record.id, True) and equal
    return Total(
        kind=kind,
        system=setting[0],
        mode=setting[1],
        prompts=len({record.id for record in own}),
        new_tokens=sum(record.new_tokens for record in own),
        prefill_s=sum(record.prefill_s for record in own),
        decode_tokens_per_s=decode_rate(own),
        end_to_end_tokens_per_s=whole_rate(own),
        tokens_per_call=_ratio(
            sum(record.decode_tokens for record in calls), sum(record.target_calls or 0 for record in calls)
        ),
        acceptance_rate=_ratio(
            sum(record.accepted or 0 for record in proposals), sum(record.proposed or 0 for record in proposals)
        ),
        identical=sum(same.values()) if plain else None,
        peak_rss=max(record.peak_rss for record in own),
        decode_vs_plain=_paired(own, plain, decode_rate),
        end_to_end_vs_plain=_paired(own, plain, whole_rate),
        worst_decode_vs_plain=_worst(own, plain, decode_rate),
        worst_end_to_end_vs_plain=_worst(own, plain, whole_rate),
        default_vs_this_decode=_paired(default, own, decode_rate),
        default_vs_this_end_to_end=_paired(default, own, whole_rate),
    )


def decode_rate(records: Iterable[Record]) -> float:
    """Tokens after the first ÷ the time that they took."""
    records = list(records)
    return _ratio(sum(record.decode_tokens for record in records), sum(record.decode_s for record in records))


def whole_rate(records: Iterable[Record]) -> float:
    """All tokens ÷ prefill and decode time."""
    records = list(records)
    seconds = sum(record.prefill_s + record.decode_s for record in records)
    return _ratio(sum(record.new_tokens for record in records), seconds)


def _paired(own: Sequence[Record], other: Sequence[Record], rate: Any) -> float:
    """rate(own) ÷ rate(other) over the prompts and groups that both have."""
    own_keys, other_keys = ({(record.group, record.id) for record in records} for records in (own, other))
    both = own_keys & other_keys
    kept = ([record for record in records if (record.group, record.id) in both] for records in (own, other))
    first, second = kept
    return _ratio(rate(first), rate(second))


def _worst(own: Sequence[Record], plain: Sequence[Record], rate: Any) -> float:
    """The smallest ratio of one prompt."""
    ids = dict.fromkeys(record.id for record in own)
    ratios = [_paired([r for r in own if r.id == key], [r for r in plain if r.id == key], rate) for key in ids]
    return min((ratio for ratio in ratios if not math.isnan(ratio)), default=math.nan)


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan


def best_peers(found: Sequence[Total], records: Iterable[Record]) -> list[Best]:
    """Per class: against which setting of another system draftc's default is relatively slowest, by decode speed and
    end to end. Within one group that is the fastest peer.
    """
    middle = medians(records)
    best = []
    for kind in dict.fromkeys(total.kind for total in found):
        peers = [total for total in found if total.kind == kind and total.system != OURS]
        for by, ratio, speed, rate in (
            ("decode", "default_vs_this_decode", "decode_tokens_per_s", decode_rate),
            ("end to end", "default_vs_this_end_to_end", "end_to_end_tokens_per_s", whole_rate),
        ):
            comparable = [total for total in peers if not math.isnan(getattr(total, ratio))]
            if not comparable:
                continue
            peer = min(comparable, key=lambda total: getattr(total, ratio))
            groups = {r.group for r in middle if r.kind == kind and r.setting == (peer.system, peer.mode)}
            ours = [r for r in middle if r.kind == kind and r.setting == (OURS, DEFAULT) and r.group in groups]
            best.append(Best(kind, by, peer.name, getattr(peer, speed), rate(ours), getattr(peer, ratio)))
    return best


def render(found: Sequence[Total], best: Sequence[Best], classes: dict[str, str]) -> Any:
    """Rich tables: one per class, and draftc's default against the best peer."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    columns = ("setting", "tokens/s", "× plain", "worst", "end to end", "× plain", "worst", "prefill s", "tok/call")
    columns += ("accepted", "identical", "peak MiB", "default ÷ this")
    parts: list[Any] = []
    for kind in dict.fromkeys(total.kind for total in found):
        rows = [total for total in found if total.kind == kind]
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for column in columns:
            table.add_column(column, justify="left" if column == "setting" else "right", no_wrap=True)
        fastest = max((row.end_to_end_tokens_per_s for row in rows), default=math.nan)
        for row in rows:
            table.add_row(
                row.name,
                *(_show(row.decode_tokens_per_s, ".1f"), _show(row.decode_vs_plain, ".2f")),
                *(_show(row.worst_decode_vs_plain, ".2f"), _show(row.end_to_end_tokens_per_s, ".1f")),
                *(_show(row.end_to_end_vs_plain, ".2f"), _show(row.worst_end_to_end_vs_plain, ".2f")),
                *(f"{row.prefill_s:.2f}", _show(row.tokens_per_call, ".2f"), _show(row.acceptance_rate, ".0%")),
                "-" if row.identical is None else f"{row.identical}/{row.prompts}",
                f"{row.peak_rss / 2**20:,.0f}",
                f"{_show(row.default_vs_this_decode, '.2f')} / {_show(row.default_vs_this_end_to_end, '.2f')}",
                style="bold" if row.end_to_end_tokens_per_s == fastest else None,
            )
        parts += [Text(f"\n{kind}: {classes.get(kind, kind)}, {rows[0].prompts} prompts", style="bold"), table]
    if best:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for column in ("class", "by", "best peer", "tokens/s", "draftc default", "ratio"):
            table.add_column(column, justify="right" if column in ("tokens/s", "draftc default", "ratio") else "left")
        for one in best:
            numbers = (f"{one.tokens_per_s:.1f}", f"{one.default_tokens_per_s:.1f}", f"{one.ratio:.2f}")
            table.add_row(one.kind, one.by, one.setting, *numbers)
        parts += [Text("\ndraftc's default against the best peer", style="bold"), table]
    return Group(*parts)


def _show(number: float, how: str) -> str:
    return "-" if math.isnan(number) else format(number, how)


def chart(found: Sequence[Total], path: Path, classes: dict[str, str]) -> None:
    """Bars of the end-to-end speeds, one panel per class. Raises ImportError without matplotlib, OSError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = list(dict.fromkeys(total.kind for total in found))
    names = list(dict.fromkeys(total.name for total in found))
    height = 1.2 + 0.27 * len(names)
    figure, panels = pyplot.subplots(
        1, len(kinds), figsize=(4.2 * len(kinds) + 1.5, height), sharey=True, squeeze=False
    )
    for panel, kind in zip(panels[0], kinds, strict=True):
        rows = {total.name: total for total in found if total.kind == kind}
        speeds = [rows[name].end_to_end_tokens_per_s if name in rows else 0.0 for name in names]
        colours = ["tab:orange" if name.startswith(OURS) else "tab:gray" for name in names]
        bars = panel.barh(names, speeds, color=colours)
        panel.bar_label(bars, fmt="%.0f", padding=3, fontsize=8)
        panel.set_title(f"{kind}: {classes.get(kind, kind)}", fontsize=10)
        panel.set_xlabel("tokens/s, with prefill")
        panel.margins(x=0.15)
        panel.tick_params(axis="y", labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
