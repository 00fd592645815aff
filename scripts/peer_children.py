"""The systems that bench_peers.py compares, where their models lie, and the process that each setting runs in."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

__all__ = ["Child", "PeerError", "Places", "System", "locked", "missing", "systems"]

WORKER = Path(__file__).with_name("peer_worker.py")
TICKS = os.sysconf("SC_CLK_TCK")


class PeerError(Exception):
    """A system cannot run here; the message is one line."""


@dataclass(frozen=True)
class Places:
    """Where things are. `pythons` by the first part of a system's name ("genai"); else the running interpreter."""

    bundle: Path
    peers: Path | None = None
    target_gguf: Path | None = None
    draft_gguf: Path | None = None
    llama_server: str | None = None
    pythons: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class System:
    """One column of the comparison: `worker` is its name in peer_worker.py, `needs` the files of its models by role."""

    name: str
    worker: str
    python: str
    modes: tuple[str, ...]
    needs: dict[str, Path | None]
    optional: bool = False

    def config(self, mode: str, threads: int, eos: Sequence[int]) -> dict[str, Any]:
        """The worker's first line."""
        paths = {role: str(path) for role, path in self.needs.items()}
        return {"system": self.worker, "mode": mode, "threads": threads, "eos": list(eos), **paths}


def systems(places: Places) -> list[System]:
    """All that are known, draftc first. `optional` ones run only when they are named."""

    def python(name: str) -> str:
        return places.pythons.get(name, sys.executable)

    def folder(name: str) -> Path | None:
        return None if places.peers is None else places.peers / name

    found = [System("draftc", "draftc", python("draftc"), ("plain", "default"), {"model": places.bundle})]
    for block in (32, 128):
        needs = {
            "model": folder(f"genai-b{block}-target"),
            "draft": folder(f"genai-b{block}-draft"),
            "pair": folder(f"genai-b{block}-pair"),
        }
        for suffix in ("", "-nospin"):
            modes = ("plain", "ngram-8", "draft-4")
            found.append(System(f"genai-b{block}{suffix}", f"genai{suffix}", python("genai"), modes, needs))
    for group in (32, 128):
        needs = {role: folder(f"openvino-g{group}-{name}") for role, name in (("model", "target"), ("draft", "draft"))}
        modes = ("plain", "ngram-8", "draft-6")
        found.append(System(f"openvino-g{group}", "openvino", python("openvino"), modes, needs))
    binary = places.llama_server and shutil.which(places.llama_server)
    needs = {"model": places.target_gguf, "draft": places.draft_gguf, "binary": Path(binary) if binary else None}
    modes = ("plain", "ngram", "ngram-8", "draft-3")
    found.append(System("llama.cpp", "llama.cpp", python("llama.cpp"), modes, needs))
    needs = {"model": folder("hf-target"), "draft": folder("hf-draft")}
    modes = ("plain", "ngram-8")
    found.append(System("transformers", "transformers", python("transformers"), modes, needs, optional=True))
    return found


def missing(system: System) -> str | None:
    """What keeps a system from running, as one line; None when all its files are there."""
    if shutil.which(system.python) is None:
        return f"{system.name} is left out: no Python at {system.python}"
    for role, path in system.needs.items():
        if path is None:
            option = {"binary": "--llama-server", "model": "--peers", "draft": "--peers", "pair": "--peers"}[role]
            if system.name == "llama.cpp":
                option = {"model": "--target-gguf", "draft": "--draft-gguf"}.get(role, option)
            return f"{system.name} is left out: {option} does not say where its {role} is"
        if not path.exists():
            return f"{system.name} is left out: {path} is missing (scripts/prepare_peers.py makes it)"
    return None


class Child:
    """A worker process. Only one of them is asked at a time; the others wait for input."""

    def __init__(self, python: str, config: dict[str, Any], log: IO[bytes] | int) -> None:
        self.config = config
        self.process = subprocess.Popen(
            [python, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            encoding="utf-8",
        )
        try:
            self.ready = self.ask(config)
        except PeerError:
            self.close()
            raise

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """The worker's answer. Raises PeerError when it reports an error or has ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerError(f"its process ended with {self.process.wait()}; --log FILE keeps what it printed")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def rss(self) -> int:
        """Resident bytes now, with those of processes that it started."""
        pages = (int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self._tree())
        return sum(pages) * os.sysconf("SC_PAGE_SIZE")

    def cpu_s(self) -> float:
        """CPU seconds so far, with those of processes that it started."""
        used = 0
        for pid in self._tree():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            used += int(fields[11]) + int(fields[12])  # utime and stime, proc(5)
        return used / TICKS

    def _tree(self) -> list[int]:
        pid = self.process.pid
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *map(int, below)]

    def close(self) -> None:
        """Let it end; kill it when it does not."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.close()
            self.process.wait(20)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


@contextmanager
def locked(files: Sequence[Path], patience: float = 40.0, pause: float = 15.0) -> Iterator[None]:
    """Hold exclusive locks (flock) on all `files` for the block.

    Who waits for one of them holds the others for `patience` seconds at most, and tries again after `pause` seconds:
    meanwhile others get on.
    """
    held: list[int] = []
    try:
        while len(held) < len(files):
            descriptor = os.open(files[len(held)], os.O_RDWR | os.O_CREAT, 0o644)
            if _lock(descriptor, patience if held else None):
                held.append(descriptor)
                continue
            os.close(descriptor)
            _release(held)
            time.sleep(pause)
        yield
    finally:
        _release(held)


def _lock(descriptor: int, patience: float | None) -> bool:
    """Whether the lock was got; None waits for as long as it takes."""
    if patience is None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return True
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.05)


def _release(held: list[int]) -> None:
    while held:
        os.close(held.pop())
