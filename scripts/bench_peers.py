#!/usr/bin/env python3
"""draftc and other systems on the same checkpoints, prompts and threads, interleaved prompt by prompt.

    scripts/bench_peers.py --bundle out/ --peers peers/ --target-gguf T.gguf --draft-gguf D.gguf \\
        --llama-server llama-build/bin/llama-server --python genai=peers-venv/bin/python \\
        --python openvino=peers-venv/bin/python --humaneval HumanEval.jsonl.gz --mt-bench question.jsonl \\
        --json peers.json --chart peers.png

scripts/prepare_peers.py says how the environments and model folders are made. A system that is not there is named and
left out. Each setting runs in a process of its own and gets the token ids that draftc's chat template makes; greedy.
Settings that do not fit into memory together run in groups one after another, draftc again in each.

The modes: plain; default (draftc's own choice); ngram-N and draft-N, up to N tokens proposed by n-grams of the text or
by the draft model; without N what the system's makers chose. --add tries others, as in --add openvino-g32:ngram-16.
"""

import argparse
import fnmatch
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import peer_report
from peer_children import Child, PeerError, Places, System, locked, missing, systems
from peer_document import (
    SCHEMA,
    MergeError,
    OutputError,
    check_outputs,
    document,
    merge,
    read_records,
    read_report,
    write_json,
)
from peer_prompts import CLASSES, BenchPrompt, PromptError, build_prompts, read_lines, read_list
from peer_report import Record
from script_arguments import at_least

from draftc.runtime.machine import processor

WARMUP_TOKENS = 8
WARMUP_IDS = list(range(1000, 1200))

Setting = tuple[Child, str, str]  # process, system, mode


def main() -> int:
    options = parse()
    try:
        check_outputs(options.json, options.chart)  # not after hours of measuring
        report = merge([read_report(path) for path in options.merge]) if options.merge else measure(options)
    except (PromptError, PeerError, MergeError, OutputError, OSError) as error:
        complain(error)
        return 2
    return 0 if show(report, options) else 2


def complain(error: Exception) -> None:
    line = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
    print(f"bench_peers: {line}", file=sys.stderr)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_argument_group("what is where")
    where.add_argument("--bundle", type=Path, metavar="DIR", help="draftc's bundle")
    where.add_argument("--peers", type=Path, metavar="DIR", help="the folders of prepare_peers.py")
    where.add_argument("--target-gguf", type=Path, metavar="FILE", help="for llama.cpp")
    where.add_argument("--draft-gguf", type=Path, metavar="FILE", help="for llama.cpp")
    where.add_argument("--llama-server", metavar="PROGRAM")
    where.add_argument("--python", action="append", default=[], metavar="SYSTEM=PATH", help="e.g. genai=v/bin/python")
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("--humaneval", type=Path, metavar="FILE", help="HumanEval.jsonl.gz, for the classes H and E")
    prompts.add_argument("--mt-bench", type=Path, metavar="FILE", help="question.jsonl of MT-Bench, for the class W")
    prompts.add_argument("--prompts", type=Path, default=Path(__file__).with_name("bench_prompts.json"), metavar="FILE")
    prompts.add_argument("--classes", default="H,E,W", help="of H, E and W (all)")
    prompts.add_argument("--count", type=at_least(1), metavar="N", help="only the first N prompts of each class")
    prompts.add_argument(
        "--skip", type=at_least(0), default=0, metavar="N", help="without the first N of each class (0)"
    )
    what = parser.add_argument_group("what runs")
    what.add_argument("--systems", default="", help="names or patterns, as draftc,genai-* (all but transformers)")
    what.add_argument("--modes", default="", help="kinds, of plain, default, ngram and draft (all)")
    what.add_argument("--add", action="append", default=[], metavar="SYSTEM:MODE", help="one more setting")
    what.add_argument("--threads", type=at_least(1), default=os.cpu_count() or 1, help="of every system (all CPUs)")
    what.add_argument("--max-new-tokens", type=at_least(1), default=128)
    what.add_argument("--ignore-eos", action="store_true", help="do not stop at the model's end tokens")
    what.add_argument("--repeats", type=at_least(1), default=1, help="rounds of each prompt; figures are medians (1)")
    what.add_argument("--memory", type=float, metavar="GIB", help="for all processes of a group (free memory - 2 GiB)")
    what.add_argument(
        "--pause", type=float, default=0.2, metavar="S", help="between two runs, for threads to calm (0.2)"
    )
    what.add_argument("--lock", type=Path, action="append", default=[], metavar="FILE", help="flock it for each round")
    output = parser.add_argument_group("results")
    output.add_argument("--json", type=Path, metavar="FILE")
    output.add_argument("--chart", type=Path, metavar="FILE", help=".png or .svg; needs matplotlib")
    output.add_argument("--log", type=Path, metavar="FILE", help="what the systems print")
    output.add_argument("--merge", type=Path, nargs="+", metavar="JSON", help="report on earlier runs together")
    options = parser.parse_args(arguments)
    if not options.merge and options.bundle is None:
        parser.error("--bundle is needed: name draftc's bundle")
    if not 0 <= options.pause < math.inf:
        parser.error("--pause must be 0 seconds or more")
    if not set(options.classes.split(",")) <= set(CLASSES):
        parser.error(f"--classes must be of {', '.join(CLASSES)}")
    if any("=" not in item for item in options.python):
        parser.error("--python is SYSTEM=PATH")
    return options


@dataclass
class Run:
    """What a measurement has so far; written after every round."""

    options: argparse.Namespace
    report: dict[str, Any]
    records: list[Record] = field(default_factory=list)

    def leave_out(self, line: str) -> None:
        print(line, file=sys.stderr)
        self.report["left_out"].append(line)

    def write(self) -> None:
        """What there is so far. A disk that is full now may not be later: nothing is given up for it."""
        if self.options.json is not None:
            try:
                write_json(self.options.json, document(self.report, self.records))
            except OSError as error:
                complain(error)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run everything; returns the document. Raises PromptError, and PeerError where draftc itself cannot run."""
    prompts = load_prompts(options)
    chosen = choose(options)
    run = Run(options, describe(options, prompts))
    budget = (options.memory * 2**30) if options.memory else available_memory() - 2 * 2**30
    with ExitStack() as opened:
        log: IO[bytes] | int = subprocess.DEVNULL
        if options.log is not None:
            log = opened.enter_context(options.log.open("ab"))
        ours, ready = chosen[0], []
        if reason := missing(ours[0]):
            raise PeerError(reason.replace("is left out: ", "cannot run: "))
        for system, modes in chosen[1:]:
            if reason := missing(system):
                run.leave_out(reason)
            elif modes:
                ready.append((system, modes))
        with locked(options.lock):
            draftc, settings, ends = start_draftc(*ours, log, run)
        opened.callback(draftc.close)
        encoded = [draftc.ask({"do": "encode", "messages": [{"role": "user", "content": p.text}]}) for p in prompts]
        ids = [answer["ids"] for answer in encoded]
        stops = [] if options.ignore_eos else ends
        for group, children in enumerate(groups(ready, draftc, budget, stops, log, run)):
            everyone = settings + children
            try:
                for number, (prompt, tokens) in enumerate(zip(prompts, ids, strict=True)):
                    print(f"group {group + 1}, {number + 1}/{len(prompts)}: {prompt.kind} {prompt.id}", file=sys.stderr)
                    rounds(run, everyone, group, prompt, tokens, set(ends))
            finally:
                for child, _, _ in children:
                    child.close()
    return document(run.report, run.records)


def start_draftc(system: System, modes: list[str], log: Any, run: Run) -> tuple[Child, list[Setting], list[int]]:
    """The one process of all of draftc's modes, warmed up, and the model's end tokens. Raises PeerError."""
    # No end tokens in the first line means that none ends a text; what they are is only known afterwards.
    child = Child(system.python, system.config("", run.options.threads, [] if run.options.ignore_eos else [-1]), log)
    run.report["versions"][system.name] = child.ready["versions"]
    settings: list[Setting] = [(child, system.name, mode) for mode in modes]
    for setting in settings:
        attempt(run, settings, setting, WARMUP_IDS, WARMUP_TOKENS)
    return child, settings, child.ready["eos"]


def groups(
    ready: list[tuple[System, list[str]]], draftc: Child, budget: float, eos: list[int], log: Any, run: Run
) -> Iterator[list[Setting]]:
    """Start as many systems, each with all its modes, as fit beside draftc; then the next ones. At least one group."""
    waiting, none_yet = list(ready), True
    while waiting or none_yet:
        children: list[Setting] = []
        with locked(run.options.lock):
            while waiting:
                started = start(*waiting[0], eos, log, run)
                used = sum(child.rss() for child in [draftc, *(child for child, _, _ in children + started)])
                if used > budget and children:
                    for child, _, _ in started:
                        child.close()
                    break
                system, _ = waiting.pop(0)
                if used > budget:
                    for child, _, _ in started:
                        child.close()
                    run.leave_out(f"{system.name} is left out: needs {used / 2**30:.1f} GiB with draftc; see --memory")
                    continue
                children += started
        if children or none_yet:
            none_yet = False
            yield children


def start(system: System, modes: list[str], eos: list[int], log: Any, run: Run) -> list[Setting]:
    """A process per mode, warmed up: so its memory is what a run takes. What does not start is named and left out."""
    started: list[Setting] = []
    for mode in modes:
        child = None
        try:
            child = Child(system.python, system.config(mode, run.options.threads, eos), log)
            child.ask({"do": "run", "mode": mode, "ids": WARMUP_IDS, "max_new_tokens": WARMUP_TOKENS})
        except PeerError as error:
            if child is not None:
                child.close()
            run.leave_out(f"{system.name} {mode} is left out: {error}")
            continue
        run.report["versions"][system.name] = child.ready["versions"]
        started.append((child, system.name, mode))
    return started


def rounds(run: Run, everyone: list[Setting], group: int, prompt: BenchPrompt, ids: list[int], ends: set[int]) -> None:
    """One prompt in every setting, `repeats` times; the order moves on by one each time.

    A peer that fails is named and taken out of `everyone`. Raises PeerError when draftc does.
    """
    for repeat in range(run.options.repeats):
        with locked(run.options.lock):
            if run.options.lock:  # others may have had the machine meanwhile: bring the weights back into memory
                for setting in list(everyone):
                    attempt(run, everyone, setting, ids[:32], 2)
            first = len(run.records) // len(everyone) % len(everyone)
            for setting in everyone[first:] + everyone[:first]:
                time.sleep(run.options.pause)
                waiting = {other for other, _, _ in everyone} - {setting[0]}
                before = sum(other.cpu_s() for other in waiting)
                if done := attempt(run, everyone, setting, ids, run.options.max_new_tokens):
                    burnt = sum(other.cpu_s() for other in waiting) - before
                    run.records.append(record(done, group, prompt, setting[1:], repeat, len(ids), burnt, ends))
        run.write()


def attempt(
    run: Run, everyone: list[Setting], setting: Setting, ids: list[int], max_new_tokens: int
) -> dict[str, Any] | None:
    """What the setting's process answers, None when it failed."""
    child, system, mode = setting
    try:
        return child.ask({"do": "run", "mode": mode, "ids": ids, "max_new_tokens": max_new_tokens})
    except PeerError as error:
        if system == "draftc":
            raise PeerError(f"draftc {mode}: {error}") from error
        run.leave_out(f"{system} {mode} is left out from here on: {error}")
        everyone.remove(setting)
        child.close()
        return None


def record(
    done: dict[str, Any],
    group: int,
    prompt: BenchPrompt,
    setting: tuple[str, str],
    repeat: int,
    prompt_tokens: int,
    burnt: float,
    ends: set[int],
) -> Record:
    """A worker's answer as a record. Not every system gives the end token that it stopped at: it is cut off."""
    tokens = done["token_ids"]
    while tokens and tokens[-1] in ends:
        tokens = tokens[:-1]
    numbers = {name: done[name] for name in ("prefill_s", "decode_s", "decode_tokens", "peak_rss")}
    numbers |= {name: done[name] for name in ("target_calls", "proposed", "accepted")}
    return Record(
        group=group,
        kind=prompt.kind,
        id=prompt.id,
        system=setting[0],
        mode=setting[1],
        repeat=repeat,
        prompt_tokens=prompt_tokens,
        new_tokens=len(done["token_ids"]),
        others_cpu_s=burnt,
        token_ids=tuple(tokens),
        **numbers,
    )


def load_prompts(options: argparse.Namespace) -> list[BenchPrompt]:
    chosen = {kind: items for kind, items in read_list(options.prompts).items() if kind in options.classes.split(",")}
    until = None if options.count is None else options.skip + options.count
    for kind, items in chosen.items():
        part = list(items)[options.skip : until]
        chosen[kind] = {key: items[key] for key in part} if isinstance(items, dict) else part
    humaneval = read_lines(options.humaneval, "--humaneval", "task_id") if {"H", "E"} & set(chosen) else {}
    mt_bench = read_lines(options.mt_bench, "--mt-bench", "question_id") if "W" in chosen else {}
    prompts = build_prompts(chosen, humaneval, mt_bench)
    if not prompts:
        raise PromptError("no prompts are left: check --classes, --skip and --count")
    return prompts


def choose(options: argparse.Namespace) -> list[tuple[System, list[str]]]:
    """The systems and modes that were asked for; draftc is always the first. Raises PeerError for unknown names."""
    pythons = dict(item.split("=", 1) for item in options.python)
    places = Places(
        options.bundle, options.peers, options.target_gguf, options.draft_gguf, options.llama_server, pythons
    )
    known = systems(places)
    names = [system.name for system in known]
    patterns = [pattern for pattern in options.systems.split(",") if pattern]
    kinds = [kind for kind in options.modes.split(",") if kind]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise PeerError(f"--systems: no system {pattern!r}: there are {', '.join(names)}")
    more: dict[str, list[str]] = {}
    for item in options.add:
        system, _, mode = item.partition(":")
        if system not in names or not mode:
            raise PeerError(f"--add {item}: write SYSTEM:MODE with a system of {', '.join(names)}")
        more.setdefault(system, []).append(mode)
    chosen = []
    for system in known:
        wanted = any(fnmatch.fnmatch(system.name, pattern) for pattern in patterns) if patterns else not system.optional
        modes = [mode for mode in system.modes if not kinds or mode.split("-")[0] in kinds] if wanted else []
        modes += [mode for mode in more.get(system.name, []) if mode not in modes]
        if system.name == "draftc":
            modes = list(dict.fromkeys(["plain", "default", *modes]))  # what everything is compared with
        if modes:
            chosen.append((system, modes))
    return chosen


def describe(options: argparse.Namespace, prompts: list[BenchPrompt]) -> dict[str, Any]:
    """What the report says beside its records."""
    return {
        "schema": SCHEMA,
        "command": shlex.join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {
            "platform": platform.platform(),
            "processor": processor(),
            "cpu_count": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        },
        "versions": {},
        "threads": options.threads,
        "max_new_tokens": options.max_new_tokens,
        "ignore_eos": options.ignore_eos,
        "repeats": options.repeats,
        "prompts": [[prompt.kind, prompt.id] for prompt in prompts],
        "left_out": [],
    }


def show(report: dict[str, Any], options: argparse.Namespace) -> bool:
    """Tables, the JSON file and the chart. Whether all were made: one that cannot be written keeps no other away."""
    from rich.console import Console

    written = True
    if options.json is not None:
        try:
            write_json(options.json, report)
        except OSError as error:
            complain(error)
            written = False
    records = read_records(report)
    found = peer_report.totals(records)
    console = Console(width=max(170, Console().width))
    machine = report["machine"]
    console.print(
        f"{machine.get('processor')}, {machine.get('cpu_count')} CPUs, {report['threads']} threads, up to "
        f"{report['max_new_tokens']} tokens, greedy, medians of {report['repeats']}",
        style="dim",
    )
    console.print(peer_report.render(found, peer_report.best_peers(found, records), CLASSES))
    # The waiting processes' CPU time, as a share of one CPU while another process was measured.
    idle = max((r.others_cpu_s / max(r.prefill_s + r.decode_s, 1e-9) for r in records), default=0.0)
    if idle > 0.05:
        console.print(f"warning: waiting processes used up to {idle:.0%} of a CPU during a run", style="yellow")
    for line in report["left_out"]:
        console.print(line, style="dim")
    if options.chart is not None and records:
        try:
            peer_report.chart(found, options.chart, CLASSES)
        except (ImportError, OSError) as error:
            complain(error)
            written = False
    return written


def available_memory() -> float:
    """MemAvailable, bytes."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


if __name__ == "__main__":
    sys.exit(main())
