"""Streamed text is final, and joins to what decoding everything at once gives."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from draftc.runtime.detokenizer import DetokenizerFactory
from draftc.runtime.errors import BundleError
from draftc.runtime.text import Tokenizer

# Drawn as fractions of the vocabulary, so that one strategy serves every tokenizer; a little above 1 is a padding row.
FRACTIONS = st.lists(st.floats(0, 1.03), max_size=40)
TEXTS = st.text(st.sampled_from("ab foxthe\n你好世😀👩‍é\u0301▁"), max_size=15)


@pytest.fixture(scope="session", params=["byte_level", "llama"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    folder: Path = request.getfixturevalue(f"{request.param}_folder")
    return Tokenizer.from_folder(folder)


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


def check(tokenizer: Tokenizer, ids: list[int]) -> None:
    detokenizer = tokenizer.detokenizer()
    so_far = ""
    for n, token in enumerate(ids, 1):
        so_far += detokenizer.push(token)
        # What is out plus what is held is the text up to here: so nothing is dropped, doubled or revised later on.
        assert so_far + detokenizer.held == tokenizer.decode(ids[:n])
    assert so_far + detokenizer.finish() == tokenizer.decode(ids)


@given(fractions=FRACTIONS)
@settings(deadline=None, max_examples=300)
def test_any_ids_join_to_the_decoded_text(tokenizer: Tokenizer, fractions: list[float]) -> None:
    check(tokenizer, [int(fraction * tokenizer.vocab_size) for fraction in fractions])


@given(blob=st.lists(st.one_of(st.binary(max_size=6), TEXTS.map(str.encode)), max_size=8).map(b"".join))
@settings(deadline=None, max_examples=300)
def test_any_bytes_one_token_each(tokenizer: Tokenizer, blob: bytes) -> None:
    if tokenizer._streams.byte_level:
        ids = {tokenizer._streams.bytes_of(i): i for i in range(tokenizer.vocab_size)}
        check(tokenizer, [ids[bytes([byte])] for byte in blob])
    else:
        check(tokenizer, [3 + byte for byte in blob])


@given(texts=st.lists(TEXTS, max_size=6), cuts=st.lists(st.integers(0, 20), min_size=6, max_size=6))
@settings(deadline=None, max_examples=300)
def test_texts_cut_anywhere_with_special_tokens_between(
    tokenizer: Tokenizer, texts: list[str], cuts: list[int]
) -> None:
    special = sorted(tokenizer._streams.special)[-1]
    ids = [i for text, cut in zip(texts, cuts, strict=False) for i in [*tokenizer.encode(text)[:cut], special]]
    check(tokenizer, ids)


@pytest.mark.parametrize("text", ["😀", "你好，世界", "👩‍👩‍👧 família", "naïve café", "a\nb\n\nc", "two  spaces "])
def test_a_split_character_never_shows(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_the_tokenizers_do_split_characters(byte_level_folder: Path, llama_folder: Path) -> None:
    """The tests above mean something only if characters fall apart into tokens."""
    for folder in (byte_level_folder, llama_folder):
        assert len(Tokenizer.from_folder(folder).encode("🦄")) >= 3


def test_a_stray_byte_is_replaced_once_it_is_certain(byte_level_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(byte_level_folder)
    first_of_four, *_ = (i for i in range(tokenizer.vocab_size) if tokenizer._streams.bytes_of(i) == b"\xf0")
    letter = tokenizer.encode("x")[0]
    assert stream(tokenizer, [first_of_four, letter, first_of_four]) == ["", "\ufffdx", "", "\ufffd"]


def test_a_later_byte_spoils_a_whole_run(llama_folder: Path) -> None:
    """tokenizers decodes a byte run as a whole, so a character in it is final only when the run is over."""
    tokenizer = Tokenizer.from_folder(llama_folder)
    byte = {b: 3 + b for b in range(256)}
    letter = tokenizer.encode("x")[-1]
    good = [byte[b] for b in "世".encode()]
    assert stream(tokenizer, [*good, letter]) == ["", "", "", "世x", ""]
    assert stream(tokenizer, [*good, byte[0xFF], letter]) == ["", "", "", "", "\ufffd" * 4 + "x", ""]


def test_text_without_bytes_comes_at_once(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the fox sleeps")
    detokenizer = tokenizer.detokenizer()
    for n, token in enumerate(ids, 1):
        detokenizer.push(token)
        assert detokenizer.held == "", f"token {n} of plain text was withheld"


def test_streams_are_independent(tokenizer: Tokenizer) -> None:
    left, right = tokenizer.encode("😀 the fox"), tokenizer.encode("你好世界 dog")
    one, two = tokenizer.detokenizer(), tokenizer.detokenizer()
    texts = ["", ""]
    for a, b in zip(left, right, strict=False):
        texts[0] += one.push(a)
        texts[1] += two.push(b)
    assert texts[0] + one.held == tokenizer.decode(left[: len(right)])
    assert texts[1] + two.held == tokenizer.decode(right[: len(left)])


WORDS = {token: i for i, token in enumerate(["[UNK]", "▁", "▁a", "b▁", "##c", "<0x41>", "<0xC3>", "<0xA9>", "▁▁", ""])}

LOCAL_DECODERS = {
    "none": None,
    "gguf order": decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)]
    ),
    "gemma": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "metaspace": decoders.Metaspace(),
    "two spaces stripped": decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
    "wordpiece": decoders.WordPiece(),
    "byte-level in a sequence": decoders.Sequence([decoders.ByteLevel()]),
}


@pytest.mark.parametrize("name", LOCAL_DECODERS)
@given(ids=st.lists(st.integers(0, len(WORDS) + 1), max_size=12))
@settings(deadline=None, max_examples=150)
def test_other_decoders_join_to_the_decoded_text(name: str, ids: list[int]) -> None:
    backend = Backend(models.WordLevel(WORDS, unk_token="[UNK]"))
    backend.add_special_tokens(["[UNK]"])
    if (decoder := LOCAL_DECODERS[name]) is not None:
        backend.decoder = decoder
    detokenizer = DetokenizerFactory(backend, "tokenizer.json").start()
    text = ""
    for n, token in enumerate(ids, 1):
        text += detokenizer.push(token)
        assert text + detokenizer.held == backend.decode(ids[:n])
    assert text + detokenizer.finish() == backend.decode(ids)


@pytest.mark.parametrize(
    ("decoder", "reason"),
    [
        (decoders.CTC(), "CTC"),
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]), "strips the end"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]), "across tokens"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]), "ByteLevel"),
    ],
)
def test_a_decoder_that_revises_text_is_refused(decoder: decoders.Decoder, reason: str) -> None:
    backend = Backend(models.WordLevel(WORDS, unk_token="[UNK]"))
    backend.decoder = decoder
    with pytest.raises(BundleError, match=f"tokenizer.json.*{reason}"):
        DetokenizerFactory(backend, "tokenizer.json")
