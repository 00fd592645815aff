"""`draftc compile` as a command: what its options become, and what is refused in one line before any work."""

import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from draftc.export import compile as pipeline
from draftc.export.catalog import load_recipe
from draftc.export.options import CompileOptions
from draftc.export.scheme import QuantizationScheme
from draftc.runtime.cli import build_app
from draftc.runtime.errors import UsageError
from draftc.runtime.manifest import parse
from tests.export.tiny_models import save_folder, save_pair, tiny_model

RTX = ["--backend", "tensorrt-rtx", "--sm", "89"]
on_cpu = partial(QuantizationScheme, embedding="shared")  # ONNX Runtime on the CPU


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pair(tmp_path_factory.mktemp("sources"))


def invoke(out: Path, *arguments: str) -> Result:
    return CliRunner().invoke(build_app(), ["compile", *arguments, "-o", str(out)])


def nothing_at(out: Path) -> bool:
    return not out.exists() and not [path for path in out.parent.iterdir() if path.name.startswith(f".{out.name}")]


def options_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> CompileOptions:
    """What the command asks the compiler for."""
    asked: list[CompileOptions] = []

    def note(options: CompileOptions, reporter: object) -> None:
        asked.append(options)
        raise UsageError("that was all")

    monkeypatch.setattr(pipeline, "compile_bundle", note)
    result = CliRunner().invoke(build_app(), ["compile", "--target", "t", "--draft", "ngram", "-o", "out", *arguments])
    assert result.stderr == "draftc: that was all\n"
    return asked[0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {"backend": "onnxruntime", "device": "cpu", "half": None, "scheme": None, "batch": (1, 1), "sms": ()}),
        (RTX, {"backend": "tensorrt-rtx", "device": "cuda", "half": "fp16", "scheme": None, "sms": ("89",)}),
        ([*RTX[:3], "86, 89,120"], {"sms": ("86", "89", "120")}),
        ([*RTX, "--batch", "1..4"], {"batch": (1, 4)}),
        ([*RTX, "--batch", "3"], {"batch": (3, 3)}),
        ([*RTX, "--precision", "bf16"], {"half": "bf16", "scheme": None}),
        ([*RTX, "--precision", "int4"], {"half": "fp16", "scheme": QuantizationScheme(4, 32)}),
        ([*RTX, "--precision", "int8"], {"half": "fp16", "scheme": QuantizationScheme(8, 0)}),
        ([*RTX, "--precision", "fp8"], {"half": "fp16", "scheme": QuantizationScheme(8, 0, format="fp8")}),
        (
            [*RTX, "--precision", "int4", "--activations", "bf16", "--block-size", "128"],
            {"half": "bf16", "scheme": QuantizationScheme(4, 128), "precision": "int4"},
        ),
        (["--backend", "tensorrt"], {"backend": "tensorrt", "device": "cuda", "half": "fp16", "sms": ()}),
        (["--device", "cuda"], {"device": "cuda", "half": None, "scheme": None}),
        (["--device", "cuda", "--precision", "fp16"], {"half": "fp16", "scheme": None}),
        (
            ["--device", "cuda", "--precision", "int4"],
            {"half": "fp16", "scheme": QuantizationScheme(4, 32, symmetric=False)},
        ),
        (["--precision", "int8"], {"device": "cpu", "half": None, "scheme": on_cpu(8, 32)}),
        (["--precision", "int4"], {"scheme": on_cpu(4, 32, symmetric=False), "calibration": None}),
        (["--precision", "int4", "--symmetric"], {"scheme": on_cpu(4, 32)}),
        (
            ["--precision", "int4", "--rounding", "gptq"],
            {"scheme": on_cpu(4, 128, symmetric=False, rounding="gptq")},
        ),
        (
            ["--precision", "int4", "--rounding", "gptq", "--block-size", "32", "--symmetric", "--calibration", "text"],
            {"scheme": on_cpu(4, 32, rounding="gptq"), "calibration": Path("text")},
        ),
        (["--precision", "int4", "--rounding", "nearest"], {"scheme": on_cpu(4, 32, symmetric=False)}),
        (["--precision", "int4", "--rounding", "stored"], {"scheme": on_cpu(4, 32, rounding="stored")}),
        (
            ["--precision", "int4", "--target-blocks", "up_proj=64", "--target-blocks", "gate=128"],
            {"scheme": on_cpu(4, 32, symmetric=False, blocks=(("up_proj", 64), ("gate", 128)))},
        ),
        (["--precision", "int8", "--rounding", "gptq"], {"scheme": on_cpu(8, 128, rounding="gptq")}),
        (["--precision", "int8", "--no-quantize-head"], {"scheme": QuantizationScheme(8, 32, head=False)}),
        (["--precision", "int8", "--embedding", "float"], {"scheme": QuantizationScheme(8, 32)}),
        (["--precision", "int8", "--embedding", "int8"], {"scheme": QuantizationScheme(8, 32, embedding="int8")}),
    ],
    ids=" ".join,
)
def test_what_the_options_become(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: dict[str, Any]
) -> None:
    options = options_of(monkeypatch, *arguments)
    assert {name: getattr(options, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draft", "ngram", "--draft-vocab", "64"], "--draft-vocab cuts a draft model's head, n-grams have none"),
        (["--draft", "d", "--draft-vocab", "-1"], "--draft-vocab must be 0 (all tokens) or more, got -1"),
        (["--draft", "d", "--draft-corpus", "x"], "--draft-corpus says which tokens --draft-vocab keeps: give both"),
        (["--draft", "d", "--draft-vocab", "64", *RTX], "--draft-vocab is not offered for tensorrt-rtx engines yet"),
    ],
    ids=["ngram", "negative", "corpus alone", "engines"],
)
def test_a_cut_that_cannot_be(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = invoke(tmp_path / "out", "--target", "t", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"draftc: {message}")
    assert result.stderr.count("\n") == 1
    assert nothing_at(tmp_path / "out")


@pytest.mark.parametrize(
    ("size", "content", "message"),
    [
        ("3", b"text", "--draft-vocab must be 4 (the special tokens) to "),
        ("999", b"text", "(the vocabulary), got 999; 0 keeps all"),
        ("64", None, "corpus.txt: cannot be read (No such file or directory)"),
        ("64", b"", "corpus.txt: there is no text in the corpus"),
        ("64", b"a\0b", "corpus.txt: not a text (a NUL byte"),
        ("64", b"a\xff", "corpus.txt: not UTF-8 at byte 1"),
    ],
)
def test_a_cut_and_its_corpus_are_checked_before_any_work(
    sources: Path, tmp_path: Path, size: str, content: bytes | None, message: str
) -> None:
    corpus = tmp_path / "corpus.txt"
    if content is not None:
        corpus.write_bytes(content)
    pair = ["--target", str(sources / "target"), "--draft", str(sources / "draft"), "--max-length", "96"]
    result = invoke(tmp_path / "out", *pair, "--draft-vocab", size, "--draft-corpus", str(corpus), "--quiet")
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert nothing_at(tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounding", "gptq"], "options of quantization need --precision int8, int4 or fp8"),
        (["--precision", "int4", "--rounding", "up"], "rounding must be one of nearest, gptq, stored, got 'up'"),
        (
            ["--precision", "int4", "--rounding", "nearest", "--calibration", "x"],
            "--calibration is the text for --rounding gptq: leave it out, or round with gptq",
        ),
        (["--precision", "int8", "--calibration", "x"], "--calibration is the text for --rounding gptq"),
        ([*RTX, "--precision", "int4", "--rounding", "gptq"], "--rounding gptq is for ONNX Runtime"),
        ([*RTX, "--precision", "fp8", "--rounding", "gptq"], "GPTQ rounds to integers: use --rounding nearest for fp8"),
        (["--precision", "int4", "--rounding", "stored", "--block-size", "128"], "stored blocks are of 32 weights"),
    ],
)
def test_roundings_that_cannot_be(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = invoke(tmp_path / "out", "--target", "t", "--draft", "ngram", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"draftc: {message}")
    assert result.stderr.count("\n") == 1
    assert nothing_at(tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cal.txt: cannot be read (No such file or directory): name a --calibration FILE"),
        (b"", "cal.txt: there is no text in the corpus: name another --calibration FILE"),
        (b"a\0b", "cal.txt: not a text (a NUL byte"),
        (b"a\xff", "cal.txt: not UTF-8 at byte 1"),
        (b"a short text", "cal.txt: too short to calibrate on"),
    ],
)
def test_the_calibration_text_is_checked_before_any_work(
    sources: Path, tmp_path: Path, content: bytes | None, message: str
) -> None:
    text = tmp_path / "cal.txt"
    if content is not None:
        text.write_bytes(content)
    pair = ["--target", str(sources / "target"), "--draft", "ngram", "--max-length", "96", "--precision", "int4"]
    pair += ["--rounding", "gptq"]
    result = invoke(tmp_path / "out", *pair, "--calibration", str(text), "--quiet")
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert nothing_at(tmp_path / "out")


def test_a_recipe_in_float32_becomes_an_engine_in_fp16(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fetched = {"smollm2-135m-instruct": tmp_path}
    monkeypatch.setattr("draftc.export.catalog.fetch_recipe", lambda *_, **__: fetched)
    asked: list[CompileOptions] = []

    def note(options: CompileOptions, reporter: object) -> None:
        asked.append(options)
        raise UsageError("that was all")

    monkeypatch.setattr(pipeline, "compile_bundle", note)
    invoke(tmp_path / "out", "--recipe", "smollm2-135m")
    invoke(tmp_path / "out", "--recipe", "smollm2-135m", *RTX)
    assert [options.precision for options in asked] == ["fp32", "fp16"]


def test_a_recipe_cuts_its_draft_for_onnx_runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recipe = load_recipe("qwen2.5-coder-1.5b")
    monkeypatch.setattr("draftc.export.catalog.fetch_recipe", lambda *_, **__: dict.fromkeys(recipe.models, tmp_path))
    asked: list[CompileOptions] = []

    def note(options: CompileOptions, reporter: object) -> None:
        asked.append(options)
        raise UsageError("that was all")

    monkeypatch.setattr(pipeline, "compile_bundle", note)
    for more in ([], ["--draft-vocab", "0"], ["--draft-vocab", "99"], RTX):
        invoke(tmp_path / "out", "--recipe", recipe.name, *more)
    assert recipe.draft_vocab > 0
    assert [options.draft_vocab for options in asked] == [recipe.draft_vocab, 0, 99, 0]


def test_a_recipe_rounds_for_onnx_runtime_as_it_was_tested(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recipe = load_recipe("qwen2.5-coder-1.5b")
    monkeypatch.setattr("draftc.export.catalog.fetch_recipe", lambda *_, **__: dict.fromkeys(recipe.models, tmp_path))
    asked: list[CompileOptions] = []

    def note(options: CompileOptions, reporter: object) -> None:
        asked.append(options)
        raise UsageError("that was all")

    monkeypatch.setattr(pipeline, "compile_bundle", note)
    for more in ([], ["--rounding", "nearest"], ["--precision", "int8"], ["--precision", "fp32"], RTX):
        invoke(tmp_path / "out", "--recipe", recipe.name, *more)
    blocks = (("layers.26.", 128), ("layers.27.", 128), ("gate_proj", 256), ("up_proj", 256), ("down_proj", 256))
    draft = on_cpu(4, 128, symmetric=False, rounding="gptq")
    assert asked[0].scheme_of("draft") == draft, "block sizes by name are the target's"
    assert [options.scheme_of("target") for options in asked] == [
        replace(draft, blocks=blocks),
        on_cpu(4, 32, symmetric=False),
        on_cpu(8, 32),
        None,
        QuantizationScheme(4, 32),
    ]


def test_sigterm_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []

    def terminated(role: str, info: object, options: object, limits: object, folder: Path, *_: object) -> None:
        (folder / "weights").write_bytes(b"0" * 1000)
        written.extend(folder.iterdir())
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    save_folder(tmp_path / "m")
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(pipeline, "build_model", terminated)
    result = invoke(tmp_path / "out", "--target", str(tmp_path / "m"), "--draft", "ngram")
    assert result.exit_code == 143
    assert len(written) == 1
    assert nothing_at(tmp_path / "out")
    assert signal.getsignal(signal.SIGTERM) == before


def test_block_sizes_for_weights_that_are_not_there(tmp_path: Path) -> None:
    save_folder(tmp_path / "m")
    line = ("--target", str(tmp_path / "m"), "--draft", "ngram", "--precision", "int4", "--target-blocks")
    result = invoke(tmp_path / "out", *line, "up_proj=32", "--target-blocks", "up_prj=64")
    assert result.exit_code == 2
    said = result.stderr.splitlines()[-1]
    assert said.startswith(
        "draftc: --target-blocks up_prj: no weight of the target is called so; they have names such as "
    )
    assert nothing_at(tmp_path / "out")


ENGINE: dict[str, Any] = {"backend": "tensorrt-rtx", "device": "cuda", "half": "fp16", "sms": ("89",)}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be 1 to 31"),
        ({"num_speculative_tokens": 32}, "num_speculative_tokens must be 1 to 31"),
        ({"max_length": 7}, "max_length must be 8 or more"),
        ({"max_width": 1}, "max_width must be"),
        ({"prefill_chunk": 0}, "prefill_chunk"),
        ({"min_ngram": 5, "max_ngram": 4}, "min_ngram <= max_ngram"),
        ({"max_length": 2**31 - 32}, "max_length must be 2147483615 or less"),
        ({"name": ""}, "printable"),
        ({"name": "a\nb"}, r"printable text, got 'a\\nb'"),
        ({"max_length": 0}, "max_length must be 8 or more"),
        ({"sms": ("89",)}, "--sm and --batch describe TensorRT engines"),
        ({"batch": (1, 2)}, "--sm and --batch describe TensorRT engines"),
        ({"half": "fp16"}, "graphs in fp16 need --device cuda"),
        ({"scheme": QuantizationScheme(8, 0)}, "integers in blocks"),
        ({"scheme": QuantizationScheme(8, 32, format="fp8")}, "integers in blocks"),
        (ENGINE | {"half": None}, "engines compute in half precision: use --precision fp16"),
        (ENGINE | {"device": "cpu"}, "run on CUDA devices only, got device 'cpu'"),
        (ENGINE | {"batch": (0, 1)}, r"batch must be 1 to 64 rows, or a range such as 1\.\.4, got 0\.\.1"),
        (ENGINE | {"batch": (3, 2)}, "batch must be"),
        (ENGINE | {"batch": (1, 65)}, "batch must be"),
        (ENGINE | {"scheme": QuantizationScheme(4, 256)}, "16 to 128 weights, got 256"),
        (ENGINE | {"scheme": QuantizationScheme(4, 32, symmetric=False)}, "no zero points"),
    ],
)
def test_options_that_are_out_of_range_or_do_not_go_together(
    sources: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        CompileOptions("target", "ngram", tmp_path / "out", **({"max_length": 96} | changes))


NO_SUCH_ENGINE = [
    (["--backend", "openvino"], "backend must be one of onnxruntime, tensorrt-rtx, tensorrt, got 'openvino'"),
    (["--device", "tpu"], "device must be one of cpu, cuda, got 'tpu'"),
    ([*RTX, "--precision", "fp32"], "engines compute in half precision"),
    ([*RTX, "--device", "cpu"], "CUDA devices only"),
    ([*RTX, "--batch", "many"], "batch must be a number of rows or a range such as 1..4, got 'many'"),
    ([*RTX, "--batch", "1..2..3"], "got '1..2..3'"),
    ([*RTX, "--batch", "..4"], "got '..4'"),
    ([*RTX, "--batch", "4..1"], "got 4..1"),
    ([*RTX, "--batch", "0"], "got 0..0"),
    ([*RTX, "--precision", "int4", "--no-symmetric"], "no zero points"),
    ([*RTX, "--precision", "int4", "--target-blocks", "q=64"], "leave out --target-blocks"),
    (
        ["--precision", "int4", "--target-blocks", "up_proj"],
        "part of a name and a block size, such as up_proj=256, got 'up_proj'",
    ),
    (["--precision", "int4", "--target-blocks", "=64"], "got '=64'"),
    (
        ["--precision", "int4", "--target-blocks", "up_proj=48"],
        "block size must be 16, 32, 64, 128, 256 or, on TensorRT, 0 (one scale per output), got 48",
    ),
    (["--precision", "int4", "--target-blocks", "up_proj=0"], "integers in blocks"),
    (["--precision", "int4", "--rounding", "stored", "--target-blocks", "q=64"], "leave out --target-blocks"),
    (["--target-blocks", "q=64"], "need --precision int8"),
    (["--precision", "int4", "--embedding", "tied"], "embedding must be one of float, int8, shared, got 'tied'"),
    (["--embedding", "float"], "need --precision int8"),
    ([*RTX, "--precision", "int4", "--embedding", "int8"], "leave out --embedding"),
    ([*RTX, "--precision", "fp8", "--block-size", "32"], "use --block-size 0"),
    ([*RTX, "--precision", "fp16", "--activations", "bf16"], "--activations goes with"),
    ([*RTX, "--precision", "int4", "--activations", "fp32"], "activations must be one of fp16, bf16, got 'fp32'"),
    ([*RTX, "--precision", "fp16", "--block-size", "32"], "need --precision int8"),
    (["--sm", "89"], "they need --backend tensorrt-rtx or tensorrt"),
    (["--batch", "2"], "they need --backend tensorrt-rtx or tensorrt"),
    (["--precision", "fp16"], "graphs in fp16 need --device cuda"),
    (["--precision", "fp8"], "use --precision int8 or int4"),
    (["--precision", "int4", "--activations", "fp16"], "--activations is for --device cuda"),
    (["--backend", "tensorrt-rtx"], "--sm is missing: name the GPUs to build for, of 75"),
    (["--backend", "tensorrt-rtx", "--sm", "90"], "does not build for SM 90"),
    (["--backend", "tensorrt-rtx", "--sm", "89,86", "--precision", "fp8"], "SM 86 cannot run fp8"),
    (["--backend", "tensorrt-rtx", "--sm", "75", "--precision", "bf16"], "SM 75 cannot run bf16"),
    (["--backend", "tensorrt-rtx", "--sm", "75", "--precision", "int4", "--activations", "bf16"], "SM 75 cannot run"),
]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "nowhere", "--draft", "ngram"], "nowhere"),
        (["--target", "nowhere"], "--draft"),
        (["--recipe", "no-such"], "no-such"),
        (["--recipe", "smollm2-135m", "--target", "x"], "either --recipe"),
        (["--target", "x", "--draft", "ngram", "--precision", "int3"], "int3"),
        (["--target", "x", "--draft", "ngram", "--embedding", "shared"], "int4"),
        (["--target", "x", "--draft", "ngram", "--block-size", "7"], "need --precision"),
        (["--target", "x", "--draft", "ngram", "--precision", "int4", "--block-size", "33"], "block size"),
        *((["--target", "x", "--draft", "ngram", *arguments], said) for arguments, said in NO_SUCH_ENGINE),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_arguments_are_one_line_and_exit_2(tmp_path: Path, arguments: list[str], said: str) -> None:
    result = invoke(tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert nothing_at(tmp_path / "out")


def test_the_command_prints_the_manifest_as_json(sources: Path, tmp_path: Path) -> None:
    arguments = ["--target", str(sources / "target"), "--draft", "ngram", "--max-length", "64", "--json"]
    result = invoke(tmp_path / "out", *arguments)
    assert result.exit_code == 0
    assert parse(result.stdout) == parse((tmp_path / "out" / "bundle.json").read_text())
    assert replace(parse(result.stdout), files=()).name == "out"


def test_beside_json_the_notes_are_plain_lines_on_standard_error(tmp_path: Path) -> None:
    save_folder(tmp_path / "m", tiny_model("mistral", sliding_window=1100))
    arguments = ["--target", str(tmp_path / "m"), "--draft", "ngram", "--max-length", "1200", "--json"]
    result = invoke(tmp_path / "out", *arguments)
    assert result.exit_code == 0
    assert parse(result.stdout) == parse((tmp_path / "out" / "bundle.json").read_text())
    lines = result.stderr.splitlines()
    assert any(line.startswith("the target's context is 128 tokens, shorter than max_length 1200") for line in lines)
    assert "target: compared over 192 positions; its window of 1100 tokens is not crossed by that text" in lines
    result = invoke(tmp_path / "out", *arguments[:-1], "--quiet", "--force")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("option", ["-k", "--max-length"])
def test_zero_is_not_taken_for_the_recipe_s_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    fetched = {"smollm2-135m-instruct": tmp_path}
    monkeypatch.setattr("draftc.export.catalog.fetch_recipe", lambda *_, **__: fetched)
    result = invoke(tmp_path / "out", "--recipe", "smollm2-135m", option, "0")
    assert result.exit_code == 2
    assert "got 0" in result.stderr
