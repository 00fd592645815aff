"""Drafters: n-grams against a naive search, the draft model against the model that it runs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftc.runtime.accept import Proposal
from draftc.runtime.decoder import Decoder
from draftc.runtime.drafter import Drafter, ModelDrafter, NgramDrafter
from draftc.runtime.errors import UsageError
from draftc.runtime.sampler import Sampler
from draftc.runtime.warp import Sampling
from tests.runtime.fakes import (
    Choices,
    EnumeratingSampler,
    FakeEngine,
    HashedModel,
    fake_decoder,
    joint,
    outcomes,
    reference_distribution,
    tokens,
    total_variation,
)

GREEDY = Sampling()
WARPED = Sampling(0.6, top_p=0.9, repetition_penalty=1.4, presence_penalty=0.3, logit_bias={0: 1.0})


def sampler(sampling: Sampling = GREEDY, vocab: int = 9) -> Sampler:
    return Sampler(sampling, [], vocab, seed=0)


def naive_lookup(text: list[int], k: int, low: int, high: int) -> list[int]:
    """For each length from the longest, for each place from the latest: does the suffix occur there?"""
    for n in range(high, low - 1, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[len(text) - n :]:
                longer = list(text)
                for i in range(k):
                    longer.append(longer[start + n + i])
                return longer[len(text) :]
    return []


@given(
    text=st.lists(st.integers(0, 2), min_size=1, max_size=30),
    k=st.integers(0, 9),
    low=st.integers(1, 4),
    more=st.integers(0, 4),
)
@settings(deadline=None, max_examples=120)
def test_ngrams_are_those_of_a_naive_search(text: list[int], k: int, low: int, more: int) -> None:
    proposal = NgramDrafter(low, low + more).propose(tokens(*text), k, sampler())
    assert proposal.tokens.tolist() == naive_lookup(text, k, low, low + more)
    assert proposal.q is None
    assert proposal.tokens.dtype == np.int64


@pytest.mark.parametrize(
    ("text", "low", "high", "expected"),
    [
        ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 2, 4, [9, 2, 3, 8]),  # the longest match wins over the latest
        ([2, 3, 9, 2, 3, 8, 7, 2, 3], 2, 4, [8, 7, 2, 3]),  # of equal ones, the latest
        ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 2, 2, [8, 1, 2, 3]),  # no longer than max_ngram
        ([5, 6, 5], 2, 4, []),  # no shorter than min_ngram
        ([5, 6, 5], 1, 4, [6, 5, 6, 5]),
        ([7, 7], 1, 4, [7, 7, 7, 7]),  # a cycle of one
        ([7, 7, 7], 2, 4, [7, 7, 7, 7]),
        ([4, 5, 6, 4, 5], 2, 4, [6, 4, 5, 6]),  # a cycle of three goes on where it began
        ([1, 2, 3, 4], 1, 4, []),
        ([1], 1, 4, []),
    ],
)
def test_which_match_and_how_it_goes_on(text: list[int], low: int, high: int, expected: list[int]) -> None:
    assert NgramDrafter(low, high).propose(tokens(*text), 4, sampler()).tokens.tolist() == expected


def test_ngrams_do_not_hold_on_to_the_text() -> None:
    """The text's buffer is written to by the next commit."""
    text = tokens(1, 2, 1, 2)
    proposal = NgramDrafter().propose(text, 2, sampler())
    assert not np.shares_memory(proposal.tokens, text)


@pytest.mark.parametrize(("low", "high"), [(0, 4), (3, 2), (-1, -1)])
def test_ngram_lengths_out_of_range(low: int, high: int) -> None:
    with pytest.raises(UsageError, match=f"1 <= min_ngram <= max_ngram, got {low} and {high}"):
        NgramDrafter(low, high)


def draft_model(vocab: int = 4, **limits: int) -> tuple[ModelDrafter, FakeEngine, HashedModel]:
    model = HashedModel(vocab, seed=5)
    decoder, engine = fake_decoder(model, vocab, **limits)
    return ModelDrafter(decoder), engine, model


def test_a_greedy_draft_is_the_argmax_of_its_own_continuation() -> None:
    drafter, _, model = draft_model()
    text = [3, 1, 2]
    proposal = drafter.propose(tokens(*text), 5, sampler(vocab=4))
    for _ in range(5):
        text.append(int(model(tokens(*text)).argmax()))
    assert proposal.tokens.tolist() == text[3:]
    assert proposal.q is None


def test_a_greedy_draft_is_warped_as_the_target_is() -> None:
    """A repetition penalty is part of greedy decoding: the draft must see what it has proposed itself."""
    drafter, _, model = draft_model()
    sampling = Sampling(repetition_penalty=3.0, frequency_penalty=1.0)
    prompt, text = [3, 1, 2], [3, 1, 2]
    proposal = drafter.propose(tokens(*text), 5, Sampler(sampling, prompt, 4, seed=0))
    for _ in range(5):
        text.append(int(reference_distribution(model(tokens(*text)), sampling, prompt, text[3:]).argmax()))
    assert proposal.tokens.tolist() == text[3:]


def test_q_is_what_the_proposal_was_drawn_from() -> None:
    """Enumerated: proposals have the warped draft model's joint distribution, and q is that distribution."""
    drafter, _, model = draft_model()
    prompt = [3, 1]

    def following(before: list[int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return reference_distribution(model(tokens(*prompt, *before)), WARPED, prompt, before)

    def program(choices: Choices) -> list[int]:
        proposal = drafter.propose(tokens(*prompt), 3, EnumeratingSampler(choices, WARPED, prompt, 4))
        x: list[int] = proposal.tokens.tolist()
        assert proposal.q is not None
        assert len(proposal.q) == 3
        for i, q in enumerate(proposal.q):
            assert q is not None
            np.testing.assert_allclose(q, following(x[:i]), atol=1e-6)
        return x

    assert total_variation(outcomes(program), joint(following, 3)) < 1e-6


@pytest.mark.parametrize("sampling", [GREEDY, WARPED], ids=["greedy", "sampling"])
def test_the_history_is_left_as_it_was_found(sampling: Sampling) -> None:
    drafter, _, _ = draft_model()
    told: list[list[int]] = []
    one = Sampler(sampling, [3], 4, seed=0, logits_mask=lambda generated: told.append(list(generated)))
    one.push(1)
    proposal = drafter.propose(tokens(3, 1), 2, one)
    one.argmax(np.zeros(4, np.float32))
    x = proposal.tokens.tolist()
    assert told == [[1], [1, x[0]], [1]]


def test_the_cache_follows_rejections_and_lacks_the_last_accepted_token() -> None:
    drafter, engine, _ = draft_model()
    first = drafter.propose(tokens(3, 1, 2), 3, sampler(vocab=4)).tokens.tolist()
    assert [(call.start, call.width) for call in engine.calls] == [(0, 3), (3, 1), (4, 1)]
    # All accepted and a bonus token: the draft has not run its last proposal, nor the bonus.
    drafter.propose(tokens(3, 1, 2, *first, 0), 1, sampler(vocab=4))
    assert [(call.start, call.width) for call in engine.calls[3:]] == [(5, 2)]
    # All rejected: one token behind the prompt.
    other = (first[0] + 1) % 4
    drafter.propose(tokens(3, 1, 2, other), 1, sampler(vocab=4))
    assert [(call.start, call.width) for call in engine.calls[4:]] == [(3, 1)]


@pytest.mark.parametrize(("length", "proposed"), [(7, 3), (8, 2), (9, 1), (10, 0), (15, 0)])
def test_a_draft_with_a_shorter_context_than_the_text(length: int, proposed: int) -> None:
    drafter, engine, _ = draft_model(max_length=10, max_width=4)
    proposal = drafter.propose(tokens(*[1] * length), 3, sampler(vocab=4))
    assert proposal.tokens.size == proposed
    if proposed == 0:
        assert engine.calls == []


def test_nothing_is_run_for_k_of_0() -> None:
    drafter, engine, _ = draft_model()
    assert drafter.propose(tokens(1), 0, sampler(vocab=4)).tokens.size == 0
    assert engine.calls == []
    assert NgramDrafter(1).propose(tokens(1, 1), 0, sampler()).tokens.size == 0


def test_decoders_are_named_for_the_session() -> None:
    drafter, _, _ = draft_model()
    decoders: list[Decoder] = [*drafter.decoders]
    assert decoders == [drafter.decoder]
    assert list(NgramDrafter().decoders) == []
    kinds: list[Drafter] = [drafter, NgramDrafter()]
    assert [kind.method for kind in kinds] == ["draft_model", "ngram"]


def test_the_empty_proposal_cannot_be_altered() -> None:
    assert Proposal().tokens.size == 0
    assert not Proposal().tokens.flags.writeable
