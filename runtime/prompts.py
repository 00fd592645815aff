"""Prompt sets of `draftc verify` and `draftc bench`: a file of one JSON object a line, or the few built in."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftc.runtime import strictjson
from draftc.runtime.errors import UsageError
from draftc.runtime.session import Message, Prompt, Session

__all__ = ["PromptCase", "builtin_prompts", "load_prompts"]


@dataclass(frozen=True)
class PromptCase:
    """A prompt with a name: a text, or chat messages that go through the bundle's chat template."""

    id: str
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None

    @property
    def content(self) -> Prompt:
        """What Session.generate takes."""
        return list(self.messages) if self.messages is not None else self.prompt or ""


def load_prompts(path: str | Path) -> tuple[PromptCase, ...]:
    """Read a .jsonl file: {"id", "prompt"} or {"id", "messages"} a line; other keys are ignored, blank lines skipped.

    Raises UsageError that names file and line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}): name a .jsonl file of prompts") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}: save it as UTF-8") from error
    lines: dict[str, int] = {}
    cases = []
    # Only line feeds end a line: a JSON string may hold U+2028, at which splitlines() would break.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            case = _parse(strictjson.load(line))
            if case.id in lines:
                raise UsageError(f"id {strictjson.show(case.id)} is taken by line {lines[case.id]}: ids must be unique")
        except UsageError as error:
            raise UsageError(f"{path}, line {number}: {error}") from error
        lines[case.id] = number
        cases.append(case)
    if not cases:
        raise UsageError(f'{path}: no prompts in it: write {{"id": "a", "prompt": "…"}}, one a line')
    return tuple(cases)


def _parse(document: object) -> PromptCase:
    if not isinstance(document, dict):
        raise UsageError(f"expected an object with id and prompt or messages, got {strictjson.show(document)}")
    case_id = document.get("id")
    if isinstance(case_id, int) and not isinstance(case_id, bool):
        case_id = str(case_id)
    if not isinstance(case_id, str) or not case_id:
        raise UsageError(f"id must be a non-empty string or a whole number, got {strictjson.show(case_id)}")
    prompt, messages = document.get("prompt"), document.get("messages")
    if (prompt is None) == (messages is None):
        raise UsageError("needs either prompt or messages" + (", not both" if prompt is not None else ""))
    if prompt is not None:
        if not isinstance(prompt, str) or not prompt:
            raise UsageError(f"prompt must be a non-empty string, got {strictjson.show(prompt)}")
        return PromptCase(case_id, prompt=prompt)
    if not isinstance(messages, list) or not messages:
        raise UsageError(f"messages must be a list of at least one message, got {strictjson.show(messages)}")
    return PromptCase(case_id, messages=tuple(_message(item, i) for i, item in enumerate(messages)))


def _message(item: Any, index: int) -> Message:
    if not isinstance(item, dict) or not isinstance(item.get("role"), str) or "content" not in item:
        raise UsageError(f"messages[{index}] must be an object with role and content, got {strictjson.show(item)}")
    return dict(item)


def builtin_prompts(session: Session) -> tuple[PromptCase, ...]:
    """Eight short prompts: code, an edit, prose, question and answer, chat (left out without a chat template)."""
    return tuple(case for case in BUILTIN if case.messages is None or session.tokenizer.has_chat_template)


def _chat(case_id: str, content: str) -> PromptCase:
    return PromptCase(case_id, messages=({"role": "user", "content": content},))


BUILTIN = (
    PromptCase(
        "code-complete",
        'def moving_average(values, window):\n    """Mean of every `window` neighbouring values."""\n',
    ),
    PromptCase(
        "code-tests",
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
        "        self.items.append(item)\n\n    def pop(self):\n        return self.items.pop()\n\n\n"
        "def test_push_then_pop():\n",
    ),
    PromptCase(
        "code-edit",
        "Rename `total` to `subtotal`.\n\nBefore:\ndef invoice(items, tax):\n    total = 0\n    for item in items:\n"
        "        total = total + item.price * item.count\n    return total + total * tax\n\n"
        "After:\ndef invoice(items, tax):\n",
    ),
    PromptCase(
        "prose",
        "The harbour was still dark when the first boats came in. Mara counted their lamps from the wall, as she had "
        "done every morning since",
    ),
    PromptCase(
        "list",
        "Shopping list for six people, Saturday:\n- 2 kg potatoes\n- 1 kg carrots\n- 500 g butter\n-",
    ),
    PromptCase(
        "question",
        "Question: Why does ice float on water?\nAnswer: Because ice is less dense than water.\n"
        "Question: Why is the sky dark at night?\nAnswer:",
    ),
    _chat("chat-explain", "Explain in two sentences what a cache does, and when it does harm."),
    _chat(
        "chat-edit", 'Correct the spelling, change nothing else: "Their are to many peple in the librery on Mundays."'
    ),
)
