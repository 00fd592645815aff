"""The GGUF container: a strict reader of its header, and its tensors as fp32, a few rows at a time.

A file is: magic, version, counts; metadata (key, type, value); tensor table (name, dimensions, type, offset); data.
Every length is checked against the file before it is used, so that a truncated or hostile file ends in one clear
`CheckpointError`, and nothing is read into memory but what is asked for.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np
from numpy.typing import NDArray

from draftc.runtime.errors import CheckpointError, UnsupportedModelError

__all__ = ["GgufFile", "GgufTensor"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
T = TypeVar("T")
CHUNK_ELEMENTS = 1 << 23  # fp32 elements made at a time: 32 MiB, and numpy's temporaries stay of that order


@dataclass(frozen=True)
class GgufTensor:
    """One entry of the tensor table. `shape` is in torch's order; `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int
    nbytes: int

    @property
    def bits(self) -> float:
        """Stored bits per element."""
        return 8 * self.nbytes / max(1, prod(self.shape))


class _Cursor:
    """Reads little-endian values from a mapped file and refuses to step past its end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.position, self.size = data, path, 0, len(data)

    def need(self, count: int) -> int:
        start = self.position
        if count > self.size - start:
            raise CheckpointError(
                f"{self.path}: truncated or corrupt GGUF header: it needs {count} more bytes at {start:,}, the file "
                f"has {self.size:,} bytes; download it again"
            )
        self.position = start + count
        return start

    def scalars(self, code: str, count: int = 1) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        return struct.unpack_from(layout, self.data, self.need(struct.calcsize(f"<{code}") * count))

    def string(self) -> str:
        (length,) = self.scalars("Q")
        start = self.need(length)
        return self.data[start : start + length].decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self.string()
        if kind in SCALARS:
            return self.scalars(SCALARS[kind])[0]
        if kind != ARRAY or depth > 2:
            raise CheckpointError(f"{self.path}: corrupt GGUF header: unknown value type {kind}; download it again")
        item, count = *self.scalars("I"), *self.scalars("Q")
        if count > self.size:
            self.need(count)
        if item in SCALARS:
            return list(self.scalars(SCALARS[item], count))
        return [self.value(item, depth + 1) for _ in range(count)]


class GgufFile:
    """An open GGUF file: `metadata`, `tensors` by name, and `rows` that dequantizes.

    Raises CheckpointError when the file is not GGUF, is truncated or is one part of several.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise CheckpointError(f"{path}: not a GGUF file (it does not start with 'GGUF'); download it again")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(self._map, path)
        cursor.need(4)
        (version,) = cursor.scalars("I")
        if version not in VERSIONS:
            raise CheckpointError(
                f"{path}: GGUF version {version} is not readable, versions 2 and 3 are; convert it again"
            )
        tensor_count, value_count = cursor.scalars("Q", 2)
        self.metadata: dict[str, Any] = {}
        for _ in range(value_count):
            key = cursor.string()
            self.metadata[key] = cursor.value(*cursor.scalars("I"))
        parts = self.get("split.count", int, 1)
        if parts > 1:
            raise CheckpointError(f"{path}: one part of {parts}; join them first with llama-gguf-split --merge")
        self.tensors = {tensor.name: tensor for tensor in self._table(cursor, tensor_count)}

    def _table(self, cursor: _Cursor, count: int) -> Iterator[GgufTensor]:
        entries = []
        for _ in range(count):
            name = cursor.string()
            (dimensions,) = cursor.scalars("I")
            shape = cursor.scalars("Q", dimensions)[::-1]  # GGUF stores the fastest-moving dimension first
            (code,) = cursor.scalars("I")
            (offset,) = cursor.scalars("Q")
            entries.append((name, shape, code, offset))
        alignment = max(1, self.get("general.alignment", int, gguf.GGUF_DEFAULT_ALIGNMENT))
        start = -(-cursor.position // alignment) * alignment
        ends = []
        for name, shape, code, offset in entries:
            try:
                kind = gguf.GGMLQuantizationType(code)
            except ValueError:
                raise UnsupportedModelError(
                    f"{self.path}: tensor {name} has GGUF type {code}, which the installed gguf package does not know; "
                    "upgrade it, or use a Q4_K_M or Q8_0 file"
                ) from None
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            if not shape or 0 in shape or shape[-1] % block:
                raise CheckpointError(f"{self.path}: corrupt GGUF: tensor {name} has shape {shape}; download it again")
            nbytes = prod(shape) // block * block_bytes
            ends.append((start + offset + nbytes, name))
            yield GgufTensor(name, shape, kind, start + offset, nbytes)
        end, name = max(ends, default=(0, ""))
        if end > self.size:
            raise CheckpointError(
                f"{self.path}: truncated GGUF: its header says {end:,} bytes (up to tensor {name}), the file has "
                f"{self.size:,}; download it again"
            )

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """A metadata value of a known type; raises CheckpointError if it is of another, or absent with no default."""
        value = self.metadata.get(key, default)
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind):
            found = "is missing" if value is None else f"is a {type(value).__name__}, not a {kind.__name__}"
            raise CheckpointError(f"{self.path}: GGUF metadata {key!r} {found}; convert the model again")
        return value

    def stored(self, name: str) -> NDArray[np.uint8]:
        """The rows of a matrix as they are stored, (rows, bytes of one)."""
        tensor = self.tensors[name]
        return np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.offset).reshape(tensor.shape[0], -1)

    def rows(self, name: str, step: int = 1) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        """Yield (row slice, fp32 rows) of a tensor in order; `step` takes every step-th row only.

        A one-dimensional tensor counts as one row and comes back with its own shape.
        """
        tensor = self.tensors[name]
        count = tensor.shape[0] if len(tensor.shape) > 1 else 1
        width = prod(tensor.shape) // count
        raw = np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.offset).reshape(count, -1)
        per_chunk = max(1, CHUNK_ELEMENTS // width) * step
        for first in range(0, count, per_chunk):
            chosen = slice(first, min(first + per_chunk, count), step)
            values = self._dequantize(raw[chosen].copy(), tensor)
            if len(tensor.shape) == 1:
                yield slice(0, tensor.shape[0]), values.reshape(tensor.shape)
            else:
                yield chosen, values.reshape(-1, *tensor.shape[1:])

    def _dequantize(self, raw: NDArray[np.uint8], tensor: GgufTensor) -> NDArray[np.float32]:
        try:
            return np.asarray(gguf.dequantize(raw, tensor.kind), np.float32)
        except NotImplementedError:
            raise UnsupportedModelError(
                f"{self.path}: tensor {tensor.name} is stored as {tensor.kind.name}, which the gguf package cannot "
                "dequantize; use a Q4_K_M or Q8_0 file"
            ) from None
