"""`draftc verify`: does this bundle, on this machine, write what its target model alone would have written?

Four parts, each independent of the others: greedy parity, the distribution of sampled tokens, caches under rewinds,
prompt boundaries. docs/verify.md explains them, and the JSON that `VerifyReport.to_dict` makes.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from draftc.runtime.check_bounds import BoundsDetails, check_bounds
from draftc.runtime.check_cache import CacheDetails, check_cache
from draftc.runtime.check_greedy import GreedyDetails, check_greedy
from draftc.runtime.check_numerics import CALIBRATION_TOKENS, WidthVariance, graphs, measure_variance
from draftc.runtime.check_sampling import SamplingDetails, check_sampling, too_small_for_sampling
from draftc.runtime.errors import DraftcError, EngineError, UsageError
from draftc.runtime.prompts import PromptCase
from draftc.runtime.reports import Progress, jsonable
from draftc.runtime.session import VERSION, Session

__all__ = ["SCHEMA", "Details", "Part", "VerifyReport", "render", "verify"]

SCHEMA = "draftc-verify/1"
LISTED_DIVERGENCES = 10

Details = GreedyDetails | SamplingDetails | CacheDetails | BoundsDetails


@dataclass(frozen=True)
class Part:
    """One part: "greedy", "sampling", "cache" or "bounds". Without `details` it broke off, and the verdict says why.

    `skipped`: the bundle is too small for what the part does. Then nothing was shown (`passed` is false), and nothing
    was found either: the report's `passed` leaves it out, and a warning says so.
    """

    name: str
    passed: bool
    verdict: str
    seconds: float
    warnings: tuple[str, ...]
    details: Details | None
    skipped: bool = False


@dataclass(frozen=True)
class VerifyReport:
    """The outcome of all parts. `variance` has, per graph, what all tolerances come from."""

    bundle: str
    precision: str
    seed: int
    budget_s: float
    seconds: float
    variance: tuple[WidthVariance, ...]
    parts: tuple[Part, ...]

    @property
    def passed(self) -> bool:
        """Whether every part passed that could be run."""
        return all(part.passed or part.skipped for part in self.parts)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Of all parts."""
        return tuple(warning for part in self.parts for warning in part.warnings)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready values; see docs/verify.md. What is not a finite number is null."""
        return {
            "schema": SCHEMA,
            "draftc_version": VERSION,
            "passed": self.passed,
            **jsonable(self),
        }


def verify(
    session: Session,
    *,
    prompts: Sequence[PromptCase],
    budget_s: float = 60.0,
    seed: int = 0,
    draws: int | None = None,
    on_progress: Progress | None = None,
) -> VerifyReport:
    """Check the bundle behind `session`, which must be idle and is left with an empty cache.

    `budget_s` seconds go to the draws of the sampling part, but for a minimum; the other parts take what they take.
    `draws` per case replaces the budget by a number. Whatever fails in a part makes that a failed part, and the next
    one begins. Raises UsageError for arguments out of range and prompts that can't be encoded or have one token each.
    """
    if not (budget_s > 0 and math.isfinite(budget_s)):
        raise UsageError(f"budget_s must be a finite number of seconds above 0, got {budget_s}")
    if seed < 0:
        raise UsageError(f"seed must be 0 or more, got {seed}")
    if draws is not None and draws < 1:
        raise UsageError(f"draws must be 1 or more, got {draws}")
    ids = _encode_all(session, prompts)
    corpus = np.concatenate([np.asarray(tokens, np.int64) for tokens in ids.values()])
    corpus = np.resize(corpus, max(corpus.size, CALIBRATION_TOKENS))
    report = on_progress or (lambda name, done: None)
    begin = time.perf_counter()
    members = graphs(session)
    variances: list[WidthVariance] = []
    parts: list[Part] = []

    def run(name: str, work: Callable[[Callable[[float], None]], Details]) -> None:
        started = time.perf_counter()
        session.reset()
        report(name, 0.0)
        try:
            if not variances:  # the first part that gets through it measures it for all
                k = session.manifest.num_speculative_tokens
                variances.extend([measure_variance(member, corpus, k) for member in members])
            details = work(lambda done: report(name, done))
        except DraftcError as error:
            if isinstance(error, EngineError):
                for decoder in session.decoders:
                    decoder.mark_broken()
            parts.append(Part(name, False, f"broke off: {error}", time.perf_counter() - started, (), None))
            return
        parts.append(
            Part(name, details.passed, details.verdict, time.perf_counter() - started, details.warnings, details)
        )

    run("greedy", lambda progress: check_greedy(session, ids, variances[0], progress))
    if reason := too_small_for_sampling(session):
        warning = f"sampling was not tested: {reason}"
        parts.append(Part("sampling", False, f"skipped: {reason}", 0.0, (warning,), None, skipped=True))
        report("sampling", 1.0)
    else:
        run(
            "sampling",
            lambda progress: check_sampling(
                session, ids, variances[0].limit, budget_s=budget_s, seed=seed, draws=draws, on_progress=progress
            ),
        )
    run("cache", lambda progress: check_cache(session, members, variances, corpus, seed, progress))
    run("bounds", lambda progress: check_bounds(session, members, variances, corpus, budget_s, progress))
    session.reset()
    return VerifyReport(
        bundle=session.manifest.name,
        precision=session.manifest.precision,
        seed=seed,
        budget_s=budget_s,
        seconds=time.perf_counter() - begin,
        variance=tuple(variances),
        parts=tuple(parts),
    )


def _encode_all(session: Session, prompts: Sequence[PromptCase]) -> Mapping[str, list[int]]:
    """Token ids by prompt id. Raises UsageError that names the prompt."""
    if not prompts:
        raise UsageError("no prompts: give at least one")
    ids = {}
    for case in prompts:
        try:
            ids[case.id] = session.encode(case.content)
        except UsageError as error:
            raise UsageError(f"prompt {case.id!r}: {error}") from error
        if not ids[case.id]:
            raise UsageError(f"prompt {case.id!r} has no tokens: give one with text in it")
    if max(map(len, ids.values())) < 2:
        raise UsageError("every prompt has a single token: give at least one of two tokens or more")
    return ids


TITLES: Mapping[str, str] = {
    "greedy": "greedy parity",
    "sampling": "sampled distribution",
    "cache": "rewind and append",
    "bounds": "prompt boundaries",
}


def render(report: VerifyReport) -> RenderableType:
    """The report for a person: one line per part, details below, warnings last."""
    title = f"{report.bundle} ({report.precision}), {report.seconds:.0f} s"
    lines: list[RenderableType] = [Text(title, style="bold")]
    for variance in report.variance:
        lines.append(
            Text(
                f"  {variance.graph}: logits of 1-token calls and of wider ones differ by up to {variance.rms:.2g} rms "
                f"(they vary by {variance.logit_std:.2g}); a near tie is a gap of up to {variance.near_tie:.2g}",
                style="dim",
            )
        )
    for part in report.parts:
        mark, colour = ("PASS ", "green") if part.passed else ("SKIP ", "yellow") if part.skipped else ("FAIL ", "red")
        head = Text(mark, style=f"bold {colour}") + Text(f"{TITLES[part.name]}: ", style="bold")
        lines.append(head + Text(f"{part.verdict}  [{part.seconds:.0f} s]"))
        lines += _details(part.details)
    lines += [Text(f"warning: {warning}", style="yellow") for warning in report.warnings]
    where = " by the parts that ran" if any(part.skipped for part in report.parts) else ""
    passed = Text(f"PASSED: no loss was found{where}", style="bold green")
    lines.append(passed if report.passed else Text("FAILED", style="bold red"))
    return Group(*lines)


def _details(details: Details | None) -> Sequence[RenderableType]:
    if isinstance(details, GreedyDetails):
        table = _table("mode", "identical", "near ties", "faults", "acceptance")
        for mode in details.modes:
            acceptance = f"{mode.accepted / mode.proposed:.3f}" if mode.proposed else "-"
            ties = sum(divergence.kind == "near tie" for divergence in mode.divergences)
            table.add_row(mode.name, f"{mode.identical}/{mode.prompts}", str(ties), str(mode.faults), acceptance)
        listed = [(mode.name, divergence) for mode in details.modes for divergence in mode.divergences]
        listed.sort(key=lambda item: item[1].kind != "fault")
        return [
            table,
            *(
                Text(
                    f"    {divergence.kind}: {name}, prompt {divergence.prompt}, token {divergence.position}: "
                    f"{divergence.token} for {divergence.plain_token}, gap {divergence.gap:.3g}, top-2 margin "
                    f"{divergence.margin:.3g}, gap at the loop's width {divergence.wide_gap:.3g}",
                    style="red" if divergence.kind == "fault" else "dim",
                )
                for name, divergence in listed[:LISTED_DIVERGENCES]
            ),
        ]
    if isinstance(details, SamplingDetails):
        table = _table(
            "drafter", "setting", "draws", "tokens", "acceptance", "p of G", "lean", "p", "finds", "proposal", "p"
        )
        for case in details.cases:
            table.add_row(
                f"{case.method}-k{case.k}",
                case.setting,
                str(case.draws),
                str(case.tokens),
                f"{case.accepted / case.proposed:.3f}" if case.proposed else "-",
                f"{case.g.p:.2g}",
                f"{case.lean.shift:+.4f}",
                f"{case.lean.p:.2g}",
                f"{case.lean.detects:.3f}",
                f"{case.proposal.shift:+.4f}" if case.proposal.events else "-",
                f"{case.proposal.p:.2g}" if case.proposal.events else "-",
                style=None if case.passed else "red",
            )
        note = (
            f"    alarm below p = {details.alpha_per_test:.1g}; total variation between call widths "
            f"{details.width_tv:.2g}, a row moves by {details.row_dependence.rms:.2g} rms with the tokens after it"
        )
        return [table, Text(note, style="dim")]
    if isinstance(details, BoundsDetails):
        return [
            Text(f"    {case.name} ({case.prompt_tokens}+{case.new_tokens}): {case.problem}", style="red")
            for case in details.cases
            if case.outcome == "failed"
        ]
    return []


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for i, column in enumerate(columns):
        table.add_column(
            column, justify="left" if i == 0 or column == "setting" else "right", no_wrap=column != "setting"
        )
    return table
