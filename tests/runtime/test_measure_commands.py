"""`draftc tune`, and the options about it: a real session over scripted engines, called as from a shell."""

import errno
import json
import sys
from pathlib import Path

import pytest

from draftc.runtime.costs import CostProfile, parse_costs
from draftc.runtime.errors import EngineError
from draftc.runtime.manifest import PROFILE_NAME
from draftc.runtime.session import Session
from tests.runtime.cli_fakes import Draftc, FakeBundle, one_line

PROMPT = "the quick brown fox"
QUICK = ("--budget", "0.001")  # three rounds


@pytest.fixture
def draftc(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Draftc:
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    return Draftc(monkeypatch, capsys)


@pytest.fixture
def bundle(draftc: Draftc, byte_level_folder: Path) -> FakeBundle:
    bundle = draftc.with_bundle(byte_level_folder, prompt=PROMPT)
    for decoder in bundle.session.decoders:
        decoder.engine.memory.fill(0)  # type: ignore[attr-defined]  # measuring reads what nobody wrote
    return bundle


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def written(out: Path) -> CostProfile:
    assert [entry.name for entry in out.iterdir()] == [PROFILE_NAME], "and nothing else"
    return parse_costs((out / PROFILE_NAME).read_text(encoding="utf-8"))


def test_tune_writes_a_profile_and_shows_it(draftc: Draftc, bundle: FakeBundle, out: Path) -> None:
    result = draftc("tune", str(out), *QUICK)
    assert (result.code, result.err) == (0, "")
    costs = written(out)
    assert costs.rounds == 3
    assert costs.draft is not None
    assert costs.target.widths[-1] == bundle.session.manifest.max_width
    lines = result.out.splitlines()
    assert lines[0] == "tiny: what a call costs"
    for graph in (costs.target, costs.draft):
        for width, ms in zip(graph.widths, graph.ms[0], strict=True):
            assert any(line.split()[:2] == [str(width), f"{ms:.2f}"] for line in lines), (width, ms)
    assert bundle.opened["tune"] is False, "it is about to be measured anyway"
    assert bundle.engine.closed == 1


def test_tune_json_is_what_was_written(draftc: Draftc, bundle: FakeBundle, out: Path) -> None:
    result = draftc("tune", str(out), *QUICK, "--json")
    assert (result.code, result.err) == (0, "")
    assert parse_costs(result.out) == written(out)


def test_tune_replaces_an_earlier_profile(draftc: Draftc, bundle: FakeBundle, out: Path) -> None:
    (out / PROFILE_NAME).write_text("of yesterday", encoding="utf-8")
    assert draftc("tune", str(out), *QUICK).code == 0
    assert written(out).rounds == 3


def test_tune_passes_its_options_on(draftc: Draftc, bundle: FakeBundle, out: Path) -> None:
    line = "--device cuda --draft-device cpu --threads 1 --no-cuda-graph --provider-option a=b --no-check-hashes"
    assert draftc("tune", str(out), *QUICK, *line.split()).code == 0
    assert bundle.opened == {
        "path": out,
        "device": "cuda",
        "target_device": None,
        "draft_device": "cpu",
        "threads": 1,
        "cuda_graph": False,
        "provider_options": {"a": "b"},
        "check_hashes": False,
        "tune": False,
    }


def test_tune_draws_the_curves(draftc: Draftc, bundle: FakeBundle, out: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs the extra plot")
    result = draftc("tune", str(out), *QUICK, "--png", str(tmp_path / "costs.png"))
    assert (result.code, result.err) == (0, "")
    assert (tmp_path / "costs.png").read_bytes().startswith(b"\x89PNG")
    written(out)


def test_tune_finds_out_first_whether_it_can_draw(
    draftc: Draftc, bundle: FakeBundle, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = draftc("tune", str(out), "--png", str(tmp_path / "costs.png"))
    assert result.code == 2
    assert one_line(result.err).endswith("pip install 'draftc[plot]'")
    assert bundle.opened == {}, "before anything is measured"
    assert list(out.iterdir()) == []


def test_tune_finds_out_first_whether_the_picture_can_be_written(
    draftc: Draftc, bundle: FakeBundle, out: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs the extra plot")
    result = draftc("tune", str(out), "--png", str(tmp_path / "nowhere" / "costs.png"))
    assert result.code == 2
    assert one_line(result.err).endswith("No such file or directory: name a file that can be written")
    assert bundle.opened == {}


@pytest.mark.parametrize("blocked", ["no new file", "a folder of that name"])
def test_a_folder_that_cannot_be_written_is_found_out_first(
    draftc: Draftc, bundle: FakeBundle, out: Path, monkeypatch: pytest.MonkeyPatch, blocked: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    if blocked == "no new file":  # root may write anywhere: the system's answer is made up
        monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    else:
        (out / PROFILE_NAME).mkdir()
    there = list(out.iterdir())
    result = draftc("tune", str(out), *QUICK)
    assert (result.code, result.out) == (2, "")
    assert one_line(result.err).startswith(f"draftc: {out / PROFILE_NAME}: ")
    assert one_line(result.err).endswith(": make the folder writable")
    assert list(out.iterdir()) == there
    assert bundle.opened == {}, "before anything is measured"
    assert bundle.engine.calls == []


def test_a_folder_that_became_full_meanwhile(
    draftc: Draftc, bundle: FakeBundle, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    result = draftc("tune", str(out), *QUICK)
    assert (result.code, result.out) == (2, "")
    assert one_line(result.err).endswith("No space left on device: make the folder writable")
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("budget", ["0", "-1", "nan", "inf"])
def test_a_budget_that_is_none(draftc: Draftc, bundle: FakeBundle, out: Path, budget: str) -> None:
    result = draftc("tune", str(out), "--budget", budget)
    assert result.code == 2
    assert one_line(result.err).startswith("draftc: the budget must be a finite number of seconds above 0, got")
    assert list(out.iterdir()) == []


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [(EngineError("no more"), 2, "draftc: no more"), (KeyboardInterrupt(), 130, "")],
    ids=["error", "ctrl-c"],
)
def test_a_measurement_that_ends_early_leaves_no_file(
    draftc: Draftc, bundle: FakeBundle, out: Path, fault: BaseException, code: int, said: str
) -> None:
    bundle.engine.faults[20] = fault
    result = draftc("tune", str(out), *QUICK)
    assert (result.code, result.out) == (code, "")
    assert one_line(result.err) == said
    assert list(out.iterdir()) == []
    assert bundle.engine.closed == 1


@pytest.mark.parametrize("fault", [EngineError("no more"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_the_session_goes_on_after_a_measurement_that_ended_early(bundle: FakeBundle, fault: BaseException) -> None:
    session = bundle.session
    expected = session.generate(PROMPT, max_new_tokens=12).token_ids
    for decoder in session.decoders:
        decoder.engine.memory.fill(0)  # type: ignore[attr-defined]
    bundle.engine.faults[len(bundle.engine.calls) + 20] = fault
    with pytest.raises(type(fault)):
        session.measure_costs(budget_s=0.001)
    assert session.costs is None
    assert session.default_method == "draft_model"
    assert "auto" not in session.drafters
    assert session.generate(PROMPT, max_new_tokens=12).token_ids == expected


def test_a_session_that_was_measured_chooses_by_it(bundle: FakeBundle) -> None:
    session = bundle.session
    costs = session.measure_costs(budget_s=0.001)
    assert session.costs is costs
    assert session.default_method == "auto"
    assert list(session.drafters) == ["draft_model", "ngram", "auto"]
    plain = session.generate(PROMPT, max_new_tokens=12, method="plain")
    for method in (None, "auto", "draft_model", "ngram"):
        assert session.generate(PROMPT, max_new_tokens=12, method=method).token_ids == plain.token_ids


@pytest.mark.parametrize("command", ["run", "chat", "bench", "verify"])
@pytest.mark.parametrize(("option", "tuned"), [([], True), (["--tune"], True), (["--no-tune"], False)])
def test_whether_to_measure_is_passed_on(
    draftc: Draftc, bundle: FakeBundle, monkeypatch: pytest.MonkeyPatch, command: str, option: list[str], tuned: bool
) -> None:
    seen: list[object] = []

    def opened(path: Path, **arguments: object) -> Session:
        seen.append(arguments["tune"])
        raise EngineError("that is all")

    monkeypatch.setattr("draftc.runtime.open", opened)
    prompt = ["-p", PROMPT] if command == "run" else []
    draftc(command, "out", *prompt, *option)
    assert seen == [tuned]


def test_a_method_is_chosen_by_name(draftc: Draftc, bundle: FakeBundle) -> None:
    result = draftc("run", "out", "-p", PROMPT, "--method", "auto")
    assert result.code == 2
    assert "unknown method 'auto'" in one_line(result.err), "nothing was measured"


def test_bench_measures_the_chooser_once_whatever_the_ks(draftc: Draftc, bundle: FakeBundle, tmp_path: Path) -> None:
    bundle.session.measure_costs(budget_s=0.001)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "a", "prompt": PROMPT}), encoding="utf-8")
    result = draftc("bench", "out", "--prompts", str(prompts), "-k", "1,3", "-n", "4", "--repeats", "1", "--json")
    assert (result.code, result.err) == (0, "")
    modes = [total["mode"] for total in json.loads(result.out)["totals"]]
    assert modes == ["plain", "auto", "draft_model-k1", "draft_model-k3", "ngram-k1", "ngram-k3"]
