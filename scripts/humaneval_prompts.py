#!/usr/bin/env python3
"""Turn OpenAI's HumanEval.jsonl.gz (MIT, from the human-eval repository) into a prompt file for `draftc bench`.

    scripts/humaneval_prompts.py HumanEval.jsonl.gz --count 10 > humaneval10.jsonl

Every prompt is one chat message, so the model's chat template applies.
"""

import argparse
import json
import sys
from pathlib import Path

from peer_prompts import PromptError, build_prompts, read_lines
from script_arguments import at_least


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=at_least(1), default=10, help="how many problems, from the first (default 10)")
    options = parser.parse_args()
    try:
        problems = read_lines(options.file, "file", "task_id")
        prompts = build_prompts({"H": list(problems)[: options.count]}, problems, {})
    except PromptError as error:
        print(f"humaneval_prompts: {error}", file=sys.stderr)
        return 2
    for prompt in prompts:
        print(json.dumps({"id": prompt.id, "messages": [{"role": "user", "content": prompt.text}]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
