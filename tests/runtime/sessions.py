"""Sessions over fake engines, for the tests of the session: a target, a draft that often agrees, and a tokenizer."""

import threading
from dataclasses import dataclass

from draftc.runtime.drafter import Drafter, ModelDrafter, NgramDrafter
from draftc.runtime.engine import Logits, Tokens
from draftc.runtime.graphio import GraphSpec
from draftc.runtime.manifest import Backend, DraftModel, Manifest, Model, NgramDraft, Source, TokenizerInfo
from draftc.runtime.session import Session
from draftc.runtime.text import Tokenizer
from tests.runtime.fakes import FakeEngine, HashedModel, fake_decoder
from tests.runtime.fakes import Model as NextLogits

__all__ = ["Gate", "Opened", "make_manifest", "make_session"]

FINGERPRINT = "sha256:" + "ab" * 32
MAX_LENGTH = 60
MAX_WIDTH = 6
PREFILL_CHUNK = 8


class Gate:
    """A model that can be made to wait in the middle of an engine call."""

    def __init__(self, model: NextLogits) -> None:
        self.model = model
        self.entered = threading.Event()
        self.open = threading.Event()
        self.open.set()

    def __call__(self, prefix: Tokens) -> Logits:
        self.entered.set()
        assert self.open.wait(timeout=30)
        return self.model(prefix)

    def shut(self) -> None:
        self.entered.clear()
        self.open.clear()


class Endless(HashedModel):
    """Never ends a text of its own accord: token `end` is last in every ranking."""

    def __init__(self, vocab: int, seed: int, end: int) -> None:
        super().__init__(vocab, seed)
        self.end = end

    def __call__(self, prefix: Tokens) -> Logits:
        logits = super().__call__(prefix)
        logits[self.end] = -40.0
        return logits


@dataclass
class Opened:
    """A session, with what it is made of."""

    session: Session
    model: NextLogits
    gate: Gate
    target: FakeEngine
    draft: FakeEngine


def make_manifest(spec: GraphSpec, vocab_size: int, *, method: str = "draft_model", k: int = 3) -> Manifest:
    source = Source(kind="folder", location="models/tiny", fingerprint=FINGERPRINT)

    def model(folder: str) -> Model:
        return Model(graph=f"{folder}/model.onnx", architecture="llama", parameters=1, source=source, spec=spec)

    ngram = NgramDraft(min_ngram=1, max_ngram=3)
    return Manifest(
        draftc_version="0.1.0",
        name="tiny",
        created="2026-01-31T12:00:00Z",
        backend=Backend(name="onnxruntime", version="1.32.0", opset=24),
        precision="fp32",
        num_speculative_tokens=k,
        max_length=spec.buffer_length - MAX_WIDTH,
        max_width=MAX_WIDTH,
        prefill_chunk=PREFILL_CHUNK,
        vocab_size=vocab_size,
        tokenizer=TokenizerInfo(fingerprint=FINGERPRINT),
        target=model("target"),
        draft=DraftModel(model=model("draft")) if method == "draft_model" else ngram,
    )


def make_session(tokenizer: Tokenizer, *, method: str = "draft_model", k: int = 3, seed: int = 1) -> Opened:
    """A fresh session. Models of the same seed say the same things."""
    vocab = tokenizer.vocab_size
    limits = {"max_length": MAX_LENGTH, "max_width": MAX_WIDTH, "prefill_chunk": PREFILL_CHUNK}
    model = Endless(vocab, seed, *tokenizer.defaults.eos_token_ids)
    gate = Gate(model)
    target, target_engine = fake_decoder(gate, vocab, **limits)
    draft, draft_engine = fake_decoder(HashedModel(vocab, seed + 1000, spread=0.3, like=model), vocab, **limits)
    drafters: dict[str, Drafter] = {"ngram": NgramDrafter(1, 3)}
    if method == "draft_model":
        drafters["draft_model"] = ModelDrafter(draft)
    manifest = make_manifest(target_engine.spec, vocab, method=method, k=k)
    return Opened(Session(manifest, tokenizer, target, drafters), model, gate, target_engine, draft_engine)
