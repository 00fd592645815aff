"""`draftc chat`, scripted through standard input and as on a terminal."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.cli_fakes import Draftc, FakeBundle, chat_folder, one_line


@pytest.fixture
def draftc(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Draftc:
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return Draftc(monkeypatch, capsys)


@pytest.fixture
def folder(byte_level_folder: Path, tmp_path: Path) -> Path:
    return chat_folder(byte_level_folder, tmp_path / "tokenizer")


def rendered(bundle: FakeBundle, *contents: str, system: str | None = None) -> list[int]:
    """Token ids of a conversation: user first, then in turns."""
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    head = [{"role": "system", "content": system}] if system else []
    return bundle.tokenizer.apply_chat_template([*head, *messages])


def held(bundle: FakeBundle) -> list[int]:
    """What was written to the target's memory, up to the first slot that never was."""
    memory = [int(token) for token in bundle.engine.memory]
    return memory[: memory.index(-1)] if -1 in memory else memory


def prompt_of_last_turn(bundle: FakeBundle, *contents: str, system: str | None = None) -> None:
    """Assert what the model saw in the last turn of a conversation. The session is closed by then; memory is not."""
    expected = rendered(bundle, *contents, system=system)
    assert held(bundle)[: len(expected)] == expected


def test_a_scripted_conversation(draftc: Draftc, folder: Path) -> None:
    bundle = draftc.with_bundle(folder)
    result = draftc("chat", "out", stdin="hello\nthe lazy dog\n\n/stats\n")
    assert (result.code, result.out) == (0, "HELLO\nTHE LAZY DOG\n")
    assert "prompt tokens cached" in one_line(result.err), "blank lines are no messages; only /stats says something"
    assert bundle.target.prompts == ["hello", "the lazy dog"]
    prompt_of_last_turn(bundle, "hello", "HELLO", "the lazy dog")
    assert bundle.engine.closed == 1


def test_the_second_turn_prefills_only_what_is_new(draftc: Draftc, folder: Path) -> None:
    bundle = draftc.with_bundle(folder)
    draftc("chat", "out", "--plain", stdin="hello hello hello hello\nfox\n")
    first = len(rendered(bundle, "hello hello hello hello"))
    widths = [call.width for call in bundle.engine.calls]
    answer = len(bundle.tokenizer.encode("HELLO HELLO HELLO HELLO"))
    second = len(rendered(bundle, "hello hello hello hello", "HELLO HELLO HELLO HELLO", "fox"))
    # Plain decoding runs one token a call: all else is prefill. The end token was never run.
    assert sum(widths) == second + len(bundle.tokenizer.encode("FOX"))
    assert second > first + answer


def test_stats_option_reports_every_answer(draftc: Draftc, folder: Path) -> None:
    draftc.with_bundle(folder)
    lines = draftc("chat", "out", "--stats", stdin="a\nb\n").err.splitlines()
    assert len(lines) == 2
    assert all("tokens/s" in line for line in lines)


def test_system_prompt_from_the_option_and_the_command(draftc: Draftc, folder: Path) -> None:
    bundle = draftc.with_bundle(folder)
    draftc("chat", "out", "--system", "Be brief.", stdin="fox\n")
    prompt_of_last_turn(bundle, "fox", system="Be brief.")
    bundle = draftc.with_bundle(folder)
    draftc("chat", "out", stdin="/system Be long.\nfox\n")
    prompt_of_last_turn(bundle, "fox", system="Be long.")
    bundle = draftc.with_bundle(folder)
    result = draftc("chat", "out", "--system", "Be brief.", stdin="/system\nfox\n")
    assert one_line(result.err) == "system prompt removed"
    prompt_of_last_turn(bundle, "fox")


def test_reset_forgets_the_conversation_and_keeps_the_system_prompt(draftc: Draftc, folder: Path) -> None:
    bundle = draftc.with_bundle(folder)
    result = draftc("chat", "out", "--system", "S", stdin="hello\n/reset\nfox\n/undo\n/undo\n/stats\n")
    assert result.out == "HELLO\nFOX\n"
    forgotten, taken_back, nothing, stats = result.err.splitlines()
    assert forgotten == "the conversation is forgotten"
    assert taken_back == "the last message and its answer are taken back"
    assert nothing == "nothing to take back"
    assert "cached" not in stats, "the cache is cleared too"
    prompt_of_last_turn(bundle, "fox", system="S")


def test_undo_takes_back_one_message_and_its_answer(draftc: Draftc, folder: Path) -> None:
    bundle = draftc.with_bundle(folder)
    draftc("chat", "out", stdin="hello\ndog\n/undo\nfox\n")
    assert bundle.target.prompts == ["hello", "dog", "fox"]
    prompt_of_last_turn(bundle, "hello", "HELLO", "fox")


def test_messages_of_several_lines(draftc: Draftc, folder: Path) -> None:
    bundle = draftc.with_bundle(folder)
    result = draftc("chat", "out", stdin="the quick\\\nbrown\\\nfox\nlazy\\\n")
    assert bundle.target.prompts == ["the quick\nbrown\nfox", "lazy"]
    assert result.out == "THE QUICK\nBROWN\nFOX\nLAZY\n"


def test_commands(draftc: Draftc, folder: Path) -> None:
    bundle = draftc.with_bundle(folder)
    result = draftc("chat", "out", stdin="/stats\n/nonsense\n//etc\n/\n/exit\nnever read\n")
    assert result.err.splitlines() == [
        "no answer yet",
        "unknown command /nonsense: /help lists them",
        "unknown command /: /help lists them",
    ]
    assert bundle.target.prompts == ["/etc"]
    shown = draftc("chat", "out", stdin="/help\n").err
    for name in ("/help", "/reset", "/system", "/undo", "/stats", "/exit", "Ctrl-D", "Ctrl-C"):
        assert name in shown


def test_the_oldest_turns_are_forgotten_when_the_bundle_is_full(draftc: Draftc, folder: Path) -> None:
    bundle = draftc.with_bundle(folder, max_length=100)
    words = ["alpha", "bravo", "charlie", "delta", "echo"]
    result = draftc("chat", "out", "-n", "12", stdin="\n".join(words))
    assert result.code == 0
    assert result.out == "".join(word.upper() + "\n" for word in words), "no answer is cut"
    notes = result.err.splitlines()
    assert notes
    assert all(note.endswith("forgotten: the bundle holds 100 tokens)") for note in notes)
    # As few turns as possible: with one more, prompt and answer would not fit.
    pairs = [text for word in words[:-1] for text in (word, word.upper())]
    kept = next(i for i in range(0, 10, 2) if len(rendered(bundle, *pairs[i:], words[-1])) + 12 <= 100)
    assert kept > 0
    prompt_of_last_turn(bundle, *pairs[kept:], words[-1])


def test_a_message_that_never_fits_is_one_line_and_the_conversation_stays(draftc: Draftc, folder: Path) -> None:
    long = "fox " * 100
    bundle = draftc.with_bundle(folder, max_length=100)
    result = draftc("chat", "out", stdin=f"hello\n{long}\n")
    assert result.code == 2
    assert one_line(result.err).startswith("draftc: the prompt has ")
    bundle = draftc.with_bundle(folder, max_length=100)
    result = draftc("chat", "out", "-n", "8", stdin=f"hello\n{long}\ndog\n", terminal=True)
    assert result.code == 0
    assert (
        sum(
            line.startswith("draftc: the prompt ") or line.startswith("draftc: prompt ")
            for line in result.err.splitlines()
        )
        == 1
    )
    prompt_of_last_turn(bundle, "hello", "HELLO", "dog")


def press_in(bundle: FakeBundle, prompt: str, index: int) -> None:
    """Press Ctrl-C once, while answer token `index` of the message `prompt` is computed."""
    pressed: list[int] = []

    def press(at: int) -> None:
        if at == index and bundle.target.prompts[-1] == prompt and not pressed:
            pressed.append(at)
            os.kill(os.getpid(), signal.SIGINT)

    bundle.target.on_token = press


def test_ctrl_c_on_a_terminal_stops_the_answer_which_stays(draftc: Draftc, folder: Path) -> None:
    bundle = draftc.with_bundle(folder)
    press_in(bundle, "the lazy dog jumps", 2)
    result = draftc("chat", "out", "--plain", stdin="the lazy dog jumps\nfox\n", terminal=True)
    tokens = bundle.tokenizer.encode("THE LAZY DOG JUMPS")[:3]
    partial = bundle.tokenizer.decode(tokens)
    assert result.code == 0
    assert partial + "\n" in result.out
    assert "FOX\n" in result.out
    assert "DOG JUMPS" not in result.out
    prompt_of_last_turn(bundle, "the lazy dog jumps", partial, "fox")


def test_ctrl_c_before_the_first_token_takes_the_message_back(draftc: Draftc, folder: Path) -> None:
    bundle = draftc.with_bundle(folder)
    press_in(bundle, "hello", 0)
    result = draftc("chat", "out", stdin="hello\nfox\n", terminal=True)
    assert result.code == 0
    assert "stopped: the message is taken back" in result.err
    prompt_of_last_turn(bundle, "fox")


@pytest.mark.parametrize("index", [0, 2])
def test_ctrl_c_ends_a_script(draftc: Draftc, folder: Path, index: int) -> None:
    bundle = draftc.with_bundle(folder)
    press_in(bundle, "hello", index)
    result = draftc("chat", "out", stdin="hello\nfox\n")
    assert result.code == 130
    assert "FOX" not in result.out
    assert "Traceback" not in result.err
    assert bundle.engine.closed == 1


def test_ctrl_c_at_the_prompt_of_a_terminal_goes_on(
    draftc: Draftc, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = draftc.with_bundle(folder)
    typed: Iterator[str | BaseException] = iter([KeyboardInterrupt(), "fox", EOFError()])

    def typing(prompt: str) -> str:
        entry = next(typed)
        if isinstance(entry, BaseException):
            raise entry
        return entry

    monkeypatch.setattr("builtins.input", typing)
    result = draftc("chat", "out", terminal=True)
    assert (result.code, result.out) == (0, "FOX\n")
    assert "Ctrl-D or /exit ends the chat" in result.err
    assert bundle.engine.closed == 1


def test_show_drafts(draftc: Draftc, folder: Path) -> None:
    draftc.with_bundle(folder)
    result = draftc("chat", "out", "--show-drafts", stdin="hello\n")
    assert "{+" in result.out
    assert "{+accepted+}" in result.err


def test_without_a_chat_template(draftc: Draftc, byte_level_folder: Path) -> None:
    bundle = draftc.with_bundle(byte_level_folder)
    result = draftc("chat", "out", stdin="hello\n")
    assert (result.code, result.out) == (2, "")
    assert one_line(result.err).startswith("draftc: this checkpoint has no chat template")
    assert bundle.engine.closed == 1
