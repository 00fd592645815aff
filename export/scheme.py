"""How weights are rounded: what `draftc compile` was asked for, checked."""

from dataclasses import dataclass
from typing import Literal

from draftc.runtime.errors import UsageError
from draftc.runtime.records import Embedding, Rounding

__all__ = ["QuantizationScheme"]


@dataclass(frozen=True)
class QuantizationScheme:
    """How weights are rounded: `bits` (4 or 8) in blocks of `block_size` inputs, to nearest or by GPTQ (`gptq`).

    A `block_size` of 0 is one scale for each output. `format` "fp8" (E4M3) has that alone, and 8 bits. `accuracy_level`
    4 lets the kernel quantize activations to int8 as it multiplies. `head` says whether the output head takes part,
    `embedding` how the embedding table is stored: "float", "int8", or "shared", as the head that is the same matrix.
    `blocks` are (part of a weight's name, block size) of weights that have another one; the first that fits counts.
    Raises UsageError when a value is not offered, or two do not go together.
    """

    bits: int
    block_size: int = 32
    symmetric: bool = True
    accuracy_level: int = 4
    head: bool = True
    embedding: Embedding = "float"
    format: Literal["int", "fp8"] = "int"
    rounding: Rounding = "nearest"
    blocks: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise UsageError(f"bits must be 4 or 8, got {self.bits}")
        for size in (self.block_size, *(size for _, size in self.blocks)):
            if size not in (0, 16, 32, 64, 128, 256):
                raise UsageError(
                    f"block size must be 16, 32, 64, 128, 256 or, on TensorRT, 0 (one scale per output), got {size}"
                )
        if not 0 <= self.accuracy_level <= 4:
            raise UsageError(f"accuracy level must be 0 to 4, got {self.accuracy_level}")
        if self.embedding == "shared" and not self.head:
            raise UsageError("a shared embedding is the quantized head's: leave out --no-quantize-head, or --embedding")
        if self.rounding == "gptq" and self.format == "fp8":
            raise UsageError("GPTQ rounds to integers: use --rounding nearest for fp8")
        if self.rounding == "stored" and (self.block_size, self.symmetric) != (32, True):
            raise UsageError("stored blocks are of 32 weights without zero points: use --block-size 32 --symmetric")
        if self.rounding == "stored" and self.blocks:
            raise UsageError("stored blocks are of 32 weights: leave out --target-blocks")

    def block_of(self, name: str) -> int:
        """The block size of the weight called `name`."""
        return next((size for part, size in self.blocks if part in name), self.block_size)
