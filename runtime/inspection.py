"""`draftc inspect`: what a bundle says of itself, from its manifest alone. No engine is loaded."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from draftc.runtime.console import printable
from draftc.runtime.graphio import GraphSpec, TensorSpec
from draftc.runtime.manifest import Manifest, Model, NgramDraft, ParityReport

__all__ = ["bundle_record", "human_bytes", "perplexity_of", "print_bundle", "tensor_rows"]

NONE = "none"


def bundle_record(manifest: Manifest) -> dict[str, Any]:
    """The manifest as JSON data, with a field `derived` of what follows from it (bytes, tokens)."""
    kv = {where.split(".")[0]: model.spec.kv_bytes() for where, model in manifest.models}
    derived = {"buffer_length": manifest.buffer_length, "kv_bytes": kv, "file_bytes": _file_bytes(manifest)}
    if manifest.target.engine is not None:
        derived["device_bytes"] = {where.split(".")[0]: _device_bytes(model) for where, model in manifest.models}
    return {**asdict(manifest), "derived": derived}


def print_bundle(manifest: Manifest, files: bool = False) -> None:
    """Print `manifest` as tables on stdout, readable at 80 columns; `files` lists every file."""
    sections: list[tuple[str, RenderableType]] = [
        ("", _facts(_general(manifest))),
        ("Models", _models(manifest)),
        ("Lengths, in tokens", _facts(_lengths(manifest))),
    ]
    for where, model in manifest.models:
        sections.append((f"Tensors of the {where.split('.')[0]} graph", _tensors(model.spec)))
    if manifest.target.engine is not None:
        sections.append(("Engines", _engines(manifest)))
    sections.append(("Parity when it was compiled", _parity(manifest)))
    sections.append(("Pair", _facts(_pair(manifest))))
    sections.append((f"Files: {len(manifest.files)}, {human_bytes(_file_bytes(manifest))}", _files(manifest, files)))
    console = Console(highlight=False)
    for title, body in sections:
        heading = [Text(title, style="bold")] if title else []
        console.print(Group(*heading, Padding(body, (0, 0, 1, 2 if title else 0))))


def human_bytes(count: int) -> str:
    """`count` bytes as "538.1 MB", decimal units."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def tensor_rows(tensors: Sequence[TensorSpec]) -> list[tuple[str, str, str]]:
    """(name, dtype, shape) a tensor; the cache tensors of consecutive layers that are alike share one row."""
    keys = [tensor for tensor in tensors if not tensor.name.endswith(".value")]
    values = {tensor.name: tensor for tensor in tensors if tensor.name.endswith(".value")}
    rows = []
    for _, group in groupby(keys, key=lambda tensor: _kind(tensor, values)):
        run = list(group)
        for part in [run, [values[name] for name in map(_value_name, run) if name in values]]:
            if part:
                shape = ", ".join(map(str, part[0].shape))
                rows.append((_name(part), part[0].dtype, f"({shape})"))
    return rows


def _kind(tensor: TensorSpec, values: dict[str, TensorSpec]) -> object:
    """Equal for tensors that share a row: the keys of like layers whose values are alike too."""
    if not tensor.name.endswith(".key"):
        return tensor.name
    value = values.get(_value_name(tensor))
    return tensor.name.split(".")[0], tensor.dtype, tensor.shape, value and (value.dtype, value.shape)


def _value_name(key: TensorSpec) -> str:
    return key.name.removesuffix(".key") + ".value"


def _name(run: Sequence[TensorSpec]) -> str:
    first, last = run[0].name, run[-1].name
    if len(run) == 1:
        return first
    prefix, low, part = first.rsplit(".", 2)
    return f"{prefix}.{low}…{last.rsplit('.', 2)[1]}.{part}"


def _general(manifest: Manifest) -> list[tuple[str, str]]:
    backend = manifest.backend
    target_of = f", for SM {', '.join(backend.sms)}" if backend.sms else ""
    return [
        ("bundle", manifest.name),
        ("created", f"{manifest.created} by draftc {manifest.draftc_version}, schema {manifest.schema_version}"),
        ("backend", f"{backend.name} {backend.version}, opset {backend.opset}, on {backend.device}{target_of}"),
        ("precision", manifest.precision),
        ("drafting", _drafting(manifest)),
        ("tokenizer", f"{manifest.tokenizer.path}/, {_short(manifest.tokenizer.fingerprint)}"),
        ("licences", ", ".join(manifest.licenses) or NONE),
    ]


def _drafting(manifest: Manifest) -> str:
    draft = manifest.draft
    k = f"K = {manifest.num_speculative_tokens}"
    if isinstance(draft, NgramDraft):
        return f"n-grams of {draft.min_ngram} to {draft.max_ngram} tokens, {k}"
    if draft.vocabulary is None:
        return f"draft model, {k}"
    cut = draft.vocabulary
    return f"draft model, {k}; proposes from {cut.size} tokens, {cut.coverage:.1%} of {cut.corpus}"


def _models(manifest: Manifest) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    columns = []
    for where, model in manifest.models:
        table.add_column(where.split(".")[0], overflow="fold")
        columns.append(_model(model))
    for row in zip(*columns, strict=True):
        table.add_row(row[0][0], *(_text(value) for _, value in row))
    return table


def _model(model: Model) -> list[tuple[str, str]]:
    quantization = model.quantization
    weights = NONE
    left, table = "all", NONE
    if quantization is not None:
        symmetry = "symmetric" if quantization.symmetric else "asymmetric"
        kind = "E4M3 floats" if quantization.format == "fp8" else f"{quantization.bits} bits"
        blocks = f"blocks of {quantization.block_size}" if quantization.block_size else "one scale per output"
        for part, size in quantization.blocks.items():
            blocks += f" ({part}: {size})"
        level = f", accuracy level {quantization.accuracy_level}" if model.engine is None else ""
        how = {"nearest": "rounded to nearest", "gptq": "GPTQ", "stored": "as stored"}[quantization.rounding]
        seen = f" on {quantization.calibration}" if quantization.calibration else ""
        weights = f"{kind}, {blocks}, {symmetry}{level}; {how}{seen}; {quantization.quantized_matmuls} MatMuls"
        left = _some(quantization.float_matmuls)
        table = {"float": "float", "int8": "8 bits", "shared": "as the output head"}[quantization.embedding]
    return [
        ("architecture", model.architecture),
        ("parameters", f"{model.parameters / 1e6:,.1f} M"),
        ("quantized", weights),
        ("float MatMuls", left),
        ("embedding", table),
        ("cache", f"{model.spec.num_layers} layers, {human_bytes(model.spec.kv_bytes())}"),
        ("rotary regime", model.rope or NONE),
        ("graph" if model.engine is None else "engine", model.graph),
        ("source", f"{model.source.kind}: {model.source.location}"),
        ("licence", model.source.license or "not stated"),
        ("weights", _short(model.source.fingerprint)),
    ]


def _some(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) + more) or NONE


def _lengths(manifest: Manifest) -> list[tuple[str, str]]:
    return [
        (
            "K",
            f"{manifest.num_speculative_tokens} proposed by default, {manifest.max_width - 1} at most",
        ),
        ("max_length", f"{manifest.max_length} of prompt and answer together"),
        ("max_width", f"{manifest.max_width} in the widest verification"),
        ("prefill_chunk", f"{manifest.prefill_chunk} in the widest prefill call"),
        ("L", f"{manifest.buffer_length} in every cache buffer"),
        ("vocabulary", f"{manifest.vocab_size} of {manifest.target.spec.vocab_rows} rows of the head"),
    ]


def _engines(manifest: Manifest) -> RenderableType:
    """What each engine's profiles take (in parentheses: tuned for), and what it needs on the device for one row."""
    profiles = _table("engine", "profile", "batch B", "tokens S", "rows R", "activations", right=("activations",))
    memory = []
    for where, model in manifest.models:
        engine, name = model.engine, where.split(".")[0]
        assert engine is not None
        for profile in engine.profiles:
            ranges = (f"{r.min}–{r.max} ({r.opt})" for r in (profile.batch, profile.tokens, profile.rows))
            profiles.add_row(name, profile.name, *ranges, _bytes_or_unknown(profile.activation_bytes))
        parts = ", ".join(f"{part} {_bytes_or_unknown(count)}" for part, count in _device_bytes(model).items())
        layers = f"{engine.attention_layers} attention and {engine.cache_layers} cache layers"
        memory.append((name, f"computes in {engine.half}; {layers}; on the device: {parts}; log in {engine.log}"))
    return Group(profiles, _facts(memory))


def _device_bytes(model: Model) -> dict[str, int]:
    """Bytes of one engine on the device for one row: weights, caches, distributions, activations, and their sum.

    Profiles share one block of activations, because they never run at once. The draft's distributions are counted with
    the target, which reads them.
    """
    engine = model.engine
    assert engine is not None
    slots, vocabulary = model.spec.q_shape or (0, 0)
    parts = {
        "weights": engine.weights_bytes,
        "caches": model.spec.kv_bytes(),
        "distributions": 4 * slots * vocabulary if model.spec.tail == "verify" else 0,
        "activations": max(profile.activation_bytes for profile in engine.profiles),
    }
    return {**parts, "together": sum(parts.values())}


def _bytes_or_unknown(count: int) -> str:
    return human_bytes(count) if count else "-"


def _tensors(spec: GraphSpec) -> Table:
    table = _table("", "tensor", "dtype", "shape")
    for direction, tensors in (("in", spec.inputs), ("out", spec.outputs)):
        for row in tensor_rows(tensors):
            table.add_row(direction, *map(_text, row))
    return table


def _parity(manifest: Manifest) -> RenderableType:
    if not manifest.parity:
        return Text("not recorded")
    table = _table("graph", "stage", "layers", "tokens", "max |Δlogit|", "allowed", "KL", "greedy", "perplexity")
    for report in manifest.parity:
        what = "Δ" if report.stage == "capture" else "KL"
        allowed = f"{what} ≤ {report.tolerance:.2g}" if report.tolerance else "-"
        differences = (f"{report.max_abs_diff:.2g}", allowed, f"{report.kl:.2g}")
        where = (report.graph, report.stage, str(report.layers), str(report.tokens))
        table.add_row(*where, *differences, f"{report.greedy_agreement:.1%}", perplexity_of(report) or NONE)
    return table


def perplexity_of(report: ParityReport) -> str:
    """The graph's and its reference's perplexity, or nothing where it was not measured."""
    if report.perplexity is None or report.reference_perplexity is None:
        return ""
    return f"{report.perplexity:.2f} (float: {report.reference_perplexity:.2f})"


def _pair(manifest: Manifest) -> list[tuple[str, str]]:
    if manifest.pair is None:
        return [("prediction", NONE)]
    speedups = [f"{speedup:.2f}x at {rate}" for rate, speedup in manifest.pair.predicted_speedup.items()]
    return [
        ("draft cost", f"{manifest.pair.draft_cost_ratio:.2f} of a target step, predicted from the sizes"),
        ("speedup", f"{', '.join(speedups) or NONE} (acceptance per token), predicted"),
    ]


def _files(manifest: Manifest, every: bool) -> RenderableType:
    if not every:
        return Text("--files lists them")
    table = _table("path", "bytes", "sha256", right=("bytes",))
    for entry in manifest.files:
        table.add_row(_text(entry.path), str(entry.size), entry.sha256[:16] + "…")
    return table


def _file_bytes(manifest: Manifest) -> int:
    return sum(entry.size for entry in manifest.files)


def _short(fingerprint: str) -> str:
    """The first 16 of 64 digits; --json has them all."""
    return fingerprint.removeprefix("sha256:")[:16] + "…"


def _facts(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, _text(value))
    return table


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        table.add_column(name, overflow="fold", justify="right" if name in right else "left")
    return table


def _text(value: str) -> Text:
    """A value as it is: whatever a manifest holds, it is neither markup nor a terminal command."""
    return Text(printable(value))
