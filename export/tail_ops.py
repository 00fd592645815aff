"""From logits to a token inside a graph: `runtime/warp.py` and `Sampler.draw` as ONNX nodes.

No sort and no TopK over the vocabulary (TensorRT's stops at 3,840), no loop and no branch (the graph is captured into a
CUDA graph), and nothing that depends on what a device makes of denormals, of NaN in a maximum, or of ties in an ArgMax.

The vocabulary is laid out as (blocks, width), both about √V, so that float32 is enough: whatever is summed over V is
summed in two levels, and so is the cumulative sum of a draw. Places behind the last token hold a logit of -inf.

"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.tape import Tape

from draftc.runtime.warp import LEAST_DISTANCE, TEMPERATURES

__all__ = [
    "FLOAT",
    "INT64",
    "Grid",
    "Operand",
    "Ops",
    "Warped",
    "draw",
    "invert",
    "row_at",
    "threshold",
    "total_of",
    "warp",
]

# How the search for a threshold goes through the float32 numbers of 0 or more: bits of each digit.
EXPONENT_DIGITS = (3, 3, 2)
MANTISSA_DIGITS = (3, 3, 3, 3, 3, 3, 3, 2)
# The smallest number of each exponent: zero, the powers of two, infinity.
POWERS = np.concatenate([[0.0], np.exp2(np.arange(-126.0, 128.0)), [np.inf]]).astype(np.float32)  # (256,)
POWERS.flags.writeable = False

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64

Operand = ir.Value | float | list[int] | NDArray[np.float32] | NDArray[np.int64]


class Ops:
    """`ops.Add(x, 1.0)` appends an Add node to the graph and returns its output, for any operator.

    Inputs that are not values become constants, whole numbers as int64 and others as float32.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._tape = Tape(graph)
        self._numbers = count()
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}

    def __getattr__(self, op_type: str) -> Callable[..., ir.Value]:
        return partial(self._append, op_type)

    def _append(self, op_type: str, *inputs: Operand, **attributes: int) -> ir.Value:
        values = [x if isinstance(x, ir.Value) else self._constant(x) for x in inputs]
        name = f"tail.{op_type}.{next(self._numbers)}"
        return self._tape.op(op_type, values, attributes, name=name, output=ir.Value(name=name))

    def _constant(self, number: float | list[int] | NDArray[np.float32] | NDArray[np.int64]) -> ir.Value:
        array = np.asarray(number)
        array = array.astype(np.float32 if array.dtype.kind == "f" else np.int64)
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._constants:
            name = f"tail.constant.{len(self._constants)}"
            self._constants[key] = self._tape.initializer(ir.tensor(array, name=name))
        return self._constants[key]


@dataclass(frozen=True)
class Grid:
    """How the vocabulary is laid out: (blocks, width), with at least one place more than there are tokens."""

    vocab_size: int

    @property
    def width(self) -> int:
        """Places of a block: the power of two next to √V."""
        return int(2 ** round(math.log2(self.vocab_size) / 2))

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.vocab_size // self.width + 1

    @property
    def places(self) -> int:
        """blocks · width: more than V."""
        return self.blocks * self.width

    def lay_out(self, op: Ops, rows: ir.Value, fill: float) -> ir.Value:
        """(B, R, V) → (B, R, blocks, width); the places behind the last token hold `fill`."""
        padded = op.Pad(rows, [0, 0, 0, 0, 0, self.places - self.vocab_size], fill)  # (B, R, places)
        return op.Reshape(padded, [0, 0, self.blocks, self.width])

    def flatten(self, op: Ops, rows: ir.Value) -> ir.Value:
        """(B, R, blocks, width) → (B, R, V)."""
        return op.Slice(op.Reshape(rows, [0, 0, self.places]), [0], [self.vocab_size], [2])

    def ids(self) -> NDArray[np.float32]:
        """(blocks, width): the token id of each place."""
        return np.arange(self.places, dtype=np.float32).reshape(self.blocks, self.width)


@dataclass(frozen=True)
class Warped:
    """Distributions p of a call's rows, unnormalised: p = weights / total."""

    weights: ir.Value  # (B, R, blocks, width)
    total: ir.Value  # (B, R, 1, 1)
    finite: ir.Value  # (B, R) bool: no NaN or +inf among the row's logits, and not all of them -inf


def warp(op: Ops, grid: Grid, logits: ir.Value, sampling: Sequence[ir.Value]) -> Warped:
    """`runtime.warp.warp` of every row of logits (B, R, rows of the head).

    sampling: temperature, top_k, top_p and min_p, (B,) each.

    Temperature 0 puts all weight on the first of the largest logits, as argmax does.
    """
    temperature, top_k, top_p, min_p = (op.Unsqueeze(x, [1, 2, 3]) for x in sampling)  # (B, 1, 1, 1)
    logits = grid.lay_out(op, op.Slice(logits, [0], [grid.vocab_size], [2]), -math.inf)  # (B, R, blocks, width)
    largest = op.ReduceMax(op.ReduceMax(logits, [3]), [2])  # (B, R, 1, 1)
    # A count, because a maximum may lose a NaN.
    below_inf = total_of(op, op.Cast(op.Less(logits, math.inf), to=FLOAT))
    finite = op.And(op.Equal(below_inf, float(grid.places)), op.Greater(largest, -math.inf))

    y = op.Sub(largest, logits)
    y = op.Where(op.Less(y, float(LEAST_DISTANCE)), 0.0, y)
    greedy = op.Equal(temperature, 0.0)
    divisor = op.Where(greedy, 1.0, op.Clip(temperature, *TEMPERATURES))
    weights = op.Exp(op.Neg(op.Div(y, divisor)))  # 1 for the largest

    k = op.Cast(op.Where(op.Equal(top_k, 0), grid.vocab_size, top_k), to=FLOAT)
    weights = op.Where(op.Less(threshold(op, y, 1.0, k), y), 0.0, weights)
    mass = op.Where(op.Less(top_p, 1.0), op.Mul(top_p, total_of(op, weights)), math.inf)
    outside = op.Less(threshold(op, y, weights, mass), y)
    weights = op.Where(op.Or(outside, op.Less(weights, min_p)), 0.0, weights)

    ids = grid.ids()
    first = op.Where(op.Equal(logits, largest), ids, float(grid.places))
    first = op.ReduceMin(op.ReduceMin(first, [3]), [2])  # (B, R, 1, 1)
    weights = op.Where(greedy, op.Cast(op.Equal(first, ids), to=FLOAT), weights)
    return Warped(weights, total_of(op, weights), op.Squeeze(finite, [2, 3]))


def total_of(op: Ops, rows: ir.Value) -> ir.Value:
    """(…, blocks, width) → (…, 1, 1)."""
    return op.ReduceSum(op.ReduceSum(rows, [-1]), [-2])


def threshold(op: Ops, y: ir.Value, weights: ir.Value | float, target: ir.Value) -> ir.Value:
    """(B, R, 1, 1): the smallest float32 t with Σ weights[y <= t] >= target, infinity if there is none.

    y (B, R, blocks, width) of 0 or more, without denormals; weights of the same shape, or one number; target
    (B, 1 or R, 1, 1) above 0.

    t is also the largest number with Σ weights[y < t] < target, so that its digits can be found from the first to the
    last, as in long division: with the digits before it fixed, a digit is the number of its values d > 0 for which
    that sum, over y < (the number with digit d and zeros behind it), is still below the target. Rounded sums of the
    same order never fall when terms are added, so the sum in float32 has exactly one such t, and this finds it.
    All candidates are exact float32 numbers, and none is denormal.

    Cost: 11 rounds, of which TensorRT-RTX makes three kernels each, with 69 sums over V; a binary search would take 31
    rounds. A row of V = 152k float32 numbers is 0.6 MB, so that the sums read from a GPU's L2 cache.
    """
    y, target = op.Unsqueeze(y, [2]), op.Squeeze(target, [3])  # (B, R, 1, blocks, width), (B, R, 1)
    if isinstance(weights, ir.Value):
        weights = op.Unsqueeze(weights, [2])

    def digit(candidates: ir.Value) -> ir.Value:
        """How many of the rising candidates (B, R, m) are not too large: (B, R, 1)."""
        below = op.Less(y, op.Unsqueeze(candidates, [3, 4]))  # (B, R, m, blocks, width)
        sums = op.Squeeze(total_of(op, op.Where(below, weights, 0.0)), [3, 4])  # (B, R, m)
        return op.ReduceSum(op.Cast(op.Less(sums, target), to=FLOAT), [2])

    exponent: Operand = np.zeros((1, 1, 1), np.int64)  # an index into POWERS
    step = 256
    for bits in EXPONENT_DIGITS:
        step //= 2**bits
        found = digit(op.Gather(POWERS, op.Add(exponent, np.arange(1, 2**bits) * step)))
        exponent = op.Add(exponent, op.Mul(op.Cast(found, to=INT64), step))  # (B, R, 1)
    scale = op.Gather(POWERS, exponent)
    mantissa: Operand = np.ones((1, 1, 1), np.float32)  # in [1, 2)
    ulp = 1.0
    for bits in MANTISSA_DIGITS:
        ulp /= 2**bits
        found = digit(op.Mul(scale, op.Add(mantissa, np.arange(1, 2**bits) * ulp)))
        mantissa = op.Add(mantissa, op.Mul(found, ulp))  # (B, R, 1)
    return op.Unsqueeze(op.Mul(scale, mantissa), [3])


def row_at(op: Ops, rows: ir.Value, index: ir.Value) -> ir.Value:
    """rows (B, R, …) and index (B, 1) → (B, …)."""
    return op.GatherND(rows, index, batch_dims=1)


def draw(op: Ops, grid: Grid, weights: ir.Value, uniform: ir.Value) -> ir.Value:
    """One token (B, 1) from weights (B, blocks, width) of any sum, by inversion of their cumulative sum.

    uniform (B, 1) from [0, 1). First a block, by the sums of all blocks, then a place in it.
    """
    mass = op.Squeeze(op.ReduceSum(weights, [2]), [2])  # (B, blocks)
    cumulative = op.CumSum(mass, 1)
    target = op.Mul(uniform, op.ReduceMax(cumulative, [1]))  # (B, 1)
    block, before = invert(op, mass, cumulative, target, grid.blocks)
    inside = row_at(op, weights, op.Cast(block, to=INT64))  # (B, width)
    place, _ = invert(op, inside, op.CumSum(inside, 1), op.Sub(target, before), grid.width)
    return op.Cast(op.Add(op.Mul(block, float(grid.width)), place), to=INT64)


def invert(op: Ops, mass: ir.Value, cumulative: ir.Value, target: ir.Value, size: int) -> tuple[ir.Value, ir.Value]:
    """The first index (B, 1), as float32, with mass and cumulative > target; and the cumulative sum before it (B, 1).

    mass, cumulative (B, size), target (B, 1). Where rounding left every sum at the target or below it, the last index
    with mass. So an index without mass never comes out, even if a parallel sum is not quite monotone.
    """
    index = np.arange(size, dtype=np.float32)
    positive = op.Greater(mass, 0.0)
    first = op.ReduceMin(op.Where(op.And(positive, op.Greater(cumulative, target)), index, float(size)), [1])
    last = op.ReduceMax(op.Where(positive, index, 0.0), [1])
    found = op.Min(first, last)
    return found, op.ReduceMax(op.Where(op.Less(index, found), cumulative, 0.0), [1])
