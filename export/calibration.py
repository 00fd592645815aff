"""The text that GPTQ is calibrated on: pieces of a file of the user's, or of what every Python has at hand.

The text that quality is measured on (`parity.txt`) is no part of it.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from draftc.export.draft_vocab import Corpus, read_corpus, standard_library
from draftc.runtime.errors import UsageError

if TYPE_CHECKING:
    from draftc.export.checkpoint import CheckpointInfo

__all__ = ["calibration_corpus", "calibration_tokens"]

LENGTH = 256  # tokens of one piece: many short ones show more than a few long ones of as many tokens
PIECES = 32
FEWEST = 8


def calibration_corpus(path: Path | None) -> Corpus:
    """The text file `path` (UTF-8), or the sources and the prose of Python's standard library.

    Raises UsageError for a file that is missing or not text, and where this Python has no sources.
    """
    if path is None:
        return standard_library("--calibration FILE")
    return read_corpus([path], "--calibration FILE")


def calibration_tokens(info: "CheckpointInfo", corpus: Corpus) -> NDArray[np.int64]:
    """Token ids (B, T) of up to PIECES evenly spaced parts of the corpus, T being LENGTH, or the model's context.

    Ids for which the model has no embedding are left out.

    Raises UsageError where the text gives fewer than FEWEST.
    """
    tokenizer, vocab_rows = info.tokenizer, info.shape.vocab_rows
    start = [tokenizer.bos_token_id] if isinstance(tokenizer.bos_token_id, int) else []
    length = min(LENGTH, info.shape.max_positions or LENGTH)
    wanted = length - len(start)
    parts: list[list[int]] = []
    texts = [text for text in corpus.pieces if len(text) >= 8 * length] or corpus.pieces  # not the ends of files
    each = -(-PIECES // len(texts))  # parts of one of them
    step = max(1.0, len(texts) / PIECES)
    for index in range(min(PIECES, len(texts))):
        text = texts[int(index * step)]
        ids = [i for i in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if i < vocab_rows]
        skip = min(len(ids) % wanted, wanted) if len(ids) > wanted else 0  # a licence or a list of imports comes first
        parts += [start + ids[at : at + wanted] for at in range(skip, len(ids) - wanted + 1, wanted)][:each]
    parts = parts[:PIECES]
    if len(parts) < FEWEST:
        raise UsageError(
            f"{corpus.note}: too short to calibrate on: {FEWEST * length} tokens at least, of text that is not repeated"
            ": pass a longer --calibration FILE, or --rounding nearest"
        )
    return np.array(parts, np.int64)
