"""What a folder's safetensors files hold, read from their headers alone, and a fingerprint of them.

A safetensors file is an 8-byte length N, N bytes of JSON ({tensor: {dtype, shape, data_offsets}}), then the data.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from draftc.runtime.errors import CheckpointError

__all__ = [
    "INDEX_FILE",
    "SINGLE_FILE",
    "Weights",
    "find_weights",
    "fingerprint",
    "one_line",
    "read_json",
    "read_weights",
]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
MAX_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class Weights:
    """Shapes of the stored tensors by name, their bytes together, and the files (none when they are still remote)."""

    shapes: dict[str, tuple[int, ...]]
    nbytes: int
    files: tuple[Path, ...] = ()

    @property
    def elements(self) -> int:
        """Number of stored values, all tensors together."""
        return sum(prod(shape) for shape in self.shapes.values())


class _Entry(NamedTuple):
    shape: tuple[int, ...]
    start: int  # of the tensor's bytes, counted from the end of the header
    end: int


@contextmanager
def one_line(source: str, what: str) -> Iterator[None]:
    """Turn any failure of another package's readers into one line that names the source and the first cause."""
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except (
        Exception
    ) as error:  # transformers and tokenizers raise OSError, ValueError, KeyError, RuntimeError and others here
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{source}: {what} cannot be read ({cause}); download it again") from error


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object; raises CheckpointError naming the file and the line."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, holds {type(value).__name__}; download it again")
    return value


def find_weights(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a model folder; raises CheckpointError that says what is there instead."""
    index = folder / INDEX_FILE
    if index.is_file():
        names = sorted(set(map(str, read_json(index).get("weight_map", {}).values())))
        if not names or any(Path(name).name != name for name in names):
            raise CheckpointError(f"{index}: its weight_map does not name files of this folder; download it again")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{folder}: {len(missing)} of {len(names)} weight files are missing, first {missing[0]}; "
                "download it again"
            )
        return tuple(folder / name for name in names)
    if (folder / SINGLE_FILE).is_file():
        return (folder / SINGLE_FILE,)
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if (folder / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{folder}: an adapter, not a whole model; merge it into its base model and save that first"
        )
    if pickled:
        raise CheckpointError(
            f"{folder}: only pickled weights ({pickled[0]}), which can run code when loaded; load them where you trust "
            "them and call save_pretrained(folder), which writes safetensors"
        )
    raise CheckpointError(f"{folder}: no weights: looked for {SINGLE_FILE} and {INDEX_FILE}; download the model again")


def read_weights(files: Sequence[Path]) -> Weights:
    """Read the headers of safetensors files; raises CheckpointError for a truncated or corrupt one."""
    shapes: dict[str, tuple[int, ...]] = {}
    nbytes = 0
    for path in files:
        for name, (shape, size) in _read_header(path).items():
            shapes[name] = shape
            nbytes += size
    return Weights(shapes, nbytes, tuple(files))


def _read_header(path: Path) -> dict[str, tuple[tuple[int, ...], int]]:
    """{tensor: (shape, bytes)} of one file whose size agrees with its header."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise CheckpointError(
                f"{path}: truncated or corrupt safetensors: its header takes {length:,} bytes, the file has {size:,}; "
                "download it again"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw)
        tensors = {
            name: _Entry(tuple(map(int, entry["shape"])), *map(int, entry["data_offsets"]))
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: corrupt safetensors header ({error}); download it again") from error
    expected = 8 + length + max((entry.end for entry in tensors.values()), default=0)
    if expected != size:
        raise CheckpointError(
            f"{path}: truncated or corrupt safetensors: its header says {expected:,} bytes, the file has {size:,}; "
            "download it again"
        )
    return {name: (entry.shape, entry.end - entry.start) for name, entry in tensors.items()}


def fingerprint(files: Sequence[Path]) -> str:
    """Sha256 of one file; of several, sha256 over the lines "name sha256" in name order. Lower-case hex."""
    digests = []
    for path in sorted(files):
        with path.open("rb") as file:
            digests.append((path.name, hashlib.file_digest(file, "sha256").hexdigest()))
    if len(digests) == 1:
        return digests[0][1]
    return hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in digests).encode()).hexdigest()
