"""A matrix of rounded weights, in the layout of ONNX Runtime's MatMulNBits and GatherBlockQuantized.

Along the K inputs of each of the N outputs, `block_size` weights share one scale and one zero point:
weight = (code - zero point) · scale. Codes of 4 bits lie two in a byte, the first in its low half.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Rounded", "RoundedMatrix", "pack_matrix", "parameter_names"]

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class RoundedMatrix:
    """`codes` (N, blocks, block_size · bits / 8), `scales` (N, blocks), of a matrix (N, columns).

    `zero_points` (N, ceil(blocks · bits / 8)), packed like the codes; None where all are 2^(bits - 1). The last block
    is filled up where `columns` does not divide into blocks.
    """

    bits: int
    block_size: int
    columns: int
    codes: Bytes
    scales: Floats
    zero_points: Bytes | None

    def take(self, rows: NDArray[np.int64]) -> "RoundedMatrix":
        """The matrix of some of the rows."""
        zero_points = None if self.zero_points is None else self.zero_points[rows]
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], zero_points=zero_points)

    def dequantize(self) -> Floats:
        """The values (N, columns) that the codes stand for."""
        count, blocks = self.scales.shape
        codes = _unpack(self.codes, self.bits)  # (N, blocks, block_size)
        zeros: Bytes | int = 2 ** (self.bits - 1)
        if self.zero_points is not None:
            zeros = _unpack(self.zero_points, self.bits)[:, :blocks, None]
        values = (codes.astype(np.float32) - zeros) * self.scales[:, :, None]
        result: Floats = values.reshape(count, -1)[:, : self.columns].astype(np.float32)
        return result


Rounded = dict[tuple[str, bool], RoundedMatrix]
"""By (name of the parameter, whether it is stored as (N, K))."""


def parameter_names(model: "nn.Module") -> dict[str, list[str]]:
    """All names of each parameter, by every one of them: a tied head has two."""
    names: dict[int, list[str]] = {}
    parameters = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters:
        names.setdefault(id(parameter), []).append(name)
    return {name: names[id(parameter)] for name, parameter in parameters}


def pack_matrix(
    codes: Bytes, scales: Floats, zero_points: Bytes | None, *, bits: int, block_size: int
) -> RoundedMatrix:
    """Pack `codes` (N, K), `scales` and `zero_points` (N, ceil(K / block_size)); no zero points: 2^(bits - 1)."""
    count, columns = codes.shape
    missing = -columns % block_size
    if missing:
        codes = np.pad(codes, ((0, 0), (0, missing)))
    packed = _pack(codes, bits).reshape(count, -1, block_size * bits // 8)
    zeros = None if zero_points is None else _pack(zero_points, bits)
    return RoundedMatrix(bits, block_size, columns, packed, np.ascontiguousarray(scales, np.float32), zeros)


def _pack(codes: Bytes, bits: int) -> Bytes:
    """(N, n) of `bits` bits → (N, ceil(n · bits / 8))."""
    if bits == 8:
        return np.ascontiguousarray(codes)
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    packed: Bytes = codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
    return packed


def _unpack(packed: Bytes, bits: int) -> Bytes:
    """(…, n) bytes → (…, n · 8 / bits) codes."""
    if bits == 8:
        return packed
    return np.stack((packed & 15, packed >> 4), axis=-1).reshape(*packed.shape[:-1], -1)
