"""Token ids to text, one at a time: what comes out is final, and joins to exactly what decoding all ids at once gives.

Two kinds of tokenizer cover decoder-only models:

* byte-level BPE (GPT-2, Llama 3, Qwen, …): a token is some bytes, so a character may be split over tokens. An
  incomplete character is held back until it is complete, or until the next byte shows that it never will be.
* everything else is text per token, some of it written as bytes ("<0xE4>", SentencePiece's byte fallback). The
  tokenizers library decodes a run of byte tokens as a whole: one stray byte turns all of the run into U+FFFD. So a run
  is held back until a token that is no byte ends it.

tokenizers' own DecodeStream is not used: it emits part of such a run and then fails on the next token.
"""

import codecs
import json
import re
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

from draftc.runtime.errors import BundleError

__all__ = ["Detokenizer", "DetokenizerFactory"]

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def _byte_level_alphabet() -> Iterator[tuple[str, int]]:
    """(character, byte) of byte-level BPE: printable Latin-1 stands for itself, other bytes for U+0100 onwards."""
    shifted = 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF:
            yield chr(byte), byte
        else:
            yield chr(0x100 + shifted), byte
            shifted += 1


BYTE_OF = MappingProxyType(dict(_byte_level_alphabet()))


class Detokenizer(Protocol):
    """One stream of text. Special tokens and ids outside the vocabulary (padding rows) give no text."""

    def push(self, token_id: int) -> str:
        """The text that this token makes final: possibly "", possibly including text held back before."""

    @property
    def held(self) -> str:
        """What `finish` would return now. U+FFFD in it stands for bytes that do not make a character (yet)."""

    def finish(self) -> str:
        """Release what is held back; the stream is over."""


class DetokenizerFactory:
    """Starts streams for one tokenizer and keeps what they share: the text or the bytes of each token, once seen.

    Raises BundleError for a decoder whose earlier text depends on later tokens (CTC, or end-of-word suffixes): it
    can't be streamed.
    """

    def __init__(self, backend: Backend, source: str) -> None:
        self.backend = backend
        self.special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        steps = _decoder_steps(backend)
        self.byte_level = [step["type"] for step in steps] == ["ByteLevel"]
        self.byte_fallback = any(step["type"] == "ByteFallback" for step in steps)
        if not self.byte_level:
            _check_streamable(steps, source)
        self._bytes: dict[int, bytes] = {}
        self._text: dict[int, str] = {}
        self._anchor = () if self.byte_level else self._find_anchor()
        self._anchor_text = self.decode(self._anchor)

    def start(self) -> Detokenizer:
        """A new stream."""
        return _ByteStream(self) if self.byte_level else _TextStream(self)

    def decode(self, ids: tuple[int, ...] | list[int]) -> str:
        """All ids at once, special tokens skipped."""
        return str(self.backend.decode(ids, skip_special_tokens=True))

    def piece(self, token_id: int) -> str:
        """A token's text where it isn't the first of a text; U+FFFD for bytes that are no character by themselves."""
        if self.byte_level:
            return self.bytes_of(token_id).decode(errors="replace")
        if token_id not in self._text:
            self._text[token_id] = self.continuation([token_id])
        return self._text[token_id]

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token of a byte-level tokenizer stands for."""
        if token_id not in self._bytes:
            token = "" if token_id in self.special else self.backend.id_to_token(token_id) or ""
            try:
                self._bytes[token_id] = bytes(BYTE_OF[char] for char in token)
            except KeyError:  # an added token, kept as plain text
                self._bytes[token_id] = token.encode()
        return self._bytes[token_id]

    def is_silent(self, token_id: int) -> bool:
        """Whether the token gives no text at all: special, or outside the vocabulary."""
        return token_id in self.special or self.backend.id_to_token(token_id) is None

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one byte of a byte-fallback run."""
        return self.byte_fallback and BYTE_TOKEN.fullmatch(self.backend.id_to_token(token_id) or "") is not None

    def continuation(self, ids: list[int]) -> str:
        """The text of `ids` in mid-text: decoded after an anchor, since decoders trim the space before a first word."""
        return self.decode([*self._anchor, *ids])[len(self._anchor_text) :]

    def _find_anchor(self) -> tuple[int, ...]:
        """Ids of an ordinary token that has some text even at the beginning."""
        for token_id in sorted(self.backend.get_vocab().values()):
            if not self.is_silent(token_id) and not self.is_byte(token_id):
                for anchor in ((token_id,), (token_id, token_id)):
                    if self.decode(anchor):
                        return anchor
        return ()


class _ByteStream:
    """Byte-level BPE. Python's incremental decoder and tokenizers agree on how many U+FFFD invalid bytes become."""

    def __init__(self, tokens: DetokenizerFactory) -> None:
        self._tokens = tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._tokens.bytes_of(token_id))

    @property
    def held(self) -> str:
        return self._decoder.getstate()[0].decode(errors="replace")

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _TextStream:
    """Text per token; `_run` has the byte tokens held back, `_head` the tokens so far while they gave no text."""

    def __init__(self, tokens: DetokenizerFactory) -> None:
        self._tokens = tokens
        self._run: list[int] = []
        self._head: list[int] | None = []

    def push(self, token_id: int) -> str:
        if self._tokens.is_silent(token_id):
            return ""
        if self._tokens.is_byte(token_id):
            self._run.append(token_id)
            return ""
        if self._head is None and not self._run:
            return self._tokens.piece(token_id)
        return self._release([token_id])

    @property
    def held(self) -> str:
        return self._text_of(self._run) if self._run else ""

    def finish(self) -> str:
        return self._release([]) if self._run else ""

    def _release(self, ids: list[int]) -> str:
        group = [*self._run, *ids]
        text = self._text_of(group)
        self._run = []
        if self._head is not None:
            self._head = None if text else [*self._head, *group]
        return text

    def _text_of(self, group: list[int]) -> str:
        return self._tokens.continuation(group) if self._head is None else self._tokens.decode([*self._head, *group])


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    """The tokenizer's decoder as a flat list of its steps, as tokenizer.json writes them."""
    if backend.decoder is None:
        return []

    def flatten(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if step["type"] == "Sequence":
            for inner in step["decoders"]:
                yield from flatten(inner)
        else:
            yield step

    return list(flatten(json.loads(backend.decoder.__getstate__())))


def _check_streamable(steps: list[dict[str, Any]], source: str) -> None:
    """Every step must work token by token, apart from what it does at the very beginning."""
    fused = False
    for step in steps:
        kind = step["type"]
        if kind == "Fuse":
            fused = True
        elif kind == "Replace":
            # On the fused text, only a pattern of one character can't reach from one token into the next.
            streamable = not fused or len(step["pattern"].get("String", "")) == 1
            if not streamable:
                raise BundleError(
                    f"{source}: the decoder replaces {step['pattern']} across tokens: it can't be streamed"
                )
        elif kind == "Strip" and step["stop"] and fused:
            raise BundleError(f"{source}: the decoder strips the end of the text: it can't be streamed")
        elif kind not in ("ByteFallback", "Metaspace", "Strip", "WordPiece"):
            raise BundleError(
                f"{source}: the decoder step {kind} can't be streamed; draftc serves byte-level, "
                "SentencePiece-like and WordPiece decoders"
            )
