"""Checkpoints in, engines out: what the manifest says of them, and that nothing is left of a compile that fails."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftc.export import build
from draftc.export import compile as pipeline
from draftc.export.compile import compile_bundle
from draftc.export.options import CompileOptions
from draftc.export.progress import Quiet
from draftc.export.scheme import QuantizationScheme
from draftc.runtime.errors import BackendUnavailableError, CaptureError, UsageError
from draftc.runtime.manifest import Manifest, parse
from draftc.runtime.records import Range
from tests.export.tiny_models import save_pair, tiny_model

trt = pytest.importorskip("tensorrt_rtx")

PARAMETERS = sum(p.numel() for p in tiny_model("qwen2", tie_word_embeddings=True, vocab_size=336).parameters())


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
        "backend": "tensorrt-rtx",
        "device": "cuda",
        "sms": ("89",),
        "half": "fp16",
        "max_length": 96,
        "prefill_chunk": 40,
    }
    return CompileOptions(**(values | changes))


class Notes(Quiet):
    """Keeps what a user would read."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def note(self, text: str) -> None:
        self.told.append(text)


def files_of(out: Path) -> set[str]:
    return {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file() and path.parent.name != "tokenizer"}


def nothing_at(out: Path) -> bool:
    return not out.exists() and not [path for path in out.parent.iterdir() if path.name.startswith(f".{out.name}")]


# A pair in fp16


@pytest.fixture(scope="module")
def pair(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    out = tmp_path_factory.mktemp("compiled") / "pair"
    return out, compile_bundle(options(sources, out, sms=("86", "89"), batch=(1, 2), num_speculative_tokens=3))


def test_the_manifest_says_what_the_engines_are_for(pair: tuple[Path, Manifest]) -> None:
    out, manifest = pair
    assert manifest == parse((out / "bundle.json").read_text())
    backend = manifest.backend
    assert (backend.name, backend.version, backend.device, backend.sms, backend.opset) == (
        "tensorrt-rtx",
        trt.__version__,
        "cuda",
        ("86", "89"),
        24,
    )
    assert (manifest.precision, manifest.max_length, manifest.max_width, manifest.prefill_chunk) == ("fp16", 96, 32, 40)


def test_each_engine_has_its_tail_profiles_and_layers(pair: tuple[Path, Manifest]) -> None:
    _, manifest = pair
    draft = manifest.draft.model
    assert draft is not None
    batch, widest = Range(min=1, opt=1, max=2), manifest.max_width
    for model, tail, likeliest, caches in ((manifest.target, "verify", 4, 2 * 2), (draft, "draft", 1, 2 * 1 + 1)):
        assert (model.spec.tail, model.spec.q_shape) == (tail, (widest, manifest.vocab_size))
        assert {past.dtype for past, _ in model.spec.cache_pairs} == {"float16"}
        assert model.engine is not None
        assert (model.engine.half, model.engine.cache_layers) == ("fp16", caches)
        assert model.engine.attention_layers == model.spec.num_layers
        decode, prefill = model.engine.profiles
        width = Range(min=1, opt=likeliest, max=widest)
        assert (decode.name, decode.batch, decode.tokens, decode.rows) == ("decode", batch, width, width)
        chunk, one = Range(min=1, opt=40, max=40), Range(min=1, opt=1, max=1)
        assert (prefill.name, prefill.batch, prefill.tokens, prefill.rows) == ("prefill", batch, chunk, one)
        assert min(decode.activation_bytes, prefill.activation_bytes) > 0


def test_the_files_are_the_engines_and_their_logs(pair: tuple[Path, Manifest]) -> None:
    out, manifest = pair
    expected = {f"{role}/{name}" for role in ("target", "draft") for name in ("model.engine", "build.log")}
    assert files_of(out) == expected | {"bundle.json"}
    assert {entry.path for entry in manifest.files if not entry.path.startswith("tokenizer")} == expected
    assert (manifest.target.graph, manifest.target.parameters) == ("target/model.engine", PARAMETERS)
    for path in out.rglob("model.engine"):
        assert path.read_bytes()[:4] == b"vtrt"
    for path in out.rglob("build.log"):
        assert str(out.parent) not in path.read_text()


def test_a_tied_table_is_in_the_engine_once(pair: tuple[Path, Manifest]) -> None:
    _, manifest = pair
    assert manifest.target.engine is not None
    table = 2 * 336 * 64
    assert 2 * PARAMETERS <= manifest.target.engine.weights_bytes < 2 * PARAMETERS + table // 2


def test_each_stage_of_half_precision_is_reported(pair: tuple[Path, Manifest]) -> None:
    _, manifest = pair
    stages = [(report.graph, report.stage) for report in manifest.parity]
    assert stages == [(role, stage) for role in ("target", "draft") for stage in ("capture", "half")]
    for report in manifest.parity:
        assert report.tokens > 60
        if report.stage == "capture":  # in float32, with weights that are the same: only sums in another order
            assert report.max_abs_diff <= report.tolerance
            assert report.greedy_agreement == 1
        else:
            assert report.max_abs_diff > 0
            assert report.kl <= report.tolerance


# Quantized weights


@pytest.mark.parametrize(
    ("scheme", "half", "precision", "stages"),
    [
        (QuantizationScheme(4, 32), "bf16", "int4", ["capture", "quantize"]),
        (QuantizationScheme(8, 0, format="fp8"), "fp16", "fp8", ["capture", "half", "quantize"]),
    ],
)
def test_quantized_engines_with_ngrams(
    sources: Path, tmp_path: Path, scheme: QuantizationScheme, half: Any, precision: str, stages: list[str]
) -> None:
    notes = Notes()
    asked = options(sources, tmp_path / "out", draft="ngram", scheme=scheme, half=half, max_ngram=3)
    manifest = compile_bundle(asked, notes)
    assert (manifest.precision, manifest.draft.method) == (precision, "ngram")
    assert [report.stage for report in manifest.parity] == stages
    assert any("no CPU can run bf16 arithmetic" in note for note in notes.told) == (half == "bf16")
    rounded = manifest.target.quantization
    assert rounded is not None
    assert (rounded.format, rounded.bits, rounded.block_size) == (scheme.format, scheme.bits, scheme.block_size)
    assert (rounded.quantized_matmuls, rounded.float_matmuls) == (2 * 7 + 1, ())
    engine = manifest.target.engine
    assert engine is not None
    assert engine.half == half
    assert {past.dtype for past, _ in manifest.target.spec.cache_pairs} == {"float16" if half == "fp16" else "bfloat16"}
    table, norms = 336 * 64, 5 * 64 + 2 * (64 + 2 * 32)  # norms, and the biases of queries, keys and values
    matrices = PARAMETERS - norms  # the head is quantized besides the tied table, which stays
    codes = matrices * scheme.bits // 8 + (2 * matrices // 32 if scheme.block_size else 0)
    least = codes + 2 * (table + norms)
    assert least <= engine.weights_bytes < least + 24 * 1024 < 2 * PARAMETERS  # with the tail's tables, and alignment
    assert files_of(tmp_path / "out") == {"bundle.json", "target/model.engine", "target/build.log"}


# What goes wrong


@pytest.mark.parametrize("error", [KeyboardInterrupt(), CaptureError("a node that the parser refuses")])
def test_a_build_that_fails_leaves_nothing(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(flavour: str, graph: Path, spec: Any, profiles: Any, sms: Any, engine: Path, *_: Any) -> None:
        assert graph.exists()
        engine.write_bytes(b"the first part")
        raise error

    monkeypatch.setattr(build, "build_engine_apart", fail)
    with pytest.raises(type(error)) as caught:
        compile_bundle(options(sources, tmp_path / "out", target=str(sources / "draft"), draft="ngram"))
    assert caught.value is error
    assert nothing_at(tmp_path / "out")


def test_what_cannot_be_built_is_told_before_any_work(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "peek", lambda *_: pytest.fail("read a checkpoint"))
    asked = options(sources, tmp_path / "out")
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"sms": ("90",)}, "does not build for SM 90"),
        ({"sms": ("89", "75"), "half": "bf16"}, "SM 75 cannot run bf16"),
        ({"sms": ("80",), "scheme": QuantizationScheme(8, 0, format="fp8")}, "SM 80 cannot run fp8"),
        ({"sms": ("75",), "scheme": QuantizationScheme(4, 32)}, "SM 75 cannot run int4"),
    ]
    for changes, said in refusals:
        with pytest.raises(UsageError, match=said):
            compile_bundle(replace(asked, **changes))
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'draftc\[tensorrt-rtx\]'"):
        compile_bundle(asked)
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    with pytest.raises(UsageError, match="leave out --sm"):
        compile_bundle(replace(asked, backend="tensorrt"))
    assert nothing_at(tmp_path / "out")
