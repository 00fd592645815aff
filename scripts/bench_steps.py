"""What a speculative step costs beyond its engine calls, and what draft and target cost each other by taking turns.

    python scripts/bench_steps.py OUT [--rounds 30] [--fill 256] [--threads N]

Three figures, each a ratio of medians in one run:
turns      3 draft calls and a verification of 4, in turns, over the same calls of each graph on its own. Two thread
           pools that spin while the other graph runs make this 1.5 and more; 1.0 is none of that.
step       decode time over the time inside engine calls, of the draft model at K = 3, greedy and at temperature 0.8
           with top-p 0.95: what drafting, acceptance, stop rules and detokenizing cost.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from script_arguments import at_least

import draftc.runtime as draftc
from draftc.runtime.drafter import ModelDrafter
from draftc.runtime.errors import DraftcError
from draftc.runtime.machine import physical_cores, processor
from draftc.runtime.prompts import builtin_prompts

DRAFT_CALLS, WIDTH = 3, 4
BLOCKS = 3  # of rounds
SETTINGS = {"greedy": {"temperature": 0.0}, "T 0.8, top-p 0.95": {"temperature": 0.8, "top_p": 0.95, "top_k": 0}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=at_least(BLOCKS), default=30)
    parser.add_argument("--fill", type=at_least(0), default=256, help="tokens in the caches")
    parser.add_argument("--threads", type=at_least(1))
    asked = parser.parse_args()
    try:
        with draftc.open(asked.out, threads=asked.threads, tune=False, check_hashes=False) as session:
            check(session, asked)
            each = asked.rounds // BLOCKS
            rounds = f"medians of {BLOCKS * each}"
            print(f"{session.manifest.name}: {processor()}, {physical_cores()} cores, {rounds}")
            report_turns(session, each, asked.fill)
            report_steps(session)
    except DraftcError as error:
        print(f"bench_steps: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def check(session: draftc.Session, asked: argparse.Namespace) -> None:
    """Raise DraftcError unless the bundle allows the calls that are measured."""
    manifest = session.manifest
    if "draft_model" not in session.drafters:
        raise DraftcError(f"{asked.out} has no draft model: name a bundle of two models")
    if manifest.max_width < WIDTH:
        raise DraftcError(
            f"{asked.out} verifies {manifest.max_width} tokens, {WIDTH} are needed: compile with a larger --max-width"
        )
    if asked.fill + WIDTH > manifest.max_length:
        most = manifest.max_length - WIDTH
        raise DraftcError(f"--fill {asked.fill} is more than {asked.out} has room for: give {most} or less")


def report_turns(session: draftc.Session, each: int, fill: int) -> None:
    """`each`: rounds of a block."""
    drafter = session.drafters["draft_model"]
    assert isinstance(drafter, ModelDrafter)
    draft, target = drafter.decoder.engine, session.target.engine
    one, wide = np.zeros(1, np.int64), np.arange(WIDTH, dtype=np.int64)

    def drafted() -> float:
        begin = time.perf_counter()
        for i in range(DRAFT_CALLS):
            draft.forward(one, fill + i, 1)
        return time.perf_counter() - begin

    def verified() -> float:
        begin = time.perf_counter()
        target.forward(wide, fill, WIDTH)
        return time.perf_counter() - begin

    alone: dict[str, list[float]] = {"draft": [], "target": []}
    turns: list[float] = []
    for _ in range(BLOCKS):  # a third of the rounds in each block, so that a drift of the machine meets all three
        for name, run in (("draft", drafted), ("target", verified)):
            run()
            alone[name] += [run() for _ in range(each)]
        drafted(), verified()
        turns += [drafted() + verified() for _ in range(each)]
    parts = {name: statistics.median(times) for name, times in alone.items()}
    ms = [1e3 * seconds for seconds in (parts["draft"], parts["target"], statistics.median(turns))]
    print(
        f"turns: {DRAFT_CALLS} draft calls {ms[0]:.1f} ms + verify({WIDTH}) {ms[1]:.1f} ms alone, "
        f"{ms[2]:.1f} ms in turns: {ms[2] / (ms[0] + ms[1]):.3f}x"
    )
    for decoder in session.decoders:
        decoder.mark_broken()


def report_steps(session: draftc.Session) -> None:
    for name, settings in SETTINGS.items():
        ratios = []
        for case in builtin_prompts(session):
            session.reset()
            stats = session.generate(
                case.content, method="draft_model", num_speculative_tokens=3, max_new_tokens=64, seed=0, **settings
            ).stats
            if stats.engine_s > 0:
                ratios.append(stats.decode_s / stats.engine_s)
        if not ratios:
            raise DraftcError("every answer ended with its first token: there is no step to measure on this bundle")
        print(f"step at K = 3, {name}: {statistics.median(ratios):.3f}x its engine calls")


if __name__ == "__main__":
    main()
