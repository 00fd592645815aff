#!/usr/bin/env python3
"""Turn OpenAI's HumanEval.jsonl.gz (MIT, from the human-eval repository) into a prompt file for `draftc bench`.

    scripts/humaneval_prompts.py HumanEval.jsonl.gz --count 10 > humaneval10.jsonl

Every prompt is one chat message, so the model's chat template applies.
"""

import argparse
import gzip
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=10, help="how many problems, from the first (default 10)")
    arguments = parser.parse_args()
    opened = gzip.open if arguments.file.suffix == ".gz" else open
    with opened(arguments.file, "rt", encoding="utf-8") as lines:
        for _, line in zip(range(arguments.count), lines, strict=False):
            problem = json.loads(line)
            content = f"Complete this Python function.\n\n```python\n{problem['prompt'].strip()}\n```"
            print(json.dumps({"id": problem["task_id"], "messages": [{"role": "user", "content": content}]}))


if __name__ == "__main__":
    main()
