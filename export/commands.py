"""The compiler's subcommands: compile and fetch. Nothing heavy is imported before a command runs."""

import json
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer
from rich.console import Console
from rich.table import Table

from draftc.runtime.cli_options import help_text
from draftc.runtime.errors import UsageError
from draftc.runtime.inspection import perplexity_of
from draftc.runtime.manifest import Manifest, to_json
from draftc.runtime.records import BackendName, Device, Embedding, Precision, Rounding

if TYPE_CHECKING:
    from draftc.export.half import Half
    from draftc.export.scheme import QuantizationScheme

__all__ = ["compile_", "fetch", "register"]

BLOCK_SIZE = 32
GPTQ_BLOCK_SIZE = 128  # the fastest kernel; GPTQ makes up for what larger blocks cost


def register(app: typer.Typer) -> None:
    """Add the compiler's commands to `app`."""
    app.command("compile", help=help_text(compile_.__doc__ or ""))(compile_)
    app.command("fetch", help=help_text(fetch.__doc__ or ""))(fetch)


def compile_(
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write the bundle to.")],
    target: Annotated[
        str | None, typer.Option(help="Model to deploy: a Hugging Face folder, a hub id, or a .gguf file.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help='What drafts for it: a smaller model of the same tokenizer, or "ngram".')
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="A tested pair of the catalog instead of --target/--draft.")
    ] = None,
    backend: Annotated[
        str, typer.Option(help="onnxruntime, tensorrt-rtx (engines for any GPU, built anywhere) or tensorrt.")
    ] = "onnxruntime",
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda: what the graphs are for. Default: cpu, or cuda for TensorRT.")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="fp32, fp16, bf16, int8, int4 or fp8 (weights). Default: fp32, or fp16 for TensorRT."),
    ] = None,
    activations: Annotated[
        str | None, typer.Option(help="fp16 or bf16: what int8, int4 and fp8 weights are multiplied in on CUDA.")
    ] = None,
    sm: Annotated[
        str | None, typer.Option(help="GPUs to build for, with --backend tensorrt-rtx: 86,89,120 (89 is 8.9).")
    ] = None,
    batch: Annotated[
        str, typer.Option(help="Rows that an engine takes: a number, or a range such as 1..4 (TensorRT).")
    ] = "1",
    k: Annotated[int | None, typer.Option("-k", help="Tokens drafted per verification. Default: 4.")] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens of prompt and answer together. Default: 2048, or the model's context.")
    ] = None,
    max_width: Annotated[int, typer.Option(help="Widest verification; K can be set up to one less at run time.")] = 32,
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens per prefill call.")] = 256,
    block_size: Annotated[
        int | None,
        typer.Option(
            help="Weights that share one scale: 16 to 256, or on TensorRT 0: one per output. Default: 128 with gptq, "
            "else 32 (TensorRT int8 and fp8: 0)."
        ),
    ] = None,
    target_blocks: Annotated[
        list[str] | None,
        typer.Option(
            help="Another block size for the target's weights whose names have a part: up_proj=256. May be given "
            "several times: the first that fits counts (ONNX Runtime)."
        ),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(help="Quantize without zero points. Default: yes, but for int4 on ONNX Runtime (unless stored)."),
    ] = None,
    rounding: Annotated[
        str | None,
        typer.Option(
            help="How weights are rounded: nearest, gptq, or stored (as a Q4_0 or Q8_0 GGUF file has them). Default: "
            "nearest."
        ),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Text file that gptq is calibrated on. Default: Python's library.")
    ] = None,
    accuracy_level: Annotated[int, typer.Option(help="MatMulNBits accuracy level, 0 to 4; 4 is int8 arithmetic.")] = 4,
    quantize_head: Annotated[bool, typer.Option(help="Quantize the output head.")] = True,
    embedding: Annotated[
        str | None,
        typer.Option(
            help="Store the embedding table as float, as int8, or shared with the quantized output head where the two "
            "are one matrix. Default: shared on ONNX Runtime's CPU, else float."
        ),
    ] = None,
    min_ngram: Annotated[int, typer.Option(help="Shortest suffix that the n-gram drafter looks up.")] = 2,
    max_ngram: Annotated[int, typer.Option(help="Longest suffix that the n-gram drafter looks up.")] = 6,
    draft_vocab: Annotated[
        int | None,
        typer.Option(help="Cut the draft's output head to this many tokens, the most frequent ones. Default: 0, all."),
    ] = None,
    draft_corpus: Annotated[
        list[Path] | None,
        typer.Option(help="Text that --draft-vocab counts tokens in; may be repeated. Default: Python's library."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the bundle. Default: the folder's name.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the bundle at --out.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run model code of the source.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the manifest as JSON; notes go to standard error.")
    ] = False,
) -> None:
    """Compile a target and its drafter into a bundle.

    draftc compile --target Qwen/Qwen2.5-Coder-1.5B-Instruct --draft Qwen/Qwen2.5-Coder-0.5B-Instruct
    --precision int4 -o out/qwen

    draftc compile --recipe smollm2-135m -o out/smollm2

    draftc compile --recipe smollm2-135m --backend tensorrt-rtx --sm 89,120 --precision fp16 -o out/smollm2-rtx
    """
    from draftc.export.catalog import fetch_recipe, load_model, load_recipe
    from draftc.export.compile import compile_bundle
    from draftc.export.options import CompileOptions
    from draftc.export.progress import Lines, Quiet, RichReporter

    console = Console(stderr=True)
    report = Quiet() if quiet else Lines() if as_json else RichReporter(console)
    target_license: str | None = None
    draft_license: str | None = None
    if recipe is not None:
        if target is not None or draft is not None:
            raise UsageError("give either --recipe or --target and --draft")
        chosen = load_recipe(recipe)
        paths = fetch_recipe(chosen, report=report.note)
        target = str(paths[chosen.target])
        draft = str(paths.get(chosen.draft, chosen.draft))
        if precision is None and not (backend != "onnxruntime" and chosen.precision == "fp32"):
            precision = chosen.precision  # TensorRT has no fp32 engines
            if rounding is None and backend == "onnxruntime":
                rounding = chosen.rounding
                if block_size is None and target_blocks is None:
                    target_blocks = [f"{part}={size}" for part, size in (chosen.target_blocks or {}).items()]
        k = chosen.k if k is None else k
        max_length = chosen.max_length if max_length is None else max_length
        name = chosen.name if name is None else name
        if draft_vocab is None and backend == "onnxruntime":
            draft_vocab = chosen.draft_vocab
        licences = {model: load_model(model).licence for model in chosen.models}
        target_license, draft_license = licences[chosen.target], licences.get(chosen.draft)
    if target is None or draft is None:
        raise UsageError('name --target and --draft (a model, or "ngram"), or a --recipe')
    place: BackendName = _one_of("backend", backend, BackendName)
    engines = place != "onnxruntime"
    wanted: Device = _one_of("device", device or ("cuda" if engines else "cpu"), Device)
    kind: Precision = _one_of("precision", precision or ("fp16" if engines else "fp32"), Precision)
    half = _half(kind, activations, on_cuda=wanted == "cuda")
    scheme = None
    if kind in ("int8", "int4", "fp8"):
        how: Rounding = _one_of("rounding", rounding or "nearest", Rounding)
        if block_size is None:
            block_size = GPTQ_BLOCK_SIZE if how == "gptq" else BLOCK_SIZE
            if kind == "fp8" or (engines and kind == "int8"):
                block_size = 0
        if symmetric is None:
            symmetric = not (kind == "int4" and how != "stored" and not engines)
        sizes = _blocks(target_blocks or ())
        table: Embedding = _one_of(
            "embedding", embedding or ("shared" if quantize_head and wanted == "cpu" else "float"), Embedding
        )
        scheme = _scheme(kind, block_size, sizes, symmetric, accuracy_level, quantize_head, table, how)
    elif (
        (block_size, symmetric, rounding, embedding) != (None, None, None, None)
        or accuracy_level != 4
        or target_blocks
        or not quantize_head
    ):
        raise UsageError("options of quantization need --precision int8, int4 or fp8")
    options = CompileOptions(
        target=target,
        draft=draft,
        out=out,
        backend=place,
        device=wanted,
        sms=tuple(part.strip() for part in sm.split(",")) if sm is not None else (),
        batch=_batch(batch),
        half=half,
        scheme=scheme,
        calibration=calibration,
        num_speculative_tokens=4 if k is None else k,
        max_length=max_length,
        max_width=max_width,
        prefill_chunk=prefill_chunk,
        min_ngram=min_ngram,
        max_ngram=max_ngram,
        draft_vocab=draft_vocab or 0,
        draft_corpus=tuple(draft_corpus or ()),
        force=force,
        trust_remote_code=trust_remote_code,
        name=name,
        target_license=target_license,
        draft_license=draft_license,
    )
    begin = time.monotonic()
    if isinstance(report, RichReporter):
        with report, _ended_by_sigterm():
            manifest = compile_bundle(options, report)
        _print_summary(console, out, manifest, time.monotonic() - begin)
    else:
        with _ended_by_sigterm():
            manifest = compile_bundle(options, report)
        if as_json:
            print(to_json(manifest))


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM, which ends a process where it stands, ends the block as an exception does: it clears up."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _one_of(name: str, value: str, allowed: Any) -> Any:
    """`value`, if it is one of the words of the Literal `allowed`."""
    if value not in get_args(allowed):
        raise UsageError(f"{name} must be one of {', '.join(get_args(allowed))}, got {value!r}")
    return value


def _half(precision: Precision, activations: str | None, *, on_cuda: bool) -> "Half | None":
    """What the graphs compute in: the precision itself, or on CUDA what quantized weights are multiplied in."""
    if precision in ("fp32", "fp16", "bf16"):
        if activations is not None:
            raise UsageError("--activations goes with --precision int8, int4 or fp8")
        return None if precision == "fp32" else precision
    if activations is not None and not on_cuda:
        raise UsageError("--activations is for --device cuda: on the CPU activations are fp32")
    if not on_cuda:
        return None
    chosen: Half = _one_of("activations", activations or "fp16", Literal["fp16", "bf16"])
    return chosen


def _scheme(
    precision: Precision,
    block_size: int,
    blocks: tuple[tuple[str, int], ...],
    symmetric: bool,
    accuracy_level: int,
    head: bool,
    embedding: Embedding,
    rounding: Rounding,
) -> "QuantizationScheme":
    from draftc.export.scheme import QuantizationScheme

    return QuantizationScheme(
        bits=4 if precision == "int4" else 8,
        block_size=block_size,
        symmetric=symmetric,
        accuracy_level=accuracy_level,
        head=head,
        embedding=embedding,
        format="fp8" if precision == "fp8" else "int",
        rounding=rounding,
        blocks=blocks,
    )


def _blocks(texts: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """(part of a name, block size) of "part=128", each."""
    found = []
    for text in texts:
        part, _, size = text.partition("=")
        if not (part and part.isprintable() and size.isdecimal()):
            raise UsageError(
                f"--target-blocks must be part of a name and a block size, such as up_proj=256, got {text!r}"
            )
        found.append((part, int(size)))
    return tuple(found)


def _batch(text: str) -> tuple[int, int]:
    """(fewest, most) of "4" or "1..4"."""
    fewest, dots, most = text.partition("..")
    try:
        return int(fewest), int(most if dots else fewest)
    except ValueError:
        raise UsageError(f"batch must be a number of rows or a range such as 1..4, got {text!r}") from None


def fetch(
    name: Annotated[str | None, typer.Argument(help="A recipe or a model of the catalog.", show_default=False)] = None,
    dest: Annotated[
        Path | None, typer.Option(help="Folder to put it into. Default: ~/.cache/draftc-models, or the hub's cache.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print {name: path} as JSON.")] = False,
) -> None:
    """Download the sources of a tested pair, checked against their sha256. Without NAME: list the catalog.

    draftc fetch smollm2-135m
    """
    from draftc.export import catalog

    console = Console(stderr=True)
    if name is None:
        for recipe in catalog.list_recipes():
            print(f"{recipe.name}\n    {recipe.summary}; {recipe.precision}, K = {recipe.k}")
            for model in recipe.models:
                print(f"    {model}")
        return
    recipes = {recipe.name: recipe for recipe in catalog.list_recipes()}
    if name in recipes:
        paths = catalog.fetch_recipe(recipes[name], dest, report=console.print)
    elif name in {model.name for model in catalog.list_models()}:
        paths = {name: catalog.fetch(name, dest, report=console.print)}
    else:
        known = ", ".join([*recipes, *(model.name for model in catalog.list_models())])
        raise UsageError(f"nothing in the catalog is called {name!r}; there are {known}")
    if as_json:
        print(json.dumps({model: str(path) for model, path in paths.items()}))
    else:
        for path in paths.values():
            print(path)


def _print_summary(console: Console, out: Path, manifest: Manifest, seconds: float) -> None:
    table = Table(box=None, show_header=False)
    for role, model in (("target", manifest.target), ("draft", getattr(manifest.draft, "model", None))):
        if model is None:
            table.add_row(role, manifest.draft.method)
            continue
        rounded = model.quantization
        what = f"{model.architecture}, {model.parameters / 1e6:,.0f}M parameters"
        table.add_row(role, f"{what}, {rounded.quantized_matmuls} MatMuls at {rounded.bits} bits" if rounded else what)
        for report in manifest.parity:
            if report.graph == role:
                against = {"capture": "eager PyTorch", "half": "float32", "quantize": "the float graph"}[report.stage]
                perplexity = perplexity_of(report)
                table.add_row(
                    "",
                    f"against {against}: max |Δlogit| {report.max_abs_diff:.2g}, KL {report.kl:.2g}, "
                    f"same argmax {report.greedy_agreement:.1%} of {report.tokens} positions"
                    + (f", perplexity {perplexity}" if perplexity else ""),
                )
    if manifest.pair is not None:
        speeds = ", ".join(f"{speed:.2f}× at {rate}" for rate, speed in manifest.pair.predicted_speedup.items())
        ratio = f"a draft step reads {manifest.pair.draft_cost_ratio:.2f} of what a target step reads"
        table.add_row("pair", f"{ratio}; predicted by acceptance: {speeds}")
    size = sum(entry.size for entry in manifest.files)
    # ru_maxrss is in KiB on Linux and in bytes on macOS.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    table.add_row("bundle", f"{out}: {size / 2**20:,.0f} MiB, {seconds:.0f} s, peak memory {peak / 2**30:.1f} GiB")
    console.print(table)
