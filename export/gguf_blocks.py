"""Weights of a GGUF file in the blocks that it stores them in, without a second rounding.

Q4_0 and Q8_0 are what MatMulNBits computes with: blocks of 32 with one scale and no zero points,

    Q4_0: weight = d · (q - 8), q of 4 bits: d in half precision, then 16 bytes whose low halves are q 0 to 15
    Q8_0: weight = d · q, q an int8:          d in half precision, then 32 bytes

The other types do not fit. Q4_1 and the K types add a minimum that is no multiple of the scale, which would need zero
points that are floats, and ONNX Runtime's fast kernels take whole numbers; Q5 and Q6 have codes of other widths. They
are rounded again.
"""

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from numpy.typing import NDArray

from draftc.export.gguf import GgufFile
from draftc.export.gguf_model import parameter_tensors, stored_rows
from draftc.export.rounding import Rounded, RoundedMatrix, pack_matrix, parameter_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["BLOCK_SIZE", "stored_blocks"]

BLOCK_SIZE = 32
Q4_0, Q8_0 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0


def stored_blocks(file: GgufFile, config: Any, model: "PreTrainedModel") -> Rounded:
    """The Q4_0 and Q8_0 matrices of `file`, from which `model` was loaded."""
    aliases = parameter_names(model)
    rounded: Rounded = {}
    for name, tensor in parameter_tensors(file, config).items():
        if tensor.kind in (Q4_0, Q8_0) and len(tensor.shape) == 2:
            rows = file.stored(tensor.name)[stored_rows(file, tensor.name, config)]
            matrix = _repack(rows.reshape(len(rows), -1, 2 + BLOCK_SIZE // (2 if tensor.kind == Q4_0 else 1)))
            rounded.update({(alias, True): matrix for alias in aliases[name]})
    return rounded


def _repack(blocks: NDArray[np.uint8]) -> RoundedMatrix:
    """(N, blocks, 2 + 16) of Q4_0, or (N, blocks, 2 + 32) of Q8_0."""
    scales = blocks[:, :, :2].copy().view(np.float16)[:, :, 0].astype(np.float32)
    payload = blocks[:, :, 2:]
    bits = 4 if payload.shape[2] == BLOCK_SIZE // 2 else 8
    # An int8 in two's complement, counted from -128, is its byte with the first bit turned.
    codes = np.concatenate((payload & 15, payload >> 4), axis=2) if bits == 4 else payload ^ np.uint8(128)
    return pack_matrix(codes.reshape(len(codes), -1), scales, None, bits=bits, block_size=BLOCK_SIZE)
