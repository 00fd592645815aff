"""The contract of a decoder graph: tensor names, dtypes and shapes. Shared by compiler and runtime; stdlib only.

One graph is one function at any width S (decode S=1, verification S=K+1, prefill a chunk):

    (input_ids[B,S], write_index[B], logit_positions[B,R], past[B,Hkv,L,D]…) → (logits[B,R,V], present[B,Hkv,L,D]…)

`write_index[b]` is the number of tokens that row b's cache already holds: token s of the call is written to, and has
the position, `write_index[b] + s`. `logit_positions[b, r]` is an index into the S tokens of this call. `present` is
the same memory as `past`, with S new entries along L.
"""

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = [
    "INPUT_IDS",
    "LOGITS",
    "LOGIT_POSITIONS",
    "WRITE_INDEX",
    "Dim",
    "GraphSpec",
    "TensorSpec",
    "past_name",
    "present_name",
]

INPUT_IDS = "input_ids"
WRITE_INDEX = "write_index"
LOGIT_POSITIONS = "logit_positions"
LOGITS = "logits"

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8}

Dim = int | str  # a symbolic dimension carries its name: "B", "S" or "R"


def past_name(layer: int, part: str) -> str:
    """Name of a cache input; `part` is "key" or "value"."""
    return f"past_key_values.{layer}.{part}"


def present_name(layer: int, part: str) -> str:
    """Name of a cache output; `part` is "key" or "value"."""
    return f"present.{layer}.{part}"


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype ("float32", "float16", "bfloat16", "int64") and shape of one graph input or output."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]


@dataclass(frozen=True)
class GraphSpec:
    """All inputs and outputs of one decoder graph, in graph order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @classmethod
    def decoder(cls, kv: list[tuple[int, int, int]], buffer_length: int, vocab_rows: int, kv_dtype: str) -> "GraphSpec":
        """The spec of a decoder graph. `kv` has (kv_heads, key_dim, value_dim) of each cache layer."""
        parts = [
            (layer, part, ("B", heads, buffer_length, dim))
            for layer, (heads, key_dim, value_dim) in enumerate(kv)
            for part, dim in (("key", key_dim), ("value", value_dim))
        ]
        return cls(
            inputs=(
                TensorSpec(INPUT_IDS, "int64", ("B", "S")),
                TensorSpec(WRITE_INDEX, "int64", ("B",)),
                TensorSpec(LOGIT_POSITIONS, "int64", ("B", "R")),
                *(TensorSpec(past_name(layer, part), kv_dtype, shape) for layer, part, shape in parts),
            ),
            outputs=(
                TensorSpec(LOGITS, "float32", ("B", "R", vocab_rows)),
                *(TensorSpec(present_name(layer, part), kv_dtype, shape) for layer, part, shape in parts),
            ),
        )

    @property
    def cache_pairs(self) -> Iterator[tuple[TensorSpec, TensorSpec]]:
        """(past, present) of every cache tensor."""
        outputs = {tensor.name: tensor for tensor in self.outputs}
        for tensor in self.inputs:
            if tensor.name.startswith("past_key_values."):
                yield tensor, outputs["present." + tensor.name.removeprefix("past_key_values.")]

    @property
    def num_layers(self) -> int:
        """Number of layers that hold a cache."""
        return sum(1 for _ in self.cache_pairs) // 2

    @property
    def buffer_length(self) -> int:
        """L, the static length of the cache buffers in tokens."""
        past, _ = next(self.cache_pairs)
        length = past.shape[2]
        assert isinstance(length, int)
        return length

    @property
    def vocab_rows(self) -> int:
        """V, the rows of the output head, padding rows included."""
        rows = next(tensor for tensor in self.outputs if tensor.name == LOGITS).shape[2]
        assert isinstance(rows, int)
        return rows

    def kv_bytes(self, batch: int = 1) -> int:
        """Bytes of all cache buffers for `batch` rows."""
        total = 0
        for past, _ in self.cache_pairs:
            size = batch * DTYPE_BYTES[past.dtype]
            for dim in past.shape[1:]:
                assert isinstance(dim, int)
                size *= dim
            total += size
        return total
