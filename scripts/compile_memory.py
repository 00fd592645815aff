#!/usr/bin/env python3
"""Run `draftc compile` with the arguments given and print what each of its stages took: seconds and peak memory.

    scripts/compile_memory.py --recipe smollm2-135m --backend tensorrt-rtx --sm 89 -o out/smollm2-rtx

Memory is the resident set of the process, and of the process that builds the engine, sampled every 50 ms. It includes
pages of mapped files, which the system takes back when it needs them; "own" is the rest of the builder's. Linux only.
"""

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

STAGE = re.compile(r"✓ (?P<name>.+?) +(?P<seconds>[\d.]+) s$")


def resident_bytes(pid: int) -> tuple[int, int]:
    """What the process holds now, and how much of that is not of a mapped file; zeros once it is gone."""
    try:
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    except (OSError, ValueError):
        return 0, 0
    return resident * 4096, (resident - shared) * 4096


def children(pid: int) -> list[int]:
    """The processes that it started."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def main() -> int:
    if not Path("/proc/self/statm").exists():
        sys.exit("error: this script reads /proc, which Linux has; run it there")
    draftc = Path(sys.executable).with_name("draftc")
    command = [str(draftc) if draftc.exists() else "draftc", "compile", *sys.argv[1:]]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    peak = builder = own = 0

    def sample() -> None:
        nonlocal peak, builder, own
        while process.poll() is None:
            peak = max(peak, resident_bytes(process.pid)[0])
            for child in children(process.pid):
                resident, private = resident_bytes(child)
                builder, own = max(builder, resident), max(own, private)
            time.sleep(0.05)

    threading.Thread(target=sample, daemon=True).start()
    assert process.stderr is not None
    print(f"{'stage':28} {'seconds':>8} {'peak MiB':>9} {'builder MiB':>12} {'own MiB':>8}")
    for line in process.stderr:
        if match := STAGE.search(line.rstrip()):
            memory = f"{peak >> 20:9,} {builder >> 20:12,} {own >> 20:8,}"
            print(f"{match['name']:28} {match['seconds']:>8} {memory}", flush=True)
            peak, builder, own = resident_bytes(process.pid)[0], 0, 0
        else:
            print(line.rstrip(), file=sys.stderr)
    code = process.wait()
    for option in {"-o", "--out"} & set(sys.argv[:-1]) if code == 0 else ():
        for engine in sorted(Path(sys.argv[sys.argv.index(option) + 1]).glob("*/model.engine")):
            print(f"{engine}: {engine.stat().st_size >> 20:,} MiB")
    return code


if __name__ == "__main__":
    sys.exit(main())
