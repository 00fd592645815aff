"""One model of a bundle, from checkpoint to graph or engine, in one straight line:

    load → eager reference → capture → lower → parity → quantize → parity → (tail → TensorRT engine)

At no time are two copies of the weights in memory: the checkpoint is gone before the first session opens, a session is
gone before the next, and the quantizer reads one float matrix at a time.
"""

import gc
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

import onnx_ir as ir

from draftc.export import parity
from draftc.export.capture import Captured, capture
from draftc.export.checkpoint import Checkpoint, CheckpointInfo, load
from draftc.export.engine_process import build_engine_apart
from draftc.export.half import WidenFloats, cast_parameters, round_parameters, widened_spec
from draftc.export.lowering import lower
from draftc.export.options import CompileOptions
from draftc.export.passes import FuseTransposedWeights
from draftc.export.progress import Reporter
from draftc.export.qdq import Dequantize
from draftc.export.quantize import NBits, QuantizationScheme, QuantizeWeights
from draftc.export.rope import fixed_rope
from draftc.export.tails import DraftTail, VerifyTail
from draftc.export.tensorrt import Flavour, check_forms
from draftc.runtime.backends import open_engine
from draftc.runtime.decoder import Decoder, Limits
from draftc.runtime.engine import Tokens
from draftc.runtime.graphio import GraphSpec
from draftc.runtime.manifest import EngineInfo, Model, ParityReport, Profile, Quantization, Range, Source

__all__ = ["Built", "Role", "build_model"]

Role = Literal["target", "draft"]
LOGITS_BYTES = 1 << 30  # most that the parity gate holds of one model's logits
GRAPH, DATA, ENGINE, LOG = "model.onnx", "model.onnx.data", "model.engine", "build.log"


@dataclass(frozen=True)
class Built:
    """One compiled model and how it was judged."""

    model: Model
    parity: list[ParityReport] = field(default_factory=list)


def build_model(
    role: Role, info: CheckpointInfo, options: CompileOptions, limits: Limits, folder: Path, reporter: Reporter
) -> Built:
    """Leave `folder`/`role` with the model's graph or engine behind.

    Raises CheckpointError, CaptureError, ParityError, ResourceError, UsageError.
    """
    with reporter.stage(f"{role}: load") as advance:
        checkpoint = load(info, progress=advance)
    fingerprint = checkpoint.fingerprint
    tokens = parity.parity_tokens(info.tokenizer, _parity_length(info, limits))
    window = _sliding_window(info)
    if window is not None and tokens.size <= window < limits.max_length:
        reporter.note(
            f"{role}: compared over {tokens.size} positions; its window of {window} tokens is not crossed by that text"
        )
    if options.half:
        round_parameters(checkpoint.model, options.half)
    with reporter.stage(f"{role}: eager reference"), fixed_rope(checkpoint.model, limits.max_length):
        expected = parity.eager_logits(checkpoint.model, tokens)
    if options.half:
        cast_parameters(checkpoint.model, options.half)
    work = folder / f"{role}.work"
    work.mkdir()
    captured = _capture(role, checkpoint, limits, work, reporter)
    # Every reference to the torch weights must go before a session maps its own.
    del checkpoint
    gc.collect()

    judge = _Judge(role, info, limits, tokens, options, reporter)
    graph = work / "lowered.onnx"  # refers to the captured graph's weight file
    ir.save(lower(ir.load(captured.path), options.backend, options.device), graph)
    logits, reports = judge.capture(graph, captured.spec, expected)
    del expected
    (folder / role).mkdir()
    quantization = None
    if options.scheme is not None:
        rounded = work / "quantized" / GRAPH
        rounded.parent.mkdir()
        quantization = _quantize(role, captured, options, rounded, reporter)
        reports.append(judge.quantized(rounded, captured.spec, logits))
        graph = rounded
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


def _quantize(role: Role, captured: Captured, options: CompileOptions, path: Path, reporter: Reporter) -> Quantization:
    """Write the quantized and lowered graph to `path`."""
    scheme = cast(QuantizationScheme, options.scheme)
    with reporter.stage(f"{role}: quantize") as advance:
        rewrite = QuantizeWeights(scheme, advance, Dequantize(scheme) if options.engines else NBits(scheme))
        graph = ir.load(captured.path)
        rewrite(graph)
        ir.save(lower(graph, options.backend, options.device), path, external_data=DATA)
        del graph
    if names := rewrite.left_in_float:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        reporter.note(
            f"{role}: {rewrite.float_share:.0%} of the weights that it multiplies with stay in float: "
            f"{', '.join(names[:3])}{more}"
        )
    return Quantization(
        format=scheme.format,
        bits=scheme.bits,
        block_size=scheme.block_size,
        symmetric=scheme.symmetric,
        accuracy_level=scheme.accuracy_level,
        quantized_matmuls=rewrite.quantized,
        float_matmuls=tuple(rewrite.left_in_float),
    )


class _Judge:
    """The parity gate of one model: runs its graphs over one text on ONNX Runtime's CPU provider and compares."""

    def __init__(
        self,
        role: Role,
        info: CheckpointInfo,
        limits: Limits,
        tokens: Tokens,
        options: CompileOptions,
        reporter: Reporter,
    ) -> None:
        self.role = role
        self.info = info
        self.limits = limits
        self.tokens = tokens
        self.options = options
        self.reporter = reporter

    def capture(
        self, graph: Path, spec: GraphSpec, expected: parity.LogitRows
    ) -> tuple[parity.LogitRows, list[ParityReport]]:
        """Compare a float graph with eager PyTorch's logits; return what it gives, and the reports.

        A half-typed graph is compared in float32, and then (fp16: ONNX Runtime's CPU has no bf16 kernels) as it is.
        """
        name, half = self.info.source.name, self.options.half
        with self.reporter.stage(f"{self.role}: parity with eager"), self._in_float32(graph, spec) as (wide, wide_spec):
            logits = self._run(wide, wide_spec)
            comparison = parity.compare(expected, logits, spec.vocab_rows)
            reports = [self._report("capture", comparison, parity.check_capture(name, comparison))]
        if half == "fp16":
            with self.reporter.stage(f"{self.role}: parity of fp16"):
                comparison = parity.compare(logits, self._run(graph, spec), self.limits.vocab_size)
                reports.append(self._report("half", comparison, parity.check_rounded(name, "fp16", comparison)))
        elif half == "bf16":
            self.reporter.note(
                f"{self.role}: compared in float32 with bf16 weights; no CPU can run bf16 arithmetic here"
            )
        return logits, reports

    def quantized(self, graph: Path, spec: GraphSpec, reference: parity.LogitRows) -> ParityReport:
        """Compare a quantized graph with the float graph's logits: as it is, but for bf16, which is widened."""
        with self.reporter.stage(f"{self.role}: parity with float"):
            if self.options.half == "bf16":
                with self._in_float32(graph, spec) as (wide, wide_spec):
                    logits = self._run(wide, wide_spec)
            else:
                logits = self._run(graph, spec)
            comparison = parity.compare(reference, logits, self.limits.vocab_size)
        allowed = parity.check_rounded(self.info.source.name, self.options.precision, comparison)
        return self._report("quantize", comparison, allowed)

    @contextmanager
    def _in_float32(self, graph: Path, spec: GraphSpec) -> Iterator[tuple[Path, GraphSpec]]:
        """The graph with every half-typed value in float32: a temporary file, unless it is in float32 already."""
        if self.options.half is None:
            yield graph, spec
            return
        path = graph.with_name("float32.onnx")
        data = path.with_name(path.name + ".data")
        model = ir.load(graph)
        WidenFloats()(model)
        FuseTransposedWeights()(model)  # or the session would hold a transposed copy of every weight
        ir.save(model, path, external_data=data.name)
        del model
        try:
            yield path, widened_spec(spec)
        finally:
            path.unlink()
            data.unlink(missing_ok=True)

    def _run(self, graph: Path, spec: GraphSpec) -> parity.LogitRows:
        limits = self.limits
        widest = max(limits.prefill_chunk, limits.max_width)
        engine = open_engine("onnxruntime", graph, spec, max_call=widest, max_rows=limits.max_width)
        decoder = Decoder(engine, replace(limits, vocab_size=spec.vocab_rows))
        try:
            return parity.graph_logits(decoder, self.tokens, self.options.num_speculative_tokens)
        finally:
            decoder.close()

    def _report(
        self, stage: Literal["capture", "half", "quantize"], result: parity.Comparison, tolerance: float
    ) -> ParityReport:
        return ParityReport(
            graph=self.role,
            stage=stage,
            layers=self.info.shape.num_layers,
            tokens=result.tokens,
            max_abs_diff=result.max_abs_diff,
            kl=result.kl,
            greedy_agreement=result.greedy_agreement,
            tolerance=tolerance,
        )


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
