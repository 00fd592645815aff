"""`draftc run` and `draftc inspect`: a real session over scripted engines, called as from a shell."""

import errno
import hashlib
import inspect
import io
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from draftc.runtime import cli_options
from draftc.runtime.cli import build_app
from draftc.runtime.errors import BackendUnavailableError, DraftcWarning, UsageError
from draftc.runtime.graphio import GraphSpec
from draftc.runtime.inspection import human_bytes, tensor_rows
from draftc.runtime.manifest import (
    FileEntry,
    Manifest,
    NgramDraft,
    PairSummary,
    ParityReport,
    Quantization,
    to_json,
)
from draftc.runtime.opening import open_session
from draftc.runtime.prompts import builtin_prompts, load_prompts
from draftc.runtime.request import Options
from draftc.runtime.session import Session
from tests.runtime.cli_fakes import Draftc, FakeBundle, Terminal, chat_folder, manifest_for, one_line
from tests.runtime.fakes import FakeEngine

PROMPT = "the quick brown fox"
ANSWER = "Hello world! def fib(n): return n\nthe lazy dog"


@pytest.fixture
def draftc(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Draftc:
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    return Draftc(monkeypatch, capsys)


@pytest.fixture
def bundle(draftc: Draftc, byte_level_folder: Path, tmp_path: Path) -> FakeBundle:
    """Opened by every command of the test: answers any prompt of PROMPT's length with ANSWER."""
    folder = chat_folder(byte_level_folder, tmp_path / "tokenizer")
    return draftc.with_bundle(folder, answer=lambda _: ANSWER, prompt=PROMPT)


def pieces(bundle: FakeBundle, text: str = ANSWER) -> list[str]:
    """What each token of `text` shows."""
    return [bundle.tokenizer.token_text(token) for token in bundle.tokenizer.encode(text)]


# draftc run: text and figures


def test_run_writes_text_to_stdout_and_figures_to_stderr(draftc: Draftc, bundle: FakeBundle) -> None:
    result = draftc("run", "out", "-p", PROMPT)
    assert (result.code, result.out) == (0, ANSWER + "\n")
    figures = one_line(result.err)
    tokens = len(pieces(bundle)) + 1  # with the end token
    assert figures.startswith(f"{tokens} tokens, ")
    assert "acceptance 100%" in figures
    assert "first token " in figures
    assert figures.endswith("finish reason stop")
    assert "seed" not in figures, "greedy decoding has no use for one"
    assert bundle.target.prompts[0] == PROMPT
    assert bundle.engine.closed == 1


def test_run_streams_piece_by_piece(draftc: Draftc, bundle: FakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a verification added is written and flushed before the next one begins."""
    log: list[str] = []

    class Recorder(io.StringIO):
        def write(self, text: str) -> int:
            log.append(text)
            return super().write(text)

        def flush(self) -> None:
            log.append("<flush>")

    recorder = Recorder()
    monkeypatch.setattr(sys, "stdout", recorder)
    bundle.target.on_token = lambda index: log.append("<call>")
    draftc("run", "out", "-p", PROMPT, "--plain")
    written = [entry for entry in log if not entry.startswith("<")]
    assert written == [*pieces(bundle), "\n"]
    for entry, following in pairwise(log):
        assert entry.startswith("<") or following == "<flush>", log


def test_run_says_nothing_of_acceptance_where_nothing_is_proposed(draftc: Draftc, bundle: FakeBundle) -> None:
    figures = one_line(draftc("run", "out", "-p", PROMPT, "--plain").err)
    assert "accept" not in figures
    assert "nan" not in figures


def test_run_without_figures(draftc: Draftc, bundle: FakeBundle) -> None:
    assert draftc("run", "out", "-p", PROMPT, "--no-stats").err == ""


def test_run_names_the_seed_of_a_sampled_answer(draftc: Draftc, bundle: FakeBundle) -> None:
    sampled = draftc("run", "out", "-p", PROMPT, "--temperature", "0.1", "--seed", "7")
    assert "seed 7" in one_line(sampled.err)


def test_run_json(draftc: Draftc, bundle: FakeBundle) -> None:
    result = draftc("run", "out", "-p", PROMPT, "--json", "--no-stats", "--seed", "3", "--logprobs", "-n", "4")
    record = json.loads(result.out)
    ids = bundle.tokenizer.encode(ANSWER)[:4]
    assert record["text"] == bundle.tokenizer.decode(ids)
    assert (record["token_ids"], record["finish_reason"], record["seed"]) == (ids, "length", 3)
    assert len(record["logprobs"]) == 4
    assert all(value < 0 for value in record["logprobs"])
    stats = record["stats"]
    assert (stats["prompt_tokens"], stats["new_tokens"]) == (len(bundle.tokenizer.encode(PROMPT)), 4)
    assert stats["steps"] == 1, "one token from the prefill, then two proposals and the bonus token"
    assert (stats["proposed"], stats["accepted"], stats["acceptance_by_position"]) == (2, 2, [1.0, 1.0])
    assert stats["mean_acceptance_length"] == 3.0
    assert {"ttft", "tpot", "tokens_per_second", "draft_s", "verify_s", "accept_s", "other_s"} <= stats.keys()


def test_run_json_has_null_for_what_is_undefined(draftc: Draftc, bundle: FakeBundle) -> None:
    record = json.loads(draftc("run", "out", "-p", PROMPT, "--json", "-n", "1").out)
    assert record["logprobs"] is None
    assert record["stats"]["acceptance_rate"] is None
    assert record["stats"]["tpot"] is None


def test_run_passes_every_option_on(draftc: Draftc, bundle: FakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    stream = bundle.session.stream

    def spy(prompt: Any, **options: Any) -> Any:
        seen.update(options)
        return stream(prompt, **options)

    monkeypatch.setattr(bundle.session, "stream", spy)
    line = (
        "-n 9 --temperature 0 --top-k 5 --top-p 0.9 --min-p 0.01 --repetition-penalty 1 --presence-penalty 0 "
        "--frequency-penalty 0 --seed 0 --stop dog --stop cat --ignore-eos --echo --method ngram -k 3 --device cuda "
        "--target-device cuda:1 --draft-device cpu --threads 2 --no-cuda-graph --provider-option gpu_mem_limit=1000 "
        "--provider-option arena_extend_strategy=a=b --no-check-hashes --no-tune"
    )
    result = draftc("run", "out", "-p", PROMPT, *line.split())
    assert result.code == 0, result.err
    assert {name: value for name, value in seen.items() if value is not False} == {  # flags that were not given
        "max_new_tokens": 9,
        "temperature": 0.0,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": 0,
        "stop": ["dog", "cat"],
        "ignore_eos": True,
        "echo": True,
        "method": "ngram",
        "num_speculative_tokens": 3,
    }
    assert callable(bundle.opened.pop("on_progress"))
    assert bundle.opened == {
        "path": Path("out"),
        "device": "cuda",
        "target_device": "cuda:1",
        "draft_device": "cpu",
        "threads": 2,
        "cuda_graph": False,
        "provider_options": {"gpu_mem_limit": "1000", "arena_extend_strategy": "a=b"},
        "check_hashes": False,
        "tune": False,
    }
    assert result.out.startswith(PROMPT + pieces(bundle)[0])


@pytest.mark.parametrize("line", ["run out -p x", "chat out", "verify out", "bench out", "tune out"])
def test_every_command_opens_where_it_is_told(draftc: Draftc, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    seen: dict[str, Any] = {}

    def opened(path: Path, **arguments: Any) -> Any:
        seen.update(arguments)
        raise BackendUnavailableError("no such device")

    monkeypatch.setattr("draftc.runtime.open", opened)
    general: dict[str, Any] = {"threads": None, "cuda_graph": True, "provider_options": {}, "check_hashes": True}
    general["tune"] = line != "tune out"  # which measures anyway
    for options, expected in (
        ("", {"device": None, "target_device": None, "draft_device": None}),
        ("--draft-device cpu --target-device cuda", {"device": None, "target_device": "cuda", "draft_device": "cpu"}),
        ("--device cuda", {"device": "cuda", "target_device": None, "draft_device": None}),
    ):
        result = draftc(*line.split(), *options.split())
        assert one_line(result.err) == "draftc: no such device"
        assert callable(seen.pop("on_progress", print))
        assert seen == expected | general


@pytest.mark.parametrize("option", ["gpu_mem_limit", "=8", ""])
def test_a_provider_option_is_a_key_and_a_value(draftc: Draftc, bundle: FakeBundle, option: str) -> None:
    result = draftc("run", "out", "-p", PROMPT, "--provider-option", option)
    assert result.code == 2
    assert one_line(result.err).endswith(f"takes KEY=VALUE, as gpu_mem_limit=8589934592, got {option!r}")


def test_what_costs_more_than_was_asked_for_is_a_note(
    draftc: Draftc, bundle: FakeBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(path: Path, **arguments: Any) -> Any:
        warnings.warn("runs without CUDA graphs:\n  no", DraftcWarning, stacklevel=1)
        warnings.warn("somebody else's", UserWarning, stacklevel=1)
        return bundle(path, **arguments)

    monkeypatch.setattr("draftc.runtime.open", opened)
    with pytest.warns(UserWarning, match="somebody else's"):
        result = draftc("run", "out", "-p", PROMPT, "-n", "1", "--no-stats")
    assert result.code == 0
    assert one_line(result.err) == "draftc: note: runs without CUDA graphs: no"


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        ("--temperature nan", "temperature"),
        ("--top-p 0", "top_p"),
        ("--top-k -1", "top_k"),
        ("-n 0", "max_new_tokens"),
        ("-n 1000", "1000"),
        ("-k 8", "num_speculative_tokens"),
        ("-k 0", "num_speculative_tokens"),
        ("--method medusa", "medusa"),
        ("--plain --method ngram", "--plain"),
        ("--plain -k 3", "--plain"),
        ("--show-drafts --json", "--show-drafts"),
        ("--logprobs", "--json"),
        ("--no-chat --system s", "--system"),
        ("--prompt-file x", "--prompt-file"),
    ],
)
def test_run_refuses_in_one_line(draftc: Draftc, bundle: FakeBundle, arguments: str, cause: str) -> None:
    result = draftc("run", "out", "-p", PROMPT, *arguments.split())
    assert (result.code, result.out) == (2, "")
    message = one_line(result.err)
    assert message.startswith("draftc: ")
    assert cause in message


# draftc run: where the prompt comes from


def test_prompt_from_standard_input_or_a_file(draftc: Draftc, bundle: FakeBundle, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbf" + PROMPT.encode() + b"\n")
    answers = [
        draftc("run", "out", stdin=PROMPT + "\n"),
        draftc("run", "out", "--prompt-file", "-", stdin=PROMPT),
        draftc("run", "out", "--prompt-file", str(file), stdin="not this"),
    ]
    for answer in answers:
        assert (answer.code, answer.out) == (0, ANSWER + "\n")
    assert [prompt for prompt in bundle.target.prompts if prompt != PROMPT] == []


def test_only_one_newline_is_taken_off_the_prompt(draftc: Draftc, bundle: FakeBundle) -> None:
    bundle.target.prompt_tokens = len(bundle.tokenizer.encode(PROMPT + "\n"))
    draftc("run", "out", "-n", "1", stdin=PROMPT + "\n\n")
    assert bundle.target.prompts == [PROMPT + "\n"]


def test_no_prompt_on_a_terminal_is_an_error(draftc: Draftc, bundle: FakeBundle) -> None:
    result = draftc("run", "out", terminal=True)
    assert result.code == 2
    assert "no prompt: give -p TEXT" in one_line(result.err)


def test_prompt_files_that_cannot_be_used(draftc: Draftc, bundle: FakeBundle, tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes("naïve".encode("latin-1"))
    result = draftc("run", "out", "--prompt-file", str(latin))
    assert result.code == 2
    assert "latin.txt: the prompt is not utf-8 text, at byte 2" in one_line(result.err)
    result = draftc("run", "out", "--prompt-file", str(tmp_path / "none.txt"))
    assert result.code == 2
    assert one_line(result.err).endswith("none.txt: No such file or directory")


def test_chat_and_system_go_through_the_template(
    draftc: Draftc, bundle: FakeBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    encode = Session.encode

    def spy(session: Session, prompt: Any) -> list[int]:
        asked.append(prompt)
        return encode(session, prompt)

    monkeypatch.setattr(Session, "encode", spy)
    for arguments in (["--chat"], ["--system", "Be brief."], ["--chat", "--system", "Be brief."], ["--no-chat"]):
        assert draftc("run", "out", "-p", PROMPT, *arguments).out == ANSWER + "\n"
    user = {"role": "user", "content": PROMPT}
    system = {"role": "system", "content": "Be brief."}
    assert asked == [[user], [system, user], [system, user], PROMPT]


def test_chat_without_a_template_is_one_line(draftc: Draftc, byte_level_folder: Path) -> None:
    draftc.with_bundle(byte_level_folder)
    result = draftc("run", "out", "--chat", "-p", PROMPT)
    assert result.code == 2
    assert "chat template" in one_line(result.err)


# draftc run --show-drafts


def marked(bundle: FakeBundle, form: dict[str, tuple[str, str]]) -> str:
    """ANSWER as it must look at K = 2 when the drafter is wrong about token 5, and the answer is cut after 9."""
    p = pieces(bundle)
    runs = [
        ("plain", p[0:1]),  # from the prefill
        ("accepted", p[1:3]),
        ("bonus", p[3:4]),
        ("accepted", p[4:5]),
        ("corrected", p[5:6]),
        ("accepted", p[6:8]),
        ("bonus", p[8:9]),
    ]
    return "".join(form[kind][0] + "".join(run) + form[kind][1] for kind, run in runs)


def test_show_drafts_marks_tokens_without_colours(draftc: Draftc, bundle: FakeBundle) -> None:
    bundle.draft.wrong = {5}
    result = draftc("run", "out", "-p", PROMPT, "-n", "9", "--show-drafts")
    form = {"plain": ("", ""), "accepted": ("{+", "+}"), "corrected": ("{!", "!}"), "bonus": ("{*", "*}")}
    assert result.out == marked(bundle, form) + "\n"
    for kind in ("{+accepted+}", "{!corrected!}", "{*bonus*}", "plain"):
        assert kind in result.err, "the legend explains it"


@pytest.mark.parametrize(("no_color", "coloured"), [(None, True), ("1", False)])
def test_show_drafts_colours_on_a_terminal_unless_no_color_is_set(
    draftc: Draftc, bundle: FakeBundle, monkeypatch: pytest.MonkeyPatch, no_color: str | None, coloured: bool
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich's word for "treat it as a terminal"
    if no_color:
        monkeypatch.setenv("NO_COLOR", no_color)
    bundle.draft.wrong = {5}
    result = draftc("run", "out", "-p", PROMPT, "-n", "9", "--show-drafts", "--no-stats")
    if coloured:
        form = {
            name: (f"\x1b[{code}m", "\x1b[0m") for name, code in (("accepted", 32), ("corrected", 33), ("bonus", 36))
        }
        assert result.out == marked(bundle, {"plain": ("", ""), **form}) + "\n"
    else:
        assert "\x1b" not in result.out + result.err
        assert "{!" in result.out


# draftc run: terminals, interrupts


def test_a_terminal_gets_no_control_characters_from_the_model(
    draftc: Draftc, byte_level_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = "a\x1b]0;title\x07\x9b2J\tb\r\nc\x7f"
    draftc.with_bundle(byte_level_folder, answer=lambda _: hostile, prompt=PROMPT)
    assert draftc("run", "out", "-p", PROMPT).out == hostile + "\n", "a pipe gets the text as it is"
    draftc.with_bundle(byte_level_folder, answer=lambda _: hostile, prompt=PROMPT)
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    draftc("run", "out", "-p", PROMPT)
    assert screen.getvalue() == "a␛]0;title␇\ufffd2J\tb\nc␡\n"


def interrupt_at(bundle: FakeBundle, index: int) -> None:
    """Press Ctrl-C while the target computes answer token `index`."""
    pressed: list[int] = []

    def press(at: int) -> None:
        if at == index and not pressed:
            pressed.append(at)
            os.kill(os.getpid(), signal.SIGINT)

    bundle.target.on_token = press


def test_ctrl_c_ends_the_answer_after_the_verification_in_progress(draftc: Draftc, bundle: FakeBundle) -> None:
    before = signal.getsignal(signal.SIGINT)
    interrupt_at(bundle, 2)
    result = draftc("run", "out", "-p", PROMPT)
    assert result.code == 130
    assert result.out == "".join(pieces(bundle)[:4]) + "\n", "one token of the prefill, two accepted and the bonus"
    assert one_line(result.err).endswith("finish reason cancelled")
    assert bundle.engine.closed == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_with_json_prints_what_there_is(draftc: Draftc, bundle: FakeBundle) -> None:
    interrupt_at(bundle, 2)
    result = draftc("run", "out", "-p", PROMPT, "--json", "--no-stats")
    assert result.code == 130
    record = json.loads(result.out)
    assert (record["text"], record["finish_reason"]) == ("".join(pieces(bundle)[:4]), "cancelled")


def test_ctrl_c_in_the_prefill_ends_at_once(draftc: Draftc, bundle: FakeBundle) -> None:
    interrupt_at(bundle, 0)
    result = draftc("run", "out", "-p", PROMPT)
    assert (result.code, result.out, result.err) == (130, "", "\n")
    assert bundle.engine.closed == 1


def test_an_interrupt_inside_an_engine_keeps_the_text_so_far(draftc: Draftc, bundle: FakeBundle) -> None:
    bundle.engine.faults[2] = KeyboardInterrupt()
    result = draftc("run", "out", "-p", PROMPT)
    assert (result.code, result.out, result.err) == (130, "".join(pieces(bundle)[:4]), "\n")
    assert bundle.engine.closed == 1


def test_an_engine_that_fails_in_mid_answer(draftc: Draftc, bundle: FakeBundle) -> None:
    bundle.engine.faults[1] = float("nan")
    result = draftc("run", "out", "-p", PROMPT)
    assert result.code == 2
    assert one_line(result.err).startswith("draftc: the graph returned nan")
    assert bundle.engine.closed == 1


# draftc verify


@dataclass(frozen=True)
class FakeReport:
    """As much of a VerifyReport as the command looks at."""

    passed: bool

    def to_dict(self) -> dict[str, Any]:
        return {"passed": self.passed}


@pytest.fixture
def verified(bundle: FakeBundle, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], dict[str, Any]]:
    """Let verification end with a verdict; returns the arguments that it gets."""

    def outcome(passed: bool) -> dict[str, Any]:
        seen: dict[str, Any] = {}

        def verify(session: Session, *, on_progress: Callable[[str, float], None], **arguments: Any) -> FakeReport:
            assert session is bundle.session
            seen.update(arguments)
            on_progress("greedy", 0.5)
            return FakeReport(passed)

        monkeypatch.setattr("draftc.runtime.selfcheck.verify", verify)
        monkeypatch.setattr("draftc.runtime.selfcheck.render", lambda report: f"passed: {report.passed}")
        return seen

    return outcome


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
def test_verify_says_the_verdict_by_report_and_exit_code(
    draftc: Draftc, bundle: FakeBundle, verified: Callable[[bool], dict[str, Any]], passed: bool, code: int
) -> None:
    verified(passed)
    result = draftc("verify", "out")
    assert (result.code, result.out, result.err) == (code, f"passed: {passed}\n", "")
    result = draftc("verify", "out", "--json")
    assert (result.code, json.loads(result.out)) == (code, {"passed": passed})
    result = draftc("verify", "out", "--quiet")
    assert (result.code, result.out, result.err) == (code, "", "")
    assert bundle.engine.closed == 1


def test_an_opening_that_measures_says_so_once_where_no_bar_can_be_seen(
    draftc: Draftc, bundle: FakeBundle, verified: Callable[[bool], dict[str, Any]]
) -> None:
    verified(True)
    bundle.measures = True
    assert "--no-tune" in one_line(draftc("verify", "out").err)
    assert draftc("verify", "out", "--quiet").err == ""


def test_verify_passes_its_options_on(
    draftc: Draftc, bundle: FakeBundle, verified: Callable[[bool], dict[str, Any]], tmp_path: Path
) -> None:
    seen = verified(True)
    draftc("verify", "out")
    assert seen == {"prompts": builtin_prompts(bundle.session), "budget_s": 60.0, "seed": 0}
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "prompt": "fox"}\n', encoding="utf-8")
    draftc("verify", "out", "--prompts", str(prompts), "--budget", "2.5", "--seed", "9", "--threads", "1")
    assert seen == {"prompts": load_prompts(prompts), "budget_s": 2.5, "seed": 9}
    assert bundle.opened["threads"] == 1


def test_verify_refuses_prompts_that_it_cannot_read(draftc: Draftc, bundle: FakeBundle, tmp_path: Path) -> None:
    result = draftc("verify", "out", "--prompts", str(tmp_path / "none.jsonl"))
    assert result.code == 2
    assert "none.jsonl" in one_line(result.err)


# draftc bench


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """A file of two prompts that the scripted engines answer."""
    file = tmp_path / "prompts.jsonl"
    lines = [{"id": name, "messages": [{"role": "user", "content": name}]} for name in ("hello", "the lazy dog")]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return file


def test_bench_measures_every_mode_on_every_prompt(draftc: Draftc, bundle: FakeBundle, chats: Path) -> None:
    line = f"out --prompts {chats} -k 1,3 --method draft_model -n 6 --repeats 2 --json"
    result = draftc("bench", *line.split())
    assert (result.code, result.err) == (0, "")
    report = json.loads(result.out)
    modes = ["plain", "draft_model-k1", "draft_model-k3"]
    runs = [(record["id"], record["mode"]) for record in report["records"]]
    assert runs == [(name, mode) for name in ("hello", "the lazy dog") for mode in modes]
    assert {len(record["decode_s_runs"]) for record in report["records"]} == {2}
    assert {record["new_tokens"] for record in report["records"]} == {6}
    assert (report["max_new_tokens"], report["sampling"]["temperature"]) == (6, 0.0)
    assert bundle.engine.closed == 1


def test_bench_prints_a_table_and_writes_a_file(
    draftc: Draftc, bundle: FakeBundle, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS")
    line = f"out --prompts {chats} -n 6 --repeats 1 --temperature 0.5 --top-p 0.9 --seed 4 --threads 2"
    result = draftc("bench", *line.split(), "--json-file", str(tmp_path / "bench.json"))
    assert (result.code, result.err) == (0, "")
    report = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert [total["mode"] for total in report["totals"]] == ["plain", "draft_model-k2", "ngram-k2"]
    for total in report["totals"]:
        assert any(line.startswith(f"{total['mode']} ") for line in result.out.splitlines()), "one row, not cut"
    assert (report["sampling"]["temperature"], report["sampling"]["top_p"], report["seed"]) == (0.5, 0.9, 4)
    assert report["machine"]["threads"] == 2


def test_bench_finds_out_first_whether_its_file_can_be_written(
    draftc: Draftc, bundle: FakeBundle, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def fails(*_: object, **__: object) -> None:
        ran.append("bench")
        raise UsageError("stop here")

    monkeypatch.setattr("draftc.runtime.bench.bench", fails)
    assert draftc("bench", "out", "--prompts", str(chats), "--json-file", str(tmp_path)).code == 2
    assert ran == []
    earlier, new = tmp_path / "earlier.json", tmp_path / "new.json"
    earlier.write_text("figures of yesterday", encoding="utf-8")
    for file in (earlier, new):
        draftc("bench", "out", "--prompts", str(chats), "--json-file", str(file))
    assert ran == ["bench", "bench"]
    assert earlier.read_text(encoding="utf-8") == "figures of yesterday", "a run that failed takes nothing away"
    assert not new.exists()


def test_bench_shows_its_figures_even_if_the_file_cannot_be_written_in_the_end(
    draftc: Draftc, bundle: FakeBundle, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, *_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", full)
    line = f"out --prompts {chats} -n 6 --repeats 1 --json-file {tmp_path / 'bench.json'}"
    result = draftc("bench", *line.split())
    assert result.code == 2
    assert "No space left on device" in one_line(result.err)
    assert "draft_model-k2" in result.out


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        ("-k 3,x", "'3,x'"),
        ("-k 9", "got 9"),
        ("--repeats 0", "repeats"),
        ("--method medusa", "medusa"),
        ("--temperature -1", "temperature"),
        ("--json-file no/such/folder.json", "no/such/folder.json: No such file or directory"),
        ("--json-file .", "--json-file .: Is a directory"),
    ],
)
def test_bench_refuses_in_one_line(draftc: Draftc, bundle: FakeBundle, chats: Path, arguments: str, cause: str) -> None:
    result = draftc("bench", "out", "--prompts", str(chats), *arguments.split())
    assert (result.code, result.out) == (2, "")
    message = one_line(result.err)
    assert message.startswith("draftc: ")
    assert cause in message


# draftc inspect


def write_bundle(folder: Path, **changes: Any) -> Manifest:
    """A bundle whose manifest is whole and whose graphs are no graphs at all."""
    manifest = replace(manifest_for(420, FakeEngine(lambda _: None, 420, 72), max_length=64, k=2), **changes)  # type: ignore[arg-type, return-value]
    contents = {"target/model.onnx": b"target", "draft/model.onnx": b"draft!", "tokenizer/tokenizer.json": b"{}"}
    if isinstance(manifest.draft, NgramDraft):
        del contents["draft/model.onnx"]
    entries = []
    for path, content in contents.items():
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_bytes(content)
        entries.append(FileEntry(path=path, size=len(content), sha256=hashlib.sha256(content).hexdigest()))
    manifest = replace(manifest, files=tuple(entries))
    (folder / "bundle.json").write_text(to_json(manifest), encoding="utf-8")
    return manifest


def quantized(manifest: Manifest) -> dict[str, Any]:
    quantization = Quantization(
        bits=4,
        block_size=32,
        symmetric=True,
        embedding="shared",
        accuracy_level=4,
        quantized_matmuls=211,
        float_matmuls=("lm_head",),
    )
    return {"precision": "int4", "target": replace(manifest.target, quantization=quantization, rope="longrope, long")}


def test_inspect_shows_what_is_in_the_bundle(draftc: Draftc, tmp_path: Path) -> None:
    plain = write_bundle(tmp_path / "plain")
    changes = quantized(plain) | {
        "parity": (
            ParityReport(
                graph="target",
                stage="capture",
                layers=2,
                tokens=48,
                max_abs_diff=3.5e-5,
                kl=1e-9,
                greedy_agreement=1.0,
                tolerance=1e-3,
            ),
            ParityReport(
                graph="target",
                stage="quantize",
                layers=30,
                tokens=96,
                max_abs_diff=4.5,
                kl=0.33,
                greedy_agreement=0.75,
                tolerance=1.0,
            ),
        ),
        "pair": PairSummary(draft_cost_ratio=0.33, predicted_speedup={"0.7": 1.42}),
        "licenses": ("apache-2.0",),
    }
    write_bundle(tmp_path / "out", **changes)
    result = draftc("inspect", str(tmp_path / "out"))
    assert (result.code, result.err) == (0, "")
    words = " ".join(result.out.split())
    for fact in (
        "int4",
        "4 bits, blocks of 32, symmetric, accuracy level 4; rounded to nearest; 211 MatMuls",
        "float MatMuls lm_head all",
        "embedding as the output head",
        "longrope, long",
        "llama",
        "1.5 M",
        "onnxruntime 1.32.0, opset 24, on cpu",
        "draft model, K = 2",
        "64 of prompt and answer together",
        "L 72 in every cache buffer",
        "420 of 423 rows",
        "1 layers, 1.2 kB",  # 2 tensors x 1 head x 72 x 2 x 4 bytes
        "past_key_values.0.key float32 (B, 1, 72, 2)",
        "target capture 2 48 3.5e-05 Δ ≤ 0.001 1e-09 100.0%",
        "target quantize 30 96 4.5 KL ≤ 1 0.33 75.0%",
        "0.33 of a target step",
        "1.42x at 0.7",
        "folder: models/tiny",
        "apache-2.0",
        "0123456789abcdef…",
        "3, 14 B",
    ):
        assert fact in words, fact
    assert "tokenizer.json" not in words, "files are listed on request"


def test_inspect_files(draftc: Draftc, tmp_path: Path) -> None:
    write_bundle(tmp_path / "out")
    words = " ".join(draftc("inspect", str(tmp_path / "out"), "--files").out.split())
    assert f"target/model.onnx 6 {hashlib.sha256(b'target').hexdigest()[:16]}…" in words


def test_inspect_is_readable_at_80_columns(draftc: Draftc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = write_bundle(tmp_path / "plain")
    write_bundle(tmp_path / "out", **quantized(manifest))
    monkeypatch.setenv("COLUMNS", "80")
    result = draftc("inspect", str(tmp_path / "out"), "--files")
    assert max(len(line) for line in result.out.splitlines()) <= 80
    assert "models/tiny" in result.out


def test_inspect_an_ngram_bundle(draftc: Draftc, tmp_path: Path) -> None:
    write_bundle(tmp_path / "out", draft=NgramDraft(min_ngram=2, max_ngram=4))
    words = " ".join(draftc("inspect", str(tmp_path / "out")).out.split())
    assert "n-grams of 2 to 4 tokens, K = 2" in words
    assert "Tensors of the draft graph" not in words


def test_inspect_json_is_the_manifest_and_what_follows_from_it(draftc: Draftc, tmp_path: Path) -> None:
    manifest = write_bundle(tmp_path / "out")
    record = json.loads(draftc("inspect", str(tmp_path / "out"), "--json").out)
    derived = record.pop("derived")
    assert record == json.loads(to_json(manifest))
    assert derived == {"buffer_length": 72, "kv_bytes": {"target": 1152, "draft": 1152}, "file_bytes": 14}


def test_inspect_compares_hashes_unless_told_not_to(draftc: Draftc, tmp_path: Path) -> None:
    write_bundle(tmp_path / "out")
    (tmp_path / "out/target/model.onnx").write_bytes(b"tarGet")
    result = draftc("inspect", str(tmp_path / "out"))
    assert result.code == 2
    assert "target/model.onnx" in one_line(result.err)
    assert draftc("inspect", str(tmp_path / "out"), "--no-check-hashes").code == 0


def test_inspect_takes_no_markup_from_a_manifest(draftc: Draftc, tmp_path: Path) -> None:
    write_bundle(tmp_path / "out", name="[red]loud[/red] [link=x]")
    assert "[red]loud[/red] [link=x]" in draftc("inspect", str(tmp_path / "out")).out


def test_tensor_rows_join_layers_that_are_alike() -> None:
    """As in models where some layers have fewer heads."""
    spec = GraphSpec.decoder([(2, 8, 8), (2, 8, 8), (1, 8, 8), (2, 8, 8)], 40, 100, "float16")
    assert tensor_rows(spec.outputs) == [
        ("logits", "float32", "(B, R, 100)"),
        ("present.0…1.key", "float16", "(B, 2, 40, 8)"),
        ("present.0…1.value", "float16", "(B, 2, 40, 8)"),
        ("present.2.key", "float16", "(B, 1, 40, 8)"),
        ("present.2.value", "float16", "(B, 1, 40, 8)"),
        ("present.3.key", "float16", "(B, 2, 40, 8)"),
        ("present.3.value", "float16", "(B, 2, 40, 8)"),
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (538_100_000, "538.1 MB"), (10**12, "1000.0 GB")],
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text


# Help


OPTIONS = {
    "run": "--prompt -p --prompt-file --chat --no-chat --system --max-new-tokens -n --temperature --top-k --top-p "
    "--min-p --repetition-penalty --presence-penalty --frequency-penalty --seed --stop --ignore-eos --echo --plain "
    "--method -k --show-drafts --logprobs --json --threads --device --target-device --draft-device "
    "--no-cuda-graph --provider-option --no-check-hashes --stats --no-stats",
    "chat": "--system --max-new-tokens --temperature --seed --stop --show-drafts --stats --plain --method -k --threads",
    "verify": "--prompts --budget --seed --json --quiet --threads --no-check-hashes",
    "bench": "--prompts -k --method -n --max-new-tokens --repeats --temperature --top-k --top-p --seed --json --quiet",
    "inspect": "--json --files --no-check-hashes",
}


@pytest.mark.parametrize("command", OPTIONS)
def test_help_explains_every_option(draftc: Draftc, command: str) -> None:
    shown = draftc(command, "--help").out
    assert set(OPTIONS[command].split()) <= set(shown.split())
    assert f"draftc {command} out" in shown, "an example"
    parameters = getattr(typer.main.get_command(build_app()), "commands", {})[command].params
    assert [p.name for p in parameters if not p.help] == []
    assert {option for p in parameters for option in p.opts if option.startswith("-")} <= set(shown.split())


def test_options_in_groups_carry_the_apis_names() -> None:
    asked = {field.name for field in fields(cli_options.Opening)}
    assert asked == inspect.signature(open_session).parameters.keys() - {"path", "on_progress"}
    asked = {field.name for field in fields(cli_options.Decoding)}
    assert asked - {"plain"} <= Options.__annotations__.keys()
