"""`draftc bench`: plain and speculative decoding of the same prompts, interleaved in one process.

A machine's speed drifts by more than the difference between two settings. So every prompt is run in all modes before
the next one begins, the round is repeated, and each figure of a prompt is a median over the rounds. docs/bench.md
explains the figures and the JSON that `BenchReport.to_dict` makes.
"""

import dataclasses
import importlib.metadata
import math
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftc.runtime.adaptive import AdaptiveDrafter
from draftc.runtime.errors import DraftcError, UsageError
from draftc.runtime.machine import backend_version, installed_version, processor
from draftc.runtime.prompts import PromptCase
from draftc.runtime.reports import Progress, jsonable
from draftc.runtime.request import Generation
from draftc.runtime.session import VERSION, Session
from draftc.runtime.warp import Sampling

__all__ = ["SCHEMA", "BenchReport", "Machine", "Mode", "Record", "Totals", "bench"]

SCHEMA = "draftc-bench/1"
WARMUP_TOKENS = 8


@dataclass(frozen=True)
class Mode:
    """One way of decoding. `k` is 0 for "plain", and for "auto", which chooses it."""

    method: str
    k: int = 0

    @property
    def name(self) -> str:
        """ "plain", "auto", "draft_model-k4", "ngram-k4", …"""
        return f"{self.method}-k{self.k}" if self.k else self.method


@dataclass(frozen=True)
class Record:
    """One prompt in one mode. Times are seconds.

    `prefill_s` is the median over the repeats. `decode_s` and its parts (draft, verify, accept, other; `engine_s` is
    what of it was spent inside engine calls) are those of the repeat with the median `decode_s`, so that they add up;
    `decode_s_runs` has `decode_s` of every repeat. The counts are of the request, prefill included, and are the same in
    every repeat unless `repeatable` is false. `steps` verifications after the first token emitted `step_tokens` tokens;
    `proposed_at[i]` and `accepted_at[i]` count i-th proposals.
    """

    id: str
    mode: str
    prompt_tokens: int
    new_tokens: int
    prefill_s: float
    decode_s: float
    draft_s: float
    verify_s: float
    accept_s: float
    other_s: float
    engine_s: float
    decode_s_runs: tuple[float, ...]
    target_calls: int
    draft_calls: int
    steps: int
    step_tokens: int
    proposed: int
    accepted: int
    proposed_at: tuple[int, ...]
    accepted_at: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: str
    identical_to_plain: bool
    repeatable: bool


@dataclass(frozen=True)
class Totals:
    """One mode over all prompts.

    `decode_tokens_per_s` is the tokens after each prompt's first over the sum of `decode_s`; `end_to_end_tokens_per_s`
    all tokens over prefill and decode. The speedups compare these with plain decoding in the same run. `worst_speedup`
    and `best_speedup` are decode speedups of single prompts. `mean_acceptance_length` is tokens per target call after
    the prefill. The shares are of `decode_s`. NaN (null in JSON) where there is nothing to divide by.
    """

    mode: str
    prompts: int
    new_tokens: int
    prefill_s: float
    decode_s: float
    decode_tokens_per_s: float
    speedup: float
    worst_speedup: float
    best_speedup: float
    end_to_end_tokens_per_s: float
    end_to_end_speedup: float
    mean_acceptance_length: float
    acceptance_rate: float
    acceptance_by_position: tuple[float, ...]
    draft_share: float
    verify_share: float
    accept_share: float
    other_share: float
    non_engine_share: float
    identical_to_plain: int


@dataclass(frozen=True)
class Machine:
    """What it ran on. `threads` is what was asked for per graph, None for ONNX Runtime's own choice.

    `backend` is the bundle's, with the version of its package here. `devices` by graph ("target", "draft"). With
    `cuda_graph`, calls on a GPU may be captured; `captured_graphs` is how many kinds of step the backend's own loop
    replayed in the end.
    """

    platform: str
    processor: str
    cpu_count: int
    threads: int | None
    backend: str
    devices: dict[str, str]
    cuda_graph: bool
    captured_graphs: int
    python: str
    numpy: str
    onnxruntime: str


@dataclass(frozen=True)
class BenchReport:
    """Records in order of running, totals by mode with plain first."""

    bundle: str
    precision: str
    machine: Machine
    max_new_tokens: int
    repeats: int
    sampling: Sampling
    seed: int
    ignore_eos: bool
    totals: tuple[Totals, ...]
    records: tuple[Record, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready values; see docs/bench.md. What is not a finite number is null."""
        return {"schema": SCHEMA, "draftc_version": VERSION, **jsonable(self)}


def bench(
    session: Session,
    *,
    prompts: Sequence[PromptCase],
    ks: Sequence[int],
    methods: Sequence[str] | None = None,
    max_new_tokens: int = 128,
    repeats: int = 3,
    sampling: Sampling | None = None,
    seed: int = 0,
    ignore_eos: bool = False,
    threads: int | None = None,
    on_progress: Progress | None = None,
) -> BenchReport:
    """Time plain decoding and each of `methods` (default: all of the bundle's) at each K of `ks`.

    Every run begins with an empty cache. `sampling` is greedy by default; the bundle's own sampling defaults are not
    used. All runs of a prompt have the same `seed`. `threads` is only reported. Raises UsageError for arguments out of
    range, CapacityError when a prompt does not fit with its answer; both before anything is timed.
    """
    modes = _modes(session, ks, methods)
    if repeats < 1:
        raise UsageError(f"repeats must be 1 or more, got {repeats}")
    if not prompts:
        raise UsageError("no prompts: give at least one")
    sampling = sampling or Sampling()
    report = on_progress or (lambda what, done: None)
    ids = [_encode(session, case, max_new_tokens, seed) for case in prompts]

    def run(prompt: list[int], mode: Mode, count: int) -> Generation:
        session.reset()
        return session.generate(
            prompt,
            method=mode.method,
            num_speculative_tokens=mode.k or None,
            max_new_tokens=count,
            seed=seed,
            ignore_eos=ignore_eos,
            **dataclasses.asdict(sampling),
        )

    for mode in modes:
        report(f"warm-up, {mode.name}", 0.0)
        run(ids[0], mode, min(WARMUP_TOKENS, max_new_tokens))
    records: list[Record] = []
    for number, (case, prompt) in enumerate(zip(prompts, ids, strict=True)):
        results: dict[Mode, list[Generation]] = {mode: [] for mode in modes}
        for repeat in range(repeats):
            for i, mode in enumerate(modes):
                done = (number + (repeat + i / len(modes)) / repeats) / len(prompts)
                report(f"{case.id}, {mode.name}", done)
                results[mode].append(run(prompt, mode, max_new_tokens))
        reference = results[modes[0]][0].token_ids
        records += [_record(case.id, mode.name, runs, reference) for mode, runs in results.items()]
    report("done", 1.0)
    session.reset()
    plain = [record for record in records if record.mode == modes[0].name]
    return BenchReport(
        bundle=session.manifest.name,
        precision=session.manifest.precision,
        machine=_machine(session, threads),
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        sampling=sampling,
        seed=seed,
        ignore_eos=ignore_eos,
        totals=tuple(_totals([r for r in records if r.mode == mode.name], plain) for mode in modes),
        records=tuple(records),
    )


def _modes(session: Session, ks: Sequence[int], methods: Sequence[str] | None) -> list[Mode]:
    """Plain first, then the drafter that chooses K, then every other method at every K."""
    methods = list(session.drafters) if methods is None else list(dict.fromkeys(methods))
    known = [*session.drafters]
    for method in methods:
        if method not in known:
            raise UsageError(f"unknown method {method!r}: this bundle offers {', '.join(known)} (plain always runs)")
    if methods and not ks:
        raise UsageError("no K to try: give at least one")
    most = session.max_speculative_tokens
    for k in ks:
        if not 1 <= k <= most:
            raise UsageError(f"K must be 1 to {most} for this bundle, got {k}")
    fixed = [Mode(method, k) for method in methods if method != AdaptiveDrafter.method for k in dict.fromkeys(ks)]
    adaptive = [Mode(method) for method in methods if method == AdaptiveDrafter.method]
    return [Mode("plain"), *adaptive, *fixed]


def _encode(session: Session, case: PromptCase, max_new_tokens: int, seed: int) -> list[int]:
    """Token ids, after everything that generate would refuse has been refused, under the prompt's name."""
    try:
        ids = session.encode(case.content)
        session.stream(ids, method="plain", max_new_tokens=max_new_tokens, seed=seed).close()
    except DraftcError as error:
        raise type(error)(f"prompt {case.id!r}: {error}") from error
    return ids


def _record(case_id: str, mode: str, runs: list[Generation], plain: list[int]) -> Record:
    middle = sorted(runs, key=lambda run: run.stats.decode_s)[(len(runs) - 1) // 2]
    stats = middle.stats
    return Record(
        id=case_id,
        mode=mode,
        prompt_tokens=stats.prompt_tokens,
        new_tokens=stats.new_tokens,
        prefill_s=statistics.median(run.stats.prefill_s for run in runs),
        decode_s=stats.decode_s,
        draft_s=stats.draft_s,
        verify_s=stats.verify_s,
        accept_s=stats.accept_s,
        other_s=stats.other_s,
        engine_s=stats.engine_s,
        decode_s_runs=tuple(run.stats.decode_s for run in runs),
        target_calls=stats.target_calls,
        draft_calls=stats.draft_calls,
        steps=stats.steps,
        step_tokens=stats.step_tokens,
        proposed=stats.proposed,
        accepted=stats.accepted,
        proposed_at=tuple(stats.proposed_at),
        accepted_at=tuple(stats.accepted_at),
        token_ids=tuple(middle.token_ids),
        finish_reason=middle.finish_reason,
        identical_to_plain=middle.token_ids == plain,
        repeatable=all(run.token_ids == middle.token_ids for run in runs),
    )


def _totals(records: list[Record], plain: list[Record]) -> Totals:
    def total(name: str, of: list[Record] = records) -> float:
        return float(sum(getattr(record, name) for record in of))

    def decode_rate(of: list[Record]) -> float:
        return _ratio(total("step_tokens", of), total("decode_s", of))

    def whole_rate(of: list[Record]) -> float:
        return _ratio(total("new_tokens", of), total("prefill_s", of) + total("decode_s", of))

    pairs = zip(records, plain, strict=True)
    single = [_ratio(decode_rate([record]), decode_rate([other])) for record, other in pairs]
    single = [speedup for speedup in single if not math.isnan(speedup)] or [math.nan]
    depth = max((len(record.proposed_at) for record in records), default=0)
    decode_s = total("decode_s")

    def at(position: int, name: str) -> int:
        return sum(getattr(record, name)[position] for record in records if position < len(record.proposed_at))

    return Totals(
        mode=records[0].mode,
        prompts=len(records),
        new_tokens=sum(record.new_tokens for record in records),
        prefill_s=total("prefill_s"),
        decode_s=decode_s,
        decode_tokens_per_s=decode_rate(records),
        speedup=_ratio(decode_rate(records), decode_rate(plain)),
        worst_speedup=min(single),
        best_speedup=max(single),
        end_to_end_tokens_per_s=whole_rate(records),
        end_to_end_speedup=_ratio(whole_rate(records), whole_rate(plain)),
        mean_acceptance_length=_ratio(total("step_tokens"), total("steps")),
        acceptance_rate=_ratio(total("accepted"), total("proposed")),
        acceptance_by_position=tuple(_ratio(at(i, "accepted_at"), at(i, "proposed_at")) for i in range(depth)),
        draft_share=_ratio(total("draft_s"), decode_s),
        verify_share=_ratio(total("verify_s"), decode_s),
        accept_share=_ratio(total("accept_s"), decode_s),
        other_share=_ratio(total("other_s"), decode_s),
        non_engine_share=1 - _ratio(total("engine_s"), decode_s),
        identical_to_plain=sum(record.identical_to_plain for record in records),
    )


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan


def _machine(session: Session, threads: int | None) -> Machine:
    backend = session.manifest.backend.name
    return Machine(
        platform=platform.platform(),
        processor=processor(),
        cpu_count=os.cpu_count() or 1,
        threads=threads,
        backend=backend_version(backend),
        devices={role: graph.device for role, graph in session.options.items()},
        cuda_graph=any(graph.cuda_graph and graph.kind != "cpu" for graph in session.options.values()),
        captured_graphs=session.loops.captured if session.loops is not None else 0,
        python=platform.python_version(),
        numpy=importlib.metadata.version("numpy"),
        onnxruntime=installed_version("onnxruntime", "onnxruntime-gpu"),
    )
