"""`draftc compile`: from checkpoints to a bundle, in one straight line.

    peek → check the pair → preflight → for each model: load → eager reference → capture → free the checkpoint
         → lower → parity → quantize → parity → write → publish

At no time are two copies of the weights in memory: the checkpoint is gone before the first session opens, sessions map
the weight file, and the quantizer holds one matrix at a time.
"""

import gc
import importlib.metadata
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from draftc.export import parity, preflight
from draftc.export.bundle_writer import BundleWriter, utc_now
from draftc.export.capture import Captured, capture, position_table
from draftc.export.checkpoint import (
    Checkpoint,
    CheckpointInfo,
    check_tokenizer,
    load,
    peek,
    resolve,
    skeleton,
    write_tokenizer,
)
from draftc.export.pair import PairReport, check_pair, target_length_warning, tokenizer_fingerprint
from draftc.export.passes import lower
from draftc.export.progress import Quiet, Reporter
from draftc.export.quantize import QuantizationScheme, QuantizeWeights
from draftc.export.rope import fixed_rope
from draftc.export.seams import OPSET
from draftc.runtime.decoder import Decoder, Limits
from draftc.runtime.engine import Tokens
from draftc.runtime.errors import UsageError
from draftc.runtime.graphio import GraphSpec
from draftc.runtime.manifest import (
    INT32_MAX,
    Backend,
    Draft,
    DraftModel,
    Manifest,
    Model,
    NgramDraft,
    PairSummary,
    ParityReport,
    Quantization,
    Source,
    TokenizerInfo,
)
from draftc.runtime.ort import OrtEngine, load_onnxruntime

__all__ = ["CompileOptions", "compile_bundle"]

BACKEND: Literal["onnxruntime"] = "onnxruntime"
Role = Literal["target", "draft"]
LOGITS_BYTES = 1 << 30  # most that the parity gate holds of one model's logits


@dataclass(frozen=True)
class CompileOptions:
    """What `draftc compile` was asked for.

    `target` and `draft` are sources (a folder, a hub id, a .gguf file); `draft` may be "ngram". `scheme` None keeps
    float32. `max_length` None is 2048, or the target's context where that is shorter. A licence that the source itself
    names goes before `target_license` and `draft_license`. Raises UsageError for values out of range.
    """

    target: str
    draft: str
    out: Path
    scheme: QuantizationScheme | None = None
    num_speculative_tokens: int = 4
    max_length: int | None = None
    max_width: int = 32
    prefill_chunk: int = 256
    min_ngram: int = 2
    max_ngram: int = 4
    force: bool = False
    trust_remote_code: bool = False
    name: str | None = None
    target_license: str | None = None
    draft_license: str | None = None

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 8:
            raise UsageError(f"max_length must be 8 or more, got {self.max_length}")
        if not 2 <= self.max_width <= 256:
            raise UsageError(f"max_width must be 2 to 256, got {self.max_width}")
        if self.max_length is not None and self.max_length > INT32_MAX - self.max_width:
            raise UsageError(f"max_length must be {INT32_MAX - self.max_width} or less, got {self.max_length}")
        if not self.bundle_name.strip() or not self.bundle_name.isprintable():
            raise UsageError(f"the bundle's name must be printable text, got {self.bundle_name!r}: pass another --name")
        if not 1 <= self.num_speculative_tokens < self.max_width:
            allowed = f"1 to {self.max_width - 1} (below max_width {self.max_width})"
            raise UsageError(f"num_speculative_tokens must be {allowed}, got {self.num_speculative_tokens}")
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise UsageError(f"n-grams need 1 <= min_ngram <= max_ngram, got {self.min_ngram} and {self.max_ngram}")
        if self.prefill_chunk < 1:
            raise UsageError(f"prefill_chunk must be 1 or more, got {self.prefill_chunk}")

    @property
    def bundle_name(self) -> str:
        """The name that was asked for, or that of the output folder."""
        return self.out.resolve().name if self.name is None else self.name

    @property
    def precision(self) -> Literal["fp32", "int8", "int4"]:
        """The manifest's word for the scheme."""
        return "fp32" if self.scheme is None else "int4" if self.scheme.bits == 4 else "int8"


@dataclass(frozen=True)
class _Built:
    """One compiled model and how it was judged."""

    model: Model
    parity: list[ParityReport] = field(default_factory=list)


def compile_bundle(options: CompileOptions, reporter: Reporter | None = None) -> Manifest:
    """Compile a bundle to `options.out` and return its manifest. Nothing is left at `out` unless everything succeeded.

    Raises BackendUnavailableError, CheckpointError, UnsupportedModelError, PairError, CaptureError, ParityError,
    ResourceError, UsageError.
    """
    reporter = reporter or Quiet()
    with reporter.stage("check"):
        backend = Backend(name=BACKEND, version=load_onnxruntime().__version__, opset=OPSET)
        target = peek(resolve(options.target, trust_remote_code=options.trust_remote_code))
        draft = None
        if options.draft != "ngram":
            draft = peek(resolve(options.draft, trust_remote_code=options.trust_remote_code))
        max_length = options.max_length
        if max_length is None:
            max_length = min(2048, target.shape.max_positions or 2048)
        limits = Limits(
            max_length, options.max_width, min(options.prefill_chunk, max_length), _vocab_size(target, draft)
        )
        pair = check_pair(target, draft, max_length, options.num_speculative_tokens) if draft else None
        infos = [info for info in (target, draft) if info]
        for role, info in zip(_ROLES, infos, strict=False):
            _check_positions(role, info, max_length)
        check_tokenizer(target)
    notes = [note for info in infos for note in info.notes]
    if (too_short := target_length_warning(target, max_length)) is not None:
        notes.append(too_short)
    for note in [*notes, *(pair.warnings if pair else ())]:
        reporter.note(note)
    with BundleWriter(options.out, force=options.force) as writer:
        needs = preflight.estimate(
            infos,
            options.precision,
            max_length=max_length,
            max_width=options.max_width,
            prefill_chunk=options.prefill_chunk,
            block_size=options.scheme.block_size if options.scheme else 32,
        )
        reporter.note(needs.summary())
        preflight.check(needs, writer.folder.parent)
        built = [
            _build(role, info, options, limits, writer.folder, reporter)
            for role, info in zip(_ROLES, infos, strict=False)
        ]
        with reporter.stage("write"):
            write_tokenizer(target, writer.folder / "tokenizer")
            return writer.finish(_manifest(options, backend, limits, target, built, pair))


_ROLES: tuple[Role, ...] = ("target", "draft")


def _check_positions(role: Role, info: CheckpointInfo, max_length: int) -> None:
    """Refuse a text longer than a learned position table now, rather than when the model is captured.

    Only where the config's context is shorter is the model's code asked whether there is such a table.
    """
    if info.shape.max_positions is None or max_length <= info.shape.max_positions:
        return
    table = position_table(skeleton(info))
    if table is not None and max_length > table:
        raise UsageError(
            f"max_length {max_length} exceeds the {table} positions of the {role} {info.source.name}: use --max-length "
            f"{table} or less, or another {role}"
        )


def _vocab_size(target: CheckpointInfo, draft: CheckpointInfo | None) -> int:
    """Ids that exist for the tokenizer and for both heads; the rest are padding rows."""
    return min(info.token_ids for info in (target, draft) if info)


def _build(
    role: Role, info: CheckpointInfo, options: CompileOptions, limits: Limits, folder: Path, reporter: Reporter
) -> _Built:
    """Load, capture, judge, quantize, judge: leaves `folder`/`role`/model.onnx behind."""
    with reporter.stage(f"{role}: load") as advance:
        checkpoint = load(info, progress=advance)
    fingerprint = checkpoint.fingerprint
    tokens = parity.parity_tokens(info.tokenizer, _parity_length(info, limits))
    window = _sliding_window(info)
    if window is not None and tokens.size <= window < limits.max_length:
        reporter.note(
            f"{role}: compared over {tokens.size} positions; its window of {window} tokens is not crossed by that text"
        )
    with reporter.stage(f"{role}: eager reference"), fixed_rope(checkpoint.model, limits.max_length):
        expected = parity.eager_logits(checkpoint.model, tokens)
    work = folder / f"{role}.float" if options.scheme else folder / role
    work.mkdir()
    captured = _capture(role, checkpoint, limits, work, reporter)
    # Every reference to the torch weights must go before a session maps its own.
    del checkpoint
    gc.collect()

    lowered = captured.path.with_name("lowered.onnx")
    ir.save(lower(ir.load(captured.path), BACKEND), lowered)  # refers to the same weight file
    with reporter.stage(f"{role}: parity with eager"):
        logits = _run(lowered, captured.spec, limits, tokens, options.num_speculative_tokens)
        comparison = parity.compare(expected, logits, captured.spec.vocab_rows)
        tolerance = parity.check_capture(info.source.name, comparison)
        reports = [_report(role, "capture", info, comparison, tolerance)]
    del expected
    quantization = None
    if options.scheme is None:
        lowered.replace(captured.path)
    else:
        quantization = _quantize(role, captured, options.scheme, folder, reporter)
        with reporter.stage(f"{role}: parity with float"):
            path = folder / role / "model.onnx"
            rounded = _run(path, captured.spec, limits, tokens, options.num_speculative_tokens)
            comparison = parity.compare(logits, rounded, limits.vocab_size)
            parity.check_quantized(info.source.name, comparison)
            reports.append(_report(role, "quantize", info, comparison, parity.MAX_KL))
    model = Model(
        graph=f"{role}/model.onnx",
        architecture=info.config.model_type,
        parameters=info.parameters,
        source=Source(
            kind=info.source.kind,
            location=info.source.repo or info.source.name,
            license=info.licence or (options.target_license if role == "target" else options.draft_license),
            fingerprint=f"sha256:{fingerprint}",
        ),
        quantization=quantization,
        rope=captured.rope_note,
        spec=captured.spec,
    )
    return _Built(model, reports)


def _capture(role: Role, checkpoint: Checkpoint, limits: Limits, work: Path, reporter: Reporter) -> Captured:
    stages = {"trace": 0, "convert": 1, "write": 2}
    with reporter.stage(f"{role}: capture") as advance:
        return capture(
            checkpoint.model,
            max_length=limits.max_length,
            max_width=limits.max_width,
            path=work / "model.onnx",
            on_stage=lambda stage: advance(stages[stage], len(stages)),
        )


def _quantize(
    role: Role, captured: Captured, scheme: QuantizationScheme, folder: Path, reporter: Reporter
) -> Quantization:
    """Write the quantized graph to `folder`/`role` and remove the float one."""
    (folder / role).mkdir()
    with reporter.stage(f"{role}: quantize") as advance:
        rewrite = QuantizeWeights(scheme, advance)
        graph = ir.load(captured.path)
        rewrite(graph)
        ir.save(lower(graph, BACKEND), folder / role / "model.onnx", external_data="model.onnx.data")
        del graph
    for path in captured.path.parent.iterdir():
        path.unlink()
    captured.path.parent.rmdir()
    if names := rewrite.left_in_float:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        reporter.note(
            f"{role}: {rewrite.float_share:.0%} of the weights that it multiplies with stay in float: "
            f"{', '.join(names[:3])}{more}"
        )
    return Quantization(
        bits=scheme.bits,
        block_size=scheme.block_size,
        symmetric=scheme.symmetric,
        accuracy_level=scheme.accuracy_level,
        quantized_matmuls=rewrite.quantized,
        float_matmuls=tuple(rewrite.left_in_float),
    )


def _run(path: Path, spec: GraphSpec, limits: Limits, tokens: Tokens, k: int) -> parity.LogitRows:
    engine = OrtEngine(path, spec, max_call=max(limits.prefill_chunk, limits.max_width), max_rows=limits.max_width)
    decoder = Decoder(engine, replace(limits, vocab_size=spec.vocab_rows))
    try:
        return parity.graph_logits(decoder, tokens, k)
    finally:
        decoder.close()


def _parity_length(info: CheckpointInfo, limits: Limits) -> int:
    """192 tokens, or past the edge of a sliding window, since only a text beyond it shows a wrong mask.

    No more than whose logits fit into LOGITS_BYTES.
    """
    window = _sliding_window(info)
    wanted = max(192, window + 64) if window is not None and window <= 1024 else 192
    return min(wanted, limits.max_length, max(8, LOGITS_BYTES // (4 * info.shape.vocab_rows)))


def _sliding_window(info: CheckpointInfo) -> int | None:
    """How many tokens a layer looks back, where some layers do not look back to the beginning."""
    config = info.config.get_text_config()
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    slides = kinds is None or "sliding_attention" in kinds
    return window if isinstance(window, int) and slides else None


def _report(
    role: Role, stage: Literal["capture", "quantize"], info: CheckpointInfo, result: parity.Comparison, tolerance: float
) -> ParityReport:
    return ParityReport(
        graph=role,
        stage=stage,
        layers=info.shape.num_layers,
        tokens=result.tokens,
        max_abs_diff=result.max_abs_diff,
        kl=result.kl,
        greedy_agreement=result.greedy_agreement,
        tolerance=tolerance,
    )


def _manifest(
    options: CompileOptions,
    backend: Backend,
    limits: Limits,
    target: CheckpointInfo,
    built: list[_Built],
    pair: PairReport | None,
) -> Manifest:
    shortest, longest = options.min_ngram, options.max_ngram
    draft: Draft = NgramDraft(min_ngram=shortest, max_ngram=longest)
    if len(built) == 2:
        draft = DraftModel(model=built[1].model, min_ngram=shortest, max_ngram=longest)
    return Manifest(
        draftc_version=importlib.metadata.version("draftc"),
        name=options.bundle_name,
        created=utc_now(),
        backend=backend,
        precision=options.precision,
        num_speculative_tokens=options.num_speculative_tokens,
        max_length=limits.max_length,
        max_width=limits.max_width,
        prefill_chunk=limits.prefill_chunk,
        vocab_size=limits.vocab_size,
        tokenizer=TokenizerInfo(fingerprint=tokenizer_fingerprint(target)),
        target=built[0].model,
        draft=draft,
        parity=tuple(report for one in built for report in one.parity),
        pair=_summary(pair) if pair else None,
        licenses=tuple(sorted({one.model.source.license for one in built if one.model.source.license})),
    )


def _summary(pair: PairReport) -> PairSummary:
    return PairSummary(
        draft_cost_ratio=pair.draft_cost_ratio,
        predicted_speedup={str(prediction.acceptance): prediction.speedup for prediction in pair.predictions},
    )
