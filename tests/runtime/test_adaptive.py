"""The drafter that chooses loses nothing, whatever it chooses: greedy text is plain decoding's, sampled text exact."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftc.runtime.accept import Proposal
from draftc.runtime.adaptive import AdaptiveDrafter
from draftc.runtime.costs import CostProfile
from draftc.runtime.decoder import Decoder, Limits
from draftc.runtime.drafter import DraftState, ModelDrafter
from draftc.runtime.engine import Tokens
from draftc.runtime.sampler import Sampler
from draftc.runtime.vocabulary import CutVocabulary
from draftc.runtime.warp import Sampling
from tests.runtime.cost_fakes import FLAT, LINEAR, make_costs, profiles
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

GREEDY = Sampling()
PLAIN = Sampling(temperature=1.0)
WARPED = Sampling(0.7, top_p=0.9, repetition_penalty=1.4, presence_penalty=0.3, logit_bias={0: 1.0})


class Recorded(AdaptiveDrafter):
    """Keeps what it proposed."""

    proposals: list[Proposal]

    def propose(self, text: Tokens, k: int, sampler: Sampler) -> Proposal:
        proposal = super().propose(text, k, sampler)
        self.proposals.append(proposal)
        return proposal


def auto(costs: CostProfile, model: ModelDrafter | None, ngrams: tuple[int, int] = (2, 3), widest: int = 8) -> Recorded:
    drafter = Recorded(costs, model, ngrams, widest)
    drafter.proposals = []
    return drafter


def following(model: HashedModel, sampling: Sampling, prompt: list[int]) -> Callable[[list[int]], NDArray[np.float64]]:
    return lambda before: reference_distribution(model(tokens(*prompt, *before)), sampling, prompt, before)


def one_by_one(model: HashedModel, prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(int(model(tokens(*text)).argmax()))
    return text[len(prompt) :]


# --- the distribution of sampled text, enumerated --------------------------------------------------------------------


def costing(draft_ms: float) -> CostProfile:
    """Wide verifications cost next to nothing, a draft token so much: so it stops early, and copies go on behind it."""
    return make_costs(lambda width: 10 + 0.001 * width, lambda width: draft_ms)


def enumerate_text(
    target_model: HashedModel,
    make: Callable[[], Recorded],
    sampling: Sampling,
    prompt: list[int],
    count: int,
    k: int,
) -> tuple[float, list[Proposal]]:
    """(total variation from the target's own distribution, every proposal on every path)."""
    proposals: list[Proposal] = []

    def program(choices: Choices) -> list[int]:
        target, _ = fake_decoder(target_model, target_model.vocab)
        drafter = make()
        sampler = EnumeratingSampler(choices, sampling, prompt, target_model.vocab)
        text = decode(target, drafter, prompt, sampler, count, k).tokens
        proposals.extend(drafter.proposals)
        return text

    expected = joint(following(target_model, sampling, prompt), count)
    return total_variation(outcomes(program), expected), proposals


# Nothing repeats at the end of these yet, and whatever a draft adds may.
PROMPTS = [[0, 1, 2, 2, 0], [2, 1, 0, 0, 2], [1, 1, 0, 2, 1]]
DRAFT_COSTS = (0.01, 2.0, 4.0, 5.5, 7.0)


@pytest.mark.parametrize("sampling", [PLAIN, WARPED], ids=["plain", "warped"])
def test_sampled_text_has_the_targets_distribution(sampling: Sampling) -> None:
    """With drafts that stop by their confidence, and copies behind drawn tokens."""
    stopped = behind = drafted = 0
    for prompt in PROMPTS:
        for draft_ms in DRAFT_COSTS:
            target_model = HashedModel(3, seed=3)
            draft_model = HashedModel(3, seed=4, spread=1.5, like=target_model)

            def make(draft_ms: float = draft_ms, draft_model: HashedModel = draft_model) -> Recorded:
                return auto(costing(draft_ms), ModelDrafter(fake_decoder(draft_model, 3)[0]))

            off, proposals = enumerate_text(target_model, make, sampling, prompt, 3, 2)
            assert off < 1e-6, (prompt, draft_ms)
            for proposal in proposals:
                q = [*(proposal.q or [None] * proposal.tokens.size)]
                assert len(q) == proposal.tokens.size
                drawn = sum(one is not None for one in q)
                assert all(one is not None for one in q[:drawn]), "what is drawn comes first"
                stopped += 0 < proposal.tokens.size < 2
                behind += 0 < drawn < len(q)
                drafted += drawn == 2
    assert stopped
    assert behind
    assert drafted


@given(seed=st.integers(0, 2**32), costs=profiles(), ngrams=st.sampled_from([(1, 2), (1, 3), (2, 3)]))
@settings(deadline=None, max_examples=15)
def test_sampled_text_is_exact_for_any_profile(seed: int, costs: CostProfile, ngrams: tuple[int, int]) -> None:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 3, 6).tolist()
    target_model = HashedModel(3, seed=seed % 1000)
    draft_model = HashedModel(3, seed=7, spread=1.0, like=target_model)
    off, _ = enumerate_text(
        target_model,
        lambda: auto(costs, ModelDrafter(fake_decoder(draft_model, 3)[0]), ngrams),
        PLAIN,
        prompt,
        3,
        2,
    )
    assert off < 1e-6


@pytest.mark.parametrize("draft_ms", [0.01, 4.0])
def test_a_cut_vocabulary_leaves_the_targets_distribution(draft_ms: float) -> None:
    kept = np.array([0, 2])
    target_model = HashedModel(3, seed=3)
    draft_model = HashedModel(3, seed=4, spread=0.5, like=target_model)

    def make() -> Recorded:
        engine = FakeEngine(lambda text: draft_model(text)[kept], kept.size, 72)
        model = ModelDrafter(Decoder(engine, Limits(64, 8, 16, kept.size)), CutVocabulary(kept, 3))
        return auto(costing(draft_ms), model)

    for prompt in PROMPTS:
        off, proposals = enumerate_text(target_model, make, WARPED, prompt, 3, 2)
        assert off < 1e-6
        assert any(proposal.q for proposal in proposals)
        for proposal in proposals:
            for token, q in zip(proposal.tokens.tolist(), proposal.q or (), strict=False):
                assert q is None or (q[1] == 0 and token != 1)


def test_without_a_draft_model_the_distribution_is_the_targets_too() -> None:
    target_model = HashedModel(3, seed=11)
    off, proposals = enumerate_text(target_model, lambda: auto(FLAT, None, (1, 3)), PLAIN, [0, 1, 2, 0, 1], 3, 2)
    assert off < 1e-6
    assert any(proposal.tokens.size for proposal in proposals)
    assert all(proposal.q is None for proposal in proposals)


# --- greedy text -----------------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 10_000),
    costs=profiles(),
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    count=st.integers(1, 28),
    k=st.integers(1, 7),
    noise=st.sampled_from([None, 0.3, 4.0]),
    draft_length=st.sampled_from([40, 10]),
    window=st.sampled_from([None, 1, 4]),
    low=st.integers(1, 3),
)
@settings(deadline=None, max_examples=120)
def test_greedy_text_is_that_of_plain_decoding(
    seed: int,
    costs: CostProfile,
    prompt: list[int],
    count: int,
    k: int,
    noise: float | None,
    draft_length: int,
    window: int | None,
    low: int,
) -> None:
    model = HashedModel(4, seed)
    target, _ = fake_decoder(model, 4, max_length=40, prefill_chunk=5)
    draft = None
    if noise is not None:
        near = HashedModel(4, seed=77, spread=noise, like=model)
        draft = ModelDrafter(fake_decoder(near, 4, max_length=draft_length, prefill_chunk=7)[0], window=window)
    drafter = auto(costs, draft, (low, 4))
    for _ in range(2):  # and again, with caches that hold the first text
        run = decode(target, drafter, prompt, Sampler(GREEDY, prompt, 4, 0), count, k)
        assert run.tokens == one_by_one(model, prompt, count)
    assert all(proposal.tokens.size <= k for proposal in drafter.proposals)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("lengths", [(30, 2), (30, 29), (4, 3), (12, 11), (2, 30)])
def test_a_later_request_with_another_prompt(lengths: tuple[int, int], window: int | None) -> None:
    """Whatever the draft model has read of an earlier text: of a short one that follows, it reads what there is."""
    model = HashedModel(4, 8)
    target, _ = fake_decoder(model, 4)
    draft = ModelDrafter(fake_decoder(model, 4)[0], window=window)
    drafter = auto(FLAT, draft)
    rng = np.random.default_rng(1)
    for size in lengths:
        prompt = rng.integers(0, 4, size).tolist()
        drafter.proposals.clear()
        assert decode(target, drafter, prompt, Sampler(GREEDY, prompt, 4, 0), 12, 5).tokens == one_by_one(
            model, prompt, 12
        )
        assert any(proposal.tokens.size for proposal in drafter.proposals)


@pytest.mark.parametrize("sampling", [GREEDY, WARPED], ids=["greedy", "sampling"])
def test_the_same_request_again_is_decided_in_the_same_way(sampling: Sampling) -> None:
    """Whatever the draft model read meanwhile: another window would give other proposals, and other draws."""
    model = HashedModel(5, 8)
    target, _ = fake_decoder(model, 5, max_length=120)
    near = HashedModel(5, seed=77, spread=0.5, like=model)
    drafter = auto(costing(1.0), ModelDrafter(fake_decoder(near, 5, max_length=120)[0], window=6))
    first, other = np.random.default_rng(3).integers(0, 5, (2, 40)).tolist()

    def proposed(prompt: list[int]) -> list[tuple[list[int], list[int]]]:
        drafter.proposals.clear()
        run = decode(target, drafter, prompt, Sampler(sampling, prompt, 5, seed=4), 40, 5)
        return [(proposal.tokens.tolist(), run.tokens) for proposal in drafter.proposals]

    once = proposed(first)
    assert sum(len(tokens) for tokens, _ in once) > 10
    for between in ([], [other], [first[:20]]):
        for prompt in between:
            proposed(prompt)
        assert proposed(first) == once


@pytest.mark.parametrize("after", [0, 3, 29, 50])
def test_a_window_on_another_text_begins_anew(after: int) -> None:
    """Where an earlier text was read from says nothing about another one."""
    decoder, engine = fake_decoder(HashedModel(9, 8), 9)
    model = ModelDrafter(decoder, window=4)
    sampler = Sampler(GREEDY, [], 9, 0)
    if after:
        model.propose(tokens(*[8] * after), 2, sampler)
    for size in (1, 3, 4, 30, 52, 2):
        engine.calls.clear()
        text = np.arange(size) % 5 + (0 if size % 2 else 2)
        decoder.cache.clear() if size == 2 else None
        assert model.state(text) == DraftState(min(4, size), 0)
        model.propose(text, 1, sampler)
        assert sum(call.width for call in engine.calls) == min(4, size)
        model.propose(tokens(*[8] * 20), 1, sampler)


# --- ends inside a draft, lags, short contexts -----------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN], ids=["greedy", "sampling"])
@pytest.mark.parametrize("draft_ms", DRAFT_COSTS)
def test_a_mask_that_allows_nothing_behind_the_end(sampling: Sampling, draft_ms: float) -> None:
    """Token 0 ends the text; drafts run past it, and must not ask what may come then."""

    def mask(generated: Sequence[int]) -> NDArray[np.bool_]:
        allowed: NDArray[np.bool_] = np.full(4, 0 not in generated)
        return allowed

    ended = False
    for seed in range(12):
        model = HashedModel(4, seed, spread=1.0)
        target, _ = fake_decoder(model, 4)
        drafter = auto(costing(draft_ms), ModelDrafter(fake_decoder(model, 4)[0]), (1, 3))
        prompt = [1, 2, 3]
        sampler = Sampler(sampling, prompt, 4, seed, mask)
        run = decode(target, drafter, prompt, sampler, 20, 5, stop=frozenset([0]))
        ended = ended or 0 in run.tokens
        assert 0 not in run.tokens[:-1]
    assert ended


@pytest.mark.parametrize("window", [None, 4])
def test_the_lag_is_what_a_proposal_runs_first(window: int | None) -> None:
    """After accepted tokens, rejected ones and steps without it, for texts that go on or begin anew."""
    decoder, engine = fake_decoder(HashedModel(4, 5), 4)
    model = ModelDrafter(decoder, window=window)
    rng = np.random.default_rng(0)
    text: list[int] = [1]
    for _ in range(40):
        state = model.state(tokens(*text))
        assert state is not None
        before = len(engine.calls)
        k = int(rng.integers(1, 4))
        proposed = model.propose(tokens(*text), k, Sampler(GREEDY, [], 4, 0)).tokens.tolist()
        ran = sum(call.width for call in engine.calls[before:])
        assert 1 <= state.lag == ran - (len(proposed) - 1)
        assert state.fill == engine.calls[before].start
        kept = int(rng.integers(0, k + 1))
        text = [*text, *proposed[:kept], *rng.integers(0, 4, rng.integers(1, 4)).tolist()]
        if len(text) > 40:
            text = text[: rng.integers(1, 30)]


def test_steps_without_the_draft_model_are_made_up_for() -> None:
    """A text that can be copied for a while, and then goes on as only the draft model knows."""
    script = [*range(4, 24), *range(4, 24), *range(4, 24), *range(30, 70)]

    def model(prefix: Tokens) -> NDArray[np.float32]:
        logits = np.zeros(80, np.float32)
        logits[script[prefix.size] if prefix.size < len(script) else 0] = 9.0
        return logits

    target, _ = fake_decoder(model, 80, max_length=120)
    decoder, engine = fake_decoder(model, 80, max_length=120)
    drafter = auto(costing(4.0), ModelDrafter(decoder))
    prompt = script[:3]
    run = decode(target, drafter, prompt, Sampler(GREEDY, prompt, 80, 0), len(script) - 3, 7)
    assert run.tokens == script[3:]
    assert run.stats.accepted > 40
    assert max(call.width for call in engine.calls) > 5, "what it had not seen of the copies, in one call"
    assert decoder.cache.tokens.tolist() == script[: len(decoder.cache)]


def test_a_draft_whose_context_is_shorter_than_the_text_is_left_alone() -> None:
    decoder, engine = fake_decoder(HashedModel(4, 5), 4, max_length=10, max_width=4)
    model = ModelDrafter(decoder)
    for size, state in ((9, DraftState(9, 0)), (10, None), (15, None)):
        assert model.state(tokens(*[1] * size)) == state
    drafter = auto(FLAT, model)
    repeated = tokens(*[1, 2, 3] * 5)
    proposal = drafter.propose(repeated, 4, Sampler(GREEDY, [], 4, 0))
    assert proposal.tokens.tolist() == [1, 2, 3, 1], "copies need no model"
    assert engine.calls == []


def test_nothing_is_run_where_nothing_is_asked_for_or_can_pay() -> None:
    for costs, k in ((FLAT, 0), (LINEAR, 5)):
        decoder, engine = fake_decoder(HashedModel(4, 5), 4)
        proposal = auto(costs, ModelDrafter(decoder)).propose(tokens(1, 2, 1, 2), k, Sampler(GREEDY, [], 4, 0))
        assert (proposal.tokens.size, proposal.q, engine.calls) == (0, None, [])


def test_decoders_are_named_for_the_session() -> None:
    decoder, _ = fake_decoder(HashedModel(4, 5), 4)
    assert list(auto(FLAT, ModelDrafter(decoder)).decoders) == [decoder]
    assert list(auto(FLAT, None).decoders) == []
    assert auto(FLAT, None).method == "auto"


@pytest.mark.parametrize("sampling", [GREEDY, WARPED], ids=["greedy", "sampling"])
def test_the_history_is_left_as_it_was_found(sampling: Sampling) -> None:
    told: list[list[int]] = []
    sampler = Sampler(sampling, [3], 4, seed=0, logits_mask=lambda generated: told.append(list(generated)))
    sampler.push(1)
    drafter = auto(FLAT, ModelDrafter(fake_decoder(HashedModel(4, 5), 4)[0]))
    assert drafter.propose(tokens(3, 1), 4, sampler).tokens.size > 0
    sampler.argmax(np.zeros(4, np.float32))
    assert told[-1] == [1]
