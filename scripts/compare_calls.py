"""Two bundles' targets (or drafts) side by side: what a call costs, by width and fill, interleaved in one run.

    python scripts/compare_calls.py BEFORE AFTER [--widths 1,4,8] [--fills 256,1500] [--rounds 40]
    python scripts/compare_calls.py BEFORE AFTER --role draft --rows last --widths 1,32,128

Prints medians in milliseconds and AFTER ÷ BEFORE; below 1 is faster. A verification asks for a row of logits of every
token (--rows all, up to the bundles' max_width); a prompt's calls and a draft's ask for that of the last one alone
(--rows last, up to the prefill chunk).
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from script_arguments import at_least, list_at_least

from draftc.runtime.backends import open_engine
from draftc.runtime.bundle import open_bundle
from draftc.runtime.devices import assign_devices
from draftc.runtime.engine import Engine
from draftc.runtime.errors import DraftcError
from draftc.runtime.machine import physical_cores, processor
from draftc.runtime.manifest import Manifest


@dataclass(frozen=True)
class Side:
    """One of the two: its graph, opened as a session opens it."""

    engine: Engine
    manifest: Manifest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--role", choices=("target", "draft"), default="target")
    parser.add_argument("--rows", choices=("all", "last"), default="all", help="whose logits a call returns (all)")
    parser.add_argument("--widths", type=list_at_least(1), default="1,4,8", help="tokens of a call (1,4,8)")
    parser.add_argument("--fills", type=list_at_least(0), default="256,1500", help="tokens in the cache (256,1500)")
    parser.add_argument("--rounds", type=at_least(1), default=40)
    asked = parser.parse_args()
    try:
        with ExitStack() as opened:
            compare([opened.enter_context(open_side(path, asked.role)) for path in asked.bundles], asked)
    except DraftcError as error:
        print(f"compare_calls: {error}", file=sys.stderr)
        raise SystemExit(2) from None


@contextmanager
def open_side(path: Path, role: str) -> Iterator[Side]:
    """Raises DraftcError where the bundle has no such model, or it does not open."""
    bundle = open_bundle(path, hashes=False)
    manifest = bundle.manifest
    model = manifest.target if role == "target" else manifest.draft.model
    if model is None:
        raise DraftcError(f"{path} has no draft model: name bundles of two models, or leave out --role draft")
    engine = open_engine(
        manifest.backend.name,
        bundle.path(model.graph),
        model.spec,
        max_call=max(manifest.prefill_chunk, manifest.max_width),
        max_rows=manifest.max_width,
        options=assign_devices([role], manifest.backend.device)[role],
        built=manifest.backend,
        info=model.engine,
    )
    try:
        yield Side(engine, manifest)
    finally:
        engine.close()


def compare(sides: list[Side], asked: argparse.Namespace) -> None:
    """Print a line for each fill and width, also where the bundles do not allow it. Raises DraftcError."""
    room = min(side.engine.spec.buffer_length for side in sides)
    widest = min(side.manifest.max_width for side in sides)
    limit = f"max_width is {widest} (--rows last goes further)"
    if asked.rows == "last":
        widest = min(max(side.manifest.prefill_chunk, side.manifest.max_width) for side in sides)
        limit = f"the prefill chunk is {widest}"
    if min(asked.widths) > widest:
        raise DraftcError(f"no width of {min(asked.widths)} or more fits: {limit}; give smaller --widths")
    if min(asked.fills) + min(asked.widths) > room:
        raise DraftcError(f"nothing fits behind a fill of {min(asked.fills)}: the caches hold {room}; see --fills")
    print(f"{processor()}, {physical_cores()} cores, medians of {asked.rounds}, ms")
    for fill in asked.fills:
        for width in asked.widths:
            call = f"fill {fill:5} S={width:2}: "
            if width > widest:
                print(f"{call}left out: {limit}")
            elif fill + width > room:
                print(f"{call}left out: the caches hold {room}")
            else:
                rows = width if asked.rows == "all" else 1
                before, after = (
                    1e3 * statistics.median(times) for times in interleaved(sides, fill, width, rows, asked.rounds)
                )
                print(f"{call}{before:8.2f} {after:8.2f}  {after / before:.3f}x")


def interleaved(sides: list[Side], fill: int, width: int, rows: int, rounds: int) -> list[list[float]]:
    """Seconds of each side's calls, those of one side every other time."""
    calls = [(side.engine, np.arange(width, dtype=np.int64) % side.manifest.vocab_size) for side in sides]
    times: list[list[float]] = [[] for _ in calls]
    for number in range(rounds + 1):
        for (engine, tokens), taken in zip(calls, times, strict=True):
            begin = time.perf_counter()
            engine.forward(tokens, fill, rows)
            if number:  # the first is a warm-up
                taken.append(time.perf_counter() - begin)
    return times


if __name__ == "__main__":
    main()
