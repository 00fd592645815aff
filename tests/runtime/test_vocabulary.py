"""A draft with a cut head: what it proposes, what q is, and that acceptance stays exact; and hostile files of ids."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from draftc.runtime.decoder import Decoder, Limits
from draftc.runtime.drafter import ModelDrafter
from draftc.runtime.engine import Logits, Tokens
from draftc.runtime.errors import BundleError, EngineError, UsageError
from draftc.runtime.sampler import NoTokenAllowedError, Sampler
from draftc.runtime.vocabulary import CutVocabulary, read_token_ids, write_token_ids
from draftc.runtime.warp import Sampling
from tests.runtime.fakes import (
    Choices,
    EnumeratingSampler,
    FakeEngine,
    HashedModel,
    decode,
    fake_decoder,
    joint,
    outcomes,
    reference_distribution,
    tokens,
    total_variation,
)

VOCAB = 5
KEPT = np.array([0, 2, 4])
WARPED = Sampling(0.7, top_p=0.9, top_k=4, repetition_penalty=1.4, presence_penalty=0.3, logit_bias={0: 1.0, 1: 3.0})
PLAIN = Sampling(1.0, top_p=0.85)


def whole_row(row: Logits, kept: Tokens, size: int) -> Logits:
    """What a head that gives the other tokens no chance would say."""
    result = np.full(size, -np.inf, np.float32)
    result[kept] = row
    return result


def cut_drafter(model: HashedModel, kept: Tokens = KEPT) -> ModelDrafter:
    """A draft whose graph gives the columns `kept` of `model`'s logits."""
    engine = FakeEngine(lambda text: model(text)[kept], kept.size, 72)
    return ModelDrafter(Decoder(engine, Limits(64, 8, 16, kept.size)), CutVocabulary(kept, model.vocab))


@pytest.mark.parametrize("sampling", [PLAIN, WARPED, Sampling(1e-3), Sampling(2.0, min_p=0.3, top_k=2)])
def test_q_is_zero_outside_the_cut_and_warped_inside(sampling: Sampling) -> None:
    rng = np.random.default_rng(0)
    vocabulary = CutVocabulary(KEPT, VOCAB)
    for _ in range(20):
        row = rng.normal(size=KEPT.size).astype(np.float32)
        sampler = Sampler(sampling, [2, 1], VOCAB, seed=0)
        sampler.push(4)
        q = vocabulary.distribution(row, sampler)
        assert q.shape == (VOCAB,)
        assert (q[[1, 3]] == 0).all()
        expected = reference_distribution(whole_row(row, KEPT, VOCAB), sampling, [2, 1], [4])
        np.testing.assert_allclose(q, expected, atol=1e-6)


def test_rows_of_one_call_do_not_leak_into_the_next() -> None:
    vocabulary = CutVocabulary(KEPT, VOCAB)
    sampler = Sampler(WARPED, [], VOCAB, seed=0)
    first = vocabulary.distribution(np.array([9, 0, 0], np.float32), sampler)
    kept = first.copy()
    second = vocabulary.distribution(np.array([0, 0, 9], np.float32), sampler)
    np.testing.assert_array_equal(first, kept)
    np.testing.assert_allclose(
        second, CutVocabulary(KEPT, VOCAB).distribution(np.array([0, 0, 9], np.float32), sampler)
    )


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(repetition_penalty=2.0, logit_bias={3: 9.0, 4: -9.0})])
def test_greedy_is_the_best_token_of_the_cut(sampling: Sampling) -> None:
    rng = np.random.default_rng(1)
    vocabulary = CutVocabulary(KEPT, VOCAB)
    for _ in range(20):
        row = rng.integers(-2, 3, KEPT.size).astype(np.float32)  # ties are frequent: the lowest id wins
        sampler = Sampler(sampling, [0, 2], VOCAB, seed=0)
        assert vocabulary.argmax(row, sampler) == Sampler(sampling, [0, 2], VOCAB, seed=0).argmax(
            whole_row(row, KEPT, VOCAB)
        )


@pytest.mark.parametrize("sampling", [PLAIN, WARPED], ids=["plain", "warped"])
def test_a_cut_draft_leaves_the_targets_distribution(sampling: Sampling) -> None:
    """Enumerated over every draw, through the loop itself: three tokens behind a prompt."""
    target_model = HashedModel(VOCAB, seed=3)
    draft_model = HashedModel(VOCAB, seed=4, spread=0.5, like=target_model)
    prompt = [2, 1]

    def program(choices: Choices) -> list[int]:
        target, _ = fake_decoder(target_model, VOCAB)
        sampler = EnumeratingSampler(choices, sampling, prompt, VOCAB)
        return decode(target, cut_drafter(draft_model), prompt, sampler, 3, 2).tokens[:3]

    def following(before: list[int]) -> NDArray[np.float64]:
        return reference_distribution(target_model(tokens(*prompt, *before)), sampling, prompt, before)

    expected = joint(following, 3)
    assert any(token in (1, 3) for key in expected for token in key)  # the target says what the draft cannot
    assert total_variation(outcomes(program), expected) < 1e-6


def test_greedy_text_is_the_targets_own() -> None:
    target_model = HashedModel(VOCAB, seed=8)
    draft = cut_drafter(HashedModel(VOCAB, seed=9, spread=0.3, like=target_model))
    text = [1, 2]
    for _ in range(20):
        text.append(int(target_model(tokens(*text)).argmax()))
    target, _ = fake_decoder(target_model, VOCAB)
    run = decode(target, draft, [1, 2], Sampler(Sampling(), [1, 2], VOCAB, seed=0), 20, 3)
    assert run.tokens == text[2:]
    assert 0 < run.stats.accepted < run.stats.proposed


def test_a_mask_that_allows_nothing_of_the_cut_ends_the_proposal() -> None:
    allowed = np.zeros(VOCAB, bool)
    allowed[[1, 3]] = True

    def mask(generated: object) -> NDArray[np.bool_] | None:
        assert isinstance(generated, tuple)
        return allowed if len(generated) >= 1 else None

    for sampling in (Sampling(), PLAIN):
        drafter = cut_drafter(HashedModel(VOCAB, seed=2))
        sampler = Sampler(sampling, [1], VOCAB, seed=0, logits_mask=mask)
        assert drafter.propose(tokens(1), 4, sampler).tokens.size == 1
    biased = Sampler(Sampling(logit_bias={0: -np.inf, 2: -np.inf, 4: -np.inf}), [], VOCAB, seed=0)
    with pytest.raises(NoTokenAllowedError):
        CutVocabulary(KEPT, VOCAB).argmax(np.zeros(3, np.float32), biased)


@pytest.mark.parametrize("sampling", [Sampling(), PLAIN, WARPED])
def test_nan_is_still_an_error(sampling: Sampling) -> None:
    vocabulary, row = CutVocabulary(KEPT, VOCAB), np.array([0, np.nan, 0], np.float32)
    read = vocabulary.argmax if sampling.greedy else vocabulary.distribution
    with pytest.raises(EngineError, match="nan"):
        read(row, Sampler(sampling, [], VOCAB, seed=0))


def test_ids_survive_a_file_in_little_endian(tmp_path: Path) -> None:
    path = tmp_path / "token_ids.bin"
    write_token_ids(path, np.array([1, 258, 65536]))
    assert path.read_bytes() == bytes([1, 0, 0, 0, 2, 1, 0, 0, 0, 0, 1, 0])
    assert read_token_ids(path, 3, 70_000).tolist() == [1, 258, 65536]


@pytest.mark.parametrize(
    ("ids", "size", "message"),
    [
        ([0, 1, 2], 4, "has 12 bytes, 4 token ids take 16"),
        ([0, 1, 2], 2, "has 12 bytes, 2 token ids take 8"),
        ([0, 2, 2], 3, "must ascend without repeating, found 2 before 2"),
        ([0, 3, 2], 3, "must ascend without repeating, found 3 before 2"),
        ([0, 1, 5], 3, "must be from 0 to 4, found 0 to 5"),
        ([-1, 1, 2], 3, "must be from 0 to 4, found -1 to 2"),
        ([3, 1, 9], 3, "must be from 0 to 4, found 1 to 9"),
        ([1, -2, 3], 3, "must be from 0 to 4, found -2 to 3"),
    ],
)
def test_hostile_ids(ids: list[int], size: int, message: str, tmp_path: Path) -> None:
    path = tmp_path / "token_ids.bin"
    path.write_bytes(np.array(ids, "<i4").tobytes())
    with pytest.raises(BundleError, match=message):
        read_token_ids(path, size, 5)


def test_ids_made_by_hand_are_checked_too() -> None:
    for ids in ([], [1, 1], [0, 5]):
        with pytest.raises(UsageError, match="token_ids"):
            CutVocabulary(np.array(ids, np.int64), 5)
