"""scripts/bench_peers.py without the peers: its arithmetic, its prompts, and whole runs with a made-up worker."""

import fcntl
import gzip
import importlib
import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("peer_report")


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("peer_prompts")


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("peer_children")


@pytest.fixture
def document(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("peer_document")


def make_record(report: Any, setting: str, prompt: str, **changed: Any) -> Any:
    """11 tokens: one with a prefill of 1 s, ten in 2 s."""
    system, mode = setting.split()
    values: dict[str, Any] = {
        **{"group": 0, "kind": "H", "id": prompt, "system": system, "mode": mode, "repeat": 0},
        **{"prompt_tokens": 5, "new_tokens": 11, "decode_tokens": 10, "prefill_s": 1.0, "decode_s": 2.0},
        **{"target_calls": 10, "proposed": None, "accepted": None, "peak_rss": 100, "others_cpu_s": 0.0},
        "token_ids": (1, 2, 3),
    }
    return report.Record(**(values | changed))


def totals_of(report: Any, *records: Any) -> dict[str, Any]:
    return {total.name: total for total in report.totals(records)}


def test_rates_are_sums_of_tokens_over_sums_of_times(report: Any) -> None:
    records = [
        make_record(report, "a plain", "p"),
        make_record(report, "a plain", "q", new_tokens=101, decode_tokens=100, decode_s=5.0, prefill_s=3.0),
    ]
    total = totals_of(report, *records)["a plain"]
    assert total.decode_tokens_per_s == pytest.approx(110 / 7)
    assert total.end_to_end_tokens_per_s == pytest.approx(112 / 11)
    assert (total.prompts, total.new_tokens, total.prefill_s) == (2, 112, 4.0)


def test_repeats_count_once_with_their_medians(report: Any) -> None:
    times = ((1.0, 9.0), (3.0, 2.0), (2.0, 4.0))
    records = [
        make_record(report, "a plain", "p", repeat=i, prefill_s=prefill, decode_s=decode, peak_rss=100 * i)
        for i, (prefill, decode) in enumerate(times)
    ]
    total = totals_of(report, *records)["a plain"]
    assert total.decode_tokens_per_s == pytest.approx(10 / 4)
    assert total.end_to_end_tokens_per_s == pytest.approx(11 / 6)
    assert total.peak_rss == 200
    assert total.prompts == 1


def test_ratios_to_plain_and_the_worst_prompt(report: Any) -> None:
    records = [
        make_record(report, "a plain", "p"),
        make_record(report, "a plain", "q"),
        make_record(report, "a ngram-8", "p", decode_s=0.5, target_calls=4, proposed=12, accepted=6),
        make_record(report, "a ngram-8", "q", decode_s=4.0, target_calls=10, proposed=20, accepted=2),
    ]
    found = totals_of(report, *records)
    ngram = found["a ngram-8"]
    assert ngram.decode_vs_plain == pytest.approx((20 / 4.5) / (20 / 4))
    assert ngram.worst_decode_vs_plain == pytest.approx(0.5)
    assert ngram.worst_end_to_end_vs_plain == pytest.approx(3 / 5)
    assert ngram.tokens_per_call == pytest.approx(20 / 14)
    assert ngram.acceptance_rate == pytest.approx(8 / 32)
    assert found["a plain"].decode_vs_plain == 1
    assert found["a plain"].acceptance_rate != found["a plain"].acceptance_rate  # NaN: it proposes nothing


def test_a_prompt_that_only_one_setting_has_run_is_not_compared(report: Any) -> None:
    records = [
        make_record(report, "a plain", "p"),
        make_record(report, "a ngram-8", "p", decode_s=1.0),
        make_record(report, "a ngram-8", "q", decode_s=100.0),
    ]
    assert totals_of(report, *records)["a ngram-8"].decode_vs_plain == pytest.approx(2)


def test_what_a_system_does_not_tell_is_left_open(report: Any) -> None:
    total = totals_of(report, make_record(report, "a ngram-8", "p", target_calls=None))["a ngram-8"]
    assert total.tokens_per_call != total.tokens_per_call
    assert total.decode_vs_plain != total.decode_vs_plain
    assert total.identical is None


def test_identical_asks_every_repeat_of_a_prompt(report: Any) -> None:
    records = [
        make_record(report, "a plain", "p"),
        make_record(report, "a plain", "p", repeat=1),
        make_record(report, "a plain", "q"),
        make_record(report, "a ngram-8", "p"),
        make_record(report, "a ngram-8", "p", repeat=1, token_ids=(1, 2, 4)),
        make_record(report, "a ngram-8", "q"),
    ]
    assert totals_of(report, *records)["a ngram-8"].identical == 1


def test_draftc_is_compared_within_the_group_of_the_peer(report: Any) -> None:
    """The machine is ten times slower in the second group; the peer there still loses."""
    records = [
        make_record(report, "draftc default", "p", decode_s=1.0),
        make_record(report, "a plain", "p", decode_s=2.0),
        make_record(report, "draftc default", "p", group=1, decode_s=10.0),
        make_record(report, "b plain", "p", group=1, decode_s=15.0),
    ]
    found = totals_of(report, *records)
    assert found["a plain"].default_vs_this_decode == pytest.approx(2)
    assert found["b plain"].default_vs_this_decode == pytest.approx(1.5)
    assert found["b plain"].default_vs_this_end_to_end == pytest.approx(16 / 11)
    assert found["draftc default"].default_vs_this_decode == pytest.approx(1)


def test_the_best_peer_is_chosen_by_class_and_by_measure(report: Any) -> None:
    records = [
        make_record(report, "draftc default", "p", decode_s=1.0, prefill_s=0.5),
        make_record(report, "a plain", "p", decode_s=2.0, prefill_s=0.1),
        make_record(report, "b draft-4", "p", decode_s=1.6, prefill_s=9.0),
        make_record(report, "draftc default", "p", kind="W", decode_s=4.0),
        make_record(report, "a plain", "p", kind="W", decode_s=2.0),
    ]
    best = {(one.kind, one.by): one for one in report.best_peers(report.totals(records), records)}
    assert (best["H", "decode"].setting, best["H", "decode"].ratio) == ("b draft-4", pytest.approx(1.6))
    assert (best["H", "end to end"].setting, best["H", "end to end"].ratio) == ("a plain", pytest.approx(2.1 / 1.5))
    assert best["W", "decode"].ratio == pytest.approx(0.5)
    assert best["W", "decode"].default_tokens_per_s == pytest.approx(2.5)


def test_draftcs_other_modes_are_no_peers(report: Any) -> None:
    records = [make_record(report, "draftc default", "p"), make_record(report, "draftc plain", "p", decode_s=0.1)]
    assert report.best_peers(report.totals(records), records) == []


def test_merged_reports_keep_their_groups_apart(report: Any, document: Any) -> None:
    def one(prompt: str, decode_s: float) -> dict[str, Any]:
        records = [
            make_record(report, "draftc default", prompt),
            make_record(report, "a plain", prompt, decode_s=decode_s),
        ]
        head = {"versions": {}, "left_out": ["b is left out"], "prompts": [["H", prompt]], "command": prompt}
        made: dict[str, Any] = document.document({"schema": document.SCHEMA, **head}, records)
        return json.loads(json.dumps(made))  # type: ignore[no-any-return]

    merged = document.merge([one("p", 4.0), one("q", 8.0)])
    assert {record["group"] for record in merged["records"]} == {0, 1}
    assert merged["prompts"] == [["H", "p"], ["H", "q"]]
    assert merged["left_out"] == ["b is left out"]
    peer = next(total for total in merged["totals"] if total["system"] == "a")
    assert peer["default_vs_this_decode"] == pytest.approx((20 / 4) / (20 / 12))
    assert peer["tokens_per_call"] == 2 * 10 / 20


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "not of schema draftc-peers/1"),
        ('{"schema": "draftc-bench/1"}', "not of schema draftc-peers/1"),
        ('{"schema": "draftc-peers/1"}', "command is missing"),
        ("records", "records[1] is not what"),
        ("prompts", "prompts are not pairs"),
        (None, "cannot be read (No such file or directory)"),
    ],
)
def test_a_file_that_is_no_report_is_not_merged(
    report: Any, document: Any, tmp_path: Path, text: str | None, said: str
) -> None:
    whole, broken = tmp_path / "whole.json", tmp_path / "broken.json"
    good = whole_report(report, document)
    whole.write_text(json.dumps(good))
    if text == "records":
        good["records"][1]["decode_s"] = "fast"
    if text == "prompts":
        good["prompts"] = [5]
    if text is not None:
        broken.write_text(json.dumps(good) if text in good else text)
    done = run_script(tmp_path, "--merge", str(whole), str(broken))
    assert (done.returncode, done.stdout) == (2, "")
    assert_one_line(done.stderr, f"{broken}: {said}")
    assert not (tmp_path / "out.json").exists()


def test_reports_are_merged_by_the_command(report: Any, document: Any, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(whole_report(report, document)))
    done = run_script(tmp_path, "--merge", "a.json", "a.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert "someone's processor, 2 CPUs" in done.stdout
    assert len(json.loads((tmp_path / "out.json").read_text())["records"]) == 4


def whole_report(report: Any, document: Any) -> dict[str, Any]:
    """What a run of two settings and one prompt wrote."""
    head = {"schema": document.SCHEMA, "command": "bench_peers.py", "versions": {}, "left_out": [], "threads": 2}
    head |= {"machine": {"processor": "someone's processor", "cpu_count": 2}, "max_new_tokens": 128, "repeats": 1}
    records = [make_record(report, setting, "p") for setting in ("draftc default", "a plain")]
    made = json.loads(json.dumps(document.document(head | {"prompts": [["H", "p"]]}, records)))
    assert isinstance(made, dict)
    return made


def assert_one_line(text: str, said: str) -> None:
    assert text.startswith("bench_peers: ")
    assert len(text.splitlines()) == 1, text
    assert said in text


HUMANEVAL = {"HumanEval/7": {"prompt": "\ndef f(a):\n", "canonical_solution": "    return a\n"}}


def test_prompts_are_made_from_the_data_sets(prompts: Any) -> None:
    chosen = {"H": ["HumanEval/7"], "E": {"HumanEval/7": "Rename `a` to `b`."}, "W": [81]}
    made = prompts.build_prompts(chosen, HUMANEVAL, {"81": {"turns": ["Write.", "Again."]}})
    assert [(prompt.kind, prompt.id) for prompt in made] == [("H", "HumanEval/7"), ("E", "HumanEval/7"), ("W", "81")]
    task, edit, essay = (prompt.text for prompt in made)
    assert "def f(a):" in task
    assert "return a" not in task
    assert edit.startswith("Rename `a` to `b`.")
    assert "def f(a):\n    return a\n```" in edit
    assert essay == "Write."


@pytest.mark.parametrize("chosen", [{"H": ["HumanEval/8"]}, {"E": {"HumanEval/8": "Edit."}}, {"W": [82]}])
def test_an_unknown_id_is_named(prompts: Any, chosen: dict[str, Any]) -> None:
    with pytest.raises(prompts.PromptError, match="8"):
        prompts.build_prompts(chosen, HUMANEVAL, {})


@pytest.mark.parametrize(
    "text", ['{"H": 5}', '{"H": [["x"]]}', '{"W": {"a": 1}}', '{"E": ["HumanEval/7"]}', '{"E": {"HumanEval/7": 5}}']
)
def test_a_list_of_another_shape_is_refused(prompts: Any, tmp_path: Path, text: str) -> None:
    path = tmp_path / "list.json"
    path.write_text(text)
    with pytest.raises(prompts.PromptError, match=r"list\.json: [HEW] must .*: see scripts/bench_prompts\.json"):
        prompts.read_list(path)


@pytest.mark.parametrize("row", [{}, {"turns": []}, {"turns": "Write."}, {"turns": [5]}])
def test_a_row_without_its_text_is_named(prompts: Any, row: dict[str, Any]) -> None:
    if row == {"turns": "Write."}:
        assert prompts.build_prompts({"W": [81]}, {}, {"81": row})[0].text == "Write."
        return
    with pytest.raises(prompts.PromptError, match="'turns' of 81"):
        prompts.build_prompts({"W": [81]}, {}, {"81": row})


def test_a_data_set_that_was_cut_off_is_one_line(prompts: Any, tmp_path: Path) -> None:
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"task_id": "HumanEval/7"}\n' * 50)[:-12])
    with pytest.raises(prompts.PromptError, match="give --humaneval the data set's file"):
        prompts.read_lines(path, "--humaneval", "task_id")


def test_the_committed_list_has_ten_prompts_of_each_class_and_no_text_twice(prompts: Any) -> None:
    chosen = prompts.read_list(SCRIPTS / "bench_prompts.json")
    assert set(chosen) == {"H", "E", "W"}
    for items in chosen.values():
        assert len(items) >= 10
        assert len(set(items)) == len(items)
    assert not set(chosen["H"]) & set(chosen["E"])


def test_a_missing_peer_is_one_line_with_what_is_missing(children: Any, tmp_path: Path) -> None:
    places = children.Places(tmp_path, peers=tmp_path)
    lines = {system.name: children.missing(system) for system in children.systems(places)}
    assert lines["draftc"] is None
    assert str(tmp_path / "genai-b32-target") in lines["genai-b32"]
    assert "--target-gguf" in lines["llama.cpp"]
    assert all("\n" not in line for line in lines.values() if line)
    nowhere = children.Places(tmp_path, peers=tmp_path, pythons={"genai": "/no/such/python"})
    assert "/no/such/python" in children.missing(children.systems(nowhere)[1])


def test_who_waits_for_the_second_lock_lets_go_of_the_first(children: Any, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    got = threading.Event()

    def wait() -> None:
        with children.locked([first, second], patience=0.0, pause=0.01):
            got.set()

    with second.open("w") as busy:
        fcntl.flock(busy, fcntl.LOCK_EX)
        waiter = threading.Thread(target=wait, daemon=True)
        waiter.start()
        with first.open("w") as wanted:
            fcntl.flock(wanted, fcntl.LOCK_EX)  # would hang here if the waiter kept it
            assert not got.is_set()
    waiter.join(30)
    assert got.is_set()


WORKER = """#!{python}
import json, os, sys
config = json.loads(sys.stdin.readline())
ballast = b"x" * (20 << 20)
if config["mode"] == "draft-4":
    print(json.dumps({{"error": "ImportError: no draft here"}}), flush=True)
    sys.exit(1)
print(json.dumps({{"ok": True, "versions": {{"fake": "1"}}, "eos": [9]}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["do"] == "encode":
        print(json.dumps({{"ids": [len(asked["messages"][0]["content"]), 7]}}), flush=True)
        continue
    if asked["mode"] == "ngram-8" and asked["max_new_tokens"] > 8 and os.path.exists("fail"):
        print(json.dumps({{"error": "RuntimeError: out of memory"}}), flush=True)
        break
    if os.path.exists("block"):
        os.makedirs("chart.png", exist_ok=True)
    speed = {{"default": 4, "ngram-8": 2}}.get(asked["mode"], 1)
    with open(os.path.join(os.path.dirname(__file__), "calls"), "a") as log:
        log.write(json.dumps([config["system"], asked["mode"], asked["ids"], config["eos"]]) + "\\n")
    print(json.dumps({{
        "token_ids": [*asked["ids"], 9], "prefill_s": 1.0, "decode_s": 2.0 / speed, "decode_tokens": 2,
        "target_calls": 2, "proposed": None, "accepted": None, "peak_rss": 2**20,
    }}), flush=True)
"""


def run_script(folder: Path, *more: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """bench_peers.py over one HumanEval problem, with the worker above for draftc and onnxruntime-genai."""
    fake = folder / "python"
    fake.write_text(WORKER.format(python=sys.executable))
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    (folder / "list.json").write_text('{"H": ["HumanEval/7"], "E": {"HumanEval/7": "Rename."}}')
    with gzip.open(folder / "humaneval.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(json.dumps({"task_id": "HumanEval/7", **HUMANEVAL["HumanEval/7"]}) + "\n")
    command = [sys.executable, str(SCRIPTS / "bench_peers.py"), "--bundle", str(folder), "--peers", str(folder)]
    command += ["--python", f"draftc={fake}", "--python", f"genai={fake}", "--prompts", "list.json", "--pause", "0"]
    command += ["--humaneval", "humaneval.jsonl.gz", "--classes", "H,E", "--json", "out.json", "--threads", "1"]
    environment = os.environ | environment
    return subprocess.run([*command, *more], cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_without_peers_draftc_runs_alone(tmp_path: Path) -> None:
    done = run_script(tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert {record["system"] for record in report["records"]} == {"draftc"}
    assert {line.split()[0] for line in report["left_out"]} == {
        *("genai-b32", "genai-b32-nospin", "genai-b128", "genai-b128-nospin"),
        *("openvino-g32", "openvino-g128", "llama.cpp"),
    }
    assert [total["decode_vs_plain"] for total in report["totals"]] == [1, 4, 1, 4]
    assert report["best"] == []


def test_every_setting_gets_the_same_ids_prompt_by_prompt(tmp_path: Path) -> None:
    for name in ("target", "draft", "pair"):
        (tmp_path / f"genai-b32-{name}").mkdir()
    done = run_script(tmp_path, "--systems", "genai-b32", "--repeats", "2")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    settings = {"draftc plain", "draftc default", "genai-b32 plain", "genai-b32 ngram-8"}
    records = report["records"]
    assert [record["kind"] for record in records] == ["H"] * 8 + ["E"] * 8
    for start in range(0, len(records), 4):  # a round has every setting once
        assert {f"{r['system']} {r['mode']}" for r in records[start : start + 4]} == settings
        assert len({tuple(record["token_ids"]) for record in records[start : start + 4]}) == 1
    assert all(9 not in record["token_ids"] and record["new_tokens"] == 3 for record in records)
    assert report["left_out"] == ["genai-b32 draft-4 is left out: ImportError: no draft here"]
    ngram = next(best for best in report["best"] if (best["kind"], best["by"]) == ("E", "decode"))
    assert (ngram["setting"], ngram["ratio"]) == ("genai-b32 ngram-8", 2)
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert [9] in [call[3] for call in calls if call[0] == "genai"]


def test_a_peer_that_fails_on_the_way_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    for name in ("target", "draft", "pair"):
        (tmp_path / f"genai-b32-{name}").mkdir()
    (tmp_path / "fail").touch()
    done = run_script(tmp_path, "--systems", "genai-b32", "--modes", "plain,ngram")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["left_out"] == ["genai-b32 ngram-8 is left out from here on: RuntimeError: out of memory"]
    ran = [(record["kind"], record["system"], record["mode"]) for record in report["records"]]
    settings = {("draftc", "plain"), ("draftc", "default"), ("genai-b32", "plain")}
    assert sorted(ran) == sorted((kind, *setting) for kind in "HE" for setting in settings)


@pytest.mark.parametrize(
    ("mode", "parsed"), [("plain", ("plain", 0)), ("ngram-16", ("ngram", 16)), ("draft_model", ("draft_model", 0))]
)
def test_modes_are_a_kind_and_a_number(monkeypatch: pytest.MonkeyPatch, mode: str, parsed: tuple[str, int]) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    assert importlib.import_module("peer_worker").parse_mode(mode) == parsed


def test_a_system_that_does_not_fit_beside_the_others_gets_a_group_of_its_own(tmp_path: Path) -> None:
    for block in (32, 128):
        for name in ("target", "draft", "pair"):
            (tmp_path / f"genai-b{block}-{name}").mkdir()
    # A made-up worker takes about 30 MiB: draftc and the two of one system fit, those of a second one do not.
    done = run_script(tmp_path, "--systems", "genai-b32,genai-b128", "--memory", "0.117")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    seen = {(record["group"], record["system"]) for record in report["records"]}
    assert seen == {(0, "draftc"), (0, "genai-b32"), (1, "draftc"), (1, "genai-b128")}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--humaneval", "no-such.jsonl"), "--humaneval"),
        (("--prompts", "no-such.json"), "no-such.json"),
        (("--systems", "vllm"), "'vllm'"),
        (("--add", "genai-b32"), "SYSTEM:MODE"),
        (("--python", "draftc=/no/such/python"), "/no/such/python"),
        (("--json", "nowhere/out.json"), "--json nowhere/out.json: No such file or directory"),
        (("--json", "."), "--json .: Is a directory"),
        (("--chart", "nowhere/out.png"), "--chart nowhere/out.png: No such file or directory"),
        (("--chart", "chart.doc"), "ends in .png or .svg"),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_2(tmp_path: Path, arguments: tuple[str, str], said: str) -> None:
    pytest.importorskip("matplotlib", reason="--chart needs it")
    done = run_script(tmp_path, *arguments)
    assert done.returncode == 2
    assert_one_line(done.stderr, said)
    assert not (tmp_path / "out.json").exists()
    assert not (tmp_path / "calls").exists(), "nothing was measured"


def test_a_chart_without_matplotlib_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')")
    done = run_script(tmp_path, "--chart", "chart.png", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert_one_line(done.stderr, "pip install matplotlib")
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize("arguments", [("--skip", "-1"), ("--count", "0"), ("--pause", "-1"), ("--pause", "nan")])
def test_a_number_out_of_range_is_refused(tmp_path: Path, arguments: tuple[str, str]) -> None:
    done = run_script(tmp_path, *arguments)
    assert done.returncode == 2
    assert arguments[0] in done.stderr.splitlines()[-1]
    assert not (tmp_path / "calls").exists()


def test_a_chart_that_cannot_be_written_after_all_costs_nothing_else(tmp_path: Path) -> None:
    """The worker puts a folder where the chart goes: as a full disk, that shows only at the end."""
    pytest.importorskip("matplotlib", reason="--chart needs it")
    (tmp_path / "block").touch()
    done = run_script(tmp_path, "--chart", "chart.png")
    assert done.returncode == 2
    assert_one_line("".join(line for line in done.stderr.splitlines() if "bench_peers" in line), "chart.png")
    assert "Traceback" not in done.stderr
    assert "draftc default" in done.stdout
    assert len(json.loads((tmp_path / "out.json").read_text())["records"]) == 4
