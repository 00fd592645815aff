"""Two bundles' targets side by side: what a call costs, by width and fill, interleaved in one run.

    python scripts/compare_calls.py BEFORE AFTER [--widths 1,4,8] [--fills 256,1500] [--rounds 40]

Prints medians in milliseconds and AFTER ÷ BEFORE; below 1 is faster.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from draftc.runtime.backends import open_engine
from draftc.runtime.bundle import open_bundle
from draftc.runtime.engine import Engine
from draftc.runtime.errors import DraftcError
from draftc.runtime.machine import physical_cores, processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--widths", default="1,4,8")
    parser.add_argument("--fills", default="256,1500")
    parser.add_argument("--rounds", type=int, default=40)
    asked = parser.parse_args()
    try:
        engines = [open_target(path) for path in asked.bundles]
    except DraftcError as error:
        print(f"compare_calls: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"{processor()}, {physical_cores()} cores, medians of {asked.rounds}, ms")
    shortest = min(engine.spec.buffer_length for engine in engines)
    for fill in (int(fill) for fill in asked.fills.split(",")):
        for width in (int(width) for width in asked.widths.split(",")):
            if fill + width > shortest:
                continue
            before, after = (
                1e3 * statistics.median(times) for times in interleaved(engines, fill, width, asked.rounds)
            )
            print(f"fill {fill:5} S={width:2}: {before:8.2f} {after:8.2f}  {after / before:.3f}x")


def open_target(path: Path) -> Engine:
    bundle = open_bundle(path, hashes=False)
    target = bundle.manifest.target
    graph = bundle.path(target.graph)
    return open_engine(bundle.manifest.backend.name, graph, target.spec, max_call=256, max_rows=32)


def interleaved(engines: list[Engine], fill: int, width: int, rounds: int) -> list[list[float]]:
    """Seconds of each engine's calls, those of one engine every other time."""
    tokens = np.arange(width, dtype=np.int64)
    times: list[list[float]] = [[] for _ in engines]
    for number in range(rounds + 1):
        for engine, taken in zip(engines, times, strict=True):
            begin = time.perf_counter()
            engine.forward(tokens, fill, width)
            if number:  # the first is a warm-up
                taken.append(time.perf_counter() - begin)
    return times


if __name__ == "__main__":
    main()
