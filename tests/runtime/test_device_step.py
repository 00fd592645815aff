"""Steps on the device, one by one, next to the host's loop over the same engines; and how they are captured."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftc.runtime.decoder import Decoder, Limits
from draftc.runtime.device_loop import DeviceLoops, open_device_loops
from draftc.runtime.devices import DeviceOptions
from draftc.runtime.drafter import Drafter, ModelDrafter, NgramDrafter
from draftc.runtime.errors import DraftcWarning
from draftc.runtime.graphio import GraphSpec
from draftc.runtime.kvcache import TokenBuffer
from draftc.runtime.loop import Loop, Step
from draftc.runtime.sampler import Sampler
from draftc.runtime.stats import Stats
from draftc.runtime.tensorrt import TensorRtEngine
from draftc.runtime.warp import Sampling
from tests.runtime.fakes import tokens
from tests.runtime.sessions import MAX_LENGTH, MAX_WIDTH, PREFILL_CHUNK
from tests.runtime.tiny_engines import BUILT, INFO, LENGTH, Gpu, fake_gpu, plain_spec, save_graph, write_engine
from tests.runtime.tiny_model import TinyModel

ROWS, PADDING = 60, 3
VOCAB = ROWS - PADDING
LIMITS = Limits(MAX_LENGTH, MAX_WIDTH, PREFILL_CHUNK, VOCAB)
WARM = Sampling(temperature=4.0, top_k=25, top_p=0.95)


@dataclass(frozen=True)
class Pair:
    """Two decoders, and what makes their loops."""

    target: Decoder
    draft: Decoder
    loops: DeviceLoops

    def loop(self, kind: str, prompt: list[int], sampling: Sampling = WARM, method: str = "draft_model") -> Any:
        """A loop of its own text, "device" or "host"."""
        drafters: dict[str, Drafter | None] = {
            "draft_model": ModelDrafter(self.draft),
            "ngram": NgramDrafter(1, 3),
            "plain": None,
        }
        sampler = Sampler(sampling, prompt, VOCAB, seed=11)
        text = TokenBuffer(tokens(*prompt), LENGTH)
        arguments = self.target, drafters[method], text, sampler, lambda token: True, Stats()
        loop = self.loops.loop(*arguments) if kind == "device" else Loop(*arguments)
        assert loop is not None
        return loop


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graphs")
    save_graph(folder / "target.onnx", TinyModel(LENGTH, ROWS), "verify", VOCAB)
    save_graph(folder / "draft.onnx", TinyModel(LENGTH, ROWS, noise=0.2), "draft", VOCAB)
    return folder


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gpu:
    return fake_gpu(monkeypatch, tmp_path)


@pytest.fixture
def paired(gpu: Gpu, graphs: Path, tmp_path: Path) -> Callable[..., Pair]:
    def make(draft_limits: Limits = LIMITS, cuda_graph: bool = True, rtx: bool = True, **lies: Any) -> Pair:
        def engine(kind: str, beside: TensorRtEngine | None = None) -> TensorRtEngine:
            spec: GraphSpec = plain_spec(ROWS).with_tail("draft" if kind == "draft" else "verify", MAX_WIDTH, VOCAB)
            return TensorRtEngine(
                write_engine(tmp_path / f"{kind}.engine", graphs / f"{kind}.onnx", spec, **lies),
                spec,
                built=BUILT if rtx else replace(BUILT, name="tensorrt"),
                info=INFO,
                max_call=PREFILL_CHUNK,
                max_rows=MAX_WIDTH,
                options=DeviceOptions("cuda", cuda_graph=cuda_graph),
                beside=beside,
            )

        draft = engine("draft")
        target = engine("target", draft)
        loops = open_device_loops(target, draft, PREFILL_CHUNK)
        assert loops is not None
        return Pair(Decoder(target, LIMITS), Decoder(draft, draft_limits), loops)

    return make


def steps_of(loop: Any, ks: list[int]) -> list[Step]:
    return [loop.step(k) for k in ks]


@pytest.mark.parametrize("sampling", [Sampling(), WARM, Sampling(temperature=15.0, min_p=0.2)], ids=str)
@pytest.mark.parametrize("prompt", [[5], [5, 9], list(range(3, 30))], ids=len)
def test_every_step_is_the_hosts_whatever_k(paired: Callable[..., Pair], prompt: list[int], sampling: Sampling) -> None:
    """A text of one token has no last two; k goes up and down, and between them drafting stops."""
    ks = [3, 0, 5, 1, 2, 0, 0, 4, 5, 3, 3, 3]
    pair = paired()
    device = steps_of(pair.loop("device", prompt, sampling), ks)
    pair.target.cache.clear()
    pair.draft.cache.clear()
    assert device == steps_of(pair.loop("host", prompt, sampling), ks)
    assert {step.proposed for step in device} == {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, top_k=10**30),
        Sampling(temperature=1.0, top_k=VOCAB + 1),
        Sampling(temperature=1e60),
        Sampling(temperature=1e-60),
        Sampling(temperature=1.0, top_p=1e-60),
        Sampling(temperature=1.0, min_p=1e-60),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("error")
def test_parameters_that_the_device_has_no_number_for(paired: Callable[..., Pair], sampling: Sampling) -> None:
    pair = paired()
    device = steps_of(pair.loop("device", [5, 9, 4], sampling), [3] * 4)
    pair.target.cache.clear()
    pair.draft.cache.clear()
    assert device == steps_of(pair.loop("host", [5, 9, 4], sampling), [3] * 4)


@pytest.mark.parametrize("method", ["draft_model", "ngram", "plain"])
def test_host_and_device_steps_may_alternate_over_one_cache(paired: Callable[..., Pair], method: str) -> None:
    prompt = list(range(3, 22))
    pair, other = paired(), paired()
    reference = other.loop("host", prompt, method=method)
    device = pair.loop("device", prompt, method=method)
    host = pair.loop("host", prompt, method=method)
    host.text, host.sampler = device.text, device.sampler  # one request, two ways to go on
    for number in range(14):
        step = (host if number % 3 == 2 else device).step(2)
        assert step == reference.step(2)
        assert other.target.cache.tokens.tolist()[: len(device.text) - 1] == device.text.view[:-1].tolist()


def test_a_draft_with_a_shorter_context_stops_proposing(paired: Callable[..., Pair]) -> None:
    short = replace(LIMITS, max_length=20)
    pair = paired(draft_limits=short)
    loop = pair.loop("device", list(range(3, 15)))
    steps = steps_of(loop, [4] * 12)
    pair.target.cache.clear()
    pair.draft.cache.clear()
    assert steps == steps_of(pair.loop("host", list(range(3, 15))), [4] * 12)
    assert steps[0].proposed == 4
    assert steps[-1].proposed == 0
    assert any(0 < step.proposed < 4 for step in steps)


def test_caches_hold_what_they_say(gpu: Gpu, paired: Callable[..., Pair], graphs: Path) -> None:
    """After device steps the record is true: what it says is cached can be gone on from."""
    pair = paired()
    loop = pair.loop("device", list(range(3, 15)))
    models = {pair.target: TinyModel(LENGTH, ROWS), pair.draft: TinyModel(LENGTH, ROWS, noise=0.2)}
    for _ in range(8):
        loop.step(3)
        for decoder, model in models.items():
            cached = decoder.cache.tokens.copy()
            assert cached.size >= len(loop.text) - 2 - 3
            following = tokens(7, 8)
            logits = decoder.extend(following, 2)
            expected = model.expected(np.concatenate((cached, following)), 2)[:, :VOCAB]
            np.testing.assert_allclose(logits, expected, atol=1e-3)


# Captured graphs


def test_the_third_time_a_step_is_captured(gpu: Gpu, paired: Callable[..., Pair]) -> None:
    pair = paired()
    loop = pair.loop("device", [5, 6, 7])
    loop.step(0)
    counts = []
    for _ in range(6):
        loop.step(3)
        counts.append((gpu.cuda.captures, gpu.cuda.launches))
    assert counts == [(0, 0), (0, 0), (1, 1), (1, 2), (1, 3), (1, 4)]
    assert pair.loops.step.captured == 1


@pytest.mark.parametrize("method", ["draft_model", "ngram", "plain"])
def test_graphs_change_nothing(gpu: Gpu, paired: Callable[..., Pair], method: str) -> None:
    ks = [0, 3, 3, 3, 2, 3, 2, 2, 3, 2, 1, 3, 0, 0, 0, 3]
    with_graphs = steps_of(paired().loop("device", [5, 6, 7], method=method), ks)
    launches = gpu.cuda.launches
    assert launches > 3
    assert with_graphs == steps_of(paired(cuda_graph=False).loop("device", [5, 6, 7], method=method), ks)
    assert gpu.cuda.launches == launches


def test_graphs_serve_the_next_request_with_its_own_parameters(gpu: Gpu, paired: Callable[..., Pair]) -> None:
    pair, other = paired(), paired(cuda_graph=False)
    for sampling in (WARM, Sampling(), Sampling(temperature=9.0), Sampling(temperature=2.0, top_p=0.5)):
        expected = steps_of(other.loop("host", [5, 6, 7], sampling), [0, 3, 3, 3, 3, 3])
        assert steps_of(pair.loop("device", [5, 6, 7], sampling), [0, 3, 3, 3, 3, 3]) == expected
    assert pair.loops.step.captured == 2  # steps of three, and plain ones where the prompt was cached


def test_an_engine_that_cannot_be_captured_is_run_as_it_is(gpu: Gpu, paired: Callable[..., Pair]) -> None:
    pair = paired(capturable=False)
    with pytest.warns(DraftcWarning, match="without CUDA graphs, .*: TensorRT cannot capture this engine") as warned:
        steps = steps_of(pair.loop("device", [5, 6, 7]), [3] * 6)
    assert len(warned) == 1
    assert (gpu.cuda.captures, pair.loops.step.note) == (0, "TensorRT cannot capture this engine")
    assert steps == steps_of(paired().loop("host", [5, 6, 7]), [3] * 6)


def test_a_rewind_between_replays(paired: Callable[..., Pair]) -> None:
    """A graph has no lengths in it: the next request may begin anywhere."""
    pair, other = paired(), paired()
    for prompt in ([5, 6, 7], [5, 6], list(range(3, 40)), [5, 6, 7, 8]):
        expected = steps_of(other.loop("host", prompt), [0, 3, 3, 3, 3])
        assert steps_of(pair.loop("device", prompt), [0, 3, 3, 3, 3]) == expected


def test_standard_tensorrt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, paired: Callable[..., Pair]) -> None:
    gpu = fake_gpu(monkeypatch, tmp_path, rtx=False)
    pair = paired(rtx=False)
    steps = steps_of(pair.loop("device", [5, 6, 7]), [0, 3, 3, 3, 3])
    assert gpu.cuda.launches == 2
    assert steps == steps_of(paired(rtx=False).loop("host", [5, 6, 7]), [0, 3, 3, 3, 3])


def test_engines_without_tails_have_no_device_loop(gpu: Gpu, tmp_path: Path) -> None:
    graph = TinyModel(LENGTH, ROWS).save(tmp_path / "plain.onnx")
    engine = TensorRtEngine(
        write_engine(tmp_path / "plain.engine", graph, plain_spec(ROWS)),
        plain_spec(ROWS),
        built=BUILT,
        info=INFO,
        max_call=PREFILL_CHUNK,
        max_rows=MAX_WIDTH,
        options=DeviceOptions("cuda"),
    )
    assert open_device_loops(engine, None, PREFILL_CHUNK) is None
    np.testing.assert_allclose(
        engine.forward(tokens(1, 2, 3), 0, 3), TinyModel(LENGTH, ROWS).expected(tokens(1, 2, 3), 3), atol=1e-4
    )


@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=str)
def test_uniforms_that_were_not_used_come_again(paired: Callable[..., Pair], sampling: Sampling) -> None:
    """After the same steps both generators are at the same place."""
    pair, other = paired(), paired()
    device, host = pair.loop("device", [5, 6, 7], sampling), other.loop("host", [5, 6, 7], sampling)
    for k in (3, 5, 1, 0, 4, 2):
        assert device.step(k) == host.step(k)
        a, b = device.sampler.uniform(), host.sampler.uniform()
        assert a == b
