"""The bundle's manifest, `bundle.json`: one frozen dataclass per JSON object, read strictly. Stdlib only.

The dataclasses are the schema: `parse` decodes by their type hints (strictjson). What a type cannot say (ranges,
spelling) each class checks when it is made, by hand or by `parse`; it raises UsageError, which `parse` reports as a
BundleError under its JSON path. `Manifest` checks last what ties its parts together: graphs to lengths, graphs to the
files table. `bundle.schema.json` states the same rules for other languages, docs/bundle-format.md explains them.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Literal

from draftc.runtime import strictjson
from draftc.runtime.errors import BundleError, BundleVersionError, UsageError
from draftc.runtime.graphio import GraphSpec
from draftc.runtime.rules import HEX64, fingerprint, inside, need, texts, within
from draftc.runtime.speccheck import check_spec
from draftc.runtime.strictjson import show

__all__ = [
    "INT32_MAX",
    "MANIFEST_NAME",
    "PROFILE_NAME",
    "SCHEMA_VERSION",
    "Backend",
    "Draft",
    "DraftModel",
    "FileEntry",
    "Manifest",
    "Model",
    "NgramDraft",
    "PairSummary",
    "ParityReport",
    "Precision",
    "Quantization",
    "Source",
    "TokenizerInfo",
    "parse",
    "to_json",
]

SCHEMA_VERSION = 1
MANIFEST_NAME = "bundle.json"
PROFILE_NAME = "profile.json"  # a later version may add it to a finished bundle, so it is not in the files table

INT32_MAX = 2**31 - 1  # bound of every length and dimension, so that a C++ reader may keep them in an int
INT64_MAX = 2**63 - 1  # bound of byte and parameter counts

Precision = Literal["fp32", "fp16", "bf16", "int8", "int4"]

_UTC = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z", re.ASCII)
_ACCEPTANCE = re.compile(r"0(\.[0-9]+)?|1(\.0+)?")


@dataclass(frozen=True, kw_only=True)
class Backend:
    """What runs the graphs, its version at compile time, the ONNX opset, and the GPUs that engines are bound to."""

    name: Literal["onnxruntime"]
    version: str
    opset: int
    sms: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        texts(self, "version")
        within(self, 1, INT32_MAX, "opset")


@dataclass(frozen=True, kw_only=True)
class TokenizerInfo:
    """The folder with tokenizer.json (and the configs beside it), and the fingerprint that both models agreed on."""

    path: str = "tokenizer"
    fingerprint: str

    def __post_init__(self) -> None:
        inside(self, "path")
        fingerprint(self)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a model's weights came from; `fingerprint` is the sha256 over them."""

    kind: Literal["folder", "hub", "gguf"]
    location: str
    license: str | None = None
    fingerprint: str

    def __post_init__(self) -> None:
        texts(self, "location")
        fingerprint(self)


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Weight-only, in blocks of `block_size`: how many MatMuls have it, and the names of those left in float."""

    bits: int
    block_size: int
    symmetric: bool
    accuracy_level: int
    quantized_matmuls: int
    float_matmuls: tuple[str, ...]

    def __post_init__(self) -> None:
        need(self.bits in (2, 4, 8), "bits", "2, 4 or 8", self.bits)
        need(self.block_size in (16, 32, 64, 128, 256), "block_size", "16, 32, 64, 128 or 256", self.block_size)
        within(self, 0, 4, "accuracy_level")
        within(self, 1, INT32_MAX, "quantized_matmuls")


@dataclass(frozen=True, kw_only=True)
class Model:
    """One compiled decoder: its graph file, what it was made of, and the tensors it takes and gives.

    `architecture` is the checkpoint's model_type; `rope` records a regime that was fixed at compile time.
    """

    graph: str
    architecture: str
    parameters: int
    source: Source
    quantization: Quantization | None = None
    rope: str | None = None
    spec: GraphSpec

    def __post_init__(self) -> None:
        inside(self, "graph")
        texts(self, "architecture")
        within(self, 1, INT64_MAX, "parameters")


def _ngrams(owner: "Draft") -> None:
    within(owner, 1, INT32_MAX, "min_ngram", "max_ngram")
    need(owner.min_ngram <= owner.max_ngram, "min_ngram", f"at most max_ngram ({owner.max_ngram})", owner.min_ngram)


@dataclass(frozen=True, kw_only=True)
class DraftModel:
    """Proposals come from a smaller model. N-grams need none, so a runtime may offer them too, of these lengths."""

    method: Literal["draft_model"] = "draft_model"
    model: Model
    min_ngram: int = 2
    max_ngram: int = 4

    def __post_init__(self) -> None:
        _ngrams(self)


@dataclass(frozen=True, kw_only=True)
class NgramDraft:
    """Proposals are copied: what followed an earlier occurrence of the text's longest suffix of min to max tokens."""

    method: Literal["ngram"] = "ngram"
    min_ngram: int
    max_ngram: int

    def __post_init__(self) -> None:
        _ngrams(self)

    @property
    def model(self) -> None:
        """None: no model drafts."""


Draft = DraftModel | NgramDraft


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """One comparison at compile time, over `tokens` positions: the capture against eager, or quantized against float.

    `max_abs_diff` is over logits, `kl` the mean KL divergence in nats, `greedy_agreement` the share of equal argmax.
    `layers` is how many of the model's layers took part, `tolerance` what was allowed: of `max_abs_diff` for "capture",
    of `kl` for "quantize".
    """

    graph: Literal["target", "draft"]
    stage: Literal["capture", "quantize"]
    layers: int
    tokens: int
    max_abs_diff: float
    kl: float
    greedy_agreement: float
    tolerance: float

    def __post_init__(self) -> None:
        within(self, 1, INT32_MAX, "layers", "tokens")
        within(self, 0, 1, "greedy_agreement")
        for name in ("max_abs_diff", "tolerance"):
            value = getattr(self, name)
            need(0 <= value < math.inf, name, "a finite number, at least 0", value)
        need(math.isfinite(self.kl), "kl", "a finite number", self.kl)  # rounding may take it a little below 0


@dataclass(frozen=True, kw_only=True)
class PairSummary:
    """What the pair check predicted: cost of one draft step over one target step, and the speedup by acceptance.

    Keys of `predicted_speedup` are per-token acceptance rates spelled as decimals ("0.7"). Treat it as read-only.
    """

    draft_cost_ratio: float
    predicted_speedup: Mapping[str, float]

    def __post_init__(self) -> None:
        need(
            0 <= self.draft_cost_ratio < math.inf,
            "draft_cost_ratio",
            "a finite number, at least 0",
            self.draft_cost_ratio,
        )
        for rate, speedup in self.predicted_speedup.items():
            rule = 'keyed by acceptance from "0" to "1", such as "0.7"'
            need(_ACCEPTANCE.fullmatch(rate) is not None, "predicted_speedup", rule, rate)
            need(0 < speedup < math.inf, f"predicted_speedup.{rate}", "a finite number above 0", speedup)


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of the bundle: relative path, bytes, and sha256 in lower-case hexadecimal."""

    path: str
    size: int
    sha256: str

    def __post_init__(self) -> None:
        inside(self, "path")
        need(
            self.path not in (MANIFEST_NAME, PROFILE_NAME),
            "path",
            "a file that is not bundle.json or profile.json",
            self.path,
        )
        within(self, 0, INT64_MAX, "size")
        need(HEX64.fullmatch(self.sha256) is not None, "sha256", "64 hexadecimal digits", self.sha256)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that `bundle.json` says. Lengths are in tokens.

    `num_speculative_tokens` is the default K. `max_length` bounds prompt and output together; `max_width` is the widest
    verification call and the slack behind `max_length` in every cache buffer. `prefill_chunk` is the widest prefill
    call. Token ids at or above `vocab_size` are padding rows of the head: mask them. `files` is empty only while a
    bundle is being written.
    """

    schema_version: int = SCHEMA_VERSION
    draftc_version: str
    name: str
    created: str
    backend: Backend
    precision: Precision
    num_speculative_tokens: int
    max_length: int
    max_width: int
    prefill_chunk: int
    vocab_size: int
    tokenizer: TokenizerInfo
    target: Model
    draft: Draft
    parity: tuple[ParityReport, ...] = ()
    pair: PairSummary | None = None
    licenses: tuple[str, ...] = ()
    files: tuple[FileEntry, ...] = ()

    def __post_init__(self) -> None:
        need(self.schema_version == SCHEMA_VERSION, "schema_version", str(SCHEMA_VERSION), self.schema_version)
        texts(self, "draftc_version", "name")
        need(_is_utc(self.created), "created", "an RFC 3339 time in UTC (2026-01-31T12:00:00Z)", self.created)
        lengths = ("num_speculative_tokens", "max_length", "max_width", "prefill_chunk", "vocab_size")
        within(self, 1, INT32_MAX, *lengths)
        width, length = self.max_width, self.buffer_length
        fits = self.num_speculative_tokens < width
        need(fits, "num_speculative_tokens", f"below max_width ({width})", self.num_speculative_tokens)
        need(
            self.prefill_chunk <= length,
            "prefill_chunk",
            f"at most max_length + max_width ({length})",
            self.prefill_chunk,
        )
        bits = self.target.quantization.bits if self.target.quantization else None
        expected = {"int4": 4, "int8": 8}.get(self.precision)
        rule = f"{expected} for precision {self.precision}" if expected else f"absent for precision {self.precision}"
        need(bits == expected, "target.quantization.bits", rule, bits)
        for where, model in self.models:
            folder = where.split(".")[0] + "/"
            need(model.graph.startswith(folder), f"{where}.graph", f"in {folder}", model.graph)
            check_spec(model.spec, f"{where}.spec", length)
            rows = model.spec.vocab_rows
            need(
                self.vocab_size <= rows,
                "vocab_size",
                f"at most {rows}, the rows of the {where.split('.')[0]}'s head",
                self.vocab_size,
            )

    @property
    def buffer_length(self) -> int:
        """L, the length of every cache buffer: `max_length + max_width`."""
        return self.max_length + self.max_width

    @property
    def models(self) -> tuple[tuple[str, Model], ...]:
        """(JSON path, model) of the target, and of the draft where it is a model."""
        drafts = (("draft.model", self.draft.model),) if self.draft.model else ()
        return (("target", self.target), *drafts)


# --- rules that tie objects together ---------------------------------------------------------------------------------


def _is_utc(text: str) -> bool:
    if not _UTC.fullmatch(text):
        return False
    try:
        datetime.fromisoformat(text)
    except ValueError:  # 30 February
        return False
    return True


def _check_files(manifest: Manifest) -> None:
    """Raise UsageError unless each file is listed once and what the bundle needs is listed."""
    listed: set[str] = set()
    for index, entry in enumerate(manifest.files):
        need(entry.path not in listed, f"files[{index}].path", "listed once", entry.path)
        listed.add(entry.path)
    needed = [(f"{where}.graph", model.graph) for where, model in manifest.models]
    for field, path in [*needed, ("tokenizer.path", f"{manifest.tokenizer.path}/tokenizer.json")]:
        if path not in listed:
            raise UsageError(f"{field}: {show(path)} is not listed in files")


# --- JSON ------------------------------------------------------------------------------------------------------------


def to_json(manifest: Manifest) -> str:
    """`manifest` as the text of `bundle.json`: every field, in the order of the dataclasses, two spaces of indent."""
    return json.dumps(asdict(manifest), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def parse(text: str) -> Manifest:
    """Read the text of `bundle.json`.

    Raises BundleVersionError when a newer draftc wrote it (checked before anything else), and BundleError naming the
    JSON path of the first thing that is wrong.
    """
    try:
        document = strictjson.load(text)
        _check_version(document)
        manifest = strictjson.decode(Manifest, document)
        _check_files(manifest)
    except UsageError as error:
        raise BundleError(f"{MANIFEST_NAME}: {error}") from error
    return manifest


def _check_version(document: object) -> None:
    if not isinstance(document, dict):
        raise UsageError(f"expected object, got {show(document)}")
    version = document.get("schema_version")
    if type(version) is not int or version < 1:
        raise UsageError(f"schema_version: expected an int from 1, got {show(version)}")
    if version > SCHEMA_VERSION:
        newer = f"made by a newer draftc (schema {show(version)}, this reads {SCHEMA_VERSION}): pip install -U draftc"
        raise BundleVersionError(f"{MANIFEST_NAME}: {newer}")
