"""Whole sessions on the device: the same text as ONNX Runtime's for every request, and only token ids cross over."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import draftc.runtime as draftc
from draftc.runtime.device_loop import DeviceLoop, DeviceLoops
from draftc.runtime.drafter import ModelDrafter
from draftc.runtime.errors import DraftcWarning, EngineError
from draftc.runtime.prompts import PromptCase
from draftc.runtime.request import Generation
from draftc.runtime.selfcheck import verify
from draftc.runtime.session import Session
from draftc.runtime.text import Tokenizer
from tests.runtime.fake_cuda_python import ErrorCode
from tests.runtime.sessions import MAX_LENGTH, MAX_WIDTH
from tests.runtime.tiny_engines import LENGTH, Gpu, fake_gpu, write_bundles
from tests.runtime.tiny_model import TinyModel

PROMPT = "the quick brown fox jumps over"
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "top_k": 0},
    {"temperature": 5.0, "top_k": 30},
    {"temperature": 8.0, "top_k": 0, "top_p": 0.9},
    {"temperature": 20.0, "top_k": 0, "min_p": 0.3},
    {"temperature": 30.0, "top_k": 50, "top_p": 0.8, "min_p": 0.02},
]
METHODS = ("draft_model", "ngram", "plain")


@dataclass(frozen=True)
class Bundles:
    """The same two models as engines and as graphs."""

    engines: Path
    graphs: Path


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory, byte_level_folder: Path) -> Bundles:
    rows = Tokenizer.from_folder(byte_level_folder).vocab_size + 3
    root = tmp_path_factory.mktemp("bundles")
    target, draft = TinyModel(LENGTH, rows), TinyModel(LENGTH, rows, noise=0.2)
    return Bundles(*write_bundles(root, byte_level_folder, target, draft))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gpu:
    return fake_gpu(monkeypatch, tmp_path)


@pytest.fixture
def device(gpu: Gpu, bundles: Bundles) -> Iterator[Session]:
    with draftc.open(bundles.engines) as session:
        yield session


@pytest.fixture
def host(bundles: Bundles) -> Iterator[Session]:
    with draftc.open(bundles.graphs, threads=1, tune=False) as session:  # drafts as the device does
        yield session


def results_bytes(session: Session) -> int:
    """What a step copies to the host: W + 1 token ids and a number, each at an aligned address."""
    assert isinstance(session.loops, DeviceLoops)
    return 2 * 256


def same(a: Generation, b: Generation) -> None:
    assert a.token_ids == b.token_ids
    assert (a.text, a.finish_reason, a.seed) == (b.text, b.finish_reason, b.seed)
    for name in ("prompt_tokens", "cached_tokens", "new_tokens", "steps", "step_tokens", "target_calls"):
        assert getattr(a.stats, name) == getattr(b.stats, name), name
    assert (a.stats.proposed_at, a.stats.accepted_at) == (b.stats.proposed_at, b.stats.accepted_at)


# The same text


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_text_is_the_hosts(gpu: Gpu, device: Session, host: Session, method: str, sampling: dict[str, Any]) -> None:
    for seed in range(3):
        options: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True, "method": method, "seed": seed, **sampling}
        result = device.generate(PROMPT, **options)
        same(result, host.generate(PROMPT, **options))
        assert len(result.token_ids) == 30
    if method == "draft_model":
        assert 0 < result.stats.accepted < result.stats.proposed  # both branches of the rule were taken
    assert gpu.cuda.launches > 0


def random_request(rng: np.random.Generator, vocabulary: int, before: list[int]) -> tuple[list[int], dict[str, Any]]:
    """A prompt, which may begin as the last one did, and options."""
    kept = before[: int(rng.integers(0, len(before) + 1))] if rng.random() < 0.6 else []
    prompt = [*kept, *rng.integers(3, vocabulary, rng.integers(1, 24)).tolist()][: MAX_LENGTH - 1]
    options: dict[str, Any] = {
        "method": METHODS[rng.choice(3, p=[0.6, 0.2, 0.2])],
        "num_speculative_tokens": int(rng.integers(1, MAX_WIDTH)),
        "ignore_eos": bool(rng.random() < 0.7),
        "seed": int(rng.integers(1 << 30)),
        **SAMPLINGS[rng.integers(len(SAMPLINGS))],
    }
    if rng.random() < 0.5:
        options["max_new_tokens"] = int(rng.integers(1, MAX_LENGTH - len(prompt) + 1))
    if rng.random() < 0.3:
        options["stop_token_ids"] = rng.integers(3, vocabulary, 40).tolist()
    if rng.random() < 0.15:
        options["stop"] = ["o", "e "]
    host_only = rng.random()
    if host_only < 0.1:
        options["logprobs"] = True
    elif host_only < 0.2:
        options["repetition_penalty"] = 1.3
    elif host_only < 0.3:
        allowed = rng.random(vocabulary) < 0.5
        options["logits_mask"] = lambda _: allowed
    return prompt, options


@pytest.mark.parametrize("cuda_graph", [True, False])
def test_any_sequence_of_requests_is_served_as_on_the_host(
    gpu: Gpu, bundles: Bundles, host: Session, cuda_graph: bool
) -> None:
    """Prefix reuse, long prompts, every K, stops, full buffers, and requests that take the host's path in between."""
    rng = np.random.default_rng(5)
    before: list[int] = []
    finished = set()
    with draftc.open(bundles.engines, cuda_graph=cuda_graph) as device:
        for _ in range(40):
            prompt, options = random_request(rng, device.manifest.vocab_size, before)
            a, b = device.generate(prompt, **options), host.generate(prompt, **options)
            assert a.token_ids == b.token_ids
            assert (a.text, a.finish_reason) == (b.text, b.finish_reason)
            assert a.stats.accepted_at == b.stats.accepted_at
            assert a.stats.cached_tokens == b.stats.cached_tokens
            finished.add(a.finish_reason)
            before = [*prompt, *a.token_ids]
    assert finished == {"length", "stop"}
    assert (gpu.cuda.captures > 0) == cuda_graph


def test_a_text_that_fills_the_buffers(device: Session, host: Session) -> None:
    for prompt in ([5], list(range(3, MAX_LENGTH)), list(range(3, 3 + MAX_LENGTH - 1))):
        for method in METHODS:
            options: dict[str, Any] = {"method": method, "ignore_eos": True, "seed": 0, "num_speculative_tokens": 5}
            result = device.generate(prompt[: MAX_LENGTH - 1], **options)
            same(result, host.generate(prompt[: MAX_LENGTH - 1], **options))
            assert result.finish_reason == "length"


# What crosses over


@pytest.mark.parametrize("method", METHODS)
def test_no_logits_cross_to_the_host(gpu: Gpu, device: Session, method: str) -> None:
    logits = device.manifest.vocab_size * 4
    gpu.cuda.copies.clear()
    options: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True, "method": method}
    result = device.generate(PROMPT * 2, temperature=9.0, seed=1, **options)
    out = [copy.size for copy in gpu.cuda.copies if copy.kind == "out"]
    assert out == [results_bytes(device)] * (1 + result.stats.steps)
    assert max(out) < logits
    device.generate(PROMPT * 2, temperature=9.0, logprobs=True, **options)
    assert max(copy.size for copy in gpu.cuda.copies if copy.kind == "out") >= logits  # the count counts


def test_a_step_is_one_copy_in_each_direction(gpu: Gpu, device: Session) -> None:
    stream = device.stream(PROMPT, max_new_tokens=40, ignore_eos=True)
    events = stream.events()
    for _ in range(5):
        next(events)
    gpu.cuda.copies.clear()
    next(events)
    assert [copy.kind for copy in gpu.cuda.copies] == ["in", "out"]
    assert sum(copy.size for copy in gpu.cuda.copies) < 8 << 10
    stream.close()


def test_a_replayed_step_sets_and_allocates_nothing(gpu: Gpu, device: Session) -> None:
    stream = device.stream(PROMPT, max_new_tokens=40, ignore_eos=True)
    events = stream.events()
    for _ in range(5):
        next(events)
    changes, configs, launches = gpu.trt.changes, len(gpu.trt.configs), gpu.cuda.launches
    memory, pinned = set(gpu.cuda.allocations), len(gpu.cuda.pinned)
    next(events)
    assert (gpu.trt.changes, len(gpu.trt.configs), gpu.cuda.launches) == (changes, configs, launches + 1)
    assert (set(gpu.cuda.allocations), len(gpu.cuda.pinned)) == (memory, pinned)
    stream.close()


@pytest.mark.parametrize(
    ("options", "on_device"),
    [
        ({}, True),
        ({"temperature": 2.0, "top_p": 0.5}, True),
        ({"logprobs": True}, False),
        ({"logits_mask": lambda _: None}, False),
        ({"presence_penalty": 0.5}, False),
        ({"logit_bias": {5: 1.0}}, False),
    ],
)
def test_who_takes_the_hosts_path(
    device: Session, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], on_device: bool
) -> None:
    steps: list[int] = []
    real = DeviceLoop.step

    def counted(loop: DeviceLoop, k: int) -> Any:
        steps.append(k)
        return real(loop, k)

    monkeypatch.setattr(DeviceLoop, "step", counted)
    device.generate(PROMPT, max_new_tokens=4, ignore_eos=True, **options)
    assert bool(steps) == on_device


def test_a_draft_on_another_gpu_takes_the_hosts_path(
    bundles: Bundles, host: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = fake_gpu(monkeypatch, tmp_path)
    gpu.cuda.machine.devices = 2
    with draftc.open(bundles.engines, draft_device="cuda:1") as session:
        logits = session.manifest.vocab_size * 4
        for method, crosses in (("draft_model", True), ("ngram", False)):
            options: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True, "method": method}
            gpu.cuda.copies.clear()
            assert session.generate(PROMPT, **options).token_ids == host.generate(PROMPT, **options).token_ids
            assert any(copy.size >= logits for copy in gpu.cuda.copies if copy.kind == "out") == crosses
    assert gpu.cuda.used == 0


# What may come between


def test_a_cancelled_stream_leaves_the_session_as_it_should_be(device: Session, host: Session) -> None:
    for count in (1, 2, 5):
        for session in (device, host):
            stream = session.stream(PROMPT, max_new_tokens=30, ignore_eos=True, temperature=4.0, seed=9)
            events = stream.events()
            for _ in range(count):
                next(events)
            stream.close()
        options: dict[str, Any] = {"max_new_tokens": 25, "ignore_eos": True, "temperature": 4.0, "seed": count}
        same(device.generate(PROMPT, **options), host.generate(PROMPT, **options))


def test_an_interrupt_while_the_gpu_works(device: Session, host: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work goes on behind it: the next step must not write its inputs before it is done."""
    assert isinstance(device.loops, DeviceLoops)
    wait = device.loops.step.gpu.wait
    for interrupted_at in range(1, 13, 2):
        device.reset()
        host.reset()
        left = [interrupted_at]

        def interrupted(left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            wait()

        with monkeypatch.context() as patched:
            patched.setattr(device.loops.step.gpu, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                device.generate(PROMPT + " and on", max_new_tokens=30, ignore_eos=True, temperature=3.0, seed=1)
        options: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True, "temperature": 3.0, "seed": 2}
        assert device.generate(PROMPT, **options).token_ids == host.generate(PROMPT, **options).token_ids


def test_closing_after_an_interrupt_waits_for_the_gpu(
    gpu: Gpu, bundles: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = draftc.open(bundles.engines)
    assert isinstance(session.loops, DeviceLoops)

    def interrupted() -> None:
        raise KeyboardInterrupt

    stream = session.stream(PROMPT, max_new_tokens=30, ignore_eos=True)
    next(stream.events())
    with monkeypatch.context() as patched:
        patched.setattr(session.loops.step.gpu, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(stream.events())
    session.close()
    assert gpu.cuda.used == 0


def test_steps_may_move_between_threads(device: Session, host: Session) -> None:
    stream = device.stream(PROMPT, max_new_tokens=30, ignore_eos=True)
    failures: list[BaseException] = []

    def one() -> None:
        try:
            next(stream.events())
        except BaseException as error:
            failures.append(error)

    for _ in range(4):
        thread = threading.Thread(target=one)
        thread.start()
        thread.join()
    assert failures == []
    assert stream.drain().token_ids == host.generate(PROMPT, max_new_tokens=30, ignore_eos=True).token_ids


@pytest.mark.parametrize("which", ["target", "draft"])
def test_nan_is_an_engine_error_and_does_not_outlive_its_request(
    gpu: Gpu, device: Session, host: Session, which: str
) -> None:
    drafter = device.drafters["draft_model"]
    assert isinstance(drafter, ModelDrafter)
    engine: Any = (device.target if which == "target" else drafter.decoder).engine
    stream = device.stream(PROMPT, max_new_tokens=40, ignore_eos=True, temperature=2.0, seed=3)
    events = stream.events()
    next(events)
    next(events)
    for address in engine.kv_addresses.values():
        gpu.cuda.device_bytes(address, 32).fill(0xFF)
    with pytest.raises(EngineError, match=r"NaN or infinity .* run `draftc verify`"):
        for _ in events:
            pass
    options: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
    assert device.generate(PROMPT, **options).token_ids == host.generate(PROMPT, **options).token_ids


def test_a_call_that_fails_breaks_the_request_and_not_the_session(gpu: Gpu, device: Session, host: Session) -> None:
    stream = device.stream(PROMPT, max_new_tokens=40, ignore_eos=True)
    events = stream.events()
    next(events)
    gpu.trt.fail_next_execution = "no more"
    with pytest.raises(EngineError, match="no more"):
        next(events)
    options: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
    assert device.generate(PROMPT, **options).token_ids == host.generate(PROMPT, **options).token_ids


# Capturing


def test_times_and_calls_are_counted(device: Session) -> None:
    result = device.generate(PROMPT, max_new_tokens=30, ignore_eos=True, num_speculative_tokens=3)
    stats = result.stats
    assert stats.draft_s > 0
    assert stats.verify_s > 0
    assert stats.draft_s + stats.verify_s <= stats.decode_s
    assert 0 < stats.engine_s <= stats.decode_s
    assert stats.draft_calls >= 3 * (stats.steps - 2)
    assert stats.target_calls == stats.steps + -(-stats.prompt_tokens // device.manifest.prefill_chunk)


def test_a_capture_that_fails_is_noted_and_everything_runs_all_the_same(
    gpu: Gpu, device: Session, host: Session
) -> None:
    gpu.cuda.fail_next["end_building"] = ErrorCode.cudaErrorInvalidValue
    options: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 6.0, "seed": 4}
    with pytest.warns(DraftcWarning, match="without CUDA graphs"):
        result = device.generate(PROMPT, **options)
    same(result, host.generate(PROMPT, **options))
    assert isinstance(device.loops, DeviceLoops)
    assert "the capture was invalidated" in device.loops.step.note
    assert gpu.cuda.launches == 0


def test_verify_passes_on_engines(device: Session) -> None:
    cases = (PromptCase("a", PROMPT), PromptCase("b", "hello world, the lazy dog sleeps"))
    report = verify(device, prompts=cases, draws=1, seed=1)
    passed = {part.name: part.passed for part in report.parts}
    assert passed == {"greedy": True, "sampling": False, "cache": True, "bounds": True}  # one draw shows nothing


def test_closing_gives_everything_back(gpu: Gpu, bundles: Bundles) -> None:
    session = draftc.open(bundles.engines)
    session.generate(PROMPT, max_new_tokens=30, ignore_eos=True)
    session.close()
    session.close()
    assert gpu.cuda.used == 0
    assert all(stream.fake_closed for stream in gpu.cuda.streams.values())
