"""The measured cost model: what a call of each graph costs on this machine, by its width and by how full the cache is.

`draftc tune` measures it (`tune`), `profile.json` keeps it, and the chooser (`chooser`) decides by it alone: never by a
clock, so that a seed gives the same text again. Stdlib only.
"""

import hashlib
import itertools
import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from draftc.runtime import strictjson
from draftc.runtime.errors import BundleVersionError
from draftc.runtime.manifest import Manifest
from draftc.runtime.rules import HEX64, need, texts, within
from draftc.runtime.strictjson import show

__all__ = ["COSTS_VERSION", "CostProfile", "GraphCosts", "MachineId", "fingerprint_graphs", "parse_costs", "to_json"]

COSTS_VERSION = 1
MAX_WIDTH = 256
MAX_FILL = 1 << 31
LEAST_MS, MOST_MS = 1e-6, 1e9  # far beyond any call; between them no sum or ratio of costs leaves the floats


@dataclass(frozen=True, kw_only=True)
class MachineId:
    """What a profile was measured on, and of what: where any of it differs, the profile says nothing.

    `graphs` is the sha256 over the graphs' files. `threads` per graph, 0 is the backend's choice. `devices` by graph.
    """

    graphs: str
    backend: str
    devices: Mapping[str, str]
    processor: str
    cores: int
    threads: int

    def __post_init__(self) -> None:
        need(HEX64.fullmatch(self.graphs) is not None, "graphs", "64 hexadecimal digits", self.graphs)
        texts(self, "backend", "processor")
        within(self, 1, 1 << 20, "cores")
        within(self, 0, 1 << 20, "threads")

    @property
    def digest(self) -> str:
        """A name for it: hexadecimal."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def differs(self, here: "MachineId") -> str:
        """The first thing in which it differs from `here`, in words; empty where nothing does."""
        for name, own in asdict(self).items():
            other = asdict(here)[name]
            if own != other:
                return f"{name} {_said(own)} there, {_said(other)} here"
        return ""


@dataclass(frozen=True, kw_only=True)
class GraphCosts:
    """Median milliseconds of one call: `ms[i][j]` with `fills[i]` tokens in the cache and `widths[j]` in the call."""

    widths: tuple[int, ...]
    fills: tuple[int, ...]
    ms: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for name, axis, least in (("widths", self.widths, 1), ("fills", self.fills, 0)):
            rising = all(a < b for a, b in itertools.pairwise(axis))
            need(bool(axis) and axis[0] >= least and rising, name, f"rising numbers from {least}", list(axis))
        need(self.widths[0] == 1, "widths", "rising numbers from 1", list(self.widths))
        need(self.widths[-1] <= MAX_WIDTH, "widths", f"at most {MAX_WIDTH}", self.widths[-1])
        need(self.fills[-1] <= MAX_FILL, "fills", f"at most {MAX_FILL}", self.fills[-1])
        fits = len(self.ms) == len(self.fills) and all(len(row) == len(self.widths) for row in self.ms)
        need(fits, "ms", "a row for each fill with a number for each width", list(self.ms))
        numbers = [number for row in self.ms for number in row]
        for number in numbers:
            need(LEAST_MS <= number <= MOST_MS, "ms", f"numbers from {LEAST_MS:g} to {MOST_MS:g}", number)

    def curve(self, fill: int, widest: int) -> list[float]:
        """Milliseconds of a call of 0, 1, … `widest` tokens at `fill`; the first entry, no call, is 0.

        Between measured points linear, outside them along the nearest two. What is extrapolated never falls with the
        width, and never below half of the cheapest measured call: noise grows with the distance.
        """
        i = min(max(bisect_right(self.fills, fill) - 1, 0), max(len(self.fills) - 2, 0))
        row = list(self.ms[i])
        if len(self.fills) > 1:
            part = (fill - self.fills[i]) / (self.fills[i + 1] - self.fills[i])
            row = [a + part * (b - a) for a, b in zip(self.ms[i], self.ms[i + 1], strict=True)]
        floor = min(min(line) for line in self.ms) / 2
        row = [max(number, floor) for number in row]
        if not self.fills[0] <= fill <= self.fills[-1]:
            row = list(itertools.accumulate(row, max))
        return [0.0] + [self._at(row, width) for width in range(1, widest + 1)]

    def _at(self, row: list[float], width: int) -> float:
        j = bisect_right(self.widths, width) - 1
        if j == len(self.widths) - 1:  # the last point or beyond it
            slope = 0.0
            if j > 0:
                slope = max(0.0, (row[j] - row[j - 1]) / (self.widths[j] - self.widths[j - 1]))
            return row[j] + slope * (width - self.widths[j])
        part = (width - self.widths[j]) / (self.widths[j + 1] - self.widths[j])
        return row[j] + part * (row[j + 1] - row[j])


@dataclass(frozen=True, kw_only=True)
class CostProfile:
    """`profile.json`. `target` at the widths of verification; `draft` None where no model drafts.

    `ngram_ms` is one lookup. `rounds` is how many times each call was timed; `created` an RFC 3339 time in UTC.
    """

    profile_version: int = COSTS_VERSION
    draftc_version: str
    created: str
    machine: MachineId
    rounds: int
    target: GraphCosts
    draft: GraphCosts | None = None
    ngram_ms: float

    def __post_init__(self) -> None:
        need(self.profile_version == COSTS_VERSION, "profile_version", str(COSTS_VERSION), self.profile_version)
        texts(self, "draftc_version", "created")
        within(self, 1, 1 << 20, "rounds")
        need(0 <= self.ngram_ms <= MOST_MS, "ngram_ms", f"from 0 to {MOST_MS:g}", self.ngram_ms)


def fingerprint_graphs(manifest: Manifest) -> str:
    """sha256 over the paths and digests of a bundle's graphs, their weights and whatever lies beside them."""
    folder = manifest.tokenizer.path + "/"
    entries = sorted((entry.path, entry.sha256) for entry in manifest.files if not entry.path.startswith(folder))
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def to_json(costs: CostProfile) -> str:
    """`costs` as the text of `profile.json`."""
    return json.dumps(asdict(costs), indent=2, allow_nan=False) + "\n"


def parse_costs(text: str) -> CostProfile:
    """Read the text of `profile.json`. Raises UsageError, or BundleVersionError for one of a newer draftc."""
    document = strictjson.load(text)
    version: Any = document.get("profile_version") if isinstance(document, dict) else None
    if type(version) is int and version > COSTS_VERSION:
        raise BundleVersionError(f"made by a newer draftc (profile {show(version)}, this reads {COSTS_VERSION})")
    return strictjson.decode(CostProfile, document)


def _said(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items()) or "none"
    return f"{value[:12]}…" if isinstance(value, str) and HEX64.fullmatch(value) else str(value)
