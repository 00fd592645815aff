"""Capture: a loaded Hugging Face causal language model becomes one portable opset-24 ONNX graph.

    trace    torch.export of the model's own code, with the two seams of `seams` in place
    convert  torch.onnx turns the traced program into ONNX
    write    names of the tensor contract (`runtime/graphio.py`), then model.onnx and model.onnx.data

The graph maps (input_ids[B,S], write_index[B], logit_positions[B,R], KV) to (logits[B,R,V], KV), with dynamic B, S and
R and a static L. Weights stay where the checkpoint loaded them: all three stages share the module's tensors.
"""

import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import torch
from onnxscript.optimizer import optimize_ir
from torch import Tensor
from torch.export import Dim, ExportedProgram
from transformers import PreTrainedModel

from draftc.export.families import check_supported
from draftc.export.half import Float32Scalars
from draftc.export.rope import fixed_rope
from draftc.export.seams import OPSET, ProbeCache, ScatterCache, cache_argument, seams_in_place
from draftc.runtime.errors import CaptureError, DraftcError, UsageError
from draftc.runtime.graphio import GraphSpec

__all__ = ["Captured", "capture", "position_table"]

_CacheShapes = list[tuple[int, int, int]]  # (kv_heads, key_dim, value_dim) of each layer


@dataclass(frozen=True)
class Captured:
    """A captured graph on disk. `rope_note` says which longrope factors were fixed into it, or is None."""

    path: Path
    spec: GraphSpec
    max_length: int
    max_width: int
    rope_note: str | None


def capture(
    model: PreTrainedModel,
    *,
    max_length: int,
    max_width: int,
    path: Path,
    on_stage: Callable[[str], None] | None = None,
) -> Captured:
    """Write `model` (loaded, on CPU, in eval mode) as an ONNX graph at `path`, its weights at `path` + ".data".

    max_length: tokens of prompt and answer together. max_width: the widest call that may begin at the last token,
    padding included (a verification; prefill calls may be wider, and end inside max_length). The buffers have
    L = max_length + max_width slots, so that no write leaves them. on_stage is told "trace", "convert" and "write" as
    they begin. The model is afterwards as it was.

    Raises UsageError when max_length exceeds the model's position table, UnsupportedModelError when the model is
    refused or its attention cannot be captured, CaptureError when torch.export, the conversion or the write fails.
    """
    report = on_stage or (lambda stage: None)
    check_supported(model.config)
    table = position_table(model)
    if table is not None and max_length > table:
        raise UsageError(f"max_length {max_length} exceeds the model's {table} positions; use {table} or less")
    report("trace")
    with _stage("trace"), fixed_rope(model, max_length) as rope_note:
        kv = _cache_shapes(model)
        program = _trace(model, kv, max_length + max_width, table)
    spec = GraphSpec.decoder(kv, max_length + max_width, _vocab_rows(program), str(model.dtype).removeprefix("torch."))
    report("convert")
    with _stage("convert"):
        graph = _convert(program, spec)
        _check_attention(graph, spec)
    report("write")
    with _stage("write"):
        ir.save(graph, path, external_data=path.name + ".data")
    # The exporter's caches keep the graph for the life of the process. They may, but not the module's weights with it.
    for weight in graph.graph.initializers.values():
        weight.const_value = None
    return Captured(path, spec, max_length, max_width, rope_note)


class _Step(torch.nn.Module):
    """The traced function: one call of the full causal language model over the tokens of `input_ids`."""

    def __init__(self, model: PreTrainedModel, table: int | None) -> None:
        super().__init__()
        self.model = model
        self.last_position = None if table is None else table - 1
        self.cache_argument = cache_argument(model)

    def forward(
        self, input_ids: Tensor, write_index: Tensor, logit_positions: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        cache = ScatterCache(past, write_index)
        positions = write_index[:, None] + torch.arange(input_ids.shape[1])  # (B, S)
        if self.last_position is not None:
            # Padding of the widest call may lie past the table's end; no token that counts does.
            positions = positions.clamp(max=self.last_position)

        def select_rows(_: torch.nn.Module, args: tuple[Tensor]) -> Tensor:
            hidden = args[0]  # (B, S, d)
            rows = logit_positions[:, :, None].expand(-1, -1, hidden.shape[2])  # (B, R, d)
            return torch.gather(hidden, 1, rows)  # (B, R, d)

        # In front of the head, inside the full model: scalings and caps that it applies to logits still apply.
        head: torch.nn.Module = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        hook = head.register_forward_pre_hook(select_rows)
        try:
            arguments = {"input_ids": input_ids, "position_ids": positions, self.cache_argument: cache}
            out = self.model(**arguments, use_cache=True)
        finally:
            hook.remove()
        return out.logits.float(), cache.buffers  # (B, R, V)


def position_table(model: PreTrainedModel) -> int | None:
    """Rows of the model's position table; None for rotary angles computed on the fly, which have no last one."""
    if any(name.endswith("inv_freq") for name, _ in model.named_buffers()):
        return None
    rows: int = model.config.max_position_embeddings
    return rows


def _cache_shapes(model: PreTrainedModel) -> _CacheShapes:
    """What each layer gives to its cache, from one call on one token: configs name it in too many ways."""
    probe = ProbeCache()
    token = torch.zeros(1, 1, dtype=torch.int64)
    with torch.no_grad():
        model(input_ids=token, position_ids=token, use_cache=True, **{cache_argument(model): probe})
    layers = sorted(probe.shapes)
    if not layers or layers != list(range(len(layers))):
        raise CaptureError(f"capture failed at trace: the model caches layers {layers} instead of 0, 1, 2, …")
    return [probe.shapes[layer] for layer in layers]


def _trace(model: PreTrainedModel, kv: _CacheShapes, length: int, table: int | None) -> ExportedProgram:
    """torch.export with dynamic B, S and R; it fails rather than fix one of them to the example's size."""
    batch, width, rows = 2, 5, 3  # distinct, and neither 0 nor 1: equal or trivial sizes would be taken for constants
    past = [
        tuple(torch.zeros(batch, heads, length, dim, dtype=model.dtype) for dim in (key_dim, value_dim))
        for heads, key_dim, value_dim in kv
    ]
    ids, index, positions = torch.zeros(batch, width), torch.zeros(batch), torch.zeros(batch, rows)
    example = (ids.long(), index.long(), positions.long(), past)
    b, s, r = Dim("B", min=1), Dim("S", min=1), Dim("R", min=1)
    dynamic = ({0: b, 1: s}, {0: b}, {0: b, 1: r}, [({0: b}, {0: b})] * len(kv))
    with seams_in_place(model), torch.no_grad(), Float32Scalars():
        return torch.export.export(_Step(model, table).eval(), example, dynamic_shapes=dynamic, strict=False)


def _vocab_rows(program: ExportedProgram) -> int:
    logits = next(iter(program.graph.output_node().args[0]))
    return int(logits.meta["val"].shape[2])


def _convert(program: ExportedProgram, spec: GraphSpec) -> ir.Model:
    """The ONNX model of a traced program, simplified, with the names and dimensions of `spec`."""
    converted = torch.onnx.export(program, dynamo=True, opset_version=OPSET, verbose=False, optimize=False)
    assert converted is not None
    model = converted.model
    graph = model.graph
    _shield_small_numbers(graph)
    weights = set(graph.initializers)
    # Folding a node that reads a weight would store a second copy of it (the transpose of a tied head, for one).
    optimize_ir(model, should_fold=lambda node: False if any(v and v.name in weights for v in node.inputs) else None)
    for values, tensors in ((graph.inputs, spec.inputs), (graph.outputs, spec.outputs)):
        for value, tensor in zip(values, tensors, strict=True):
            value.name = tensor.name
            value.shape = ir.Shape(tensor.shape)
    for weight in list(graph.initializers.values()):
        if weight.name in weights:
            weight.name = weight.name.removeprefix("model.")  # the checkpoint's own name, without `_Step`'s prefix
    _forget_origins(model)
    return model


def _shield_small_numbers(graph: ir.Graph) -> None:
    """Give numbers that are almost a neutral element one dimension.

    The optimizer takes a scalar within 1e-8 of 0, or 1e-5 of 1, for x + 0 or x · 1 and drops it, but no one-dimensional
    one. An epsilon of 1e-8 (helium's) keeps a norm of zeros from being NaN.
    """
    for node in list(graph.all_nodes()):
        if node.op_type not in ("Add", "Sub", "Mul", "Div"):
            continue
        neutral = 0.0 if node.op_type in ("Add", "Sub") else 1.0
        for index, (operand, other) in enumerate(zip(node.inputs, reversed(node.inputs), strict=True)):
            tensor = ir.convenience.get_const_tensor(operand) if operand is not None else None
            if tensor is None or len(tensor.shape) > 0 or other is None or not other.shape:
                continue
            number = float(tensor.numpy())
            if number != neutral and math.isclose(number, neutral, rel_tol=2e-5, abs_tol=2e-8):
                name = f"{node.op_type}_{tensor.dtype.name}_{number:.9g}"
                if name not in graph.initializers:
                    one = ir.tensor(tensor.numpy().reshape(1), dtype=tensor.dtype, name=name)
                    typed = ir.TensorType(tensor.dtype)
                    graph.register_initializer(ir.Value(name=name, shape=ir.Shape([1]), type=typed, const_value=one))
                node.replace_input_with(index, graph.initializers[name])


def _forget_origins(model: ir.Model) -> None:
    """Drop the exporter's notes for debugging: stack traces with this machine's file names, and its own symbols.

    Of an inner value's shape, the static dimensions stay: passes ask for head counts and sizes.
    """
    graph = model.graph
    values = [*graph.inputs, *graph.initializers.values()]
    for node in graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        values.extend(node.outputs)
    named = {id(value) for value in (*graph.inputs, *graph.outputs)}
    for value in values:
        value.metadata_props.clear()
        if id(value) not in named and value.shape is not None and not value.shape.is_static():
            value.shape = ir.Shape(dim if isinstance(dim, int) else None for dim in value.shape)
    graph.metadata_props.clear()
    model.metadata_props.clear()


def _check_attention(model: ir.Model, spec: GraphSpec) -> None:
    """Every cache buffer is written by TensorScatter and read by Attention: no layer went round the seams.

    Between the two there may be what a model does to its cached states (expanding a compressed cache, for one), but no
    Softmax: that would be an attention of the model's own, which no mask of ours has reached.
    """
    outputs = {value.name: value for value in model.graph.outputs}
    for past, present in spec.cache_pairs:
        value = outputs[present.name]
        writer = value.producer()
        if writer is None or writer.op_type != "TensorScatter" or _first_readers(value) != {"Attention"}:
            raise CaptureError(
                f"capture failed at convert: {past.name} is not read by Attention nodes alone: this model computes "
                "attention in its own code, which draftc cannot compile"
            )


def _first_readers(value: ir.Value) -> set[str]:
    """Which of Attention and Softmax come first on the ways that lead on from `value`."""
    found: set[str] = set()
    pending, seen = [value], {value}
    while pending:
        for node in pending.pop().consumers():
            if node.op_type in ("Attention", "Softmax"):
                found.add(node.op_type)
                continue
            new = set(node.outputs) - seen
            seen |= new
            pending.extend(new)
    return found


@contextmanager
def _stage(stage: str) -> Iterator[None]:
    """Keep torch, its exporter and transformers quiet inside, and turn what fails into one line."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "transformers")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        except DraftcError:
            raise
        except Exception as error:
            raise CaptureError(f"capture failed at {stage}: {_first_cause(error)}") from error
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _first_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
