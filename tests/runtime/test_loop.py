"""Nothing is lost: greedy text is plain decoding's, and sampled text has the target's distribution.

The distribution is checked twice. By enumeration: every path of draws and acceptances is run and weighed, so the result
is exact. And by a goodness-of-fit test of real draws. Planted faults show that both find what they are made to find.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftc.runtime.accept import Proposal
from draftc.runtime.decoder import Decoder
from draftc.runtime.drafter import Drafter, ModelDrafter, NgramDrafter
from draftc.runtime.engine import Tokens
from draftc.runtime.kvcache import TokenBuffer
from draftc.runtime.loop import Loop, Step, token_logprobs
from draftc.runtime.sampler import Sampler
from draftc.runtime.stats import Stats
from draftc.runtime.warp import Distribution, LogitsMask, Sampling
from tests.runtime.fakes import (
    Choices,
    DroppingDrafter,
    EnumeratingSampler,
    HashedModel,
    Model,
    Outcomes,
    Run,
    UnwarpedDrafter,
    decode,
    fake_decoder,
    fixed,
    goodness_of_fit,
    joint,
    outcomes,
    reference_distribution,
    tokens,
    total_variation,
)

MAX_LENGTH = 40


class Scripted:
    """Proposes, at each place, what is written there, for as long as the text follows the script."""

    method = "scripted"
    decoders: Sequence[Decoder] = ()

    def __init__(self, script: Sequence[int]) -> None:
        self.script = tokens(*script)

    def begin(self, room: int) -> None:
        """Nothing is learnt."""

    def propose(self, text: Tokens, k: int, sampler: Sampler) -> Proposal:
        return Proposal(self.script[text.size : text.size + k])


def make_drafter(kind: str, target: Model, vocab: int, max_length: int = MAX_LENGTH) -> Drafter | None:
    """`near` agrees with the target often, `far` hardly ever."""
    if kind in ("near", "far"):
        noise = 0.5 if kind == "near" else 4.0
        draft = HashedModel(vocab, seed=77, spread=noise, like=target)
        return ModelDrafter(fake_decoder(draft, vocab, max_length=max_length, prefill_chunk=7)[0])
    return {"ngram1": NgramDrafter(1, 3), "ngram2": NgramDrafter(2, 4), "plain": None}[kind]


def one_by_one(
    model: Model, sampling: Sampling, prompt: list[int], count: int, stop: frozenset[int], mask: LogitsMask | None
) -> tuple[list[int], list[float]]:
    """Greedy decoding by definition, with logprobs from the unwarped logits."""
    output: list[int] = []
    logprobs: list[float] = []
    while len(output) < count and not stop & set(output):
        logits = model(tokens(*prompt, *output))
        output.append(int(reference_distribution(logits, sampling, prompt, output, mask).argmax()))
        exact = logits.astype(np.float64)
        logprobs.append(float(exact[output[-1]] - np.log(np.exp(exact).sum())))
    return output, logprobs


def odd_mask(generated: Sequence[int]) -> NDArray[np.bool_]:
    """Forbids what the last token names: a rule on the history that every place must apply anew."""
    allowed: NDArray[np.bool_] = np.ones(5, bool)
    allowed[generated[-1] if generated else 0] = False
    return allowed


GREEDY = [
    Sampling(),
    Sampling(repetition_penalty=1.8),
    Sampling(presence_penalty=0.7, frequency_penalty=0.4),
    Sampling(repetition_penalty=0.6, logit_bias={0: 1.5, 3: -np.inf}),
]


@given(
    seed=st.integers(0, 10_000),
    prompt=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    count=st.integers(1, 28),
    k=st.integers(1, 7),
    kind=st.sampled_from(["near", "far", "ngram1", "ngram2", "plain"]),
    sampling=st.sampled_from(GREEDY),
    stop=st.frozensets(st.integers(0, 4), max_size=2),
    masked=st.booleans(),
    draft_length=st.sampled_from([MAX_LENGTH, 10]),
)
@settings(deadline=None, max_examples=80)
def test_greedy_text_is_that_of_decoding_one_by_one(
    seed: int,
    prompt: list[int],
    count: int,
    k: int,
    kind: str,
    sampling: Sampling,
    stop: frozenset[int],
    masked: bool,
    draft_length: int,
) -> None:
    model = HashedModel(5, seed)
    mask = odd_mask if masked else None
    target, _ = fake_decoder(model, 5, max_length=MAX_LENGTH, prefill_chunk=5)
    drafter = make_drafter(kind, model, 5, draft_length)
    run = decode(target, drafter, prompt, Sampler(sampling, prompt, 5, 0, mask), count, k, stop)
    expected, logprobs = one_by_one(model, sampling, prompt, count, stop, mask)
    assert run.tokens == expected
    np.testing.assert_allclose(run.logprobs, logprobs, rtol=1e-6)
    assert all(value < 0 for value in run.logprobs)
    check_counts(run)


def check_counts(run: Run) -> None:
    """What steps and stats say of one another, and of the text."""
    for step in run.steps:
        assert 1 <= len(step.tokens) <= step.proposed + 1
        assert step.accepted <= min(step.proposed, len(step.tokens))
        assert len(step.logprobs) == len(step.tokens)
        assert len(step.tokens) - step.accepted in (0, 1)
    assert run.stats.accepted == sum(step.accepted for step in run.steps)
    assert run.stats.accepted <= run.stats.proposed <= sum(step.proposed for step in run.steps)
    assert run.stats.accepted <= len(run.tokens)


def test_the_hypothesis_cases_do_accept_and_reject() -> None:
    """The test above means something only if drafts are judged both ways, within one proposal."""
    seen = set()
    for seed in range(30):
        model = HashedModel(5, seed)
        target, _ = fake_decoder(model, 5)
        run = decode(target, make_drafter("near", model, 5), [1, 2], Sampler(Sampling(), [1, 2], 5, 0), 24, 4)
        seen |= {(step.accepted, step.proposed) for step in run.steps}
    assert {(accepted, 4) for accepted in range(5)} <= seen


@pytest.mark.parametrize("kind", ["near", "ngram1"])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_a_text_that_fills_the_buffer_exactly(kind: str, k: int) -> None:
    model = HashedModel(5, 3)
    target, engine = fake_decoder(model, 5, max_length=MAX_LENGTH, max_width=8)
    prompt = [1, 2, 3]
    run = decode(
        target, make_drafter(kind, model, 5), prompt, Sampler(Sampling(), prompt, 5, 0), MAX_LENGTH - len(prompt), k
    )
    assert run.tokens == one_by_one(model, Sampling(), prompt, MAX_LENGTH - len(prompt), frozenset(), None)[0]
    assert max(call.start + call.width for call in engine.calls) < engine.spec.buffer_length


# --- what ends inside a proposal -------------------------------------------------------------------------------------


def script_of(model: Model, prompt: list[int], count: int) -> list[int]:
    return prompt + one_by_one(model, Sampling(), prompt, count, frozenset(), None)[0]


def ending_after(count: int) -> Callable[[int], bool]:
    """A stop rule that ends the text at its `count`-th token."""
    numbers = itertools.count(1)
    return lambda token: next(numbers) < count


def one_step(emit: Callable[[int], bool], k: int, wrong_from: int | None = None) -> tuple[Step, Stats, Loop]:
    """A verification of k proposals that are all right, or wrong from one of them on."""
    model, prompt = HashedModel(9, 4), [1, 2, 3]
    script = script_of(model, prompt, k + 1)
    if wrong_from is not None:
        script[len(prompt) + wrong_from] = (script[len(prompt) + wrong_from] + 1) % 9
    target, _ = fake_decoder(model, 9)
    stats = Stats()
    loop = Loop(
        target,
        Scripted(script),
        TokenBuffer(tokens(*prompt), 30),
        Sampler(Sampling(), prompt, 9, 0),
        emit,
        stats,
        logprobs=True,
    )
    return loop.step(k), stats, loop


@pytest.mark.parametrize("kept", [1, 2, 4])
def test_a_stop_inside_an_accepted_draft(kept: int) -> None:
    """Nothing behind it is in the text, in the logprobs, or in any figure."""
    step, stats, loop = one_step(ending_after(kept), k=4)
    expected = script_of(HashedModel(9, 4), [1, 2, 3], kept)
    assert loop.text.view.tolist() == expected
    assert step.tokens == expected[3:]
    assert (step.accepted, step.proposed, len(step.logprobs)) == (kept, 4, kept)
    assert (stats.proposed_at, stats.accepted_at) == ([1] * kept, [1] * kept)


def test_a_stop_at_the_bonus_token() -> None:
    step, stats, _ = one_step(ending_after(99), k=4)
    assert (len(step.tokens), step.accepted, step.proposed) == (5, 4, 4)
    assert (stats.proposed_at, stats.accepted_at) == ([1] * 4, [1] * 4)


def test_a_stop_before_a_correction_and_at_it() -> None:
    step, stats, _ = one_step(ending_after(2), k=4, wrong_from=2)
    assert (len(step.tokens), step.accepted) == (2, 2)
    assert (stats.proposed_at, stats.accepted_at) == ([1, 1], [1, 1])
    step, stats, _ = one_step(ending_after(99), k=4, wrong_from=2)
    assert (len(step.tokens), step.accepted) == (3, 2)
    assert (stats.proposed_at, stats.accepted_at) == ([1] * 4, [1, 1, 0, 0])


def test_without_a_drafter_and_with_k_of_0_nothing_is_proposed() -> None:
    for k in (0, 3):
        model = HashedModel(5, 1)
        target, engine = fake_decoder(model, 5)
        drafter = Scripted([1] * 20) if k == 0 else None
        loop = Loop(
            target, drafter, TokenBuffer(tokens(1), 9), Sampler(Sampling(), [1], 5, 0), lambda token: True, Stats()
        )
        step = loop.step(k)
        assert (len(step.tokens), step.accepted, step.proposed, step.logprobs) == (1, 0, 0, [])
        assert engine.calls[-1].rows == 1


def test_a_drafter_that_has_nothing_to_say_costs_one_row() -> None:
    target, engine = fake_decoder(HashedModel(5, 1), 5)
    decode(target, NgramDrafter(4, 4), [1, 2, 3], Sampler(Sampling(), [1, 2, 3], 5, 0), 2, 4)
    assert [call.rows for call in engine.calls] == [1, 1]


def test_phases_are_timed() -> None:
    model = HashedModel(5, 2)
    target, _ = fake_decoder(model, 5)
    stats = decode(target, make_drafter("near", model, 5), [1], Sampler(Sampling(), [1], 5, 0), 9, 3).stats
    assert min(stats.draft_s, stats.verify_s, stats.accept_s) > 0


# --- logprobs --------------------------------------------------------------------------------------------------------


def test_logprobs_are_the_unwarped_targets_whatever_was_sampled() -> None:
    model, prompt = HashedModel(5, 8), [1, 2]
    sampling = Sampling(1.3, top_k=3, repetition_penalty=1.5, logit_bias={2: 2.0})
    target, _ = fake_decoder(model, 5)
    run = decode(target, make_drafter("near", model, 5), prompt, Sampler(sampling, prompt, 5, 11), 20, 4)
    assert sum(step.accepted for step in run.steps) > 3
    for i, (token, logprob) in enumerate(zip(run.tokens, run.logprobs, strict=True)):
        logits = model(tokens(*prompt, *run.tokens[:i])).astype(np.float64)
        assert logprob == pytest.approx(logits[token] - np.log(np.exp(logits).sum()), rel=1e-6)


def test_token_logprobs_do_not_overflow() -> None:
    logits = np.array([[1e4, 1e4, -1e4], [-np.inf, -3e38, 0]], np.float32)
    assert token_logprobs(logits, [1, 2]) == pytest.approx([-np.log(2), 0.0])
    assert token_logprobs(logits, [2]) == pytest.approx([-2e4 - np.log(2)])


# --- seeds and state -------------------------------------------------------------------------------------------------


WARM = Sampling(0.9, top_p=0.95, repetition_penalty=1.1)


@pytest.mark.parametrize("kind", ["near", "far", "ngram1", "plain"])
def test_same_seed_same_text(kind: str) -> None:
    model, prompt = HashedModel(5, 2), [1, 2, 1]

    def text(seed: int) -> list[int]:
        target, _ = fake_decoder(model, 5)
        return decode(target, make_drafter(kind, model, 5), prompt, Sampler(WARM, prompt, 5, seed), 30, 4).tokens

    assert text(3) == text(3)
    assert len({tuple(text(seed)) for seed in range(8)}) == 8


@given(
    prompts=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=15), min_size=2, max_size=4),
    seed=st.integers(0, 999),
    k=st.integers(1, 5),
)
@settings(deadline=None, max_examples=25)
def test_what_was_decoded_before_changes_nothing(prompts: list[list[int]], seed: int, k: int) -> None:
    """Caches are kept between requests: sampled text must be that of fresh ones."""
    model = HashedModel(5, seed)
    target, _ = fake_decoder(model, 5, prefill_chunk=4)
    drafter = make_drafter("near", model, 5)
    for prompt in prompts:
        fresh, _ = fake_decoder(model, 5, prefill_chunk=4)
        expected = decode(
            fresh, make_drafter("near", model, 5), prompt, Sampler(WARM, prompt, 5, seed), 12, k, frozenset([4])
        )
        again = decode(target, drafter, prompt, Sampler(WARM, prompt, 5, seed), 12, k, frozenset([4]))
        assert again.tokens == expected.tokens
        assert again.logprobs == expected.logprobs


# --- the distribution of sampled text --------------------------------------------------------------------------------


def no_repeat(generated: Sequence[int]) -> NDArray[np.bool_]:
    """Of three tokens, not the last one again."""
    allowed: NDArray[np.bool_] = np.ones(3, bool)
    if generated:
        allowed[generated[-1]] = False
    return allowed


WARPS: dict[str, tuple[Sampling, LogitsMask | None]] = {
    "temperature": (Sampling(0.7), None),
    "hot": (Sampling(3.0), None),
    "top_k": (Sampling(1.0, top_k=2), None),
    "top_p": (Sampling(0.8, top_p=0.85), None),
    "min_p": (Sampling(1.2, min_p=0.3), None),
    "repetition": (Sampling(1.0, repetition_penalty=1.9), None),
    "presence and frequency": (Sampling(1.0, presence_penalty=0.8, frequency_penalty=-0.5), None),
    "bias": (Sampling(1.0, logit_bias={0: 1.0, 1: -np.inf}), None),
    "mask": (Sampling(1.0), no_repeat),
    "everything": (Sampling(0.9, 3, 0.95, 0.05, 1.4, 0.3, 0.2, {2: 0.5}), no_repeat),
}
PROMPT = [0, 1, 2, 0, 1]  # n-grams find something from the first step
COUNT = 3


class Case:
    """A model of three tokens, with what its text should be distributed as, and what a drafter makes of it."""

    def __init__(self, warp: str, seed: int = 6) -> None:
        self.model = HashedModel(3, seed, spread=1.0)
        self.sampling, self.mask = WARPS[warp]
        self.target, _ = fake_decoder(self.model, 3, prefill_chunk=2)

    def expected(self) -> Outcomes:
        def following(before: list[int]) -> Distribution:
            logits = self.model(tokens(*PROMPT, *before))
            return reference_distribution(logits, self.sampling, PROMPT, before, self.mask)

        return joint(following, COUNT)

    def drafter(self, kind: str) -> Drafter | None:
        draft = fake_decoder(HashedModel(3, 1, spread=1.0), 3, prefill_chunk=3)[0]
        kinds: dict[str, Drafter | None] = {
            "draft_model": ModelDrafter(draft),
            "ngram": NgramDrafter(1, 3),
            "plain": None,
            "unwarped q": UnwarpedDrafter(draft),
            "stops by q": DroppingDrafter(draft, lambda x, q: bool(q.max() < 0.6)),
            "drops by x": DroppingDrafter(draft, lambda x, q: bool(q[x] < 0.4)),
        }
        return kinds[kind]

    def enumerated(self, kind: str, k: int = 2) -> Outcomes:
        drafter = self.drafter(kind)

        def program(choices: Choices) -> list[int]:
            sampler = EnumeratingSampler(choices, self.sampling, PROMPT, 3, self.mask)
            return decode(self.target, drafter, PROMPT, sampler, COUNT, k).tokens

        return outcomes(program)

    def drawn(self, kind: str, draws: int) -> Counter[tuple[int, ...]]:
        drafter = self.drafter(kind)
        return Counter(
            tuple(
                decode(
                    self.target, drafter, PROMPT, Sampler(self.sampling, PROMPT, 3, seed, self.mask), COUNT, 2
                ).tokens
            )
            for seed in range(draws)
        )


@pytest.mark.parametrize("kind", ["draft_model", "ngram", "plain", "stops by q"])
@pytest.mark.parametrize("warp", WARPS)
def test_sampled_text_has_exactly_the_targets_distribution(warp: str, kind: str) -> None:
    case = Case(warp)
    assert total_variation(case.enumerated(kind), case.expected()) < 1e-6


@pytest.mark.parametrize(
    ("fault", "warp"), [("unwarped q", "temperature"), ("unwarped q", "top_k"), ("drops by x", "top_p")]
)
def test_enumeration_finds_a_planted_fault(fault: str, warp: str) -> None:
    case = Case(warp)
    assert total_variation(case.enumerated(fault), case.expected()) > 0.01


def test_the_stopping_rule_of_the_planted_fault_through_the_loop() -> None:
    """p = (.5, .5), q = (.9, .1): dropping x where q(x) < .4 gives (.55, .45); any rule on q itself gives p."""
    target, _ = fake_decoder(fixed([0.5, 0.5]), 2)
    draft, _ = fake_decoder(fixed([0.9, 0.1]), 2)

    def first(stops: Callable[[int, Distribution], bool]) -> Outcomes:
        drafter = DroppingDrafter(draft, stops)

        def program(choices: Choices) -> list[int]:
            return decode(target, drafter, [0], EnumeratingSampler(choices, Sampling(1.0), [0], 2), 2, 1).tokens[:1]

        return outcomes(program)

    assert first(lambda x, q: bool(q[x] < 0.4)) == pytest.approx({(0,): 0.55, (1,): 0.45}, abs=1e-6)
    assert first(lambda x, q: bool(q.max() < 0.95)) == pytest.approx({(0,): 0.5, (1,): 0.5}, abs=1e-6)
    assert first(lambda x, q: False) == pytest.approx({(0,): 0.5, (1,): 0.5}, abs=1e-6)


ALPHA = 1e-6 / 8  # for the tests below and that of the session together, one in a million at most is a false alarm


DRAWS = 1000


@pytest.mark.parametrize(("warp", "kind"), [("hot", "draft_model"), ("everything", "draft_model"), ("hot", "ngram")])
def test_draws_fit_the_targets_distribution(warp: str, kind: str) -> None:
    case = Case(warp, seed=9)
    assert goodness_of_fit(case.drawn(kind, DRAWS), case.expected()) > ALPHA


@pytest.mark.parametrize("fault", ["unwarped q", "drops by x"])
def test_draws_of_a_planted_fault_do_not_fit(fault: str) -> None:
    case = Case("hot", seed=9)
    assert goodness_of_fit(case.drawn(fault, DRAWS), case.expected()) < ALPHA


def test_the_goodness_of_fit_test_itself() -> None:
    expected: dict[tuple[int, ...], float] = {(0,): 0.6, (1,): 0.39, (2,): 0.005, (3,): 0.005}
    assert goodness_of_fit(Counter({(0,): 300, (1,): 195, (2,): 2, (3,): 3}), expected) > 0.9
    assert goodness_of_fit(Counter({(0,): 360, (1,): 135, (2,): 2, (3,): 3}), expected) < 1e-6
    assert goodness_of_fit(Counter({(0,): 300, (1,): 200, (9,): 1}), expected) == 0


def test_penalties_apply_at_each_place_of_a_proposal() -> None:
    """A target that repeats itself is pushed off by a penalty, wherever in a proposal that happens."""
    sampling: Any = Sampling(presence_penalty=1.0, frequency_penalty=0.5)
    model = fixed([0.5, 0.3, 0.2])
    target, _ = fake_decoder(model, 3)
    expected, _ = one_by_one(model, sampling, [0], 12, frozenset(), None)
    assert len(set(expected[:3])) > 1
    for k in range(1, 7):
        run = decode(target, Scripted([0, *expected]), [0], Sampler(sampling, [0], 3, 0), 12, k)
        assert run.tokens == expected
        assert all(step.accepted == step.proposed for step in run.steps), "the target agrees with one-by-one decoding"
