"""The JSON document of bench_peers.py: one run, or several put together. The schema only grows."""

import errno
import importlib
import json
import math
import os
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import peer_report
from peer_report import Record

__all__ = [
    "SCHEMA",
    "MergeError",
    "OutputError",
    "check_outputs",
    "document",
    "merge",
    "read_records",
    "read_report",
    "write_json",
]

SCHEMA = "draftc-peers/1"
CHARTS = (".png", ".svg")
# What is read of a report beside its records.
HEAD = {"command": str, "versions": dict, "left_out": list, "prompts": list, "machine": dict, "records": list}
HEAD |= dict.fromkeys(("threads", "max_new_tokens", "repeats"), int)


class MergeError(Exception):
    """Reports cannot be put together; the message is one line with the way out."""


class OutputError(Exception):
    """Results could not be written; the message is one line with the way out."""


def check_outputs(report: Path | None, chart: Path | None) -> None:
    """Raise OutputError unless the files of --json and --chart can be written; nothing is left behind."""
    if chart is not None:
        if chart.suffix.lower() not in CHARTS:
            raise OutputError(f"--chart {chart}: name a file that ends in {' or '.join(CHARTS)}")
        try:
            importlib.import_module("matplotlib")
        except ImportError as error:
            raise OutputError(f"--chart needs matplotlib ({error}): pip install matplotlib") from error
    for option, file in (("--json", report), ("--chart", chart)):
        if file is None:
            continue
        try:
            if file.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            tempfile.TemporaryFile(dir=file.parent).close()
        except OSError as error:
            raise OutputError(f"{option} {file}: {error.strerror}: name a file that can be written") from error


def document(report: dict[str, Any], records: list[Record]) -> dict[str, Any]:
    """The JSON document: the report with totals, comparisons and records."""
    found = peer_report.totals(records)
    best = peer_report.best_peers(found, records)
    return (
        report
        | {name: [_plain(vars(row)) for row in rows] for name, rows in (("totals", found), ("best", best))}
        | {"records": [_plain(vars(row)) for row in records]}
    )


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Without numbers that JSON lacks."""
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in row.items()}


def read_records(report: dict[str, Any]) -> list[Record]:
    return [Record(**(row | {"token_ids": tuple(row["token_ids"])})) for row in report["records"]]


def read_report(path: Path) -> dict[str, Any]:
    """A document of an earlier run, with everything in it that is read here. Raises MergeError that names the file."""
    way_out = "name files that bench_peers.py wrote"
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MergeError(f"{path}: cannot be read ({error.strerror}): {way_out}") from error
    except ValueError as error:
        raise MergeError(f"{path}: not JSON ({error}): {way_out}") from error
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        raise MergeError(f"{path}: not of schema {SCHEMA}: {way_out}")
    for name, kind in HEAD.items():
        if not isinstance(report.get(name), kind):
            raise MergeError(f"{path}: {name} is missing, or no {kind.__name__}: {way_out}")
    if not all(isinstance(pair, list) and all(isinstance(part, str) for part in pair) for pair in report["prompts"]):
        raise MergeError(f"{path}: prompts are not pairs of class and id: {way_out}")
    if not all(isinstance(line, str) for line in report["left_out"]):
        raise MergeError(f"{path}: left_out has more than lines in it: {way_out}")
    for number, row in enumerate(report["records"]):
        if not _is_record(row):
            raise MergeError(f"{path}: records[{number}] is not what this version writes: {way_out}")
    return report


def _is_record(row: object) -> bool:
    """Whether Record has exactly these fields, and each its type; JSON has lists for tuples, and whole floats."""
    kinds: dict[str, Any] = {field.name: field.type for field in fields(Record)} | {"token_ids": list}
    return (
        isinstance(row, dict)
        and row.keys() == kinds.keys()
        and all(isinstance(row[name], float | int if kind is float else kind) for name, kind in kinds.items())
    )


def merge(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """One document of several: their groups stay apart, the rest is of the first."""
    records: list[Record] = []
    for report in reports:
        offset = 1 + max((record.group for record in records), default=-1)
        records += [Record(**(vars(row) | {"group": row.group + offset})) for row in read_records(report)]
    first = {name: value for name, value in reports[0].items() if name not in ("totals", "best", "records")}
    changed = {
        "versions": {name: value for report in reports for name, value in report["versions"].items()},
        "left_out": list(dict.fromkeys(line for report in reports for line in report["left_out"])),
        "prompts": [list(pair) for pair in dict.fromkeys(tuple(p) for report in reports for p in report["prompts"])],
        "commands": [report["command"] for report in reports],
    }
    return document(first | changed, records)


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Replace `path` by the document, or leave it as it is. Raises OSError."""
    temporary = path.with_name(path.name + ".part")
    try:
        temporary.write_text(json.dumps(report) + "\n", encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
