"""Which tokens a cut head keeps: counted against a plain count, with the special tokens always among them."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from draftc.export.checkpoint import CheckpointInfo, peek
from draftc.export.draft_vocab import (
    Corpus,
    check_size,
    choose_tokens,
    read_corpus,
    required_tokens,
    standard_library,
)
from draftc.runtime.errors import UsageError
from tests.export.tiny_models import save_folder, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
SIZE = len(TOKENIZER)
NONE = np.array([], np.int64)


def ids(text: str) -> list[int]:
    """The tokens of a text."""
    encoded: list[list[int]] = TOKENIZER([text])["input_ids"]
    return encoded[0]


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> CheckpointInfo:
    folder = tmp_path_factory.mktemp("model")
    save_folder(folder)
    return peek(str(folder))


def test_the_most_frequent_tokens_are_kept() -> None:
    pieces = tuple("the fox jumps\n" * (1 + i % 3) + "lazy dog" for i in range(40))
    counts = Counter(token for i, piece in enumerate(pieces) if i % 10 != 9 for token in ids(piece))
    frequent = {token for token, count in counts.items() if count > 20}
    assert 3 <= len(frequent) < SIZE
    kept = choose_tokens(TOKENIZER, Corpus("test", pieces), len(frequent) + 2, NONE, SIZE)
    assert frequent <= set(kept.token_ids.tolist())
    assert (np.diff(kept.token_ids) > 0).all()
    assert kept.token_ids.size == len(frequent) + 2


def test_the_coverage_is_that_of_pieces_that_were_not_counted() -> None:
    """Every tenth piece says something else: nothing of it is kept while there is better."""
    pieces = tuple("the the the the" if i % 10 != 9 else "fox fox" for i in range(20))
    counted = set(ids("the the"))
    kept = choose_tokens(TOKENIZER, Corpus("test", pieces), len(counted), NONE, SIZE)
    assert counted == set(kept.token_ids.tolist())
    fox = ids("fox fox")
    assert kept.coverage == pytest.approx(sum(token in kept.token_ids for token in fox) / len(fox))
    assert kept.coverage < 1
    assert choose_tokens(TOKENIZER, Corpus("test", pieces), SIZE, NONE, SIZE).coverage == 1


def test_required_tokens_come_first_and_the_lowest_ids_fill_up(info: CheckpointInfo) -> None:
    required = required_tokens(info, SIZE)
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>"]
    assert np.isin([TOKENIZER.convert_tokens_to_ids(name) for name in names], required).all()
    assert required.max() == SIZE - 1
    kept = choose_tokens(TOKENIZER, Corpus("test", ("aaaa",)), required.size + 20, required, SIZE).token_ids
    assert np.isin(required, kept).all()
    said = set(ids("aaaa"))
    rest = set(kept.tolist()) - set(required.tolist()) - said
    lowest = [i for i in range(SIZE) if i not in set(required.tolist()) | said]
    assert rest == set(lowest[: len(rest)])
    assert required_tokens(info, 2).tolist() == [0, 1]


def test_the_text_of_chat_answers_counts_with_the_corpus() -> None:
    corpus = Corpus("test", ("the fox " * 200, "the fox " * 200), chat="12 12 12 12")
    plain = Corpus("test", corpus.pieces)
    chat = set(ids(corpus.chat))
    size = len(chat | set(ids(corpus.pieces[0]))) + 20  # the lowest ids come too
    assert chat <= set(choose_tokens(TOKENIZER, corpus, size, NONE, SIZE).token_ids.tolist())
    assert not chat <= set(choose_tokens(TOKENIZER, plain, size, NONE, SIZE).token_ids.tolist())


@pytest.mark.parametrize("size", [-1, 1, 3, SIZE + 1])
def test_sizes_that_cannot_be(size: int, info: CheckpointInfo) -> None:
    required = required_tokens(info, SIZE)
    with pytest.raises(UsageError, match=rf"must be {required.size} \(the special tokens\) to {SIZE} .*, got {size}"):
        check_size(size, required, SIZE)
    check_size(required.size, required, SIZE)
    check_size(SIZE, required, SIZE)


def test_files_are_read_whole_and_characters_are_not_torn(tmp_path: Path) -> None:
    text = "naïve café 你好 😀 " * 5000  # 16 KiB boundaries fall into characters of two, three and four bytes
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "b.txt").write_text("b", encoding="utf-8")
    corpus = read_corpus([tmp_path / "a.txt", tmp_path / "b.txt"])
    read = "".join(corpus.pieces)
    assert len(corpus.pieces) > 5
    assert 0 <= len(text) + 1 - len(read) < len(corpus.pieces)  # at most one character a boundary is left out
    assert corpus.note == "a.txt and 1 more"
    assert not corpus.chat


def test_of_a_large_corpus_evenly_spaced_pieces_are_read(tmp_path: Path) -> None:
    (tmp_path / "large").write_text("".join(f"{i:07}\n" for i in range(2**21)), encoding="utf-8")  # 16 MiB
    pieces = read_corpus([tmp_path / "large"]).pieces
    assert sum(map(len, pieces)) == 8 << 20
    starts = [int(piece.split("\n")[0]) for piece in pieces]
    assert np.ptp(np.diff(starts)) == 0
    assert starts[-1] > 2**21 * 0.99


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"corpus: cannot be read \(No such file or directory\): name a --draft-corpus"),
        (b"", "corpus: there is no text in the corpus"),
        (b" \n", "corpus: there is no text in the corpus"),
        (b"abc\0def", "corpus: not a text .a NUL byte"),
        (b"x" * 20_000 + b"\xff", "corpus: not UTF-8 at byte 20000"),
        ("é".encode("latin-1"), "corpus: not UTF-8 at byte 0"),
    ],
)
def test_what_is_no_text_is_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "corpus"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        read_corpus([path])
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_corpus(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError):
        read_corpus([tmp_path / "folder"])


def test_the_default_corpus_is_code_prose_and_chat() -> None:
    corpus = standard_library()
    assert 1 << 20 < sum(map(len, corpus.pieces)) < 10 << 20
    text = "".join(corpus.pieces)
    assert "def __init__(self" in text
    assert "```python" in corpus.chat
    assert standard_library() == corpus
