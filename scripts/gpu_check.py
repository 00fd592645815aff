"""The work of gpu_check.sh. Each part is a process of its own, with a time limit; where one fails the rest still runs.

The JSON file is written anew after each part, so that nothing is lost if the machine goes away.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import draftc.runtime as draftc

PACKAGES = (
    *("draftc", "numpy", "onnxruntime", "onnxruntime-gpu", "tensorrt-rtx", "tensorrt"),
    *("cuda-core", "cuda-bindings"),
)
KS = (1, 2, 4, 8)
TOKENS = 64
FILLS = (0.1, 0.5, 0.9)  # shares of max_length


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check.sh", description=__doc__)
    parser.add_argument("bundles", nargs="*", type=Path, metavar="BUNDLE")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), metavar="FILE")
    parser.add_argument("--steps", type=Path, help=argparse.SUPPRESS)  # the part of one bundle that needs a process
    parser.add_argument("--seconds", type=float, default=350, help="for everything (350)")
    options = parser.parse_args()
    if options.steps is not None:
        print(json.dumps(steps(options.steps)))
        return 0
    report: dict[str, Any] = {"machine": platform.platform(), "packages": packages(), "gpu": gpu()}
    say("packages", report["packages"])
    say("gpu", report["gpu"])
    deadline = time.monotonic() + options.seconds
    failed = False
    if "skipped" in report["gpu"]:
        print(f"skipped: {report['gpu']['skipped']}")
    elif not options.bundles:
        print("skipped: no bundle was named")
    else:
        report["bundles"] = {}
        for done, bundle in enumerate(options.bundles):
            left = (deadline - time.monotonic()) / (len(options.bundles) - done)
            result: dict[str, Any] = {}
            report["bundles"][str(bundle)] = result
            for part in check(bundle, result, time.monotonic() + left):
                failed |= part["code"] != 0
                write(options.json, report)
    write(options.json, report)
    print(f"wrote {options.json}")
    return 1 if failed else 0


def write(path: Path, report: dict[str, Any]) -> None:
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def packages() -> dict[str, str]:
    """Versions of what is installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "-"
    return found


def gpu() -> dict[str, Any]:
    """Name, compute capability, memory and driver of the first GPU, or why there is none."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return {"skipped": "no cuda-bindings (pip install 'draftc[tensorrt-rtx]' or 'draftc[gpu]')"}

    def ask(result: tuple[Any, ...]) -> Any:
        code, *values = result
        if int(code) != 0:
            raise RuntimeError(f"CUDA says {code.name}")
        return values[0] if values else None

    try:
        ask(driver.cuInit(0))
        device = ask(driver.cuDeviceGet(0))
        attribute = driver.CUdevice_attribute
        major = ask(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device))
        minor = ask(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device))
        return {
            "name": ask(driver.cuDeviceGetName(100, device)).split(b"\0")[0].decode(),
            "sm": f"{major}{minor}",
            "memory": ask(driver.cuDeviceTotalMem(device)),
            "cuda": ask(driver.cuDriverGetVersion()),
        }
    except RuntimeError as error:
        # cuda-bindings raises RuntimeError of its own where libcuda is missing.
        reason = " ".join(str(error).split())
        return {"skipped": "no driver" if "driver" in reason or "cuInit" in reason else "no GPU", "reason": reason}


def check(bundle: Path, result: dict[str, Any], deadline: float) -> Iterator[dict[str, Any]]:
    """Put everything about one bundle into `result`, and yield each part as it is finished."""
    print(f"\n== {bundle}")
    shown = result["inspect"] = command(["inspect", str(bundle), "--json"], deadline)
    yield shown
    if shown["code"] != 0:
        print(shown["err"])
        return
    manifest = json.loads(shown.pop("out"))
    result["backend"], result["precision"] = manifest["backend"], manifest["precision"]
    result["parity_when_compiled"], result["memory_planned"] = manifest["parity"], manifest["derived"]
    say("parity when compiled", [f"{r['graph']} {r['stage']}: KL {r['kl']:.2g}" for r in manifest["parity"]])
    say("memory that was planned", manifest["derived"])
    verify = result["verify"] = command(["verify", str(bundle), "--budget", "20", "--json"], deadline)
    say("verify", {0: "passed", 1: "FAILED"}.get(verify["code"], verify["err"]))
    yield verify
    ks = ",".join(str(k) for k in KS if k < manifest["max_width"])
    for name, extra in (("with CUDA graphs", []), ("without CUDA graphs", ["--no-cuda-graph"])):
        arguments = ["bench", str(bundle), "-k", ks, "-n", str(TOKENS), "--repeats", "3", "--json", *extra]
        bench = result[f"bench {name}"] = command(arguments, deadline)
        if bench["code"] == 0:
            bench["out"] = json.loads(bench["out"])
            print(f"{name}: {bench['out']['machine']['captured_graphs']} captured")
            for row in bench["out"]["totals"]:
                print(f"    {row['mode']:16} {row['decode_tokens_per_s']:8.1f} tokens/s, {row['speedup']:.2f}x")
        else:
            print(f"{name}: {bench['err']}")
        yield bench
    timed = result["steps"] = run([sys.executable, __file__, "--steps", str(bundle)], deadline)
    if timed["code"] == 0:
        timed["out"] = json.loads(timed["out"])
        say("memory that is taken", timed["out"]["memory"])
        for row in timed["out"]["calls"]:
            print(f"{row['tokens']} tokens at {row['fill']} of {row['length']}: {row['milliseconds']:.2f} ms")
    else:
        print(timed["err"])
    yield timed


def command(arguments: list[str], deadline: float) -> dict[str, Any]:
    """Run a draftc command within the time that is left."""
    return run([shutil.which("draftc", path=str(Path(sys.executable).parent)) or "draftc", *arguments], deadline)


def run(arguments: list[str], deadline: float) -> dict[str, Any]:
    left = deadline - time.monotonic()
    if left <= 0:
        return {"code": None, "err": "skipped: no time left"}
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=left)
    except subprocess.TimeoutExpired:
        return {"code": None, "err": f"stopped after {left:.0f} s"}
    return {"code": done.returncode, "out": done.stdout, "err": done.stderr.strip()[-400:]}


def steps(bundle: Path) -> dict[str, Any]:
    """Milliseconds of the target's calls through the host path, by width and by fill of the cache; its memory."""
    calls = []
    with draftc.open(bundle, check_hashes=False) as session:
        manifest, engine = session.manifest, session.target.engine
        for fill in (int(share * manifest.max_length) for share in FILLS):
            for width in sorted({1, manifest.num_speculative_tokens + 1, min(16, manifest.max_width)}):
                tokens, times = np.ones(width, np.int64), []
                for _ in range(20):
                    begin = time.perf_counter()
                    engine.forward(tokens, fill, 1)
                    times.append(1000 * (time.perf_counter() - begin))
                length = manifest.buffer_length
                calls.append({"tokens": width, "fill": fill, "length": length, "milliseconds": median(times[5:])})
        memory = {
            method: dataclasses.asdict(decoder.engine.memory)
            for method, decoder in [("target", session.target), *session_drafts(session)]
            if hasattr(decoder.engine, "memory")
        }
    return {"calls": calls, "memory": memory}


def session_drafts(session: draftc.Session) -> list[tuple[str, Any]]:
    return [(method, decoder) for method, drafter in session.drafters.items() for decoder in drafter.decoders]


def say(title: str, value: object) -> None:
    print(f"{title}: {json.dumps(value) if not isinstance(value, str) else value}")


if __name__ == "__main__":
    sys.exit(main())
