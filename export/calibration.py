"""The text that GPTQ is calibrated on: pieces of a file of the user's, or of what every Python has at hand.

What it does not show, GPTQ rounds worse than to nearest: sources alone made answers in prose worse. So by default half
of it is code and half is prose, and every second piece is shown as an answer in the model's own chat markup. The texts
that quality is measured on (`parity.txt`, `held_out.txt`) are no part of it.
"""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from draftc.export.draft_vocab import Corpus, language_reference, read_corpus, standard_library
from draftc.runtime.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from draftc.export.checkpoint import CheckpointInfo

__all__ = ["calibration_corpus", "calibration_tokens"]

LENGTH = 256  # tokens of one piece: many short ones show more than a few long ones of as many tokens
PIECES = 64
FEWEST = 8
QUESTION = 200  # characters of a piece that are the user's, where it is shown as a chat


def calibration_corpus(path: Path | None) -> Corpus:
    """The text file `path` (UTF-8), or Python's library: as many pieces of its sources as of its language reference.

    Raises UsageError for a file that is missing or not text, and where this Python has no sources.
    """
    option = "--calibration FILE"
    if path is not None:
        return read_corpus([path], option)
    library = standard_library(option)
    prose = language_reference()
    code = [piece for piece in library.pieces if piece not in prose]
    step = max(1, len(prose) * 2 // PIECES)
    parts = [prose[start : start + step] for start in range(0, len(prose) - step + 1, step)]
    pairs = zip(_spread([text for text in code if len(text) >= 8 * LENGTH], len(parts)), parts, strict=False)
    return Corpus(library.note, tuple(chain.from_iterable(pairs)) or library.pieces, library.chat)


def calibration_tokens(info: "CheckpointInfo", corpus: Corpus) -> NDArray[np.int64]:
    """Token ids (B, T) of up to PIECES evenly spaced parts of the corpus, T being LENGTH, or the model's context.

    Ids for which the model has no embedding are left out. Where the corpus has a text that shows what chat answers look
    like, and the tokenizer a chat template, every second pair of parts is shown as a chat.

    Raises UsageError where the text gives fewer than FEWEST.
    """
    tokenizer, vocab_rows = info.tokenizer, info.shape.vocab_rows
    start = [tokenizer.bos_token_id] if isinstance(tokenizer.bos_token_id, int) else []
    length = min(LENGTH, info.shape.max_positions or LENGTH)
    wanted = length - len(start)
    parts: list[list[int]] = []
    texts = [text for text in corpus.pieces if len(text) >= 8 * length] or corpus.pieces  # not the ends of files
    each = -(-PIECES // len(texts))  # parts of one of them
    markup = corpus.chat.split("\n\n") if corpus.chat and tokenizer.chat_template else []
    for index, text in enumerate(_spread(texts, PIECES)):
        chat = _chat(tokenizer, text, markup[index :: PIECES // 2]) if markup and index % 4 < 2 else None
        ids = [
            i for i in tokenizer(chat or text, add_special_tokens=False, verbose=False)["input_ids"] if i < vocab_rows
        ]
        if chat is not None:  # its template says how a text begins
            parts += [ids[:length]] if len(ids) >= length else []
            continue
        skip = len(ids) % wanted if len(ids) > wanted else 0  # a licence or a list of imports comes first
        parts += [start + ids[at : at + wanted] for at in range(skip, len(ids) - wanted + 1, wanted)][:each]
    parts = parts[:PIECES]
    if len(parts) < FEWEST:
        raise UsageError(
            f"{corpus.note}: too short to calibrate on: {FEWEST * length} tokens at least, of text that is not repeated"
            ": pass a longer --calibration FILE, or --rounding nearest"
        )
    return np.array(parts, np.int64)


def _spread(texts: Sequence[str], count: int) -> list[str]:
    """Up to `count` of the texts, evenly spaced."""
    step = max(1.0, len(texts) / max(1, count))
    return [texts[int(i * step)] for i in range(min(count, len(texts)))]


def _chat(tokenizer: "PreTrainedTokenizerBase", text: str, markup: Sequence[str]) -> str | None:
    """The text as a question and an answer, which begins with some of the markup that answers have.

    None where the template refuses.
    """
    answer = "\n\n".join((*markup, text[QUESTION:]))
    messages = [{"role": "user", "content": text[:QUESTION]}, {"role": "assistant", "content": answer}]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # foreign code, which may refuse anything
        return None
