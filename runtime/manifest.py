"""The bundle's manifest, `bundle.json`: one frozen dataclass per JSON object, read strictly. Stdlib only.

The dataclasses are the schema: `parse` decodes by their type hints (strictjson). What a type cannot say (ranges,
spelling) each class checks when it is made, by hand or by `parse`; it raises UsageError, which `parse` reports as a
BundleError under its JSON path. The parts are in `records`; `Manifest` checks last what ties them together: graphs to
lengths, graphs to the files table. `bundle.schema.json` states the same rules for other languages,
docs/bundle-format.md explains them.
"""

import json
import re
from dataclasses import asdict, dataclass
from datetime import datetime

from draftc.runtime import strictjson
from draftc.runtime.errors import BundleError, BundleVersionError, UsageError
from draftc.runtime.records import (
    INT32_MAX,
    MANIFEST_NAME,
    PROFILE_NAME,
    Backend,
    Draft,
    DraftModel,
    DraftVocabulary,
    EngineInfo,
    FileEntry,
    Model,
    NgramDraft,
    PairSummary,
    ParityReport,
    Precision,
    Profile,
    Quantization,
    Range,
    Source,
    TokenizerInfo,
)
from draftc.runtime.rules import need, texts, within
from draftc.runtime.speccheck import check_spec
from draftc.runtime.strictjson import show

__all__ = [
    "AGAIN",
    "INT32_MAX",
    "MANIFEST_NAME",
    "PROFILE_NAME",
    "SCHEMA_VERSION",
    "Backend",
    "Draft",
    "DraftModel",
    "DraftVocabulary",
    "EngineInfo",
    "FileEntry",
    "Manifest",
    "Model",
    "NgramDraft",
    "PairSummary",
    "ParityReport",
    "Precision",
    "Profile",
    "Quantization",
    "Range",
    "Source",
    "TokenizerInfo",
    "parse",
    "to_json",
]

SCHEMA_VERSION = 1
AGAIN = "copy the bundle again or recompile it"  # the way out of a damaged one
_UTC = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z", re.ASCII)


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
        expected = {"int4": 4, "int8": 8, "fp8": 8}.get(self.precision)
        rule = f"{expected} for precision {self.precision}" if expected else f"absent for precision {self.precision}"
        need(bits == expected, "target.quantization.bits", rule, bits)
        if self.target.quantization is not None:
            form = self.target.quantization.format
            rule = f"{'fp8' if self.precision == 'fp8' else 'int'} for precision {self.precision}"
            need((form == "fp8") == (self.precision == "fp8"), "target.quantization.format", rule, form)
        engines = self.backend.name != "onnxruntime"
        for where, model in self.models:
            rule = f"{'described' if engines else 'absent'} for backend {self.backend.name}"
            need((model.engine is not None) == engines, f"{where}.engine", rule, model.engine and "an engine")
            folder = where.split(".")[0] + "/"
            need(model.graph.startswith(folder), f"{where}.graph", f"in {folder}", model.graph)
            check_spec(model.spec, f"{where}.spec", length)
            tail = model.spec.tail
            rule = "the verification's for a target, the draft's for a draft"
            need(tail in (None, "verify" if where == "target" else "draft"), f"{where}.spec tail", rule, tail)
            if model.spec.q_shape is not None:
                slots, vocabulary = model.spec.q_shape
                rule = f"of max_width ({width}) slots and vocab_size ({self.vocab_size})"
                fits = (slots, vocabulary) == (width, self.vocab_size)
                need(fits, f"{where}.spec tail", rule, f"{slots} and {vocabulary}")
            cut = self.draft.vocabulary is not None and where == "draft.model"
            rows = model.spec.vocab_rows
            rule = f"at most {rows}, the rows of the {where.split('.')[0]}'s head"
            need(cut or self.vocab_size <= rows, "vocab_size", rule, self.vocab_size)
        self._check_cut()
        shapes = {model.spec.q_shape for _, model in self.models}
        if len(shapes) > 1:
            raise UsageError(f"draft.model.spec: its tail must be of the target's slots and vocabulary, got {shapes}")

    def _check_cut(self) -> None:
        """The draft's cut vocabulary, where it has one."""
        cut, model = self.draft.vocabulary, self.draft.model
        if cut is None or model is None:
            return
        where, rows = "draft.vocabulary", model.spec.vocab_rows
        need(self.backend.name == "onnxruntime", where, f"absent for backend {self.backend.name}", "a cut vocabulary")
        need(cut.path.startswith("draft/"), f"{where}.path", "in draft/", cut.path)
        need(cut.size == rows, f"{where}.size", f"the rows of the draft's head ({rows})", cut.size)
        need(cut.size <= self.vocab_size, f"{where}.size", f"at most vocab_size ({self.vocab_size})", cut.size)

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
    needed += [(f"{where}.engine.log", model.engine.log) for where, model in manifest.models if model.engine]
    if manifest.draft.vocabulary is not None:
        needed.append(("draft.vocabulary.path", manifest.draft.vocabulary.path))
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
        raise BundleError(f"{MANIFEST_NAME}: {error}: {AGAIN}") from error
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
