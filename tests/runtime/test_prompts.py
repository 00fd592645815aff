"""Prompt files: what is read, and that each error names its line."""

from pathlib import Path

import pytest

from draftc.runtime.errors import UsageError
from draftc.runtime.prompts import PromptCase, builtin_prompts, load_prompts
from draftc.runtime.text import Tokenizer
from tests.runtime.check_fakes import kv_session
from tests.runtime.cli_fakes import chat_folder


def test_reads_prompts_and_messages(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"id": "a", "prompt": "one\\n\u2028two", "source": "ignored"}\n'
        "\n"
        '{"id": 7, "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}',
        encoding="utf-8",
    )
    first, second = load_prompts(file)
    assert first == PromptCase("a", prompt="one\n\u2028two")
    assert first.content == "one\n\u2028two"
    assert second.id == "7"
    assert second.content == [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ('["a"]', "expected an object"),
        ('{"prompt": "x"}', "id must be"),
        ('{"id": "", "prompt": "x"}', "id must be"),
        ('{"id": true, "prompt": "x"}', "id must be"),
        ('{"id": "b"}', "needs either prompt or messages"),
        ('{"id": "b", "promt": "x"}', "needs either prompt or messages"),
        ('{"id": "b", "prompt": "x", "messages": [{"role": "user", "content": "y"}]}', "not both"),
        ('{"id": "b", "prompt": ""}', "prompt must be a non-empty string"),
        ('{"id": "b", "prompt": 3}', "prompt must be a non-empty string"),
        ('{"id": "b", "messages": []}', "at least one message"),
        ('{"id": "b", "messages": "hi"}', "at least one message"),
        ('{"id": "b", "messages": [{"content": "x"}]}', r"messages\[0\] must be"),
        ('{"id": "a", "prompt": "again"}', "taken by line 1"),
        ('{"id": "b", "id": "c", "prompt": "x"}', "comes twice"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "a", "prompt": "fine"}\n\n' + line + "\n", encoding="utf-8")
    with pytest.raises(UsageError, match=rf"prompts\.jsonl, line 3: .*{message}"):
        load_prompts(file)


def test_refuses_files_without_prompts(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n  \n", encoding="utf-8")
    with pytest.raises(UsageError, match="no prompts"):
        load_prompts(tmp_path / "empty.jsonl")
    with pytest.raises(UsageError, match="cannot be read"):
        load_prompts(tmp_path / "missing.jsonl")
    (tmp_path / "latin1.jsonl").write_bytes('{"id": "a", "prompt": "café"}'.encode("latin-1"))
    with pytest.raises(UsageError, match="not UTF-8 at byte 26"):
        load_prompts(tmp_path / "latin1.jsonl")


def test_built_in_prompts_fit_the_bundle(byte_level_folder: Path, tmp_path: Path) -> None:
    plain = builtin_prompts(kv_session(Tokenizer.from_folder(byte_level_folder)))
    assert all(case.messages is None for case in plain)
    chat_session = kv_session(Tokenizer.from_folder(chat_folder(byte_level_folder, tmp_path / "chat")))
    cases = builtin_prompts(chat_session)
    assert len(cases) > len(plain)
    assert len({case.id for case in cases}) == len(cases)
    for case in cases:
        assert 8 < len(chat_session.encode(case.content)) < 400  # short even where a tokenizer is poor
