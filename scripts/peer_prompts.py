"""The prompts of bench_peers.py: three classes, made from the ids of bench_prompts.json and the data sets' own files.

* H: HumanEval problems as a chat message (write the function).
* E: edits of HumanEval's solved functions (the answer repeats most of the prompt).
* W: first turns of MT-Bench (open writing, questions and answers).

The texts are the data sets' own and are read from their files; only ids and the wording of the edits are kept here.
"""

import gzip
import json
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
            return {str(item[key]): item for item in map(json.loads, filter(str.strip, lines))}
    except (OSError, UnicodeDecodeError) as error:
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
    return chosen


def build_prompts(
    chosen: Mapping[str, Any], humaneval: Mapping[str, dict[str, Any]], mt_bench: Mapping[str, dict[str, Any]]
) -> list[BenchPrompt]:
    """The prompts in the list's order. Raises PromptError for an id that its data set lacks."""

    def find(source: Mapping[str, dict[str, Any]], name: str, key: object) -> dict[str, Any]:
        if str(key) not in source:
            raise PromptError(f"{name} has no {key!r}: name the whole data set, or correct the list of prompts")
        return source[str(key)]

    prompts = []
    for key in chosen.get("H", ()):
        problem = find(humaneval, "HumanEval", key)
        text = f"Complete this Python function.\n\n```python\n{problem['prompt'].strip()}\n```"
        prompts.append(BenchPrompt("H", str(key), text))
    for key, instruction in dict(chosen.get("E", {})).items():
        problem = find(humaneval, "HumanEval", key)
        code = (problem["prompt"] + problem["canonical_solution"]).strip()
        text = f"{instruction} Answer with the whole code.\n\n```python\n{code}\n```"
        prompts.append(BenchPrompt("E", str(key), text))
    for key in chosen.get("W", ()):
        prompts.append(BenchPrompt("W", str(key), find(mt_bench, "MT-Bench", key)["turns"][0].strip()))
    return prompts
