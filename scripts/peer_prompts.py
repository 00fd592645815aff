"""The prompts of bench_peers.py: three classes, made from the ids of bench_prompts.json and the data sets' own files.

* H: HumanEval problems as a chat message (write the function).
* E: edits of HumanEval's solved functions (the answer repeats most of the prompt).
* W: first turns of MT-Bench (open writing, questions and answers).

The texts are the data sets' own and are read from their files; only ids and the wording of the edits are kept here.
"""

import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["CLASSES", "BenchPrompt", "PromptError", "build_prompts", "read_lines", "read_list"]

CLASSES = {"H": "HumanEval", "E": "code edits", "W": "writing, Q&A"}


class PromptError(Exception):
    """A prompt list or a data set cannot be used; the message is one line with the way out."""


@dataclass(frozen=True)
class BenchPrompt:
    """One user message with its class ("H", "E", "W") and the data set's id."""

    kind: str
    id: str
    text: str


def read_lines(path: Path | None, option: str, key: str) -> dict[str, dict[str, Any]]:
    """A .jsonl or .jsonl.gz file by the ids under `key`. Raises PromptError that names the option."""
    if path is None:
        raise PromptError(f"{option} is needed for the chosen prompts: name the data set's file")
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            items: list[dict[str, Any]] = [json.loads(line) for line in lines if line.strip()]
            return {str(item[key]): item for item in items}
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise PromptError(f"{path}: cannot be read ({reason}): give {option} the data set's file") from error
    except (ValueError, KeyError, TypeError) as error:
        raise PromptError(f"{path}: not a file of JSON objects with {key!r}, one a line: check {option}") from error


def read_list(path: Path) -> dict[str, Any]:
    """{"H": [id, …], "E": {id: instruction, …}, "W": [id, …]}; classes may be left out. Raises PromptError."""
    try:
        chosen = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PromptError(f"{path}: cannot be read ({error.strerror}): name a list of prompts") from error
    except ValueError as error:
        raise PromptError(f"{path}: not JSON ({error}): see scripts/bench_prompts.json") from error
    if not isinstance(chosen, dict) or not chosen or not set(chosen) <= set(CLASSES):
        raise PromptError(f"{path}: expected an object with H, E and W: see scripts/bench_prompts.json")
    for kind in ("H", "W"):
        ids = chosen.get(kind, [])
        if not isinstance(ids, list) or not all(isinstance(key, str | int) for key in ids):
            raise PromptError(f"{path}: {kind} must be a list of ids: see scripts/bench_prompts.json")
    edits = chosen.get("E", {})
    if not isinstance(edits, dict) or not all(isinstance(text, str) for text in edits.values()):
        raise PromptError(f"{path}: E must give an instruction for each id: see scripts/bench_prompts.json")
    return chosen


def build_prompts(
    chosen: Mapping[str, Any], humaneval: Mapping[str, dict[str, Any]], mt_bench: Mapping[str, dict[str, Any]]
) -> list[BenchPrompt]:
    """The prompts in the list's order. Raises PromptError for an id that its data set lacks, or has without a text."""

    def text(source: Mapping[str, dict[str, Any]], name: str, key: object, field: str) -> str:
        if str(key) not in source:
            raise PromptError(f"{name} has no {key!r}: name the whole data set, or correct the list of prompts")
        value = source[str(key)].get(field)
        if name == "MT-Bench" and isinstance(value, list) and value:
            value = value[0]
        if not isinstance(value, str):
            raise PromptError(f"{name} has no text under {field!r} of {key!r}: name the data set's own file")
        return value

    prompts = []
    for key in chosen.get("H", ()):
        code = text(humaneval, "HumanEval", key, "prompt").strip()
        prompts.append(BenchPrompt("H", str(key), f"Complete this Python function.\n\n```python\n{code}\n```"))
    for key, instruction in chosen.get("E", {}).items():
        parts = (text(humaneval, "HumanEval", key, field) for field in ("prompt", "canonical_solution"))
        code = "".join(parts).strip()
        edit = f"{instruction} Answer with the whole code.\n\n```python\n{code}\n```"
        prompts.append(BenchPrompt("E", str(key), edit))
    for key in chosen.get("W", ()):
        prompts.append(BenchPrompt("W", str(key), text(mt_bench, "MT-Bench", key, "turns").strip()))
    return prompts
