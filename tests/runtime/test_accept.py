"""Acceptance is exact: its outcomes are enumerated, with their probabilities, and compared with the target's own."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftc.runtime.accept import Outcome, Proposal, accept, residual
from draftc.runtime.engine import Logits
from draftc.runtime.errors import EngineError
from draftc.runtime.sampler import Sampler
from draftc.runtime.warp import Distribution, Sampling
from tests.runtime.fakes import Choices, EnumeratingSampler, joint, outcomes, tokens, total_variation

Table = Callable[[Sequence[int]], Distribution]  # the tokens before → the next token's distribution
PLAIN = Sampling(temperature=1.0)


def random_table(vocab: int, rng: np.random.Generator, zeros: bool) -> Table:
    """A distribution for every prefix, of small whole weights: so zeros and ties of p and q are frequent."""
    known: dict[tuple[int, ...], Distribution] = {}

    def table(prefix: Sequence[int]) -> Distribution:
        key = tuple(prefix)
        if key not in known:
            weights = rng.integers(0 if zeros else 1, 5, vocab).astype(np.float64)
            weights[rng.integers(vocab)] += 1
            known[key] = weights / weights.sum()
        return known[key]

    return table


def as_logits(p: Distribution) -> Logits:
    with np.errstate(divide="ignore"):
        return np.log(p).astype(np.float32)


def realised(p: Distribution) -> Distribution:
    """`p` after its way through float32 logits: what the sampler makes of them."""
    return Sampler(PLAIN, [], p.size, seed=0).distribution(as_logits(p))


def verify(target: Table, proposal: Proposal, sampler: Sampler) -> Outcome:
    """One verification, as the loop does it."""
    x = proposal.tokens.tolist()
    logits = np.stack([as_logits(target(x[:i])) for i in range(len(x) + 1)])
    return accept(proposal, logits, sampler)


def continued(target: Table, emitted: list[int], count: int, choices: Choices) -> list[int]:
    """Up to `count` tokens: what follows the emitted ones is drawn from the target one at a time."""
    while len(emitted) < count:
        emitted = [*emitted, choices.choose(realised(target(emitted)))]
    return emitted


@given(seed=st.integers(0, 2**32), vocab=st.integers(2, 4), k=st.integers(0, 3), zeros=st.booleans())
@settings(deadline=None, max_examples=25)
def test_drawn_proposals_leave_the_targets_distribution(seed: int, vocab: int, k: int, zeros: bool) -> None:
    if vocab == 4:
        k = min(k, 2)
    rng = np.random.default_rng(seed)
    target, draft = random_table(vocab, rng, zeros), random_table(vocab, rng, zeros)

    def program(choices: Choices) -> list[int]:
        x: list[int] = []
        q: list[Distribution] = []
        for _ in range(k):
            q.append(draft(x))
            x.append(choices.choose(q[-1]))
        outcome = verify(target, Proposal(tokens(*x), q), EnumeratingSampler(choices, PLAIN, [], vocab))
        assert outcome.tokens[: outcome.accepted] == x[: outcome.accepted]
        assert len(outcome.tokens) == outcome.accepted + 1
        return continued(target, outcome.tokens, k + 1, choices)

    expected = joint(lambda before: realised(target(before)), k + 1)
    assert total_variation(outcomes(program), expected) < 1e-12


@given(seed=st.integers(0, 2**32), vocab=st.integers(2, 5), k=st.integers(1, 3), zeros=st.booleans())
@settings(deadline=None, max_examples=15)
def test_chosen_proposals_leave_the_targets_distribution(seed: int, vocab: int, k: int, zeros: bool) -> None:
    """As n-grams make them: q is one-hot, whether it is said or left out."""
    rng = np.random.default_rng(seed)
    target = random_table(vocab, rng, zeros)
    x = rng.integers(0, vocab, k)

    for q in (None, [np.eye(vocab)[token] for token in x]):

        def program(choices: Choices, q: Sequence[Distribution] | None = q) -> list[int]:
            outcome = verify(target, Proposal(x, q), EnumeratingSampler(choices, PLAIN, [], vocab))
            return continued(target, outcome.tokens, k + 1, choices)

        expected = joint(lambda before: realised(target(before)), k + 1)
        assert total_variation(outcomes(program), expected) < 1e-12


def test_the_chance_of_acceptance_is_the_overlap() -> None:
    """Σ min(p, q): Leviathan et al. 2023, theorem 3.5."""
    p, q = np.array([0.5, 0.2, 0.3, 0.0]), np.array([0.1, 0.4, 0.25, 0.25])

    def program(choices: Choices) -> list[int]:
        x = choices.choose(q)
        return [verify(lambda _: p, Proposal(tokens(x), [q]), EnumeratingSampler(choices, PLAIN, [], 4)).accepted]

    assert outcomes(program)[1,] == pytest.approx(np.minimum(p, q).sum(), abs=1e-7)


def first_token(p: list[float], q: list[float], stops: Callable[[int, Distribution], bool]) -> Distribution:
    """The first token's exact distribution under a drafter of one token that proposes none where `stops(x, q)`."""
    draft = np.array(q)

    def program(choices: Choices) -> list[int]:
        x = choices.choose(draft)
        proposal = Proposal() if stops(x, draft) else Proposal(tokens(x), [draft])
        return verify(lambda _: np.array(p), proposal, EnumeratingSampler(choices, PLAIN, [], len(p))).tokens[:1]

    found = outcomes(program)
    return np.array([found.get((token,), 0.0) for token in range(len(p))])


def test_dropping_a_drawn_token_is_the_planted_fault() -> None:
    """The check that passes the right stopping rules finds the wrong one, with the figures of its closed form."""
    p, q = [0.5, 0.5], [0.9, 0.1]
    np.testing.assert_allclose(first_token(p, q, lambda x, q: False), p, atol=1e-7)
    np.testing.assert_allclose(first_token(p, q, lambda x, q: bool(q.max() < 0.95)), p, atol=1e-7)
    np.testing.assert_allclose(first_token(p, q, lambda x, q: bool(q.max() < 0.85)), p, atol=1e-7)
    np.testing.assert_allclose(first_token(p, q, lambda x, q: bool(q[x] < 0.4)), [0.55, 0.45], atol=1e-7)


@given(seed=st.integers(0, 2**32), vocab=st.integers(2, 5), k=st.integers(0, 4))
@settings(deadline=None)
def test_greedy_is_the_longest_agreeing_prefix_and_the_targets_next(seed: int, vocab: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((k + 1, vocab)).astype(np.float32)
    best = logits.argmax(axis=1)
    x = np.where(rng.random(k) < 0.7, best[:k], rng.integers(0, vocab, k))
    agreeing = next((i for i in range(k) if x[i] != best[i]), k)
    logits[agreeing + 1 :] = np.nan  # rows after the first disagreement are never read
    outcome = accept(Proposal(x), logits, Sampler(Sampling(), [], vocab, seed=0))
    assert outcome == Outcome(best[: agreeing + 1].tolist(), accepted=agreeing)


def test_rows_after_a_rejection_are_never_read() -> None:
    logits = np.full((3, 2), np.nan, np.float32)
    logits[0] = as_logits(np.array([0.0, 1.0]))
    outcome = accept(Proposal(tokens(0, 1)), logits, Sampler(PLAIN, [], 2, seed=0))
    assert outcome == Outcome([1], accepted=0)


def test_a_row_that_is_read_must_be_finite() -> None:
    for sampling in (Sampling(), PLAIN):
        logits = np.zeros((2, 3), np.float32)
        logits[0, 1] = np.nan
        with pytest.raises(EngineError):
            accept(Proposal(tokens(1)), logits, Sampler(sampling, [], 3, seed=0))


class Constant(Sampler):
    """Its uniform variable is always `u`."""

    u = 0.0

    def uniform(self) -> float:
        return self.u


def test_what_the_target_would_never_say_is_never_accepted() -> None:
    """Not even when the uniform variable is the smallest there is."""
    logits = np.stack([as_logits(np.array([0.0, 1.0]))] * 2)
    for q in (None, [np.array([1.0, 0.0])], [np.array([1e-300, 1.0])]):
        outcome = accept(Proposal(tokens(0), q), logits, Constant(PLAIN, [], 2, seed=0))
        assert outcome == Outcome([1], accepted=0)


def test_what_both_say_alike_is_always_accepted() -> None:
    """p = q leaves nothing to reject: not even when the uniform variable is the largest there is."""

    rng = np.random.default_rng(0)
    for _ in range(200):
        p = rng.dirichlet(np.ones(7))
        x = int(rng.integers(7))
        sampler = Constant(PLAIN, [], 7, seed=0)
        sampler.u = float(np.nextafter(1.0, 0.0))
        outcome = accept(Proposal(tokens(x), [realised(p)]), np.stack([as_logits(p)] * 2), sampler)
        assert outcome.accepted == 1


@pytest.mark.parametrize("sampling", [Sampling(), PLAIN], ids=["greedy", "sampling"])
def test_each_row_is_seen_after_the_tokens_before_it(sampling: Sampling) -> None:
    """History grows token by token within one verification: penalties and masks depend on it."""
    told: list[list[int]] = []

    def mask(generated: Sequence[int]) -> NDArray[np.bool_]:
        told.append(list(generated))
        allowed: NDArray[np.bool_] = np.arange(5) == len(generated)  # token n at place n
        return allowed

    sampler = Sampler(sampling, [4], 5, seed=0, logits_mask=mask)
    sampler.push(0)
    outcome = accept(Proposal(tokens(1, 2, 4)), np.zeros((4, 5), np.float32), sampler)
    assert outcome == Outcome([1, 2, 3], accepted=2)
    assert told == [[0], [0, 1], [0, 1, 2]]
    sampler.distribution(np.zeros(5, np.float32))
    assert told[-1] == [0, 1, 2, 3]


def test_residual_closed_form() -> None:
    p, q = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.2, 0.4, 0.1, 0.3])
    np.testing.assert_allclose(residual(p, q), [0.75, 0, 0.25, 0])
    np.testing.assert_allclose(residual(p, np.array([0, 1.0, 0, 0])), [5 / 7, 0, 2 / 7, 0])


def test_residual_of_equal_distributions_is_the_target() -> None:
    p = np.array([0.25, 0.75])
    np.testing.assert_array_equal(residual(p, p.copy()), p)


@given(seed=st.integers(0, 2**32), vocab=st.integers(2, 40))
@settings(deadline=None)
def test_residual_is_a_distribution_where_the_target_exceeds_the_draft(seed: int, vocab: int) -> None:
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(vocab, 0.3), 2)
    r = residual(p, q)
    assert abs(r.sum() - 1) < 1e-9
    assert (r[p <= q] == 0).all()
    assert (r[p > q] > 0).all()


def test_an_empty_proposal_is_plain_decoding() -> None:
    logits = as_logits(np.array([0.1, 0.6, 0.3]))[None]
    assert accept(Proposal(), logits, Sampler(Sampling(), [], 3, seed=0)) == Outcome([1], accepted=0)
    found = outcomes(lambda choices: accept(Proposal(), logits, EnumeratingSampler(choices, PLAIN, [], 3)).tokens)
    assert found == pytest.approx({(0,): 0.1, (1,): 0.6, (2,): 0.3}, abs=1e-7)
