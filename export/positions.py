"""What positions do in a captured attention layer, read from the numbers: which slots are seen, what is rotated."""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from draftc.export.by_value import Piece, Sources

__all__ = ["Rotation", "find_rotation", "rotate", "visible_window"]

BLOCK = 256  # positions of one evaluation
TOLERANCE = 1e-5  # of a rotation of numbers of about 1, in float32

Tables = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Rotation:
    """Pairs of channels turned by an angle by position: `cos` and `sin` are (L, D' / 2) for the first D' channels.

    A pair is (i, i + D' / 2), or (2i, 2i + 1) where `interleaved`. Scaled tables scale what they turn.
    """

    cos: Tables
    sin: Tables
    interleaved: bool


def visible_window(sources: Sources, mask: ir.Value, length: int) -> int | None:
    """W where the bool mask (B, 1, S, L) shows a token at position p the slots from p - W + 1 to p; 0 for all up to p.

    None for any other mask, of which every position is looked at.
    """
    if not sources.positional(mask):
        return None
    piece = Piece(sources, mask)
    last = piece([length - 1], 1)
    if last.dtype != np.bool_ or last.size != length:
        return None
    window = int(last.sum())

    def expected(start: int, width: int) -> NDArray[np.bool_]:
        places, slots = start + np.arange(width)[:, None], np.arange(length)
        result: NDArray[np.bool_] = (slots <= places) & (slots > places - window)
        return result

    for start in range(0, length, BLOCK):
        width = min(BLOCK, length - start)
        seen = piece([start], width)
        if seen.size != width * length or not np.array_equal(seen.reshape(width, length), expected(start, width)):
            return None
    starts, width = [length // 2, 1], min(3, length // 2)
    seen = piece(starts, width)  # rows of a batch, each from its own position
    if seen.shape != (2, 1, width, length):
        return None
    if not all(np.array_equal(seen[row, 0], expected(start, width)) for row, start in enumerate(starts)):
        return None
    return window if window < length else 0


def find_rotation(
    sources: Sources, value: ir.Value, length: int, known: dict[int, Rotation | None]
) -> tuple[ir.Value, Rotation] | None:
    """(x, rotation) where `value` (B, H, S, D) is x, (B, H, S, D) or (B, S, H, D), rotated; else None.

    `known` keeps what was found, by the way in which it is computed.
    """
    for x in sources.origins(value):
        if x.shape is None or len(x.shape) != 4 or not sources.leaves(value, x):
            continue
        number = sources.number(value, x)
        if number not in known:
            known[number] = _measure(Piece(sources, value, x), x, value, length)
        if (rotation := known[number]) is not None:
            return x, rotation
    return None


def _measure(piece: Piece, x: ir.Value, value: ir.Value, length: int) -> Rotation | None:
    """The rotation that `piece` is: its tables from vectors of zeros and ones, and a proof on random ones."""
    assert x.shape is not None
    assert value.shape is not None
    heads, size = value.shape[1], value.shape[3]
    swapped = x.shape[2] == heads and not isinstance(x.shape[1], int)
    if not isinstance(heads, int) or not isinstance(size, int) or x.shape[3] != size:
        return None
    if not swapped and x.shape[1] != heads:
        return None

    def turn(start: list[int], vectors: Tables) -> Tables:  # (B, S, H, D) → the same
        given = vectors if swapped else vectors.swapaxes(1, 2)
        return np.asarray(piece(start, vectors.shape[1], np.ascontiguousarray(given))).swapaxes(1, 2)

    place = min(1, length - 1)
    first = np.zeros((1, 1, heads, size), np.float32)
    first[..., 0] = 1
    partner = np.flatnonzero(turn([place], first)[0, 0, 0])
    if len(partner) != 2 or partner[0] != 0:
        return None
    interleaved = bool(partner[1] == 1)
    half = size // 2 if interleaved else int(partner[1])  # pairs that are not turned have a cosine of 1 and a sine of 0
    if 2 * half > size:
        return None
    ones = np.zeros(size, np.float32)
    ones[: 2 * half : 2 if interleaved else 1] = 1
    if not interleaved:
        ones[half:] = 0
    cos, sin = np.empty((length, half), np.float32), np.empty((length, half), np.float32)
    for start in range(0, length, BLOCK):
        width = min(BLOCK, length - start)
        turned = turn([start], np.broadcast_to(ones, (1, width, heads, size)))[0, :, 0]  # (S, D)
        cos[start : start + width], sin[start : start + width] = _pairs(turned, half, interleaved)
    rotation = Rotation(cos, sin, interleaved)
    rng = np.random.default_rng(0)
    for start in range(0, length, BLOCK):
        width = min(BLOCK, length - start)
        vectors = rng.standard_normal((1, width, heads, size), np.float32)
        if not _equal(turn([start], vectors), rotate(vectors, np.arange(start, start + width)[None], rotation)):
            return None
    vectors = rng.standard_normal((2, 2, heads, size), np.float32)
    places = np.array([[length // 2], [0]]) + np.arange(2)
    if not _equal(turn(places[:, 0].tolist(), vectors), rotate(vectors, places, rotation)):
        return None
    return rotation


def rotate(x: Tables, places: NDArray[np.int64], rotation: Rotation) -> Tables:
    """Rotate x (B, S, H, D), whose tokens are at the positions `places` (B, S)."""
    half = rotation.cos.shape[1]
    first, second = _pairs(x, half, rotation.interleaved)
    cos, sin = (table[places][:, :, None] for table in (rotation.cos, rotation.sin))
    turned = x.copy()
    new = _pairs(turned, half, rotation.interleaved)
    new[0][...] = first * cos - second * sin
    new[1][...] = second * cos + first * sin
    return turned


def _pairs(x: Tables, half: int, interleaved: bool) -> tuple[Tables, Tables]:
    """Views of the first and the second channel of each pair."""
    if interleaved:
        return x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
    return x[..., :half], x[..., half : 2 * half]


def _equal(actual: Tables, expected: Tables) -> bool:
    return actual.shape == expected.shape and bool(
        np.abs(actual - expected).max() <= TOLERANCE * max(1.0, float(np.abs(expected).max()))
    )
