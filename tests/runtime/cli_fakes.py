"""What the tests of the command share: a session over scripted fake engines, and a way to call `draftc` in-process."""

import io
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftc.runtime.cli import main
from draftc.runtime.drafter import Drafter, ModelDrafter, NgramDrafter
from draftc.runtime.engine import Logits, Tokens
from draftc.runtime.manifest import Backend, DraftModel, Manifest, Model, Source, TokenizerInfo
from draftc.runtime.session import Session
from draftc.runtime.text import Tokenizer
from tests.runtime.fakes import FakeEngine, fake_decoder

__all__ = ["Draftc", "FakeBundle", "Result", "Script", "Terminal", "chat_folder", "manifest_for", "one_line"]

FINGERPRINT = "sha256:" + "0123456789abcdef" * 4
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Script:
    """A model that answers text with text: `answer` maps the prompt's text to the answer's, which ends with EOS.

    In a conversation the prompt is the last message. `wrong` are indices of answer tokens that it gets wrong.
    """

    def __init__(self, tokenizer: Tokenizer, answer: Callable[[str], str], prompt_tokens: int = 0) -> None:
        self._tokenizer = tokenizer
        self._answer = answer
        self._start = tokenizer.encode("<|im_start|>")[0]
        self._end = tokenizer.encode("<|im_end|>")[0]
        self._header = tokenizer.encode("<|im_start|>assistant\n")
        self.prompt_tokens = prompt_tokens
        self.wrong: set[int] = set()
        self.prompts: list[str] = []  # what was asked, in order
        self.on_token: Callable[[int], None] = lambda index: None

    def __call__(self, prefix: Tokens) -> Logits:
        logits = np.zeros(self._tokenizer.vocab_size, np.float32)
        ids = prefix.tolist()
        starts = [i for i, token in enumerate(ids) if token == self._start]
        begin = starts[-1] + len(self._header) if starts else self.prompt_tokens
        index = len(ids) - begin
        if index < 0 or (starts and ids[starts[-1] : begin] != self._header):
            return logits  # a row inside the prompt, which nobody looks at
        if starts:
            prompt = self._tokenizer.decode(ids[starts[-2] : starts[-1]]).partition("\n")[2].strip()
        else:
            prompt = self._tokenizer.decode(ids[:begin])
        if index == 0:
            self.prompts.append(prompt)
        self.on_token(index)
        answer = [*self._tokenizer.encode(self._answer(prompt)), self._end]
        token = answer[index] if index < len(answer) else self._end
        logits[token + 1 if index in self.wrong else token] = 9.0
        return logits


def manifest_for(vocab_size: int, engine: FakeEngine, *, max_length: int, k: int) -> Manifest:
    """A manifest as the session needs it: target and draft are the same graph."""
    source = Source(kind="folder", location="models/tiny", license="apache-2.0", fingerprint=FINGERPRINT)

    def model(folder: str) -> Model:
        graph = f"{folder}/model.onnx"
        return Model(graph=graph, architecture="llama", parameters=1_500_000, source=source, spec=engine.spec)

    return Manifest(
        draftc_version="0.1.0",
        name="tiny",
        created="2026-01-31T12:00:00Z",
        backend=Backend(name="onnxruntime", version="1.32.0", opset=24),
        precision="fp32",
        num_speculative_tokens=k,
        max_length=max_length,
        max_width=8,
        prefill_chunk=16,
        vocab_size=vocab_size,
        tokenizer=TokenizerInfo(fingerprint=FINGERPRINT),
        target=model("target"),
        draft=DraftModel(model=model("draft")),
    )


@dataclass
class FakeBundle:
    """Stands in for `draftc.runtime.open`: a real session, whose engines are scripted, and a new one each time.

    `opened` has the arguments of the last call. `measures`: opening reports progress, as measuring costs does.
    """

    folder: Path
    answer: Callable[[str], str] = field(default=lambda prompt: prompt.upper())
    max_length: int = 200
    prompt: str = ""  # what a plain `run` is asked, to know where its answer begins
    opened: dict[str, Any] = field(default_factory=dict)
    measures: bool = False

    def __post_init__(self) -> None:
        tokenizer = self.tokenizer = Tokenizer.from_folder(self.folder)
        self.target = Script(tokenizer, self.answer, len(tokenizer.encode(self.prompt)))
        self.draft = Script(tokenizer, self.answer, len(tokenizer.encode(self.prompt)))
        self.session, self.engine = self._new_session()

    def __call__(self, path: Path, **arguments: Any) -> Session:
        if self.opened:
            self.session, self.engine = self._new_session()
        self.opened = {"path": path, **arguments}
        for done in (0.5, 1.0) if self.measures else ():
            arguments["on_progress"]("measuring", done)
        return self.session

    def _new_session(self) -> tuple[Session, FakeEngine]:
        vocab = self.tokenizer.vocab_size
        target, engine = fake_decoder(self.target, vocab, max_length=self.max_length)
        draft, _ = fake_decoder(self.draft, vocab, max_length=self.max_length)
        manifest = manifest_for(vocab, engine, max_length=self.max_length, k=2)
        drafters: Mapping[str, Drafter] = {"draft_model": ModelDrafter(draft), "ngram": NgramDrafter()}
        return Session(manifest, self.tokenizer, target, drafters), engine


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@dataclass(frozen=True)
class Result:
    """What a call of `draftc` did."""

    code: int
    out: str
    err: str


@dataclass
class Draftc:
    """Calls `draftc` in this process, with `stdin` as its input: piped, or typed if `terminal`."""

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *args: str, stdin: str = "", terminal: bool = False) -> Result:
        self.monkeypatch.setattr(sys, "stdin", Terminal(stdin) if terminal else io.StringIO(stdin))
        with pytest.raises(SystemExit) as exit_info:
            main(args)
        captured = self.capsys.readouterr()
        code = exit_info.value.code
        assert isinstance(code, int)
        return Result(code, captured.out, captured.err)

    def with_bundle(self, folder: Path, **fields: Any) -> FakeBundle:
        """Let every bundle that is opened be a FakeBundle of these fields."""
        bundle = FakeBundle(folder, **fields)
        self.monkeypatch.setattr("draftc.runtime.open", bundle)
        return bundle


def chat_folder(source: Path, folder: Path) -> Path:
    """A copy of the tokenizer folder `source` with a ChatML template."""
    shutil.copytree(source, folder)
    (folder / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    return folder


def one_line(text: str) -> str:
    """`text`, which must be a single line."""
    assert text.count("\n") == 1, text
    assert text.endswith("\n")
    return text.removesuffix("\n")
