"""The JSON document of bench_peers.py: one run, or several put together. The schema only grows."""

import json
import math
from pathlib import Path
from typing import Any

import peer_report
from peer_report import Record

__all__ = ["SCHEMA", "MergeError", "document", "merge", "read_records", "write_json"]

SCHEMA = "draftc-peers/1"


class MergeError(Exception):
    """Reports cannot be put together; the message is one line with the way out."""


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


def merge(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """One document of several: their groups stay apart, the rest is of the first. Raises MergeError."""
    records: list[Record] = []
    for report in reports:
        if report.get("schema") != SCHEMA:
            raise MergeError(f"--merge: a file is not of schema {SCHEMA}: name files that bench_peers.py wrote")
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
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(report) + "\n", encoding="utf-8")
    temporary.replace(path)
