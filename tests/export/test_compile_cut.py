"""A pair whose draft has a cut head, from checkpoints to text: lossless, and refused where its ids are wrong."""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray

import draftc.runtime as runtime
from draftc.export.compile import compile_bundle
from draftc.export.options import CompileOptions
from draftc.export.scheme import QuantizationScheme
from draftc.runtime.bundle import open_bundle
from draftc.runtime.errors import BundleError
from draftc.runtime.manifest import parse
from draftc.runtime.sampler import Sampler
from draftc.runtime.vocabulary import read_token_ids
from draftc.runtime.warp import Sampling
from tests.export.tiny_models import SPECIAL, TEXT, save_pair, tiny_tokenizer

PROMPT = "the quick brown fox"
SIZE = 100


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=["fp32", "int4", "tied", "tied int4"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A qwen2 target with a llama draft; "tied": the qwen2 model drafts for itself, its head is its embedding."""
    folder = tmp_path_factory.mktemp("cut")
    save_pair(folder)
    (folder / "corpus.txt").write_text(TEXT * 40, encoding="utf-8")
    compile_bundle(
        CompileOptions(
            str(folder / "target"),
            str(folder / ("target" if "tied" in request.param else "draft")),
            folder / "out",
            max_length=96,
            scheme=QuantizationScheme(4, 16, embedding="shared") if "int4" in request.param else None,
            draft_vocab=SIZE,
            draft_corpus=(folder / "corpus.txt",),
        )
    )
    return folder / "out"


def test_the_bundle_says_what_was_kept(bundle: Path) -> None:
    manifest = open_bundle(bundle).manifest
    cut, model = manifest.draft.vocabulary, manifest.draft.model
    assert cut is not None
    assert model is not None
    assert (cut.size, model.spec.vocab_rows, cut.corpus) == (SIZE, SIZE, "corpus.txt")
    assert 0.5 < cut.coverage <= 1
    ids = read_token_ids(bundle / cut.path, cut.size, manifest.vocab_size)
    tokenizer = tiny_tokenizer()
    assert np.isin([tokenizer.convert_tokens_to_ids(token) for token in SPECIAL], ids).all()
    (said,) = tokenizer([TEXT])["input_ids"]
    assert np.isin([token for token, _ in Counter(said).most_common(5)], ids).all()
    assert all(report.max_abs_diff <= report.tolerance for report in manifest.parity if report.stage == "capture")


def test_a_cut_draft_keeps_its_whole_embedding(bundle: Path) -> None:
    """Stored as the head where the two are one matrix and rounded; in the target in one place."""
    manifest = open_bundle(bundle).manifest
    for role, model in (("target", manifest.target), ("draft", manifest.draft.model)):
        assert model is not None
        tied = role == "target" or model.architecture == "qwen2"
        initializers = ir.load(bundle / model.graph).graph.initializers
        if model.quantization is None or not tied:
            assert model.quantization is None or model.quantization.embedding == "float"
            continue
        assert model.quantization.embedding == "shared"
        (rows,) = (value for name, value in initializers.items() if name.endswith("_rows"))
        assert rows.shape is not None
        assert rows.shape[0] == 336  # the model's
        codes = initializers[(rows.name or "").removesuffix("_rows")] if role == "target" else None
        if codes is not None:
            assert isinstance(codes.const_value, ir.ExternalTensor)
            assert isinstance(rows.const_value, ir.ExternalTensor)
            assert codes.const_value.offset == rows.const_value.offset


def test_greedy_text_is_the_targets_own(bundle: Path) -> None:
    with runtime.open(bundle, threads=1) as session:
        plain = session.generate(PROMPT, max_new_tokens=40, temperature=0, ignore_eos=True, method="plain")
        drafted = session.generate(PROMPT, max_new_tokens=40, temperature=0, ignore_eos=True, method="draft_model")
        assert drafted.token_ids[:12] == plain.token_ids[:12]  # behind that, near ties of int4 may go either way
        if session.manifest.precision == "fp32":
            assert drafted.token_ids == plain.token_ids
        assert drafted.stats.proposed > 0


def test_what_is_proposed_is_in_the_cut_and_q_is_zero_elsewhere(bundle: Path) -> None:
    with runtime.open(bundle, threads=1) as session:
        manifest = session.manifest
        assert manifest.draft.vocabulary is not None
        ids = read_token_ids(bundle / manifest.draft.vocabulary.path, SIZE, manifest.vocab_size)
        outside = np.setdiff1d(np.arange(manifest.vocab_size), ids)
        text = np.array(session.encode(PROMPT))
        for sampling in (Sampling(1.0), Sampling(1.0, repetition_penalty=1.2, top_k=5), Sampling()):
            sampler = Sampler(sampling, text.tolist(), manifest.vocab_size, seed=0)
            proposal = session.drafters["draft_model"].propose(text, 6, sampler)
            assert np.isin(proposal.tokens, ids).all()
            for q in proposal.q or ():
                assert q is not None
                assert q.shape == (manifest.vocab_size,)
                assert q.sum() == pytest.approx(1)
                assert not q[outside].any()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda ids: ids[:-1], "token_ids.bin: has 396 bytes"),
        (lambda ids: np.where(np.arange(ids.size) == 5, ids[4], ids), "must ascend without repeating"),
        (lambda ids: np.append(ids[:-1], 10_000), "token ids must be from 0 to"),
        (lambda ids: None, "token_ids.bin: missing from the bundle"),
    ],
    ids=["too few", "twice", "out of range", "missing"],
)
def test_hostile_ids_are_refused(
    bundle: Path, tmp_path: Path, harm: Callable[[NDArray[np.int32]], NDArray[np.int32] | None], message: str
) -> None:
    shutil.copytree(bundle, tmp_path / "b")
    file = tmp_path / "b" / "draft" / "token_ids.bin"
    harmed = harm(np.frombuffer(file.read_bytes(), "<i4"))
    if harmed is None:
        file.unlink()
    else:
        file.write_bytes(harmed.astype("<i4").tobytes())
        document = json.loads((tmp_path / "b" / "bundle.json").read_text())
        (entry,) = (entry for entry in document["files"] if entry["path"] == "draft/token_ids.bin")
        entry["size"] = file.stat().st_size
        entry["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
        (tmp_path / "b" / "bundle.json").write_text(json.dumps(document))
        parse((tmp_path / "b" / "bundle.json").read_text())
    with pytest.raises(BundleError, match=message):
        runtime.open(tmp_path / "b", threads=1)
