"""How much disk and memory a compile will need, and whether they are there, before anything is loaded.

The models of a pair are compiled one after the other, so memory is that of the larger one; disk adds up.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftc.export.checkpoint import CheckpointInfo
from draftc.export.nbits import TABLE_BLOCK
from draftc.runtime.errors import ResourceError, UsageError
from draftc.runtime.memory import available_memory, format_bytes
from draftc.runtime.records import Embedding

__all__ = ["Requirements", "check", "estimate"]

# Bytes per weight, without the scale of its block.
WEIGHT_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5, "fp8": 1.0}
FLOATS = ("fp32", "fp16", "bf16")
FP32, HALF = 4, 2
# Peak memory of one model: its fp32 weights, what the exporter or the quantizer holds besides (up to one more copy),
# and the packages themselves.
COPIES = 2.0
BASE_BYTES = 3 << 29  # 1.5 GiB
GRAPH_BYTES = 32 << 20  # graph, tokenizer and manifest of one model


@dataclass(frozen=True)
class Requirements:
    """In bytes. disk: bundle and temporary files together. kv: key and value buffers of one open session.

    gathered: copies of expert weights that the widest call makes in a mixture of experts, `call_tokens` tokens wide;
    they are needed when the bundle runs, too.
    """

    disk_bytes: int
    bundle_bytes: int
    ram_bytes: int
    kv_bytes: int
    gathered_bytes: int = 0
    call_tokens: int = 0

    def summary(self) -> str:
        """One line for the log."""
        text = (
            f"needs about {format_bytes(self.ram_bytes)} of memory and {format_bytes(self.disk_bytes)} of disk; the "
            f"bundle takes {format_bytes(self.bundle_bytes)}, its KV buffers {format_bytes(self.kv_bytes)} when open"
        )
        if self.gathered_bytes:
            text += f"; {self.gathered()}"
        return text

    def gathered(self) -> str:
        """What a mixture of experts copies, as part of a sentence."""
        return (
            f"a call of {self.call_tokens} tokens copies {format_bytes(self.gathered_bytes)} of expert weights, when "
            "the bundle runs, too"
        )


def estimate(
    infos: Sequence[CheckpointInfo],
    precision: str,
    *,
    max_length: int,
    max_width: int = 32,
    prefill_chunk: int = 256,
    block_size: int = 32,
    half: bool = False,
    engines: bool = False,
    cut_draft: bool = False,
    embedding: Embedding = "float",
    float_head: bool = False,
) -> Requirements:
    """Estimate what compiling `infos` (target first, then a draft model if there is one) needs.

    The float graph of each model is written before it is quantized, so it counts as temporary disk; `half` says that it
    is in fp16 or bf16, then a float32 copy for the parity gate comes and goes besides; `engines`, that the graph is
    there while its engine is written; `cut_draft`, that the draft's graph is written twice, the second time with a
    smaller head; `embedding`, how the table is stored beside quantized weights; `float_head`, that the head is not
    among those. Experts stay float. Raises UsageError for an unknown precision.
    """
    if precision not in WEIGHT_BYTES:
        raise UsageError(f"precision must be one of {', '.join(WEIGHT_BYTES)}, is {precision!r}")
    quantized = precision not in FLOATS
    float_bytes = HALF if half else FP32
    per_weight = WEIGHT_BYTES[precision] + (float_bytes / block_size if quantized else 0.0)
    weights = [FP32 * info.parameters for info in infos]
    call_tokens = max(max_width, min(prefill_chunk, max_length))
    gathered = [FP32 * call_tokens * info.experts_per_token for info in infos]
    buffers = [info.shape.kv_bytes(max_length + max_width) for info in infos]
    # The peak is at the capture, which traces a batch of two, or at the parity gate: one graph, and what its widest
    # call gathers. The builder of an engine takes about three times the engine: less than a capture, at any precision.
    peaks = [
        max(COPIES * size + 2 * kv, size + kv + copied)
        for size, kv, copied in zip(weights, buffers, gathered, strict=True)
    ]
    finished = [
        (
            _quantized_bytes(info, per_weight, float_bytes, embedding, float_head)
            if quantized
            else float_bytes * info.parameters
        )
        + GRAPH_BYTES
        for info in infos
    ]
    bundle = sum(finished)
    largest = max(info.parameters for info in infos)
    temporary = float_bytes * largest if quantized else 0
    if half:
        temporary += FP32 * largest  # for the parity gate
    if cut_draft:
        temporary += float_bytes * infos[-1].parameters
    if engines:
        temporary = max(temporary, max(finished))
    return Requirements(
        disk_bytes=bundle + temporary,
        bundle_bytes=bundle,
        ram_bytes=int(max(peaks)) + BASE_BYTES,
        kv_bytes=sum(info.shape.kv_bytes(max_length + max_width, float_bytes) for info in infos),
        gathered_bytes=max(gathered),
        call_tokens=call_tokens,
    )


def _quantized_bytes(
    info: CheckpointInfo, per_weight: float, float_bytes: int, embedding: Embedding, float_head: bool
) -> int:
    table = info.shape.vocab_rows * info.shape.hidden_size
    matrices = info.parameters - info.expert_parameters - (0 if info.tied else table)
    if embedding == "shared" and info.tied:
        table_bytes = 0.0  # the head's, which is among the matrices
    else:
        table_bytes = table * (1.0 + float_bytes / TABLE_BLOCK if embedding == "int8" else float_bytes)
    if float_head:
        matrices -= table
        table_bytes += 0 if info.tied and embedding == "float" else float_bytes * table
    return int(table_bytes + float_bytes * info.expert_parameters + per_weight * matrices)


def check(requirements: Requirements, work_dir: Path) -> None:
    """Compare with free disk below `work_dir` and available memory; raises ResourceError with both numbers."""
    existing = next(folder for folder in (work_dir.absolute(), *work_dir.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free
    if free < requirements.disk_bytes:
        raise ResourceError(
            f"compiling needs about {format_bytes(requirements.disk_bytes)} of disk, {existing} has "
            f"{format_bytes(free)} free; free some, or choose another output folder with -o"
        )
    memory = available_memory()
    gathers = requirements.gathered_bytes > 0
    if gathers and memory is not None and memory < requirements.gathered_bytes + BASE_BYTES:
        raise ResourceError(
            f"{requirements.gathered()}; {format_bytes(memory)} of memory is available: lower --prefill-chunk (and "
            "--max-width), or compile on a larger machine"
        )
    if memory is not None and memory < requirements.ram_bytes:
        raise ResourceError(
            f"compiling needs about {format_bytes(requirements.ram_bytes)} of memory, {format_bytes(memory)} is "
            "available; close other programs, compile on a larger machine, or choose a smaller model"
        )
