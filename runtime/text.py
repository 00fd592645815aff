"""The bundle's tokenizer folder: text to token ids and back, chat templates, and the checkpoint's sampling defaults.

The folder is what transformers' `save_pretrained` writes: tokenizer.json, tokenizer_config.json, and where the
checkpoint has them chat_template.jinja and generation_config.json. As in transformers, tokenizer.json alone decides
which special tokens (BOS, …) a plain prompt gets: `add_bos_token` in tokenizer_config.json is not read.
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import tokenizers

from draftc.runtime.chat_template import ChatTemplate
from draftc.runtime.detokenizer import Detokenizer, DetokenizerFactory
from draftc.runtime.errors import BundleError, UsageError
from draftc.runtime.manifest import INT32_MAX
from draftc.runtime.strictjson import show

__all__ = ["Detokenizer", "GenerationDefaults", "Tokenizer"]

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
EXTRA_TEMPLATES = "additional_chat_templates"

# The variables that transformers hands to every chat template, where the checkpoint names them.
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MAX_FILE_BYTES = 16 << 20  # of every file but tokenizer.json


@dataclass(frozen=True)
class GenerationDefaults:
    """How the checkpoint's authors want it sampled: generation_config.json, completed as transformers' `generate` does.

    Without `do_sample` decoding is greedy: `temperature` is then 0, whatever the file says of it. The other filters
    keep the values that they would have if sampling is asked for; where the file is silent that is top_k = 50 (0 is
    off), top_p = 1, min_p = 0, and temperature = 1. `repetition_penalty` counts in greedy decoding too.
    `eos_token_ids`, `bos_token_id` and `pad_token_id` fall back to what the tokenizer names.
    """

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    do_sample: bool = False
    temperature: float = 0.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None

    @classmethod
    def from_folder(cls, folder: Path, tokenizer: "Tokenizer | None" = None) -> Self:
        """Read `folder`/generation_config.json, which may be missing. Raises BundleError when a value is malformed."""
        fields = _Fields(folder / GENERATION_CONFIG)
        eos, bos, pad = fields.ids("eos_token_id"), fields.ids("bos_token_id"), fields.ids("pad_token_id")
        if tokenizer is not None:
            eos = eos or _ids(tokenizer.named_token_id("eos_token"))
            bos = bos or _ids(tokenizer.named_token_id("bos_token"))
            pad = pad or _ids(tokenizer.named_token_id("pad_token"))
        do_sample = fields.boolean("do_sample")
        temperature = fields.number("temperature", 1.0, low=0.0)
        return cls(
            eos_token_ids=eos,
            bos_token_id=next(iter(bos), None),
            pad_token_id=next(iter(pad), None),
            do_sample=do_sample,
            temperature=temperature if do_sample else 0.0,
            top_k=fields.whole("top_k", low=0) if fields.has("top_k") else 50,
            top_p=fields.number("top_p", 1.0, low=0.0, high=1.0, above=True),
            min_p=fields.number("min_p", 0.0, low=0.0, high=1.0),
            repetition_penalty=fields.number("repetition_penalty", 1.0, low=0.0, above=True),
            max_new_tokens=fields.whole("max_new_tokens", low=1) if fields.has("max_new_tokens") else None,
        )


class Tokenizer:
    """Text to token ids and back, exactly as transformers' AutoTokenizer does from the same folder.

    Nothing is ever truncated or padded. Only the clean-up of spaces that transformers applies to some encoder models'
    decoded text is left out: it would rewrite text that has been streamed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with _malformed(folder / TOKENIZER):
            self._backend = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER))
            self._backend.no_truncation()
            self._backend.no_padding()
            self._backend.encode("")  # a post-processor that lacks its tokens fails only when it is used
        self._config = _read_json(folder / TOKENIZER_CONFIG)
        self._backend.encode_special_tokens = self._config.get("split_special_tokens") is True
        self._streams = DetokenizerFactory(self._backend, str(folder / TOKENIZER))
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self.named_tokens = {name: token for name in NAMED_TOKENS if (token := self._named_token(name)) is not None}
        self.defaults = GenerationDefaults.from_folder(folder, self)
        self._compiled: dict[str, ChatTemplate] = {}

    @classmethod
    def from_folder(cls, folder: str | Path) -> Self:
        """Open a tokenizer folder. Raises BundleError that names the file which is missing or malformed."""
        return cls(Path(folder))

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the checkpoint puts around one (often BOS)."""
        return self._encode(prompt, add_special_tokens=True)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: object,
    ) -> list[int]:
        """Token ids of a conversation. The template writes BOS itself where the checkpoint wants one, so none is added.

        See `render_chat`.
        """
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables)
        return self._encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: object,
    ) -> str:
        """The prompt text of a conversation. `variables` are the template's own switches (`enable_thinking=False`).

        With several templates, "tool_use" serves a call with tools and "default" the rest. Raises UsageError for
        malformed messages, for a checkpoint without a template, and when the template refuses.
        """
        template = self._chat_template("tool_use" if tools is not None and "tool_use" in self._templates else "default")
        values = {**self.named_tokens, "tools": tools, "documents": None, **variables}
        return template.render(messages, {**values, "add_generation_prompt": add_generation_prompt})

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint comes with a chat template."""
        return bool(self._templates)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`. Special tokens and ids outside the vocabulary (padding rows) give no text."""
        try:
            return self._streams.decode([int(token_id) for token_id in ids])
        except (OverflowError, TypeError, ValueError) as error:
            raise UsageError(f"token ids must be whole numbers of 0 or more: {error}") from error

    def token_text(self, token_id: int) -> str:
        """One token for display: as in mid-text, special tokens by their name, U+FFFD for a part of a character."""
        if token_id in self._streams.special:
            return self._backend.id_to_token(token_id) or ""
        return self._streams.piece(token_id)

    def detokenizer(self) -> Detokenizer:
        """A new stream of text; see `detokenizer.Detokenizer`."""
        return self._streams.start()

    def named_token_id(self, name: str) -> int | None:
        """The id of "eos_token", "bos_token", …; None where the checkpoint has none."""
        return self._backend.token_to_id(self.named_tokens[name]) if name in self.named_tokens else None

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if not isinstance(text, str):
            raise UsageError(f"the prompt must be text, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"the prompt holds a lone surrogate at {error.start}: it is not valid Unicode") from error
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def _named_token(self, name: str) -> str | None:
        token = self._config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if token is not None and not isinstance(token, str):
            raise BundleError(f"{self._folder / TOKENIZER_CONFIG}: {name} must be a string, got {token!r}")
        return token

    @cached_property
    def _templates(self) -> dict[str, tuple[str, Path]]:
        """Name → (template, its file). As in transformers, template files win over tokenizer_config.json."""
        files = {"default": self._folder / CHAT_TEMPLATE}
        files |= {path.stem: path for path in sorted((self._folder / EXTRA_TEMPLATES).glob("*.jinja"))}
        found = {name: (_read_text(path), path) for name, path in files.items() if path.is_file()}
        if found:
            return found
        path = self._folder / TOKENIZER_CONFIG
        entry = self._config.get("chat_template")
        if entry is None:
            return {}
        if isinstance(entry, str):
            entry = {"default": entry}
        if isinstance(entry, list) and all(isinstance(one, dict) for one in entry):
            entry = {one.get("name"): one.get("template") for one in entry}
        if not isinstance(entry, dict) or not all(isinstance(text, str) for pair in entry.items() for text in pair):
            raise BundleError(f"{path}: chat_template must be a string, or a list of name and template")
        return {name: (template, path) for name, template in entry.items()}

    def _chat_template(self, name: str) -> ChatTemplate:
        if name not in self._compiled:
            if name not in self._templates:
                named = f"only {', '.join(sorted(self._templates))}" if self._templates else "none"
                raise UsageError(
                    f"this checkpoint has no default chat template ({named}): use a plain prompt, "
                    f"or add {CHAT_TEMPLATE} to the checkpoint and compile it again"
                )
            template, path = self._templates[name]
            self._compiled[name] = ChatTemplate(template, str(path))
        return self._compiled[name]


class _Fields:
    """Typed access to one JSON file; null counts as missing. Raises BundleError that names file, field and value."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values = {key: value for key, value in _read_json(path).items() if value is not None}

    def has(self, name: str) -> bool:
        return name in self._values

    def boolean(self, name: str) -> bool:
        value = self._values.get(name, False)
        if not isinstance(value, bool):
            self._fail(name, value, "true or false")
        return bool(value)

    def number(self, name: str, default: float, *, low: float, high: float = math.inf, above: bool = False) -> float:
        value = self._values.get(name, default)
        fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        # float_info.max: JSON's 1e999 is infinity, and a whole number may exceed every float.
        if not fits or value > sys.float_info.max or (above and value == low):
            self._fail(name, value, f"a number {'above' if above else 'of at least'} {low:g} and up to {high:g}")
        return float(value)

    def whole(self, name: str, *, low: int) -> int:
        value = self._values[name]
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= INT32_MAX:
            self._fail(name, value, f"a whole number from {low} to {INT32_MAX}")
        return int(value)

    def ids(self, name: str) -> tuple[int, ...]:
        """One id or a list of them; a negative id means "none", as older configs write it."""
        value = self._values.get(name, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i <= INT32_MAX for i in ids):
            self._fail(name, value, f"a token id up to {INT32_MAX} or a list of them")
        return tuple(dict.fromkeys(i for i in ids if i >= 0))

    def _fail(self, name: str, value: object, allowed: str) -> None:
        raise BundleError(f"{self._path}: {name} must be {allowed}, got {show(value)}")


def _ids(token_id: int | None) -> tuple[int, ...]:
    return () if token_id is None else (token_id,)


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BundleError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB, which no such file needs")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BundleError(f"{path}: not UTF-8 text") from error


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, {} where there is no such file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise BundleError(f"{path}: must hold a JSON object, holds {type(value).__name__}")
    return value


@contextmanager
def _malformed(path: Path) -> Iterator[None]:
    """Turn whatever the tokenizers library raises on a file, panics of its Rust code included, into BundleError."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise BundleError(f"{path}: not a readable tokenizer: {' '.join(str(error).split())}") from error
        raise
