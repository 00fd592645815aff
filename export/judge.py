"""The parity gate of one model: its graphs run on ONNX Runtime's CPU provider and are compared (`parity`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from draftc.export import parity
from draftc.export.checkpoint import CheckpointInfo
from draftc.export.half import WidenFloats, widened_spec
from draftc.export.options import CompileOptions
from draftc.export.passes import FuseTransposedWeights
from draftc.export.progress import Reporter
from draftc.runtime.backends import open_engine
from draftc.runtime.decoder import Decoder, Limits
from draftc.runtime.engine import Tokens
from draftc.runtime.graphio import GraphSpec
from draftc.runtime.manifest import ParityReport

__all__ = ["Judge", "parity_length", "sliding_window"]

LOGITS_BYTES = 1 << 30  # most that the parity gate holds of one model's logits


class Judge:
    """Compares the graphs of one model over `tokens` (n,), and where there is a quantized one over a held-out text too.

    `kept` are the token ids of a cut head, ascending: its column i is token kept[i].
    """

    def __init__(
        self,
        role: Literal["target", "draft"],
        info: CheckpointInfo,
        limits: Limits,
        tokens: Tokens,
        options: CompileOptions,
        reporter: Reporter,
        kept: NDArray[np.int64] | None = None,
    ) -> None:
        self.role = role
        self.info = info
        self.limits = limits
        self.tokens = tokens
        self.options = options
        self.reporter = reporter
        held_out = (
            parity.held_out_tokens(info.tokenizer, _held_out_length(info, limits)) if options.scheme else tokens[:0]
        )
        self._held_out = held_out
        columns = np.arange(limits.vocab_size) if kept is None else kept
        at = np.searchsorted(columns, held_out[1:])
        is_column = (at < columns.size) & (columns[np.minimum(at, columns.size - 1)] == held_out[1:])
        # Held-out positions are numbered on from those of the parity text.
        self._following = {tokens.size + i: int(at[i]) for i in np.flatnonzero(is_column).tolist()}

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
        before, after = (
            parity.perplexity(rows, self._following, self.limits.vocab_size) if self._following else None
            for rows in (reference, logits)
        )
        report = self._report("quantize", comparison, allowed)
        return replace(report, reference_perplexity=before, perplexity=after)

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
            rows = parity.graph_logits(decoder, self.tokens, self.options.num_speculative_tokens)
            held_out = parity.text_logits(decoder, self._held_out)
            return rows | {self.tokens.size + position: row for position, row in held_out.items()}
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


def parity_length(info: CheckpointInfo, limits: Limits) -> int:
    """192 tokens, or past the edge of a sliding window, since only a text beyond it shows a wrong mask.

    No more than whose logits fit into LOGITS_BYTES.
    """
    window = sliding_window(info)
    wanted = max(192, window + 64) if window is not None and window <= 1024 else 192
    return min(wanted, limits.max_length, max(8, LOGITS_BYTES // (4 * info.shape.vocab_rows)))


def _held_out_length(info: CheckpointInfo, limits: Limits) -> int:
    """640 tokens, or as many as fit: two models' logits of them are held at a time."""
    return min(640, limits.max_length, LOGITS_BYTES // (8 * info.shape.vocab_rows))


def sliding_window(info: CheckpointInfo) -> int | None:
    """How many tokens a layer looks back, where some layers do not look back to the beginning."""
    config = info.config.get_text_config()
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    slides = kinds is None or "sliding_attention" in kinds
    return window if isinstance(window, int) and slides else None
