"""Which tokens a cut draft head keeps: the most frequent ones of a corpus.

The idea is that of FR-Spec (Zhao et al. 2025, arXiv 2502.14856).

A corpus of some megabytes says little about rare tokens, but the tokenizer says something: ids are about in the order
of the frequency that they had where it was trained (merges of BPE, scores of a unigram model). By Zipf's law that is
proportional to 1 / (id + 1). The two are mixed; what ends turns and texts is always kept.
"""

import codecs
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from draftc.runtime.engine import Tokens
from draftc.runtime.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from draftc.export.checkpoint import CheckpointInfo

__all__ = [
    "Corpus",
    "KeptTokens",
    "check_size",
    "choose_tokens",
    "language_reference",
    "read_corpus",
    "required_tokens",
    "standard_library",
]

PIECE_BYTES = 16 << 10
MAX_PIECES = 512  # 8 MiB; of a larger corpus evenly spaced pieces are read
HELD_OUT = 10  # each tenth piece is not counted: the coverage is measured there
BATCH = 16
PRIOR = 0.3  # weight of the tokenizer's order next to the counts
CHAT_SHARE = 0.02  # of the counts, for the text that shows what chat answers look like
# Folders that installations leave out, or that hold tables rather than code.
SKIPPED = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)


@dataclass(frozen=True)
class Corpus:
    """Texts of up to PIECE_BYTES each. `note` says in a few words what they are; `chat` has text that counts extra."""

    note: str
    pieces: tuple[str, ...]
    chat: str = ""


@dataclass(frozen=True)
class KeptTokens:
    """The tokens that a cut head keeps: `token_ids` (N,) ascending, and their share of a held-out part of `corpus`."""

    token_ids: Tokens
    corpus: str
    coverage: float


def required_tokens(target: "CheckpointInfo", vocab_size: int) -> Tokens:
    """Ids that every answer needs: those that end it, and the tokens that were added to the tokenizer's own (roles of
    the chat template, tool calls).
    """
    ends = target.generation_config.eos_token_id
    ids = {*target.tokenizer.get_added_vocab().values(), *target.tokenizer.all_special_ids}
    ids |= {ends} if isinstance(ends, int) else set(ends or ())
    return np.array(sorted(token for token in ids if 0 <= token < vocab_size), np.int64)


def check_size(size: int, required: Tokens, vocab_size: int) -> None:
    """Raise UsageError unless a head may be cut to `size` of `vocab_size` tokens, `required` (n,) among them."""
    least = max(1, required.size)
    if not least <= size <= vocab_size:
        raise UsageError(
            f"--draft-vocab must be {least} (the special tokens) to {vocab_size} (the vocabulary), got {size}; 0 keeps "
            "all"
        )


def read_corpus(paths: Sequence[Path], option: str = "--draft-corpus") -> Corpus:
    """The text files `paths`, UTF-8, which the user named with `option`.

    Raises UsageError for one that is missing, not text, or if all are empty.
    """
    pieces = tuple(_pieces(paths, option))
    if not any(piece.strip() for piece in pieces):
        raise UsageError(f"{paths[0]}: there is no text in the corpus: name another {option}")
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return Corpus(f"{_printable(paths[0].name)}{more}", pieces)


def standard_library(option: str = "--draft-corpus") -> Corpus:
    """What every Python has at hand: its library's code and docstrings, and the prose of its language reference.

    Raises UsageError where it is installed without sources.
    """
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in library.rglob("*.py") if not SKIPPED & set(path.relative_to(library).parts))
    if not files:
        raise UsageError(f"{library}: this Python has no sources to take text from: name a {option}")
    prose = language_reference()
    pieces = [*_pieces(files, option), *(prose[i : i + PIECE_BYTES] for i in range(0, len(prose), PIECE_BYTES))]
    chat = resources.files("draftc.export").joinpath("chat.txt").read_text("utf-8")
    return Corpus("Python's standard library", tuple(pieces), chat)


def choose_tokens(
    tokenizer: "PreTrainedTokenizerBase",
    corpus: Corpus,
    size: int,
    required: Tokens,
    vocab_size: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> KeptTokens:
    """The `size` of `vocab_size` tokens that are most frequent in `corpus`, `required` (n,) among them."""
    counts = np.zeros(vocab_size)
    held_out = np.zeros(vocab_size)
    total = len(corpus.pieces)
    for start in range(0, total, BATCH):
        progress(start, total)
        ids = _encode(tokenizer, corpus.pieces[start : start + BATCH])
        for index, piece in enumerate(ids, start):
            # A single piece is all there is: then it is measured where it was counted.
            (held_out if total > 1 and index % HELD_OUT == HELD_OUT - 1 else counts)[:] += _count(piece, vocab_size)
    progress(total, total)
    measured = held_out if held_out.any() else counts
    frequency = counts / max(1.0, counts.sum())
    if corpus.chat:
        (chat,) = _encode(tokenizer, [corpus.chat])
        shown = _count(chat, vocab_size)
        frequency += CHAT_SHARE * shown / max(1.0, shown.sum())
    zipf = 1 / np.arange(1, vocab_size + 1)
    score = (1 - PRIOR) * frequency + PRIOR * zipf / zipf.sum()
    score[required] = np.inf
    kept = np.sort(np.argsort(-score, kind="stable")[:size])
    coverage = measured[kept].sum() / max(1.0, measured.sum())
    return KeptTokens(kept.astype(np.int64), corpus.note, float(coverage))


def language_reference() -> str:
    """What `help("topics")` shows. An installation may leave it out; the coverage then tells how well the rest does."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return ""
    return "\n".join(topics.values())


def _encode(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    encoded: list[list[int]] = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return encoded


def _count(ids: Sequence[int], vocab_size: int) -> NDArray[np.int64]:
    counts = np.bincount(np.asarray(ids, np.int64), minlength=vocab_size)
    return counts[:vocab_size]


def _pieces(paths: Sequence[Path], option: str) -> Iterator[str]:
    """Evenly spaced pieces of all `paths`, no more than MAX_PIECES."""
    places = []
    for path in paths:
        try:
            bytes_ = path.stat().st_size
        except OSError as error:
            raise _unreadable(path, error, option) from error
        places += [(path, offset) for offset in range(0, bytes_, PIECE_BYTES)]
    step = max(1.0, len(places) / MAX_PIECES)
    for i in range(min(len(places), MAX_PIECES)):
        yield _read(*places[int(i * step)], option)


def _read(path: Path, offset: int, option: str) -> str:
    """The characters that begin in the PIECE_BYTES from `offset` on, but for one that the end cuts."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(PIECE_BYTES)
    except OSError as error:
        raise _unreadable(path, error, option) from error
    if b"\0" in data:
        raise UsageError(f"{path}: not a text (a NUL byte after byte {offset}): name a {option} of UTF-8 text")
    begin = next((i for i in range(min(3, len(data))) if data[i] & 0xC0 != 0x80), 3) if offset else 0
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data[begin:], final=len(data) < PIECE_BYTES)
    except UnicodeDecodeError as error:
        at = offset + begin + error.start
        raise UsageError(f"{path}: not UTF-8 at byte {at}: name a {option} of UTF-8 text") from error


def _unreadable(path: Path, error: OSError, option: str) -> UsageError:
    return UsageError(f"{path}: cannot be read ({error.strerror}): name a {option} of UTF-8 text")


def _printable(name: str) -> str:
    return name if name.isprintable() else ascii(name)
