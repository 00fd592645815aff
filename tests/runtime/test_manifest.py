"""The manifest against hostile and mutated JSON, and against the JSON Schema that documents it."""

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from draftc.runtime.errors import BundleError, BundleVersionError, UsageError
from draftc.runtime.graphio import GraphSpec
from draftc.runtime.manifest import (
    AGAIN,
    SCHEMA_VERSION,
    Backend,
    DraftModel,
    DraftVocabulary,
    EngineInfo,
    FileEntry,
    Manifest,
    Model,
    NgramDraft,
    PairSummary,
    ParityReport,
    Profile,
    Quantization,
    Range,
    Source,
    TokenizerInfo,
    parse,
    to_json,
)
from draftc.runtime.rules import is_relative_path
from draftc.runtime.strictjson import decode

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((files("draftc.runtime") / "bundle.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
SHA = "0123456789abcdef" * 4

# What docs/bundle-format.md lists under "Rules that a schema cannot state", as the messages say it.
BEYOND_THE_SCHEMA = re.compile(
    r"num_speculative_tokens: must be below|prefill_chunk: must be at most|min_ngram: must be at most|"
    r"created: must be|vocab_size: must be at most|quantization\.(bits|format): must be|graph: must be in |"
    r"draft\.vocabulary(\.(path|size))?: must be (in draft/|the rows|at most|absent)|"
    r"opt: must be from|profiles: must be decode|engine: must be (described|absent)|spec tail: must be|"
    r"its tail must be|"
    r"is not listed in files|must be listed once|expected a finite number|"
    r"\.spec\.(inputs|outputs)(\[\d+\])?: (\"|caches are)"
)


def documented_example() -> dict[str, Any]:
    text = (ROOT / "docs" / "bundle-format.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    document: dict[str, Any] = json.loads(block)
    return document


def full_manifest() -> Manifest:
    """Every optional part filled in: an int4 target of two unlike layers, and a float16 draft with padded rows."""
    example = parse(json.dumps(documented_example()))
    target = replace(
        example.target,
        spec=GraphSpec.decoder([(2, 16, 8), (4, 8, 8)], 288, 128, "float32"),
        quantization=Quantization(
            bits=4,
            block_size=32,
            blocks={"up_proj": 64},
            symmetric=True,
            accuracy_level=4,
            quantized_matmuls=14,
            float_matmuls=("router",),
        ),
        rope="longrope: short factors, max_length below 4096",
    )
    draft = Model(
        graph="draft/model.onnx",
        architecture="qwen2",
        parameters=9_007_199_254_740_993,  # not a float64
        source=Source(kind="hub", location="example/draft", fingerprint=f"sha256:{SHA}"),
        spec=GraphSpec.decoder([(1, 16, 16)], 288, 100, "float16"),
    )
    report = ParityReport(
        graph="draft",
        stage="quantize",
        layers=1,
        tokens=64,
        max_abs_diff=0.25,
        kl=-1e-9,
        greedy_agreement=0.97,
        tolerance=1.0,
    )
    return replace(
        example,
        name="ünïcode 名",
        precision="int4",
        target=target,
        draft=DraftModel(model=draft, min_ngram=3, max_ngram=6),
        parity=(report,),
        pair=PairSummary(draft_cost_ratio=0.33, predicted_speedup={"0.7": 1.4, "1": 2.5}),
        files=(
            *example.files,
            FileEntry(path="draft/model.onnx", size=0, sha256=SHA),
            FileEntry(path="draft/model.onnx.data", size=2**40, sha256=SHA),
        ),
    )


def cut_manifest() -> Manifest:
    """A draft whose head has fewer rows than there are tokens."""
    full = full_manifest()
    assert isinstance(full.draft, DraftModel)
    cut = DraftVocabulary(path="draft/token_ids.bin", size=40, corpus="Python's standard library", coverage=0.99)
    model = replace(full.draft.model, spec=full.draft.model.spec.with_vocab_rows(40))
    files = (*full.files, FileEntry(path="draft/token_ids.bin", size=160, sha256=SHA))
    return replace(full, draft=replace(full.draft, model=model, vocabulary=cut), files=files)


def engine_manifest() -> Manifest:
    """A pair of TensorRT engines with tails."""
    full = full_manifest()
    assert full.draft.model is not None
    info = EngineInfo(
        half="bf16",
        profiles=(
            Profile(
                name="decode",
                batch=Range(min=1, opt=1, max=4),
                tokens=Range(min=1, opt=5, max=32),
                rows=SOME,
                activation_bytes=2**40,
            ),
            Profile(name="prefill", batch=SOME, tokens=Range(min=1, opt=256, max=256), rows=Range(min=1, opt=1, max=1)),
        ),
        weights_bytes=2**40,
        attention_layers=2,
        cache_layers=5,
        log="target/build.log",
    )
    target = replace(full.target, graph="target/model.engine", engine=info)
    draft = replace(full.draft.model, graph="draft/model.engine", engine=replace(info, log="draft/build.log"))
    files = [replace(entry, path=entry.path.replace("model.onnx", "model.engine")) for entry in full.files]
    return replace(
        full,
        backend=Backend(name="tensorrt-rtx", version="1.7.1.116", opset=24, device="cuda", sms=("86", "89")),
        target=replace(target, spec=target.spec.with_tail("verify", 32, 96)),
        draft=replace(full.draft, model=replace(draft, spec=draft.spec.with_tail("draft", 32, 96))),
        files=(
            *files,
            FileEntry(path="target/build.log", size=1, sha256=SHA),
            FileEntry(path="draft/build.log", size=1, sha256=SHA),
        ),
    )


SOME = Range(min=1, opt=2, max=3)
FULL: dict[str, Any] = json.loads(to_json(full_manifest()))
ENGINES: dict[str, Any] = json.loads(to_json(engine_manifest()))
CUT: dict[str, Any] = json.loads(to_json(cut_manifest()))
DOCUMENTS = [FULL, documented_example(), ENGINES, CUT]


def edited(path: str, value: object, document: dict[str, Any] = FULL) -> str:
    """JSON of `document` with the value at `path` ("a.b[0].c") replaced, or removed where it is `...`."""
    result = copy.deepcopy(document)
    *parents, last = re.findall(r"[^.\[\]]+", path)
    place: Any = result
    for key in parents:
        place = place[int(key)] if isinstance(place, list) else place[key]
    key = int(last) if isinstance(place, list) else last
    if value is ...:
        del place[key]
    else:
        place[key] = value
    return json.dumps(result)


def refusal(text: str) -> str:
    with pytest.raises(BundleError) as caught:
        parse(text)
    message = str(caught.value)
    assert message.startswith("bundle.json: ")
    assert "\n" not in message
    assert len(message) < 400
    assert message.endswith(AGAIN)
    return message.removeprefix("bundle.json: ").removesuffix(f": {AGAIN}")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_round_trip_keeps_everything(document: dict[str, Any]) -> None:
    manifest = parse(json.dumps(document))
    assert json.loads(to_json(manifest)) == document
    assert parse(to_json(manifest)) == manifest
    VALIDATOR.validate(document)


def test_json_order_is_stable_and_versions_come_first() -> None:
    text = to_json(full_manifest())
    assert list(json.loads(text))[:2] == ["schema_version", "draftc_version"]
    shuffled = dict(reversed(json.loads(text).items()))
    assert to_json(parse(json.dumps(shuffled))) == text
    assert '\n  "name": "ünïcode 名"' in text
    assert text.endswith("}\n")


def test_optional_parts_may_be_left_out() -> None:
    text = json.dumps(
        {key: value for key, value in documented_example().items() if key not in ("parity", "pair", "licenses")}
    )
    manifest = parse(text)
    assert manifest.parity == ()
    assert manifest.pair is None
    assert manifest.licenses == ()
    assert VALIDATOR.is_valid(json.loads(text))


def test_a_draft_model_may_leave_its_ngrams_out() -> None:
    draft = {"method": "draft_model", "model": FULL["draft"]["model"]}
    text = edited("draft", draft)
    assert (parse(text).draft.min_ngram, parse(text).draft.max_ngram) == (2, 4)
    assert VALIDATOR.is_valid(json.loads(text))
    assert parse(json.dumps(documented_example())).draft.model is None


def test_models_and_lengths() -> None:
    manifest = full_manifest()
    assert manifest.buffer_length == 288
    assert [where for where, _ in manifest.models] == ["target", "draft.model"]
    assert [where for where, _ in parse(json.dumps(documented_example())).models] == ["target"]
    assert manifest.target.spec.kv_bytes() == 4 * 288 * (2 * (16 + 8) + 4 * (8 + 8))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("name", ..., "name: missing"),
        ("files", ..., "target.graph: "),
        ("target.source.fingerprint", ..., "target.source.fingerprint: missing"),
        ("target.spec.inputs[3].shape[2]", None, "target.spec.inputs[3].shape[2]: expected int or str, got null"),
        ("target.spec.inputs[3].shape[2]", True, "target.spec.inputs[3].shape[2]: expected int or str, got true"),
        ("target.spec.inputs[3].shape[2]", 288.0, "target.spec.inputs[3].shape[2]: expected int or str, got 288.0"),
        ("target.spec.inputs[0]", [], "target.spec.inputs[0]: expected object, got an array"),
        ("target.spec.inputs", {}, "target.spec.inputs: expected array, got an object"),
        ("target.colour", 1, "target.colour: unknown key"),
        ("a\nb", 1, r'"a\nb": unknown key'),
        ("x" * 500, 1, '"' + "x" * 76 + "...: unknown key"),
        ("pair", [], "pair: expected object or null, got an array"),
        ("pair.draft_cost_ratio", "1", 'pair.draft_cost_ratio: expected number, got "1"'),
        (
            "pair.predicted_speedup",
            {"0.7\n": 1},
            r'pair.predicted_speedup: must be keyed by acceptance from "0" to "1"',
        ),
        ("pair.predicted_speedup", {"0.7": 0}, "pair.predicted_speedup.0.7: must be a finite number above 0, got 0.0"),
        (
            "precision",
            "int3",
            'precision: expected "fp32" or "fp16" or "bf16" or "int8" or "int4" or "fp8", got "int3"',
        ),
        ("precision", "fp32", "target.quantization.bits: must be absent for precision fp32, got 4"),
        ("target.quantization", None, "target.quantization.bits: must be 4 for precision int4, got null"),
        (
            "target.quantization.block_size",
            33,
            "target.quantization.block_size: must be 0, 16, 32, 64, 128 or 256, got 33",
        ),
        (
            "target.quantization.blocks",
            {"up_proj": 0},
            "target.quantization.blocks.up_proj: must be 16, 32, 64, 128 or 256, got 0",
        ),
        (
            "target.quantization.blocks",
            {"a\nb": 32},
            'target.quantization.blocks: must be keyed by printable text, got "a\\nb"',
        ),
        ("max_length", 0, "max_length: must be from 1 to 2147483647, got 0"),
        ("max_length", 2**31, "max_length: must be from 1 to 2147483647, got 2147483648"),
        ("num_speculative_tokens", 32, "num_speculative_tokens: must be below max_width (32), got 32"),
        ("prefill_chunk", 289, "prefill_chunk: must be at most max_length + max_width (288), got 289"),
        ("vocab_size", 101, "vocab_size: must be at most 100, the rows of the draft's head, got 101"),
        ("name", "a\nb", r'name: expected one line of text, got "a\nb"'),
        ("name", "\x1b[31m", r'name: expected one line of text, got "\u001b[31m"'),
        ("name", "\ud800", r'name: expected one line of text, got "\ud800"'),
        ("name", "", 'name: must be a non-empty string, got ""'),
        ("created", "2026-02-30T00:00:00Z", "created: must be an RFC 3339 time in UTC"),
        ("created", "2026-01-31T00:00:00+00:00", "created: must be an RFC 3339 time in UTC"),
        (
            "draft",
            {"method": "ngram", "min_ngram": 5, "max_ngram": 4},
            "draft.min_ngram: must be at most max_ngram (4)",
        ),
        ("draft", {"method": "ngram", "model": None}, "draft.model: unknown key"),
        ("draft", {"method": "draft_model"}, "draft.model: missing"),
        ("draft", {"method": "eagle"}, 'draft.method: expected "draft_model" or "ngram", got "eagle"'),
        ("draft", {"method": ["ngram"]}, 'draft.method: expected "draft_model" or "ngram", got an array'),
        ("draft", {}, 'draft.method: expected "draft_model" or "ngram", got null'),
        ("draft", None, "draft: expected object, got null"),
        ("parity[0].max_abs_diff", -1, "parity[0].max_abs_diff: must be a finite number, at least 0, got -1.0"),
        ("parity[0].max_abs_diff", 10**400, "parity[0].max_abs_diff: expected a finite number, got 1000"),
        ("parity[0].greedy_agreement", 1.5, "parity[0].greedy_agreement: must be from 0 to 1, got 1.5"),
        ("files[0].sha256", SHA.upper(), "files[0].sha256: must be 64 hexadecimal digits"),
        ("files[0].size", -1, "files[0].size: must be from 0 to"),
        ("files[1].path", "target/model.onnx", 'files[1].path: must be listed once, got "target/model.onnx"'),
        ("files[2].path", "draft/other.onnx", 'draft.model.graph: "draft/model.onnx" is not listed in files'),
        ("files[1].path", "tokenizer/a", 'tokenizer.path: "tokenizer/tokenizer.json" is not listed in files'),
        ("target.graph", "draft/model.onnx", 'target.graph: must be in target/, got "draft/model.onnx"'),
        (
            "backend.name",
            "vulkan",
            'backend.name: expected "onnxruntime" or "tensorrt-rtx" or "tensorrt", got "vulkan"',
        ),
        ("backend.name", "tensorrt", "target.engine: must be described for backend tensorrt, got null"),
    ],
)
def test_refusals_name_the_place(path: str, value: object, message: str) -> None:
    assert refusal(edited(path, value)).startswith(message)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("draft.vocabulary", None, "vocab_size: must be at most 40, the rows of the draft's head, got 96"),
        ("draft.vocabulary.size", 39, "draft.vocabulary.size: must be the rows of the draft's head (40), got 39"),
        ("draft.vocabulary.size", 0, "draft.vocabulary.size: must be from 1 to 2147483647, got 0"),
        ("vocab_size", 39, "draft.vocabulary.size: must be at most vocab_size (39), got 40"),
        ("vocab_size", 129, "vocab_size: must be at most 128, the rows of the target's head, got 129"),
        ("draft.vocabulary.path", "target/ids", 'draft.vocabulary.path: must be in draft/, got "target/ids"'),
        ("draft.vocabulary.path", "draft/../ids", "draft.vocabulary.path: must be a relative path inside the bundle"),
        ("draft.vocabulary.path", "draft/other", 'draft.vocabulary.path: "draft/other" is not listed in files'),
        ("draft.vocabulary.coverage", 1.01, "draft.vocabulary.coverage: must be from 0 to 1, got 1.01"),
        ("draft.vocabulary.corpus", "", "draft.vocabulary.corpus: must be a non-empty string"),
        ("draft.vocabulary.corpus", "a\nb", "draft.vocabulary.corpus: expected one line of text"),
        ("draft.vocabulary.ids", [], "draft.vocabulary.ids: unknown key"),
        ("draft.vocabulary.size", ..., "draft.vocabulary.size: missing"),
    ],
)
def test_a_cut_vocabulary_must_fit_the_draft_and_the_target(path: str, value: object, message: str) -> None:
    assert refusal(edited(path, value, CUT)).startswith(message)


def test_engines_have_no_cut_vocabulary() -> None:
    document = copy.deepcopy(ENGINES)
    document["draft"]["vocabulary"] = {**CUT["draft"]["vocabulary"], "size": 100}
    assert "draft.vocabulary: must be absent for backend tensorrt" in refusal(json.dumps(document))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("inputs[0].name", "ids", 'inputs[0]: "ids" comes twice or is no tensor of a decoder graph'),
        ("inputs[0].dtype", "int32", 'inputs[0]: "input_ids" must be "int64" ["B", "S"], got "int32" ["B", "S"]'),
        ("inputs[1].shape", ["B", 1], 'inputs[1]: "write_index" must be "int64" ["B"], got "int64" ["B", 1]'),
        ("inputs[2]", ..., 'inputs: "logit_positions" is missing'),
        ("inputs[3]", ..., 'inputs: "past_key_values.0.key" is missing'),
        ("inputs[5].name", "past_key_values.2.key", 'inputs: "past_key_values.1.key" is missing'),
        (
            "inputs[3].shape[2]",
            287,
            'inputs: "past_key_values.0.key" must have shape ["B", n, 288, n], got ["B", 2, 287',
        ),
        (
            "inputs[4].shape[1]",
            1,
            'inputs: "past_key_values.0.value" must have shape ["B", 2, 288, n], got ["B", 1, 288',
        ),
        ("inputs[3].shape[3]", 0, 'inputs: "past_key_values.0.key" must have shape'),
        ("inputs[3].shape[3]", "D", 'inputs: "past_key_values.0.key" must have shape'),
        ("inputs[3].shape", [], 'inputs: "past_key_values.0.key" must have shape ["B", n, 288, n], got []'),
        ("inputs[3].dtype", "int64", "inputs: caches are of type float32 or float16 or bfloat16"),
        ("inputs[5].dtype", "float16", 'inputs[5]: "past_key_values.1.key" must be "float32"'),
        ("outputs[1].dtype", "float16", 'outputs[1]: "present.0.key" must be "float32"'),
        ("outputs[1].shape[3]", 8, 'outputs[1]: "present.0.key" must be "float32" ["B", 2, 288, 16]'),
        ("outputs[0].shape[2]", "V", 'outputs: "logits" must have shape ["B", "R", n], got ["B", "R", "V"]'),
        ("outputs[0].dtype", "float16", 'outputs[0]: "logits" must be "float32"'),
        ("outputs[0]", ..., 'outputs: "logits" is missing'),
        ("outputs[2]", ..., 'outputs: "present.0.value" is missing'),
        ("inputs", [], 'inputs: "past_key_values.0.key" is missing'),
    ],
)
@pytest.mark.parametrize("where", ["target.spec", "draft.model.spec"])
def test_graphs_must_be_decoder_graphs(where: str, path: str, value: object, message: str) -> None:
    document = copy.deepcopy(FULL)
    document["draft"]["model"]["spec"] = copy.deepcopy(document["target"]["spec"])
    assert refusal(edited(f"{where}.{path}", value, document)).startswith(f"{where}.{message}")


@pytest.mark.parametrize(("slots", "vocabulary"), [(31, 96), (33, 96), (32, 95)])
def test_tails_must_be_of_the_bundles_sizes(slots: int, vocabulary: int) -> None:
    """The runtime's buffers are as large as these say, and calls as wide as max_width says."""
    whole, spec = engine_manifest(), full_manifest().target.spec
    target = replace(whole.target, spec=spec.with_tail("verify", slots, vocabulary))
    expected = re.escape(f'must be of max_width (32) slots and vocab_size (96), got "{slots} and {vocabulary}"')
    with pytest.raises(UsageError, match=rf"^target\.spec tail: {expected}"):
        replace(whole, target=target)


def test_a_tensor_may_not_come_twice_and_order_is_free() -> None:
    inputs = FULL["target"]["spec"]["inputs"]
    assert "comes twice" in refusal(edited("target.spec.inputs", [*inputs, inputs[0]]))
    assert parse(edited("target.spec.inputs", inputs[::-1])).target.spec.num_layers == 2


@pytest.mark.parametrize("version", [2, 3, 10**30])
def test_a_newer_schema_is_reported_before_anything_else(version: int) -> None:
    with pytest.raises(BundleVersionError) as caught:
        parse(json.dumps({"schema_version": version, "surprise": None}))
    assert f"made by a newer draftc (schema {version}, this reads {SCHEMA_VERSION}): pip install -U draftc" in str(
        caught.value
    )


@pytest.mark.parametrize("version", [0, -1, None, "1", True, 1.0, [], {}])
def test_a_schema_version_is_a_positive_int(version: object) -> None:
    assert refusal(edited("schema_version", version)).startswith("schema_version: expected an int from 1, got ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("\x7fELF", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[]", "expected object, got an array"),
        ("null", "expected object, got null"),
        ('{"schema_version": 1, "schema_version": 1}', 'not valid JSON: key "schema_version" comes twice'),
        (edited("backend.version", "1").replace('"opset"', '"version": "2", "opset"'), "not valid JSON: key"),
        (edited("name", 0).replace('"name": 0', '"name": NaN'), "not valid JSON: NaN is not a JSON number"),
        (edited("name", 0).replace('"name": 0', '"name": -Infinity'), "not valid JSON: -Infinity"),
        (edited("parity[0].kl", 0).replace('"kl": 0', '"kl": 1e999'), "parity[0].kl: expected a finite number"),
        (edited("name", 0).replace('"name": 0', f'"name": {"9" * 5000}'), "not valid JSON: "),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        (edited("name", 0).replace('"name": 0', f'"name": {"[" * 100_000}{"]" * 100_000}'), "nested too deeply"),
    ],
)
def test_hostile_json(text: str, message: str) -> None:
    assert refusal(text).startswith(message)


def test_values_are_checked_when_made_by_hand_too() -> None:
    with pytest.raises(UsageError, match="min_ngram: must be from 1"):
        NgramDraft(min_ngram=0, max_ngram=2)
    with pytest.raises(UsageError, match="kl: must be a finite number, got NaN"):
        replace(full_manifest().parity[0], kl=float("nan"))
    with pytest.raises(UsageError, match="max_abs_diff: must be a finite number, at least 0, got NaN"):
        replace(full_manifest().parity[0], max_abs_diff=float("nan"))
    with pytest.raises(UsageError, match="vocab_size: must be at most 100"):
        replace(full_manifest(), vocab_size=101)
    with pytest.raises(UsageError, match=r'target\.spec\.inputs: "past_key_values\.0\.key" must have shape'):
        replace(full_manifest(), max_length=100)


SAFE = ["a", "a/b", "a.b/..c", "...", "target/model.onnx.data", "ünï/名", "a b", "-x"]
UNSAFE = [
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "../a",
    "a/..",
    "a/./b",
    "a/../b",
    "\\a",
    "a\\..\\b",
    "C:",
    "C:/a",
    "a:b",
]


@pytest.mark.parametrize("path", SAFE)
def test_paths_inside(path: str) -> None:
    assert is_relative_path(path)
    assert VALIDATOR.is_valid(json.loads(edited("files[3].path", path)))


@pytest.mark.parametrize("path", [*UNSAFE, "a\0", "a\n", "\n", "..\n", "a/\x9f", "a\ud800"])
def test_paths_that_could_leave(path: str) -> None:
    assert not is_relative_path(path)
    refusal(edited("files[3].path", path))
    refusal(edited("target.graph", path))
    refusal(edited("tokenizer.path", path))
    if path != "a\ud800":  # a lone surrogate cannot be named in a portable regular expression
        assert not VALIDATOR.is_valid(json.loads(edited("files[3].path", path)))


def test_every_key_of_the_dataclasses_is_in_the_schema_and_none_else() -> None:
    """Removing or renaming any one key of a full manifest: both refuse, or both accept (it had a default)."""
    seen = 0
    for path in places(FULL):
        if isinstance(path[-1], str) and "blocks" not in path[:-1]:  # whose keys are free
            seen += 1
            document = copy.deepcopy(FULL)
            place = inside(document, path)
            place["unknown_key"] = place[path[-1]]
            assert not VALIDATOR.is_valid(document) or "predicted_speedup" in path
            assert refused(document)
            del place["unknown_key"]
            del place[path[-1]]
            assert_agreement(document)
    assert seen > 100


Place = tuple[str | int, ...]


def places(document: Any, prefix: Place = ()) -> list[Place]:
    """Paths of all values inside `document`."""
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    return [place for key, value in items for place in ((*prefix, key), *places(value, (*prefix, key)))]


def inside(document: Any, path: Place) -> Any:
    """The container of the value at `path`."""
    for key in path[:-1]:
        document = document[key]
    return document


def refused(document: object) -> str:
    """Why parse refuses `document`; empty where it accepts it."""
    try:
        parse(json.dumps(document))
    except BundleError as error:
        return str(error)
    return ""


def assert_agreement(document: object, validator: Any = VALIDATOR, refused: Callable[[object], str] = refused) -> None:
    reason = refused(document)
    if validator.is_valid(document):
        assert not reason or BEYOND_THE_SCHEMA.search(reason), "the schema accepts it"
    else:
        assert reason, next(validator.iter_errors(document)).message


NUMBERS = [-1, 0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 32, 33, 64, 128, 255, 256, 257, 0.5, 1.5, -0.5, 1e-9, -1e-9, 1e300]
LIMITS = [2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**31), 10**400]
TEXTS = [
    *["", "a", "a\n", "\x7f", "\x9f", "é", "sha256:", SHA, SHA + "\n", SHA.upper(), SHA[1:], f"sha256:{SHA}"],
    *[f"sha256:{SHA}0", f"md5:{SHA}", "fp32", "fp16", "bf16", "int8", "int4", "int2", "onnxruntime", "tensorrt"],
    *["folder", "hub", "gguf", "url", "draft_model", "ngram", "eagle", "target", "draft", "capture", "quantize"],
    *["bundle.json", "profile.json", "a/bundle.json", "2026-01-31T12:00:00Z", "2026-12-01T23:59:59.123456Z"],
    *["2026-13-01T00:00:00Z", "2026-00-01T00:00:00Z", "2026-01-32T00:00:00Z", "2026-01-01T24:00:00Z", "2026-01-01"],
    *[
        "2026-01-01T00:60:00Z",
        "2026-01-01T00:00:60Z",
        "2026-01-01T00:00:00z",
        "2026-01-01 00:00:00Z",
        "٢026-01-01T00:00:00Z",
    ],
    *["2026-01-01T00:00:00.Z", "2026-01-01T00:00:00.1234567Z", "2026-01-01T00:00:00Z\n", "2026-01-01T00:00:00+00:00"],
]
OTHERS = [
    None,
    True,
    False,
    [],
    {},
    [None],
    ["a"],
    [1],
    {"a": 1},
    {"0": 1},
    {"1.0": 0},
    {"0.5": -1},
    {"1.1": 1},
    {"0.": 1},
]
EDGES = [*NUMBERS, *LIMITS, *TEXTS, *SAFE, *UNSAFE, *OTHERS]

PARTS: list[tuple[Any, str, Any]] = [
    (Backend, "properties.backend", FULL["backend"]),
    (TokenizerInfo, "properties.tokenizer", FULL["tokenizer"]),
    (NgramDraft, "properties.draft", documented_example()["draft"]),
    (ParityReport, "properties.parity.items", FULL["parity"][0]),
    (PairSummary, "properties.pair", FULL["pair"]),
    (FileEntry, "properties.files.items", FULL["files"][0]),
    (Source, "$defs.model.properties.source", FULL["target"]["source"]),
    (DraftVocabulary, "$defs.vocabulary", CUT["draft"]["vocabulary"]),
    (EngineInfo, "$defs.engine", ENGINES["target"]["engine"]),
    (Quantization, "$defs.quantization", FULL["target"]["quantization"]),
    (Model, "$defs.model", FULL["target"]),
]


@pytest.mark.parametrize(("cls", "pointer", "value"), PARTS, ids=[part[0].__name__ for part in PARTS])
def test_schema_and_classes_agree_at_the_edges(cls: Any, pointer: str, value: dict[str, Any]) -> None:
    """Each value of each object, replaced by every value at or beside the edge of some rule."""
    part = SCHEMA
    for key in pointer.split("."):
        part = part[key]
    validator = jsonschema.Draft202012Validator({**part, "$defs": SCHEMA["$defs"]})

    def refused(document: object) -> str:
        try:
            decode(cls, document)
        except UsageError as error:
            return str(error)
        return ""

    assert_agreement(value, validator, refused)
    for path in places(value):
        if "spec" in path:  # its rules tie tensors together: test_speccheck
            continue
        for edge in EDGES:
            document = copy.deepcopy(value)
            inside(document, path)[path[-1]] = edge
            assert_agreement(document, validator, refused)


@pytest.mark.parametrize("key", [key for key, value in FULL.items() if not isinstance(value, dict | list)])
def test_schema_and_manifest_agree_at_the_edges(key: str) -> None:
    for edge in EDGES:
        assert_agreement({**documented_example(), key: edge})


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 300),
    st.sampled_from([2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**70), 10**19]),
    st.floats(allow_nan=False, allow_infinity=False).filter(lambda number: not number.is_integer()),
    st.text(max_size=5),
    st.text(st.characters(codec="utf-8", categories=("Cc", "L")), max_size=3),
    st.sampled_from(
        [*SAFE, *UNSAFE, SHA, SHA + "\n", f"sha256:{SHA}", "B", "S", "R", "D", "int64", "float16", "logits"]
    ),
    st.sampled_from(["fp32", "int8", "ngram", "draft_model", "quantize", "draft", "gguf", "2026-02-30T23:59:59.5Z"]),
    st.sampled_from([[], {}, [1], ["a"], {"0.5": 1.5}, {"1.5": 1}, {"0.5": 0}, {"method": "ngram"}]),
)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), document=st.sampled_from(DOCUMENTS))
def test_schema_and_parse_agree(data: st.DataObject, document: dict[str, Any]) -> None:
    mutated = copy.deepcopy(document)
    paths = places(mutated)
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(paths))
        try:
            place = inside(mutated, path)
            old = place[path[-1]]
        except (KeyError, IndexError, TypeError):
            assume(False)
        action = data.draw(st.sampled_from(["replace", "replace", "swap", "remove", "add", "repeat"]))
        if action == "replace":
            place[path[-1]] = data.draw(values)
        elif action == "swap":  # a value that is right somewhere else
            other = data.draw(st.sampled_from(paths))
            place[path[-1]] = copy.deepcopy(inside(document, other)[other[-1]])
        elif action == "remove":
            del place[path[-1]]
        elif action == "add" and isinstance(old, dict):
            old[data.draw(st.text(max_size=4))] = data.draw(values)
        elif isinstance(old, list):
            old.append(copy.deepcopy(old[0]) if old else data.draw(values))
    assert_agreement(mutated)


@settings(max_examples=300, deadline=None)
@given(text=st.one_of(st.text(st.characters(codec="utf-8")), st.text(st.sampled_from("./\\:a\n\0\x85"), max_size=8)))
def test_path_rule_and_schema_pattern_agree(text: str) -> None:
    pattern = VALIDATOR.schema["$defs"]["path"]["pattern"]
    assert is_relative_path(text) == bool(re.search(pattern, text))
