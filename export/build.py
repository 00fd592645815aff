"""One model of a bundle, from checkpoint to graph or engine, in one straight line:

    load → eager reference → capture → lower → parity → quantize → parity → (tail → TensorRT engine)

At no time are two copies of the weights in memory: the checkpoint is gone before the first session opens, a session is
gone before the next, and the quantizer reads one float matrix at a time.
"""

import gc
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, cast

import onnx_ir as ir

from draftc.export import parity
from draftc.export.calibration import calibration_corpus, calibration_tokens
from draftc.export.capture import Captured, capture
from draftc.export.checkpoint import Checkpoint, CheckpointInfo, load
from draftc.export.draft_vocab import KeptTokens
from draftc.export.engine_process import build_engine_apart
from draftc.export.gguf import GgufFile
from draftc.export.gguf_blocks import stored_blocks
from draftc.export.gptq import round_model
from draftc.export.graph_file import save_graph
from draftc.export.half import cast_parameters, round_parameters
from draftc.export.head import CutHead
from draftc.export.judge import Judge, parity_length, sliding_window
from draftc.export.lowering import lower
from draftc.export.nbits import NBits
from draftc.export.options import CompileOptions
from draftc.export.passes import cut_name
from draftc.export.progress import Reporter
from draftc.export.qdq import Dequantize
from draftc.export.quantize import QuantizeWeights, WeightForm
from draftc.export.rope import fixed_rope
from draftc.export.rounding import Rounded
from draftc.export.scheme import QuantizationScheme
from draftc.export.tails import DraftTail, VerifyTail
from draftc.export.tensorrt import Flavour, check_forms
from draftc.runtime.decoder import Limits
from draftc.runtime.graphio import GraphSpec
from draftc.runtime.manifest import EngineInfo, Model, ParityReport, Profile, Quantization, Range, Source
from draftc.runtime.vocabulary import write_token_ids

__all__ = ["TOKEN_IDS", "Built", "Role", "build_model"]

Role = Literal["target", "draft"]
GRAPH, DATA, ENGINE, LOG = "model.onnx", "model.onnx.data", "model.engine", "build.log"
TOKEN_IDS = "token_ids.bin"


@dataclass(frozen=True)
class Built:
    """One compiled model and how it was judged."""

    model: Model
    parity: list[ParityReport] = field(default_factory=list)


def build_model(
    role: Role,
    info: CheckpointInfo,
    options: CompileOptions,
    limits: Limits,
    folder: Path,
    reporter: Reporter,
    kept: KeptTokens | None = None,
) -> Built:
    """Leave `folder`/`role` with the model's graph or engine behind, its head cut to the tokens `kept`.

    Raises CheckpointError, CaptureError, ParityError, ResourceError, UsageError.
    """
    with reporter.stage(f"{role}: load") as advance:
        checkpoint = load(info, progress=advance)
    fingerprint = checkpoint.fingerprint
    tokens = parity.parity_tokens(info.tokenizer, parity_length(info, limits))
    window = sliding_window(info)
    if window is not None and tokens.size <= window < limits.max_length:
        reporter.note(
            f"{role}: compared over {tokens.size} positions; its window of {window} tokens is not crossed by that text"
        )
    if options.half:
        round_parameters(checkpoint.model, options.half)
    with reporter.stage(f"{role}: eager reference"), fixed_rope(checkpoint.model, limits.max_length):
        expected = parity.eager_logits(checkpoint.model, tokens)
    rounded, calibration = _round(role, checkpoint, options, limits, reporter)
    if options.half:
        cast_parameters(checkpoint.model, options.half)
    work = folder / f"{role}.work"
    work.mkdir()
    captured = _capture(role, checkpoint, limits, work, reporter)
    # Every reference to the torch weights must go before a session maps its own.
    del checkpoint
    gc.collect()
    (folder / role).mkdir()
    if kept is not None:
        captured = _cut(role, captured, kept, reporter)
        heads = {key: matrix for key, matrix in rounded.items() if len(matrix.codes) == info.shape.vocab_rows}
        rounded |= {(cut_name(name), stored): head.take(kept.token_ids) for (name, stored), head in heads.items()}
        write_token_ids(folder / role / TOKEN_IDS, kept.token_ids)
        # From here on the graph's logits are compared with the checkpoint's own at these ids.
        expected = {position: row[kept.token_ids] for position, row in expected.items()}
        limits = replace(limits, vocab_size=kept.token_ids.size)

    judge = Judge(role, info, limits, tokens, options, reporter, None if kept is None else kept.token_ids)
    graph = captured.path.with_name("lowered.onnx")  # refers to the captured graph's weight file
    ir.save(lower(ir.load(captured.path), options.backend, options.device, partial(_note, role, reporter)), graph)
    logits, reports = judge.capture(graph, captured.spec, expected)
    del expected
    quantization = None
    if options.scheme is not None:
        graph = work / "quantized" / GRAPH
        graph.parent.mkdir()
        quantization = replace(_quantize(role, captured, options, rounded, graph, reporter), calibration=calibration)
        rounded.clear()
        reports.append(judge.quantized(graph, captured.spec, logits))
    del logits
    spec, engine = captured.spec, None
    if options.engines:
        spec, engine = _build_engine(role, graph, captured.spec, options, limits, folder, reporter)
    else:
        graph.replace(folder / role / GRAPH)
        graph.with_name(DATA).replace(folder / role / DATA)
    shutil.rmtree(work)
    model = Model(
        graph=f"{role}/{ENGINE if options.engines else GRAPH}",
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
        engine=engine,
        spec=spec,
    )
    return Built(model, reports)


def _note(role: Role, reporter: Reporter, message: str) -> None:
    reporter.note(f"{role}: {message}")


def _capture(role: Role, checkpoint: Checkpoint, limits: Limits, work: Path, reporter: Reporter) -> Captured:
    stages = {"trace": 0, "convert": 1, "write": 2}
    with reporter.stage(f"{role}: capture") as advance:
        return capture(
            checkpoint.model,
            max_length=limits.max_length,
            max_width=limits.max_width,
            path=work / GRAPH,
            on_stage=lambda stage: advance(stages[stage], len(stages)),
        )


def _cut(role: Role, captured: Captured, kept: KeptTokens, reporter: Reporter) -> Captured:
    """The captured graph with a head for the tokens `kept`, in place of the one with the whole head."""
    with reporter.stage(f"{role}: cut the head"):
        path = captured.path.parent / "cut" / GRAPH
        path.parent.mkdir()
        graph = ir.load(captured.path)
        CutHead(kept.token_ids)(graph)
        ir.save(graph, path, external_data=DATA)
        del graph
        for old in (captured.path, captured.path.with_name(DATA)):
            old.unlink()
    return replace(captured, path=path, spec=captured.spec.with_vocab_rows(kept.token_ids.size))


def _round(
    role: Role, checkpoint: Checkpoint, options: CompileOptions, limits: Limits, reporter: Reporter
) -> tuple[Rounded, str | None]:
    """The weights that are not rounded to nearest, and what GPTQ was calibrated on."""
    scheme, info = options.scheme_of(role), checkpoint.info
    if scheme is None or scheme.rounding == "nearest":
        return {}, None
    if scheme.rounding == "stored":
        return stored_blocks(GgufFile(info.source.location), info.config, checkpoint.model), None
    with reporter.stage(f"{role}: gptq") as advance:
        corpus = calibration_corpus(options.calibration)
        tokens = calibration_tokens(info, corpus)
        with fixed_rope(checkpoint.model, limits.max_length):
            rounded = round_model(
                checkpoint.model,
                tokens,
                bits=scheme.bits,
                block_of=scheme.block_of,
                symmetric=scheme.symmetric,
                head=scheme.head,
                progress=advance,
            )
    return rounded, f"{tokens.size} tokens of {corpus.note}"


def _quantize(
    role: Role, captured: Captured, options: CompileOptions, given: Rounded, path: Path, reporter: Reporter
) -> Quantization:
    """Write the quantized and lowered graph to `path`, with the weights `given` as they are rounded there."""
    scheme = cast(QuantizationScheme, options.scheme_of(role))
    with reporter.stage(f"{role}: quantize") as advance:
        form: WeightForm = Dequantize(scheme) if options.engines else NBits(scheme, given)
        rewrite = QuantizeWeights(scheme, advance, form)
        graph = ir.load(captured.path)
        rewrite(graph)
        save_graph(lower(graph, options.backend, options.device), path)
        del graph
    if names := rewrite.left_in_float:
        reporter.note(
            f"{role}: {rewrite.float_share:.0%} of the weights that it multiplies with stay in float: {_some(names)}"
        )
    if isinstance(form, NBits) and scheme.rounding != "nearest" and form.nearest:
        why = "no calibration reached them" if scheme.rounding == "gptq" else "stored in another type"
        reporter.note(f"{role}: rounded to nearest ({why}): {_some(form.nearest)}")
    return Quantization(
        format=scheme.format,
        rounding=scheme.rounding,
        bits=scheme.bits,
        block_size=scheme.block_size,
        blocks=dict(scheme.blocks),
        symmetric=scheme.symmetric,
        accuracy_level=scheme.accuracy_level,
        embedding=rewrite.embedding,
        quantized_matmuls=rewrite.quantized,
        float_matmuls=tuple(rewrite.left_in_float),
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _build_engine(
    role: Role,
    graph: Path,
    spec: GraphSpec,
    options: CompileOptions,
    limits: Limits,
    folder: Path,
    reporter: Reporter,
) -> tuple[GraphSpec, EngineInfo]:
    """Attach the role's tail and build `folder`/`role`/model.engine; return the engine's tensors and description."""
    slots = limits.max_width
    model = ir.load(graph)
    (VerifyTail if role == "target" else DraftTail)(slots, limits.vocab_size)(model)
    spec = spec.with_tail("verify" if role == "target" else "draft", slots, limits.vocab_size)
    check_forms(model)
    with_tail = graph.with_name("tail.onnx")
    ir.save(model, with_tail)  # refers to the same weight file
    del model
    profiles = _profiles(role, options, limits)
    with reporter.stage(f"{role}: build engine") as advance:
        built = build_engine_apart(
            cast(Flavour, options.backend),
            with_tail,
            spec,
            profiles,
            options.sms,
            folder / role / ENGINE,
            folder / role / LOG,
            advance,
        )
    assert options.half is not None
    info = EngineInfo(
        half=options.half,
        profiles=tuple(
            replace(profile, activation_bytes=count)
            for profile, count in zip(profiles, built.activation_bytes, strict=True)
        ),
        weights_bytes=built.weights_bytes,
        attention_layers=built.attention,
        cache_layers=built.cache,
        log=f"{role}/{LOG}",
    )
    return spec, info


def _profiles(role: Role, options: CompileOptions, limits: Limits) -> tuple[Profile, ...]:
    """Decode: 1 to max_width tokens, K + 1 of a target and one of a draft the likeliest. Prefill: a chunk, one row."""
    fewest, most = options.batch
    batch = Range(min=fewest, opt=fewest, max=most)
    likeliest = options.num_speculative_tokens + 1 if role == "target" else 1
    width = Range(min=1, opt=likeliest, max=limits.max_width)
    chunk = Range(min=1, opt=limits.prefill_chunk, max=limits.prefill_chunk)
    return (
        Profile(name="decode", batch=batch, tokens=width, rows=width),
        Profile(name="prefill", batch=batch, tokens=chunk, rows=Range(min=1, opt=1, max=1)),
    )
