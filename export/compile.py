"""`draftc compile`: from checkpoints to a bundle, in one straight line.

peek → check the pair → choose the draft's tokens → preflight → build each model → write → publish
"""

import importlib.metadata
from collections.abc import Sequence
from dataclasses import replace

from draftc.export import preflight, tensorrt
from draftc.export.build import TOKEN_IDS, Built, Role, build_model
from draftc.export.bundle_writer import BundleWriter, utc_now
from draftc.export.calibration import calibration_corpus, calibration_tokens
from draftc.export.capture import position_table
from draftc.export.checkpoint import CheckpointInfo, check_tokenizer, peek, resolve, skeleton, write_tokenizer
from draftc.export.draft_vocab import (
    KeptTokens,
    check_size,
    choose_tokens,
    read_corpus,
    required_tokens,
    standard_library,
)
from draftc.export.options import CompileOptions
from draftc.export.pair import PairReport, check_pair, target_length_warning, tokenizer_fingerprint
from draftc.export.progress import Quiet, Reporter
from draftc.export.seams import OPSET
from draftc.runtime.decoder import Limits
from draftc.runtime.errors import UsageError
from draftc.runtime.manifest import (
    Backend,
    Draft,
    DraftModel,
    DraftVocabulary,
    Manifest,
    NgramDraft,
    PairSummary,
    TokenizerInfo,
)
from draftc.runtime.ort_session import load_onnxruntime

__all__ = ["CompileOptions", "compile_bundle"]


def compile_bundle(options: CompileOptions, reporter: Reporter | None = None) -> Manifest:
    """Compile a bundle to `options.out` and return its manifest. Nothing is left at `out` unless everything succeeded.

    Raises BackendUnavailableError, CheckpointError, UnsupportedModelError, PairError, CaptureError, ParityError,
    ResourceError, UsageError.
    """
    reporter = reporter or Quiet()
    with reporter.stage("check"):
        backend = _backend(options)
        options = replace(options, sms=backend.sms)
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
        if options.draft_vocab:
            check_size(options.draft_vocab, required_tokens(target, limits.vocab_size), limits.vocab_size)
        rows = options.draft_vocab or None
        pair = check_pair(target, draft, max_length, options.num_speculative_tokens, rows) if draft else None
        infos = [info for info in (target, draft) if info]
        for role, info in zip(_ROLES, infos, strict=False):
            _check_positions(role, info, max_length)
        check_tokenizer(target)
        _check_rounding(options, infos)
    notes = [note for info in infos for note in info.notes]
    if (too_short := target_length_warning(target, max_length)) is not None:
        notes.append(too_short)
    for note in [*notes, *(pair.warnings if pair else ())]:
        reporter.note(note)
    kept = _choose_tokens(options, target, limits, reporter) if options.draft_vocab else None
    with BundleWriter(options.out, force=options.force) as writer:
        needs = preflight.estimate(
            infos,
            options.precision,
            max_length=max_length,
            max_width=options.max_width,
            prefill_chunk=options.prefill_chunk,
            block_size=(options.scheme.block_size or 4096) if options.scheme else 32,
            half=options.half is not None,
            engines=options.engines,
            cut_draft=kept is not None,
            embedding=options.scheme.embedding if options.scheme else "float",
            float_head=options.scheme is not None and not options.scheme.head,
        )
        reporter.note(needs.summary())
        preflight.check(needs, writer.folder.parent)
        built = [
            build_model(role, info, options, limits, writer.folder, reporter, kept if role == "draft" else None)
            for role, info in zip(_ROLES, infos, strict=False)
        ]
        with reporter.stage("write"):
            write_tokenizer(target, writer.folder / "tokenizer")
            return writer.finish(_manifest(options, backend, limits, target, built, pair, kept))


_ROLES: tuple[Role, ...] = ("target", "draft")


def _backend(options: CompileOptions) -> Backend:
    """The backend's record, with what is installed here. Both need ONNX Runtime: it runs the parity gate."""
    version = load_onnxruntime().__version__
    sms = options.sms
    if options.backend != "onnxruntime":
        trt = tensorrt.load_tensorrt(options.backend)
        types = (options.half or "fp32", options.precision)
        sms = tensorrt.check_sms(options.backend, trt, options.sms, types)
        version = trt.__version__
    return Backend(name=options.backend, version=version, opset=OPSET, device=options.device, sms=sms)


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


def _check_rounding(options: CompileOptions, infos: Sequence[CheckpointInfo]) -> None:
    """What rounding needs of a source or of a text is there."""
    rounding = options.scheme.rounding if options.scheme else "nearest"
    for info in infos:
        if rounding == "stored" and info.source.kind != "gguf":
            raise UsageError(f"{info.source.name}: not a GGUF file, so no blocks are stored: use --rounding gptq")
        if rounding == "gptq":
            calibration_tokens(info, calibration_corpus(options.calibration))
    parts = [part for part, _ in options.scheme.blocks] if options.scheme else []
    if parts:
        names = [name for name, weight in skeleton(infos[0]).named_parameters() if weight.dim() == 2]
        for part in parts:
            if not any(part in name for name in names):
                raise UsageError(
                    f"--target-blocks {part}: no weight of the target is called so; they have names such as {names[-1]}"
                )


def _choose_tokens(options: CompileOptions, target: CheckpointInfo, limits: Limits, reporter: Reporter) -> KeptTokens:
    """The tokens that the draft's head is cut to."""
    with reporter.stage("draft vocabulary") as advance:
        corpus = read_corpus(options.draft_corpus) if options.draft_corpus else standard_library()
        required = required_tokens(target, limits.vocab_size)
        kept = choose_tokens(
            target.tokenizer, corpus, options.draft_vocab, required, limits.vocab_size, progress=advance
        )
    reporter.note(
        f"the draft proposes from {kept.token_ids.size} of {limits.vocab_size} tokens: {kept.coverage:.2%} of a "
        f"held-out part of {kept.corpus}"
    )
    return kept


def _vocab_size(target: CheckpointInfo, draft: CheckpointInfo | None) -> int:
    """Ids that exist for the tokenizer and for both heads; the rest are padding rows."""
    return min(info.token_ids for info in (target, draft) if info)


def _manifest(
    options: CompileOptions,
    backend: Backend,
    limits: Limits,
    target: CheckpointInfo,
    built: list[Built],
    pair: PairReport | None,
    kept: KeptTokens | None,
) -> Manifest:
    shortest, longest = options.min_ngram, options.max_ngram
    draft: Draft = NgramDraft(min_ngram=shortest, max_ngram=longest)
    if len(built) == 2:
        cut = None
        if kept is not None:
            size = int(kept.token_ids.size)
            cut = DraftVocabulary(path=f"draft/{TOKEN_IDS}", size=size, corpus=kept.corpus, coverage=kept.coverage)
        draft = DraftModel(model=built[1].model, vocabulary=cut, min_ngram=shortest, max_ngram=longest)
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
