"""The work of gpu_check.sh. Each part has a time limit and may fail by itself; the rest still runs and is reported."""

import argparse
import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import draftc.runtime as draftc
from draftc.runtime.errors import DraftcError

PACKAGES = (
    *("draftc", "numpy", "onnxruntime", "onnxruntime-gpu", "tensorrt-rtx", "tensorrt"),
    *("cuda-core", "cuda-bindings"),
)
KS = "1,2,4,8"
TOKENS = 64
FILLS = (0.1, 0.5, 0.9)  # shares of max_length


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check.sh", description=__doc__)
    parser.add_argument("bundles", nargs="*", type=Path, metavar="BUNDLE")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), metavar="FILE")
    parser.add_argument("--seconds", type=float, default=350, help="for everything (350)")
    options = parser.parse_args()
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
            result = report["bundles"][str(bundle)] = check(bundle, time.monotonic() + left)
            failed |= result.get("verify", {}).get("code") != 0 or "error" in result
    options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {options.json}")
    return 1 if failed else 0


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
            raise RuntimeError(str(code))
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
        return {"skipped": "no driver", "reason": " ".join(str(error).split())}


def check(bundle: Path, deadline: float) -> dict[str, Any]:
    """Everything about one bundle."""
    print(f"\n== {bundle}")
    result: dict[str, Any] = {}
    shown = command(["inspect", str(bundle), "--json"], deadline)
    if shown["code"] != 0:
        return {"error": shown["err"]}
    manifest = json.loads(shown.pop("out"))
    result["backend"], result["precision"] = manifest["backend"], manifest["precision"]
    result["parity_when_compiled"] = manifest["parity"]
    result["memory"] = manifest["derived"]
    say("parity when compiled", [f"{r['graph']} {r['stage']}: KL {r['kl']:.2g}" for r in manifest["parity"]])
    say("memory", result["memory"])
    result["verify"] = command(["verify", str(bundle), "--budget", "20", "--json"], deadline)
    say("verify", {0: "passed", 1: "FAILED"}.get(result["verify"]["code"], result["verify"]["err"]))
    for name, extra in (("with CUDA graphs", []), ("without CUDA graphs", ["--no-cuda-graph"])):
        arguments = ["bench", str(bundle), "-k", KS, "-n", str(TOKENS), "--repeats", "3", "--json", *extra]
        bench = command(arguments, deadline)
        if bench["code"] == 0:
            bench["out"] = json.loads(bench["out"])
            for row in bench["out"]["totals"]:
                print(f"{name}: {row['mode']:16} {row['decode_tokens_per_s']:8.1f} tokens/s, {row['speedup']:.2f}x")
        else:
            print(f"{name}: {bench['err']}")
        result[f"bench {name}"] = bench
    try:
        result["steps"] = steps(bundle)
    except DraftcError as error:
        result["error"] = str(error)
    for row in result.get("steps", ()):
        print(f"{row['tokens']} tokens at {row['fill']} of {row['length']}: {row['milliseconds']:.2f} ms")
    return result


def command(arguments: list[str], deadline: float) -> dict[str, Any]:
    """Run a draftc command within the time that is left."""
    left = deadline - time.monotonic()
    if left <= 0:
        return {"code": None, "err": "skipped: no time left"}
    draftc_command = shutil.which("draftc", path=str(Path(sys.executable).parent)) or "draftc"
    try:
        done = subprocess.run([draftc_command, *arguments], capture_output=True, text=True, timeout=left)
    except subprocess.TimeoutExpired:
        return {"code": None, "err": f"stopped after {left:.0f} s"}
    return {"code": done.returncode, "out": done.stdout, "err": done.stderr.strip()[-400:]}


def steps(bundle: Path) -> list[dict[str, Any]]:
    """Milliseconds of the target's calls through the host path, by width and by how much of the cache is filled."""
    rows = []
    with draftc.open(bundle, check_hashes=False) as session:
        manifest, target = session.manifest, session.target
        for fill in (int(share * manifest.max_length) for share in FILLS):
            for width in sorted({1, manifest.num_speculative_tokens + 1, min(16, manifest.max_width)}):
                tokens, times = np.ones(width, np.int64), []
                for _ in range(20):
                    begin = time.perf_counter()
                    target.engine.forward(tokens, fill, 1)
                    times.append(1000 * (time.perf_counter() - begin))
                length = manifest.buffer_length
                rows.append({"tokens": width, "fill": fill, "length": length, "milliseconds": median(times[5:])})
        session.reset()
    return rows


def say(title: str, value: object) -> None:
    print(f"{title}: {json.dumps(value) if not isinstance(value, str) else value}")


if __name__ == "__main__":
    sys.exit(main())
