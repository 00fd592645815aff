"""The whole line: checkpoints in, a bundle out that generates what the checkpoint generates; or nothing at all."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import draftc.runtime as runtime
from draftc.export import build, judge, parity, preflight
from draftc.export import compile as pipeline
from draftc.export.compile import compile_bundle
from draftc.export.options import CompileOptions
from draftc.export.progress import Quiet
from draftc.export.scheme import QuantizationScheme
from draftc.runtime.errors import (
    BackendUnavailableError,
    CheckpointError,
    PairError,
    ParityError,
    ResourceError,
    UsageError,
)
from draftc.runtime.manifest import Manifest, parse
from draftc.runtime.records import Rounding
from tests.export.tiny_models import save_folder, save_pair, tiny_model, tiny_tokenizer, write_gguf

PROMPT = "the quick brown fox"


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pair(tmp_path_factory.mktemp("sources"))


def options(sources: Path, out: Path, **changes: Any) -> CompileOptions:
    values: dict[str, Any] = {
        "target": str(sources / "target"),
        "draft": str(sources / "draft"),
        "out": out,
        "max_length": 96,
    }
    return CompileOptions(**(values | changes))


@pytest.fixture(scope="module")
def bundle(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compiled") / "pair"
    compile_bundle(options(sources, out))
    return out


class Notes(Quiet):
    """Keeps what a user would read."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def note(self, text: str) -> None:
        self.told.append(text)


def manifest_of(out: Path) -> Manifest:
    return parse((out / "bundle.json").read_text())


def hf_greedy(folder: Path, prompt: str, count: int) -> list[int]:
    """transformers' own greedy decoding, padding rows and all."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    vocabulary = len(tokenizer)
    for _ in range(count):
        with torch.no_grad():
            row = model(ids).logits[0, -1, :vocabulary]
        ids = torch.cat([ids, row.argmax()[None, None]], 1)
    return [int(token) for token in ids[0, -count:]]


@pytest.mark.parametrize("method", ["plain", "draft_model", "ngram"])
def test_the_bundle_generates_what_the_checkpoint_does(bundle: Path, sources: Path, method: str) -> None:
    expected = hf_greedy(sources / "target", PROMPT, 40)
    with runtime.open(bundle, threads=1) as session:
        result = session.generate(PROMPT, max_new_tokens=40, temperature=0, ignore_eos=True, method=method)
    assert result.token_ids == expected
    assert result.finish_reason == "length"


def test_the_manifest_says_what_was_made(bundle: Path, sources: Path) -> None:
    manifest = manifest_of(bundle)
    assert (manifest.precision, manifest.max_length, manifest.max_width, manifest.buffer_length) == (
        "fp32",
        96,
        32,
        128,
    )
    assert manifest.target.architecture == "qwen2"
    assert manifest.target.parameters == sum(
        p.numel() for p in tiny_model("qwen2", tie_word_embeddings=True, vocab_size=336).parameters()
    )
    assert manifest.target.spec.vocab_rows == 336
    assert manifest.vocab_size == len(AutoTokenizer.from_pretrained(sources / "target"))
    assert [(report.graph, report.stage) for report in manifest.parity] == [("target", "capture"), ("draft", "capture")]
    assert all(report.max_abs_diff <= report.tolerance and report.tokens > 60 for report in manifest.parity)
    assert manifest.pair is not None
    assert 0 < manifest.pair.draft_cost_ratio < 1
    assert {path.name for path in bundle.iterdir()} == {"bundle.json", "target", "draft", "tokenizer"}


def test_a_tied_table_is_stored_once(bundle: Path) -> None:
    manifest = manifest_of(bundle)
    size = (bundle / "target" / "model.onnx.data").stat().st_size
    table = 4 * 336 * 64
    assert (
        4 * manifest.target.parameters - 4096 < size < 4 * manifest.target.parameters + table // 2
    )  # norms are inline


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_with_ngrams(sources: Path, tmp_path: Path, bits: int) -> None:
    out = tmp_path / "q"
    compile_bundle(options(sources, out, draft="ngram", scheme=QuantizationScheme(bits), max_ngram=3))
    manifest = manifest_of(out)
    assert manifest.precision == f"int{bits}"
    assert manifest.target.quantization is not None
    assert manifest.target.quantization.quantized_matmuls == 2 * 7 + 1  # q k v o gate up down per layer, and the head
    assert manifest.target.quantization.float_matmuls == ()
    assert (manifest.draft.method, manifest.draft.max_ngram) == ("ngram", 3)
    assert [report.stage for report in manifest.parity] == ["capture", "quantize"]
    assert not list(out.glob("*.float"))
    with runtime.open(out, threads=1) as session:
        plain = session.generate(PROMPT, max_new_tokens=24, temperature=0, method="plain").token_ids
        assert session.generate(PROMPT, max_new_tokens=24, temperature=0).token_ids[:8] == plain[:8]


def test_gptq_comes_closer_than_rounding_to_nearest(sources: Path, tmp_path: Path) -> None:
    """Through the whole pipeline, on a text that it was not calibrated on, with a draft that has a cut head."""
    reports = {}
    roundings: tuple[Rounding, ...] = ("nearest", "gptq")
    for rounding in roundings:
        scheme = QuantizationScheme(4, 64, symmetric=False, rounding=rounding)
        compile_bundle(options(sources, tmp_path / rounding, scheme=scheme, draft_vocab=64))
        manifest = manifest_of(tmp_path / rounding)
        reports[rounding] = [report for report in manifest.parity if report.stage == "quantize"]
        for _, model in manifest.models:
            assert model.quantization is not None
            assert model.quantization.rounding == rounding
            assert (model.quantization.calibration is not None) == (rounding == "gptq")
        with runtime.open(tmp_path / rounding, threads=1) as session:
            assert session.generate(PROMPT, max_new_tokens=8, temperature=0).token_ids
    for nearest, gptq in zip(reports["nearest"], reports["gptq"], strict=True):
        assert gptq.kl < 0.7 * nearest.kl
        assert gptq.tokens == nearest.tokens
        assert gptq.reference_perplexity == nearest.reference_perplexity
        assert gptq.perplexity is not None


def test_gpt2_has_all_its_weights_quantized(tmp_path: Path) -> None:
    """Its layers are Gemm nodes with (K, N) weights, not MatMuls."""
    save_folder(tmp_path / "gpt2", tiny_model("gpt2", n_embd=64, n_layer=2, n_head=4, max_position_embeddings=96))
    out = tmp_path / "out"
    compile_bundle(CompileOptions(str(tmp_path / "gpt2"), "ngram", out, scheme=QuantizationScheme(8)))
    manifest = manifest_of(out)
    assert manifest.max_length == 96  # its position table
    assert manifest.target.quantization is not None
    assert manifest.target.quantization.quantized_matmuls == 2 * 4 + 1
    assert manifest.target.quantization.float_matmuls == ()


def test_a_gguf_file_compiles(tmp_path: Path) -> None:
    model = tiny_model("llama")
    file = write_gguf(tmp_path / "tiny.gguf", model)
    compile_bundle(CompileOptions(str(file), "ngram", tmp_path / "out", max_length=64))
    manifest = manifest_of(tmp_path / "out")
    assert manifest.target.source.kind == "gguf"
    save_folder(tmp_path / "folder", model)
    expected = hf_greedy(tmp_path / "folder", PROMPT, 12)
    with runtime.open(tmp_path / "out", threads=1) as session:
        assert session.generate(PROMPT, max_new_tokens=12, temperature=0, ignore_eos=True).token_ids == expected


def nothing_at(out: Path) -> bool:
    return not out.exists() and not [path for path in out.parent.iterdir() if path.name.startswith(f".{out.name}")]


def test_a_capture_that_computes_something_else_is_not_written(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = parity.eager_logits

    def shifted(model: Any, tokens: Any) -> parity.LogitRows:
        return {position + 1: row for position, row in real(model, tokens).items()}

    monkeypatch.setattr(parity, "eager_logits", shifted)
    with pytest.raises(ParityError, match="cannot be compiled faithfully"):
        compile_bundle(options(sources, tmp_path / "out"))
    assert nothing_at(tmp_path / "out")


@pytest.mark.parametrize(("module", "where"), [(build, "capture"), (pipeline, "write_tokenizer")])
def test_an_interrupt_leaves_nothing(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, where: str
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, where, interrupt)
    with pytest.raises(KeyboardInterrupt):
        compile_bundle(options(sources, tmp_path / "out", draft="ngram"))
    assert nothing_at(tmp_path / "out")


def test_a_pair_that_does_not_fit_is_refused_before_any_work(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "load", lambda *_, **__: pytest.fail("loaded weights"))
    with pytest.raises(PairError):
        compile_bundle(options(sources, tmp_path / "out", draft=str(sources / "other")))
    assert nothing_at(tmp_path / "out")


@pytest.mark.parametrize("side", ["target", "draft"])
def test_a_learned_position_table_that_is_too_short_is_refused_before_any_work(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    short = tiny_model("gpt2", n_embd=64, n_layer=1, n_head=4, max_position_embeddings=90)
    save_folder(tmp_path / "short", short)
    monkeypatch.setattr(build, "load", lambda *_, **__: pytest.fail("loaded weights"))
    with pytest.raises(UsageError, match=f"max_length 96 exceeds the 90 positions of the {side} .*short: use"):
        compile_bundle(options(sources, tmp_path / "out", **{side: str(tmp_path / "short")}))
    assert nothing_at(tmp_path / "out")


def test_a_tokenizer_that_the_runtime_refuses_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_folder(tmp_path / "m", tiny_model(), tiny_tokenizer(chat_template="{% for %}"))
    monkeypatch.setattr(build, "load", lambda *_, **__: pytest.fail("loaded weights"))
    with pytest.raises(CheckpointError, match="chat template"):
        compile_bundle(CompileOptions(str(tmp_path / "m"), "ngram", tmp_path / "out", max_length=64))


def test_a_missing_backend_is_told_before_any_work(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Any:
        raise BackendUnavailableError("not there")

    monkeypatch.setattr(pipeline, "load_onnxruntime", missing)
    monkeypatch.setattr(pipeline, "peek", lambda *_: pytest.fail("read a checkpoint"))
    with pytest.raises(BackendUnavailableError):
        compile_bundle(options(sources, tmp_path / "out"))


def test_the_shortest_text_the_widest_k_and_another_build_of_the_backend(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "load_onnxruntime", lambda: SimpleNamespace(__version__="9.9.9"))
    changes = {"draft": "ngram", "max_length": 8, "num_speculative_tokens": 20}
    manifest = compile_bundle(options(sources, tmp_path / "out", **changes))
    assert manifest.backend.version == "9.9.9"  # of the module, whatever distribution brought it
    assert manifest.parity[0].tokens == 8


def test_experts_stay_in_float_and_are_named(tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    save_folder(tmp_path / "moe", tiny_model("qwen3_moe", num_hidden_layers=1, **sizes))
    notes = Notes()
    manifest = compile_bundle(
        CompileOptions(str(tmp_path / "moe"), "ngram", tmp_path / "out", scheme=QuantizationScheme(8), max_length=64),
        notes,
    )
    assert manifest.target.quantization is not None
    assert manifest.target.quantization.quantized_matmuls == 4 + 1 + 1  # q k v o, the router, the head
    experts = tuple(f"model.layers.0.mlp.experts.{part}_proj" for part in ("down", "gate_up"))
    assert manifest.target.quantization.float_matmuls == experts
    rest = 2 * 64 * 64 + 2 * 64 * 32 + 4 * 64 + 320 * 64
    share = 4 * 3 * 64 * 32 / (4 * 3 * 64 * 32 + rest)
    assert (
        f"target: {share:.0%} of the weights that it multiplies with stay in float: {', '.join(experts)}" in notes.told
    )


def test_the_gate_holds_no_more_logits_than_fit(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "LOGITS_BYTES", 4 * 336 * 40)
    manifest = compile_bundle(options(sources, tmp_path / "out", draft="ngram"))
    assert 20 <= manifest.parity[0].tokens <= 40


def test_too_little_memory_is_refused_before_any_work(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "available_memory", lambda: 1024)
    monkeypatch.setattr(build, "load", lambda *_, **__: pytest.fail("loaded weights"))
    with pytest.raises(ResourceError, match="memory"):
        compile_bundle(options(sources, tmp_path / "out"))
    assert nothing_at(tmp_path / "out")


def test_force_replaces_and_without_it_the_old_bundle_stays(bundle: Path, sources: Path) -> None:
    before = (bundle / "bundle.json").read_bytes()
    with pytest.raises(ResourceError, match="--force"):
        compile_bundle(options(sources, bundle))
    assert (bundle / "bundle.json").read_bytes() == before


def test_logits_of_padding_rows_never_become_tokens(sources: Path, tmp_path: Path) -> None:
    """A head row past the vocabulary that would win every argmax."""
    model = tiny_model("llama", vocab_size=336)
    with torch.no_grad():
        model.lm_head.weight[330] = 50 * torch.sign(model.lm_head.weight[330])
        model.lm_head.weight[330:] *= 1.0
        hidden = model.model(torch.arange(24)[None] * 7 % 300).last_hidden_state[0, -1]
        model.lm_head.weight[330] = 50 * hidden
    save_folder(tmp_path / "padded", model)
    compile_bundle(CompileOptions(str(tmp_path / "padded"), "ngram", tmp_path / "out", max_length=64))
    with runtime.open(tmp_path / "out", threads=1) as session:
        for seed in range(4):
            result = session.generate(
                np.arange(24) * 7 % 300, max_new_tokens=12, temperature=1.0, seed=seed, ignore_eos=True, top_k=0
            )
            assert max(result.token_ids) < session.manifest.vocab_size


@pytest.mark.parametrize(("max_length", "factors"), [(200, "short"), (256, "long")])
def test_longrope_is_compared_in_the_regime_that_was_compiled(tmp_path: Path, max_length: int, factors: str) -> None:
    """Its factors depend on max_length here, and on the longest position of each call in the checkpoint's own code.

    The text of the gate, 192 tokens, is short for the checkpoint in both cases.
    """
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0 + i for i in range(8)],
        "original_max_position_embeddings": 200,
        "factor": 1.6,
    }
    sizes = {"max_position_embeddings": 512, "original_max_position_embeddings": 200}
    save_folder(tmp_path / "phi3", tiny_model("phi3", rope_parameters=rope, **sizes))
    compile_bundle(CompileOptions(str(tmp_path / "phi3"), "ngram", tmp_path / "out", max_length=max_length))
    rope_note = manifest_of(tmp_path / "out").target.rope
    assert rope_note is not None
    assert factors in rope_note
