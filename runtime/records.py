"""The parts of a bundle's manifest: one frozen dataclass per JSON object of `bundle.json`. Stdlib only.

Each class checks, when it is made, what its types cannot say (ranges, spelling), and raises UsageError. What ties parts
together, `manifest.Manifest` checks.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from draftc.runtime.graphio import GraphSpec
from draftc.runtime.rules import HEX64, fingerprint, inside, need, texts, within

__all__ = [
    "INT32_MAX",
    "MANIFEST_NAME",
    "PROFILE_NAME",
    "Backend",
    "BackendName",
    "Device",
    "Draft",
    "DraftModel",
    "DraftVocabulary",
    "Embedding",
    "EngineInfo",
    "FileEntry",
    "Model",
    "NgramDraft",
    "PairSummary",
    "ParityReport",
    "Precision",
    "Profile",
    "Quantization",
    "Range",
    "Rounding",
    "Source",
    "TokenizerInfo",
]

MANIFEST_NAME = "bundle.json"
PROFILE_NAME = "profile.json"  # a later version may add it to a finished bundle, so it is not in the files table

INT32_MAX = 2**31 - 1  # bound of every length and dimension, so that a C++ reader may keep them in an int
INT64_MAX = 2**63 - 1  # bound of byte and parameter counts

BackendName = Literal["onnxruntime", "tensorrt-rtx", "tensorrt"]
Device = Literal["cpu", "cuda"]
Precision = Literal["fp32", "fp16", "bf16", "int8", "int4", "fp8"]
Rounding = Literal["nearest", "gptq", "stored"]
Embedding = Literal["float", "int8", "shared"]

_ACCEPTANCE = re.compile(r"0(\.[0-9]+)?|1(\.0+)?")


@dataclass(frozen=True, kw_only=True)
class Backend:
    """What runs the graphs, its version at compile time, the ONNX opset, and the device that they are meant for.

    `sms` are the CUDA compute capabilities that engines were built for ("89" is 8.9); graphs have none.
    """

    name: BackendName
    version: str
    opset: int
    device: Device = "cpu"
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
    """Weight-only: how many MatMuls have it, and the names of those left in float.

    `block_size` inputs share one scale; 0 is one scale for each output. `blocks` are other block sizes, by a part of a
    weight's name; the first that fits counts. `format` is of the codes: integers, or E4M3. `rounding` is how they were
    chosen, "stored" as a GGUF file has them (in blocks of 32, and a weight that has 8 bits there has 8 here);
    `calibration` is the text that GPTQ saw. `embedding` says how the embedding table is stored: "shared" as the output
    head that is tied to it, in one place where the head has all its rows.
    """

    format: Literal["int", "fp8"] = "int"
    bits: int
    block_size: int
    blocks: Mapping[str, int] = field(default_factory=dict)
    symmetric: bool
    accuracy_level: int
    embedding: Embedding = "float"
    rounding: Rounding = "nearest"
    calibration: str | None = None
    quantized_matmuls: int
    float_matmuls: tuple[str, ...]

    def __post_init__(self) -> None:
        need(self.bits in (2, 4, 8), "bits", "2, 4 or 8", self.bits)
        sizes = (0, 16, 32, 64, 128, 256)
        need(self.block_size in sizes, "block_size", "0, 16, 32, 64, 128 or 256", self.block_size)
        for part, size in self.blocks.items():
            need(part.isprintable() and part != "", "blocks", "keyed by printable text", part)
            need(size in sizes[1:], f"blocks.{part}", "16, 32, 64, 128 or 256", size)
        within(self, 0, 4, "accuracy_level")
        within(self, 1, INT32_MAX, "quantized_matmuls")


@dataclass(frozen=True, kw_only=True)
class Range:
    """Smallest, likeliest and largest size of a dynamic dimension."""

    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        within(self, 1, INT32_MAX, "min", "opt", "max")
        need(self.min <= self.opt <= self.max, "opt", f"from min ({self.min}) to max ({self.max})", self.opt)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Which calls one optimization profile of an engine takes: batch B, tokens S and rows of logits R.

    `activation_bytes` is what the builder planned for the largest of them; 0 where it did not say.
    """

    name: Literal["decode", "prefill"]
    batch: Range
    tokens: Range
    rows: Range
    activation_bytes: int = 0

    def __post_init__(self) -> None:
        within(self, 0, INT64_MAX, "activation_bytes")


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What a built engine adds to its graph: the calls that it takes, and its build log (a file of the bundle).

    `half` is the type that it computes in, `weights_bytes` what its weights take on the device (0: the builder did not
    say). `attention_layers` and `cache_layers` were counted when it was built: each
    cache tensor is written in place by one cache layer.
    """

    half: Literal["fp16", "bf16"]
    profiles: tuple[Profile, ...]
    weights_bytes: int = 0
    attention_layers: int
    cache_layers: int
    log: str

    def __post_init__(self) -> None:
        inside(self, "log")
        within(self, 0, INT64_MAX, "weights_bytes")
        within(self, 0, INT32_MAX, "attention_layers")
        within(self, 1, INT32_MAX, "cache_layers")
        names = [profile.name for profile in self.profiles]
        need(names == ["decode", "prefill"], "profiles", "decode, then prefill", names)


@dataclass(frozen=True, kw_only=True)
class Model:
    """One compiled decoder: its graph or engine file, what it was made of, and the tensors it takes and gives.

    `architecture` is the checkpoint's model_type; `rope` records a regime that was fixed at compile time.
    """

    graph: str
    architecture: str
    parameters: int
    source: Source
    quantization: Quantization | None = None
    rope: str | None = None
    engine: EngineInfo | None = None
    spec: GraphSpec

    def __post_init__(self) -> None:
        inside(self, "graph")
        texts(self, "architecture")
        within(self, 1, INT64_MAX, "parameters")


def _ngrams(owner: "Draft") -> None:
    within(owner, 1, INT32_MAX, "min_ngram", "max_ngram")
    need(owner.min_ngram <= owner.max_ngram, "min_ngram", f"at most max_ngram ({owner.max_ngram})", owner.min_ngram)


@dataclass(frozen=True, kw_only=True)
class DraftVocabulary:
    """The draft's head was cut to `size` tokens: column i of its logits is the token of entry i of the file `path`.

    The file holds `size` little-endian int32, strictly ascending. `corpus` says whose most frequent tokens they are,
    `coverage` which share of the tokens in a held-out part of it is among them.
    """

    path: str
    size: int
    corpus: str
    coverage: float

    def __post_init__(self) -> None:
        inside(self, "path")
        within(self, 1, INT32_MAX, "size")
        texts(self, "corpus")
        within(self, 0, 1, "coverage")


@dataclass(frozen=True, kw_only=True)
class DraftModel:
    """Proposals come from a smaller model. N-grams need none, so a runtime may offer them too, of these lengths.

    `vocabulary` None: the columns of its logits are the token ids in order.
    """

    method: Literal["draft_model"] = "draft_model"
    model: Model
    vocabulary: DraftVocabulary | None = None
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

    @property
    def vocabulary(self) -> None:
        """None: copies may be of any token."""


Draft = DraftModel | NgramDraft


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """One comparison at compile time, over `tokens` positions.

    "capture": the float32 graph against eager PyTorch (where the graph computes in a half type: the same graph with
    every value cast to float32). "half": the graph in its half type against that. "quantize": the quantized graph
    against the one before it, over a held-out text too; `perplexity` there is its own, `reference_perplexity` the
    other's. `max_abs_diff` is over logits, `kl` the mean KL divergence in nats, `greedy_agreement`
    the share of equal argmax. `layers` is how many of the model's layers took part, `tolerance` what was allowed: of
    `max_abs_diff` for "capture", of `kl` for the others.
    """

    graph: Literal["target", "draft"]
    stage: Literal["capture", "half", "quantize"]
    layers: int
    tokens: int
    max_abs_diff: float
    kl: float
    greedy_agreement: float
    tolerance: float
    perplexity: float | None = None
    reference_perplexity: float | None = None

    def __post_init__(self) -> None:
        within(self, 1, INT32_MAX, "layers", "tokens")
        within(self, 0, 1, "greedy_agreement")
        for name in ("max_abs_diff", "tolerance"):
            value = getattr(self, name)
            need(0 <= value < math.inf, name, "a finite number, at least 0", value)
        for name in ("perplexity", "reference_perplexity"):
            value = getattr(self, name)
            need(value is None or 1 <= value < math.inf, name, "a finite number, at least 1", value)
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
