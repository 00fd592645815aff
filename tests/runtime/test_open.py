"""`draftc.runtime.open` on a bundle of two tiny graphs: the whole runtime, with its real engine."""

import itertools
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import pytest

import draftc.runtime as draftc
from draftc.runtime.costs import CostProfile, parse_costs
from draftc.runtime.engine import Logits, Tokens
from draftc.runtime.errors import BackendUnavailableError, BundleError, DraftcWarning, ResourceError, UsageError
from draftc.runtime.manifest import MANIFEST_NAME, PROFILE_NAME
from draftc.runtime.ort import OrtEngine
from draftc.runtime.profiles import write_profile
from draftc.runtime.sampler import Sampler
from draftc.runtime.session import Session
from draftc.runtime.text import Tokenizer
from draftc.runtime.tune import measure_costs
from draftc.runtime.warp import Sampling
from tests.runtime.cli_fakes import Draftc, one_line
from tests.runtime.fake_ort_gpu import Copy, install
from tests.runtime.fakes import tokens
from tests.runtime.sessions import MAX_LENGTH
from tests.runtime.tiny_bundle import LENGTH, write_bundle, write_manifest
from tests.runtime.tiny_model import TinyModel

PROMPT = "the quick brown fox"


@pytest.fixture(scope="module")
def target(byte_level_folder: Path) -> TinyModel:
    return TinyModel(LENGTH, Tokenizer.from_folder(byte_level_folder).vocab_size)


@pytest.fixture
def bundle(tmp_path: Path, byte_level_folder: Path, target: TinyModel) -> Path:
    return write_bundle(tmp_path / "bundle", byte_level_folder, target)


def addresses(session: Session) -> Iterator[dict[str, int]]:
    for decoder in session.decoders:
        assert isinstance(decoder.engine, OrtEngine)
        yield decoder.engine.kv_addresses


def test_text_is_the_targets_and_caches_stay_where_they_are(bundle: Path, target: TinyModel) -> None:
    with draftc.open(bundle, threads=1) as session:
        before = list(addresses(session))
        prompt = session.encode(PROMPT)
        text = list(prompt)
        for _ in range(30):
            text.append(int(target.expected(tokens(*text), 1)[0].argmax()))
        accepted = {}
        for method in ("draft_model", "ngram", "plain"):
            result = session.generate(PROMPT, method=method, max_new_tokens=30, ignore_eos=True, logprobs=True)
            assert result.token_ids == text[len(prompt) :]
            accepted[method] = result.stats.accepted
            assert list(addresses(session)) == before
        assert accepted["draft_model"] > 0
        assert accepted["plain"] == 0
        logits = target.expected(tokens(*text[:-1]), 30).astype(np.float64)
        normalised = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        expected = [row[token] for row, token in zip(normalised, text[-30:], strict=True)]
        assert result.logprobs == pytest.approx(expected, abs=1e-3)


def test_two_sessions_share_nothing(bundle: Path) -> None:
    with draftc.open(bundle, threads=1) as one, draftc.open(str(bundle), threads=1) as two:
        assert not {a for named in addresses(one) for a in named.values()} & {
            a for named in addresses(two) for a in named.values()
        }
        stream = one.stream(PROMPT, max_new_tokens=10)
        next(stream)
        assert two.generate(PROMPT, max_new_tokens=10).text == stream.drain().text


def test_an_ngram_bundle_opens_without_a_draft_graph(bundle: Path, byte_level_folder: Path) -> None:
    shutil.rmtree(bundle / "draft")
    write_manifest(bundle, Tokenizer.from_folder(byte_level_folder), method="ngram")
    with draftc.open(bundle, threads=1, tune=False) as session:
        assert list(session.drafters) == ["ngram"]
        lookup = partial(session.drafters["ngram"].propose, k=1, sampler=Sampler(Sampling(), [], 99, seed=0))
        assert lookup(tokens(7, 8, 7)).tokens.tolist() == [8], "min_ngram is 1"
        of_three_and_of_four = tokens(4, 1, 2, 3, 5, 9, 1, 2, 3, 6, 4, 1, 2, 3)
        assert lookup(of_three_and_of_four).tokens.tolist() == [6], "max_ngram is 3: the latest"
        assert len(session.generate(PROMPT, max_new_tokens=5, ignore_eos=True).token_ids) == 5
    with pytest.raises(UsageError, match="draft_device is 'cpu', and this bundle has no draft model: leave it out"):
        draftc.open(bundle, draft_device="cpu")


def test_an_altered_file_is_found(bundle: Path) -> None:
    path = bundle / "draft" / "model.onnx"
    path.write_bytes(path.read_bytes()[:-1] + b"?")  # of the same size
    with pytest.raises(BundleError, match="sha256"):
        draftc.open(bundle)


def test_bytes_that_are_no_graph_under_a_right_hash(bundle: Path, byte_level_folder: Path) -> None:
    (bundle / "target" / "model.onnx").write_bytes(b"this is no graph")
    write_manifest(bundle, Tokenizer.from_folder(byte_level_folder))
    with pytest.raises(BundleError, match=r"cannot load model\.onnx"):
        draftc.open(bundle)


def test_arguments_of_open(bundle: Path, tmp_path: Path) -> None:
    for name in ("device", "target_device", "draft_device"):
        with pytest.raises(UsageError, match="unknown device 'tpu': this backend serves cpu, cuda"):
            draftc.open(bundle, **{name: "tpu"})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="provider option use_tf32: device cpu takes none"):
        draftc.open(bundle, provider_options={"use_tf32": "0"})
    with pytest.raises(UsageError, match="threads must be 1 or more, got 0"):
        draftc.open(bundle, threads=0)
    with pytest.raises(BundleError, match="no such folder"):
        draftc.open(tmp_path / "nowhere")


def test_a_double_install_is_found_on_open(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftc.runtime.ort_session._installed", lambda name: True)
    with pytest.raises(BackendUnavailableError, match="both installed"):
        draftc.open(bundle)


# --- what calls cost -------------------------------------------------------------------------------------------------


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_first_use_measures_and_later_ones_know(
    bundle: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[float] = []
    with draftc.open(bundle, threads=1, on_progress=lambda what, done: said.append(done)) as session:
        assert session.default_method == "auto"
        text = session.generate(PROMPT, max_new_tokens=20, ignore_eos=True).token_ids
        assert text == session.generate(PROMPT, max_new_tokens=20, ignore_eos=True, method="plain").token_ids
        measured = session.costs
    assert said[-1] == 1.0
    (kept,) = (own_cache / "draftc" / "profiles").glob("*.json")
    assert parse_costs(kept.read_text(encoding="utf-8")) == measured
    monkeypatch.setattr("draftc.runtime.opening.measure_costs", lambda *_, **__: pytest.fail("measured again"))
    for tune in (True, False):
        with draftc.open(bundle, threads=1, tune=tune) as session:
            assert session.costs == measured
            assert session.default_method == "auto"
    with draftc.open(bundle, threads=2, tune=False) as session:  # which would be a profile of its own
        assert session.costs is None


@pytest.mark.skipif(sys.platform == "win32", reason="no flock: two processes may measure at once there")
def test_of_two_that_open_at_once_one_measures(bundle: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    asked, both_asked, measured = itertools.count(1), threading.Event(), []

    def flock(file: IO[str], operation: int) -> None:
        if next(asked) == 2:
            both_asked.set()
        fcntl.flock(file, operation)

    def measure(*arguments: Any, **options: Any) -> CostProfile:
        assert both_asked.wait(60), "the other one would not have waited"
        measured.append(measure_costs(*arguments, **options))
        return measured[-1]

    monkeypatch.setattr("draftc.runtime.profiles.fcntl", SimpleNamespace(flock=flock, LOCK_EX=fcntl.LOCK_EX))
    monkeypatch.setattr("draftc.runtime.opening.measure_costs", measure)
    with ThreadPoolExecutor() as pool:
        sessions = list(pool.map(lambda _: draftc.open(bundle, threads=1), range(2)))
    assert [session.costs for session in sessions] == measured * 2
    for session in sessions:
        session.close()


def test_without_a_profile_the_bundles_method_drafts(bundle: Path, own_cache: Path) -> None:
    with draftc.open(bundle, threads=1, tune=False) as session:
        assert (session.costs, session.default_method) == (None, "draft_model")
        assert list(session.drafters) == ["draft_model", "ngram"]
        assert session.generate(PROMPT, max_new_tokens=12, ignore_eos=True).stats.draft_calls > 0
    assert not own_cache.exists()


def test_the_bundles_own_profile_is_used(bundle: Path, own_cache: Path) -> None:
    with draftc.open(bundle, threads=1, tune=False) as session:
        costs = session.measure_costs(budget_s=0.001)
    write_profile(bundle / PROFILE_NAME, costs)
    with draftc.open(bundle, threads=1) as session:
        assert session.costs == costs
    assert not own_cache.exists(), "nothing had to be measured"
    write_profile(bundle / PROFILE_NAME, replace(costs, machine=replace(costs.machine, processor="another")))
    with pytest.warns(DraftcWarning, match="was measured with something else"):
        draftc.open(bundle, threads=1, tune=False).close()


def test_more_threads_than_cores_is_a_note(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftc.runtime.opening.physical_cores", lambda: 1)
    with pytest.warns(DraftcWarning, match="2 threads for each graph on 1 cores: they will wait for each other"):
        draftc.open(bundle, threads=2, tune=False).close()


def test_threads_from_a_shell(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Draftc(monkeypatch, capsys)
    line = ("run", str(bundle), "-p", PROMPT, "-n", "2", "--no-stats", "--no-tune", "--threads")
    for threads in ("0", "-1"):
        result = command(*line, threads)
        assert (result.code, result.out) == (2, "")
        assert one_line(result.err).startswith(f"draftc: threads must be 1 or more, got {threads}")
    monkeypatch.setattr("draftc.runtime.opening.physical_cores", lambda: 1)
    result = command(*line, "2")
    assert result.code == 0
    assert one_line(result.err).startswith("draftc: note: 2 threads for each graph on 1 cores")


# --- on a GPU whose memory is faked ----------------------------------------------------------------------------------

GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 5}


def texts(bundle: Path, **opening: Any) -> list[list[int]]:
    """What a fresh session says, to the end of its buffers, over prompts that share some of their beginnings."""
    said = []
    with draftc.open(bundle, threads=1, tune=False, **opening) as session:
        for prompt in (PROMPT, PROMPT[:-4], PROMPT + " jumps", "the lazy dog, and then the fox sleeps. " * 2):
            for method in ("draft_model", "ngram", "plain"):
                for sampling in (GREEDY, SAMPLED):
                    result = session.generate(prompt, method=method, ignore_eos=True, **sampling)
                    assert result.stats.prompt_tokens + len(result.token_ids) == MAX_LENGTH
                    said.append(result.token_ids)
    return said


@pytest.mark.parametrize(
    "opening",
    [
        {"device": "cuda"},
        {"device": "cuda", "cuda_graph": False},
        {"device": "cuda", "draft_device": "cpu"},
        {"target_device": "cpu", "draft_device": "cuda:1"},
        {"target_device": "cuda", "draft_device": "cuda:1", "provider_options": {"use_tf32": "0"}},
    ],
    ids=str,
)
def test_every_device_says_the_same(bundle: Path, monkeypatch: pytest.MonkeyPatch, opening: dict[str, Any]) -> None:
    expected = texts(bundle)
    gpu = install(monkeypatch, gpus=2)
    assert texts(bundle, **opening) == expected
    kinds = Counter((device, kind) for device, kind, _ in gpu.runs)
    graphs = opening.get("cuda_graph", True)
    assert (kinds["cuda", "replay"] > kinds["cuda", "run"]) == graphs
    assert (kinds["cpu", "run"] > 0) == ("cpu" in opening.values())


@pytest.mark.parametrize(("target_device", "draft_device"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_between_devices_only_ids_and_rows_of_logits_move(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, target_device: str, draft_device: str
) -> None:
    """A call on a GPU takes ids, a position and, the first time, which rows to give; it gives those rows of logits."""
    gpu = install(monkeypatch)
    devices = {"target_device": target_device, "draft_device": draft_device}
    with draftc.open(bundle, threads=1, tune=False, **devices) as session:  # type: ignore[arg-type]
        engine = session.decoders[0 if target_device == "cuda" else 1].engine
        assert [copy.target for copy in gpu.copies] == ["cuda"] * 2, "the zeros of its two caches"
        assert sum(copy.size for copy in gpu.copies) == engine.spec.kv_bytes()
        gpu.reset()
        shapes = []
        forward = engine.forward

        def spy(ids: Tokens, start: int, rows: int) -> Logits:
            shapes.append((ids.size, rows))
            return forward(ids, start, rows)

        monkeypatch.setattr(engine, "forward", spy)
        for sampling in (GREEDY, SAMPLED):
            session.generate(PROMPT, max_new_tokens=30, ignore_eos=True, **sampling)
        expected = []
        for i, (width, rows) in enumerate(shapes):
            first = (width, rows) not in shapes[:i]
            expected += [Copy("cpu", "cuda", 8 * rows)] if first else []
            expected += [Copy("cpu", "cuda", 8 * width), Copy("cpu", "cuda", 8)]
            expected += [Copy("cuda", "cpu", 4 * rows * engine.spec.vocab_rows)]
        assert gpu.copies == expected
        assert len(set(shapes)) < len(shapes) == sum(device == "cuda" for device, _, _ in gpu.runs)


def test_caches_are_counted_on_the_device_that_holds_them(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with draftc.open(bundle, threads=1) as session:
        one = session.target.engine.spec.kv_bytes()
    room = one + one // 2  # for the caches of one graph
    monkeypatch.setattr("draftc.runtime.memory.available_memory", lambda: room)
    with pytest.raises(ResourceError, match=r"of memory, .* is available"):
        draftc.open(bundle, threads=1)
    install(monkeypatch, free=room)
    draftc.open(bundle, threads=1, target_device="cuda").close()
    with pytest.raises(ResourceError, match=r"of device memory, .* is free on cuda:0"):
        draftc.open(bundle, threads=1, device="cuda", draft_device="cuda:0")
    monkeypatch.setattr("draftc.runtime.memory.available_memory", lambda: 0)
    install(monkeypatch, gpus=2, free=room)
    draftc.open(bundle, threads=1, device="cuda", draft_device="cuda:1").close()


def test_the_bundle_says_which_device_it_is_for(
    bundle: Path, byte_level_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = install(monkeypatch)
    tokenizer = Tokenizer.from_folder(byte_level_folder)
    text = (bundle / MANIFEST_NAME).read_text(encoding="utf-8")
    for manifests, expected in ((text, "cpu"), (text.replace('"device": "cpu"', '"device": "cuda"'), "cuda")):
        assert expected in manifests
        (bundle / MANIFEST_NAME).write_text(manifests, encoding="utf-8")
        gpu.reset()
        with draftc.open(bundle, threads=1) as session:
            session.generate(tokenizer.encode(PROMPT), max_new_tokens=2, ignore_eos=True)
        assert {device for device, _, _ in gpu.runs} == {expected}
