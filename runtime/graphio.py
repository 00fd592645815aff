"""The contract of a decoder graph: tensor names, dtypes and shapes. Shared by compiler and runtime; stdlib only.

One graph is one function at any width S (decode S=1, verification S=K+1, prefill a chunk):

    (input_ids[B,S], write_index[B], logit_positions[B,R], past[B,Hkv,L,D]…) → (logits[B,R,V], present[B,Hkv,L,D]…)

`write_index[b]` is the number of tokens that row b's cache already holds: token s of the call is written to, and has
the position, `write_index[b] + s`. `logit_positions[b, r]` is an index into the S tokens of this call. `present` is
the same memory as `past`, with S new entries along L.

A graph for a device-resident loop also has a *tail*, which turns its logits into tokens where they are. Per row:
temperature, top_k, top_p and min_p as in `warp.Sampling` (temperature 0 is greedy), and uniforms from [0, 1).

draft tail     draws one token from the last row's warped distribution q. It writes q at `slot` of `past_q` (in place:
               `present_q` is the same memory), and into `proposal` the call's last input token at `slot`, the drawn
               one at `slot + 1`: after k calls, `next_proposal` is the [last, x_1 … x_k] that the verification takes.
verify tail    accepts, draws the token after the accepted ones, and says where the next calls start. Row r is a
               distribution after `input_ids[logit_positions[r]]`; the proposals are the R - 1 tokens behind row 0's.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

__all__ = [
    "ACCEPTED",
    "DRAFT_Q",
    "DTYPE_BYTES",
    "EMITTED",
    "INPUT_IDS",
    "LOGITS",
    "LOGIT_POSITIONS",
    "MIN_P",
    "NEXT_DRAFT_INDEX",
    "NEXT_INDEX",
    "NEXT_PROPOSAL",
    "NEXT_TOKEN",
    "NEXT_TOKENS",
    "ONE_HOT",
    "PAST_Q",
    "PRESENT_Q",
    "PROPOSAL",
    "SLOT",
    "TEMPERATURE",
    "TOP_K",
    "TOP_P",
    "UNIFORM",
    "UNIFORMS",
    "WRITE_INDEX",
    "Dim",
    "GraphSpec",
    "Tail",
    "TensorSpec",
    "past_name",
    "present_name",
]

INPUT_IDS = "input_ids"
WRITE_INDEX = "write_index"
LOGIT_POSITIONS = "logit_positions"
LOGITS = "logits"

# Tails. Inputs of both:
TEMPERATURE = "temperature"
TOP_K = "top_k"
TOP_P = "top_p"
MIN_P = "min_p"
# Inputs and outputs of the draft's:
UNIFORM = "uniform"
SLOT = "slot"
PROPOSAL = "proposal"
PAST_Q = "past_q"
PRESENT_Q = "present_q"
NEXT_PROPOSAL = "next_proposal"
NEXT_TOKEN = "next_token"  # (B, 1): the input_ids of the next draft call
NEXT_INDEX = "next_index"  # (B,): the write_index of the next call of this graph
# … and of the verification's:
UNIFORMS = "uniforms"  # one for each acceptance test, in order, and one for the draw behind the last test that was made
DRAFT_Q = "draft_q"
ONE_HOT = "one_hot"  # 1: the proposals were chosen, not drawn, and draft_q is not read
EMITTED = "emitted"  # (B, R): the accepted proposals, the target's own token, and -1 for the rest
ACCEPTED = "accepted"  # (B,): how many proposals were; -1 where a logit that mattered was NaN or infinite
NEXT_TOKENS = "next_tokens"  # (B, 2): the last two tokens of the text, with which the draft goes on …
NEXT_DRAFT_INDEX = "next_draft_index"  # (B,): … from here on: it has not seen the last proposal where all were accepted

Tail = Literal["draft", "verify"]

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8}

Dim = int | str  # a symbolic dimension carries its name: "B", "S", "R", or "P" for the tokens of a proposal


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

    def with_tail(self, tail: Tail, slots: int, vocab_size: int) -> "GraphSpec":
        """This spec with the tensors of a tail behind its own.

        `slots` is W, how many distributions the draft can leave for a verification of up to W rows; `vocab_size` counts
        the ids that exist: padding rows of the head are not among the distributions.
        """
        sampling = [
            TensorSpec(TEMPERATURE, "float32", ("B",)),
            TensorSpec(TOP_K, "int64", ("B",)),
            TensorSpec(TOP_P, "float32", ("B",)),
            TensorSpec(MIN_P, "float32", ("B",)),
        ]
        q = ("B", 1, slots, vocab_size)
        if tail == "draft":
            inputs = [
                TensorSpec(UNIFORM, "float32", ("B",)),
                TensorSpec(SLOT, "int64", ("B",)),
                TensorSpec(PROPOSAL, "int64", ("B", "P")),
                TensorSpec(PAST_Q, "float32", q),
            ]
            outputs = [
                TensorSpec(PRESENT_Q, "float32", q),
                TensorSpec(NEXT_PROPOSAL, "int64", ("B", "P")),
                TensorSpec(NEXT_TOKEN, "int64", ("B", 1)),
                TensorSpec(NEXT_INDEX, "int64", ("B",)),
            ]
        else:
            inputs = [
                TensorSpec(UNIFORMS, "float32", ("B", "R")),
                TensorSpec(DRAFT_Q, "float32", q),
                TensorSpec(ONE_HOT, "int64", ("B",)),
            ]
            outputs = [
                TensorSpec(EMITTED, "int64", ("B", "R")),
                TensorSpec(ACCEPTED, "int64", ("B",)),
                TensorSpec(NEXT_INDEX, "int64", ("B",)),
                TensorSpec(NEXT_TOKENS, "int64", ("B", 2)),
                TensorSpec(NEXT_DRAFT_INDEX, "int64", ("B",)),
            ]
        return GraphSpec((*self.inputs, *sampling, *inputs), (*self.outputs, *outputs))

    def with_vocab_rows(self, rows: int) -> "GraphSpec":
        """This spec with a head of `rows` rows."""
        outputs = (
            replace(tensor, shape=(*tensor.shape[:-1], rows)) if tensor.name == LOGITS else tensor
            for tensor in self.outputs
        )
        return GraphSpec(self.inputs, tuple(outputs))

    @property
    def tail(self) -> Tail | None:
        """Which tail the graph has, by its inputs."""
        names = {tensor.name for tensor in self.inputs}
        return "draft" if PAST_Q in names else "verify" if DRAFT_Q in names else None

    @property
    def q_shape(self) -> tuple[int, int] | None:
        """(slots W, vocabulary) of the tail's distributions; None without a tail."""
        for tensor in self.inputs:
            if tensor.name in (PAST_Q, DRAFT_Q):
                _, _, slots, vocabulary = tensor.shape
                assert isinstance(slots, int)
                assert isinstance(vocabulary, int)
                return slots, vocabulary
        return None

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
