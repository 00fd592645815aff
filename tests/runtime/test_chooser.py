"""What the chooser promises: the best length by its formula, nothing where nothing can pay, and no look at a clock."""

import time
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftc.runtime.adaptive import AdaptiveDrafter
from draftc.runtime.chooser import Chooser, DraftPlan, best_length
from draftc.runtime.costs import CostProfile, GraphCosts
from draftc.runtime.drafter import DraftState, ModelDrafter
from draftc.runtime.engine import Tokens
from draftc.runtime.estimates import Estimate, Pace
from draftc.runtime.ngrams import NgramIndex
from draftc.runtime.sampler import Sampler
from draftc.runtime.warp import Sampling
from tests.runtime.cost_fakes import FLAT, LINEAR, StubModel, make_costs, profiles
from tests.runtime.fakes import Call, Choices, EnumeratingSampler, decode, fake_decoder, fixed, outcomes, tokens

WIDEST = 32
# A draft token costs a good third of what decoding one does: likely ones pay, others don't.
CLOSE = make_costs(lambda width: 10 + 0.5 * width, lambda width: 3.0)
CHEAP = make_costs(lambda width: 10 + 0.1 * width, lambda width: 0.3)


@dataclass(frozen=True)
class Turn:
    """One step: where in the text it was, what was proposed and what held, and whether the draft model was asked."""

    size: int
    proposed: int
    accepted: int
    asked: bool


def play(
    costs: CostProfile, model: StubModel | None, script: list[int], start: int = 4, k: int = WIDEST - 1
) -> list[Turn]:
    """Follow a text that is known beforehand, as greedy decoding would."""
    drafter = AdaptiveDrafter(costs, model, (2, 4), WIDEST)
    return follow(drafter, model, script, start, k)


def follow(drafter: AdaptiveDrafter, model: StubModel | None, script: list[int], start: int, k: int) -> list[Turn]:
    sampler = Sampler(Sampling(), script[:start], max(script) + 9, seed=0)
    text = np.array(script, np.int64)
    drafter.begin(text.size - start)
    turns = []
    end = start
    while end < text.size:
        runs = model.runs if model else 0
        proposal = drafter.propose(text[:end], min(k, text.size - end - 1), sampler).tokens.tolist()
        accepted = 0
        while accepted < len(proposal) and proposal[accepted] == script[end + accepted]:
            accepted += 1
        turns.append(Turn(end, len(proposal), accepted, asked=model is not None and model.runs > runs))
        end += accepted + 1
    return turns


def oracle(script: list[int], right: range | None = None, confidence: float = 0.6) -> StubModel:
    """Knows the script, at the places `right` (default: all), and says something else elsewhere."""

    def says(text: list[int]) -> tuple[int, float]:
        place = len(text)
        known = place < len(script) and (right is None or place in right)
        return (script[place] if known else max(script) + 5), confidence

    return StubModel(says)


# --- the formula -----------------------------------------------------------------------------------------------------


@given(
    chances=st.lists(st.floats(0, 1), max_size=9),
    costs=st.lists(st.floats(0, 5), max_size=9),
    verify=st.lists(st.floats(0.1, 20), min_size=1, max_size=9),
    rate=st.floats(0.01, 2),
    reach=st.floats(0, 1),
)
@settings(deadline=None, max_examples=300)
def test_the_best_length_is_the_best_of_all(
    chances: list[float], costs: list[float], verify: list[float], rate: float, reach: float
) -> None:
    most = min(len(chances), len(costs), len(verify) - 1)
    gains = [
        reach * sum(float(np.prod(chances[:t])) for t in range(1, n + 1))
        - rate * (sum(costs[:n]) + verify[n] - verify[0])
        for n in range(most + 1)
    ]
    gain, length = best_length(chances, costs, verify, rate, reach)
    assert gain == pytest.approx(max(gains), abs=1e-9)
    assert gains[length] == pytest.approx(max(gains), abs=1e-9)
    assert gain >= 0


@given(prior=st.floats(0.05, 0.95), trials=st.lists(st.booleans(), max_size=60))
def test_an_estimate_goes_where_the_trials_are(prior: float, trials: list[bool]) -> None:
    estimate = Estimate(prior)
    assert estimate.value == pytest.approx(prior)
    for success in trials:
        before = estimate.value
        estimate.count(success)
        assert 0 < estimate.value < 1
        assert estimate.value > before if success else estimate.value < before
    estimate.relax(1.0)
    assert estimate.value == pytest.approx(prior)


def test_an_estimate_forgets() -> None:
    estimate = Estimate(0.5, memory=20)
    for _ in range(1000):
        estimate.count(False)
    for _ in range(20):
        estimate.count(True)
    assert estimate.value > 0.5


# --- where nothing can pay -------------------------------------------------------------------------------------------


@given(script=st.lists(st.integers(0, 2), min_size=5, max_size=60), k=st.integers(0, 31), confidence=st.floats(0, 1))
@settings(deadline=None)
def test_where_verifying_costs_what_decoding_does_nothing_is_proposed(
    script: list[int], k: int, confidence: float
) -> None:
    """Not of texts that repeat themselves, nor of a draft model that is always right, which is never run."""
    model = oracle(script, confidence=confidence)
    turns = play(LINEAR, model, script, k=k)
    assert [turn.proposed for turn in turns] == [0] * (len(script) - 4)
    assert model.runs == 0


@given(script=st.lists(st.integers(0, 2), min_size=5, max_size=60))
@settings(deadline=None)
def test_a_draft_that_costs_more_than_the_target_is_never_run(script: list[int]) -> None:
    model = oracle(script)
    play(make_costs(lambda width: 10 + 0.01 * width, lambda width: 30.0), model, script)
    assert model.runs == 0


def test_without_costs_of_a_draft_model_it_is_never_run() -> None:
    script = list(range(60))
    model = oracle(script)
    play(make_costs(lambda width: 10.0), model, script)
    assert model.runs == 0


@given(costs=profiles(), script=st.lists(st.integers(0, 2), min_size=5, max_size=40), k=st.integers(0, 40))
@settings(deadline=None)
def test_never_more_than_was_asked_for_or_fits(costs: CostProfile, script: list[int], k: int) -> None:
    for turn in play(costs, oracle(script), script, k=k):
        assert turn.proposed <= min(k, WIDEST - 1)


# --- where it pays ---------------------------------------------------------------------------------------------------


def test_proposals_lengthen_while_they_hold() -> None:
    script = list(range(400))
    turns = play(CHEAP, oracle(script), script)
    drafted = [turn.proposed for turn in turns if turn.asked]
    assert drafted, "a draft that cheap is tried"
    assert np.mean(drafted[-5:-1]) > 2 * drafted[0]
    assert len(turns) < 100


def test_proposals_shorten_while_they_do_not_hold() -> None:
    script = list(range(400))
    turns = play(CLOSE, oracle(script, right=range(0), confidence=0.9), script)
    assert turns[0].proposed > 0 or any(turn.proposed for turn in turns[:20])
    late = turns[200:]
    assert sum(turn.asked for turn in late) < len(late) / 3, "it is asked now and then"
    assert sum(turn.proposed for turn in late) < len(late) / 2


def test_a_draft_that_became_good_is_tried_again() -> None:
    script = list(range(900))
    turns = play(CLOSE, oracle(script, right=range(300, 900), confidence=0.9), script)
    before = [turn for turn in turns if 200 <= turn.size < 300]
    after = [turn for turn in turns if turn.size >= 600]
    assert sum(turn.asked for turn in before) < len(before) / 3
    assert sum(turn.accepted for turn in after) > len(after)


def test_a_draft_that_became_bad_is_given_up() -> None:
    script = list(range(900))
    turns = play(CLOSE, oracle(script, right=range(300), confidence=0.9), script)
    assert sum(turn.accepted for turn in turns if turn.size < 300) > 100
    after = [turn for turn in turns if turn.size >= 600]
    assert sum(turn.asked for turn in after) < len(after) / 3


def test_a_text_that_repeats_itself_is_copied_in_long_strides() -> None:
    once = list(range(60))
    turns = play(CHEAP, None, once * 6)
    assert sum(turn.accepted for turn in turns) > 60 * 4
    assert max(turn.accepted for turn in turns) > 20
    assert all(turn.proposed == 0 for turn in turns if turn.size < 60), "until then nothing was there before"


def test_copies_that_never_hold_are_given_up() -> None:
    """A text in which every pair that comes again goes on differently."""
    script: list[int] = []
    for i in range(300):
        script += [7, 8, 100 + i]
    turns = play(make_costs(lambda width: 8.0 + 2 * width), None, script)
    assert sum(turn.proposed for turn in turns[-150:]) <= sum(turn.accepted for turn in turns[-150:]) + 75
    pairs = [turn for turn in turns[-150:] if script[turn.size - 1] == 8]
    assert sum(turn.proposed for turn in pairs) <= len(pairs) / 3


# --- what a step is said to cost -------------------------------------------------------------------------------------


def test_the_pace_is_that_of_the_calls_that_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft calls that catch up, those after them, and verifications, each at its own width and fill."""
    target_costs = GraphCosts(widths=(1, 8), fills=(0, 300), ms=((10.0, 12.0), (20.0, 24.0)))
    draft_costs = GraphCosts(widths=(1, 9), fills=(0, 900), ms=((1.0, 9.0), (3.0, 27.0)))
    prompt, count, vocab = list(range(60)), 140, 210

    def next_number(text: Tokens) -> NDArray[np.float32]:
        row: NDArray[np.float32] = 6 * np.eye(vocab, dtype=np.float32)[text[-1] + 1]
        return row

    target, target_engine = fake_decoder(next_number, vocab, max_length=220, max_width=WIDEST)
    draft, draft_engine = fake_decoder(next_number, vocab, max_length=220, max_width=WIDEST)
    target.sync_but(1, tokens(*prompt))
    target_engine.calls.clear()
    said, made = [], []

    def cost(graph: GraphCosts, calls: list[Call]) -> float:
        return sum(graph.curve(call.start, call.width)[call.width] for call in calls)

    def count_step(pace: Pace, new: int, ms: float) -> None:
        said.append(ms)
        made.append(cost(target_costs, target_engine.calls) + cost(draft_costs, draft_engine.calls))

    monkeypatch.setattr(Pace, "count", count_step)
    costs = make_costs(lambda width: 1.0, target=target_costs, draft=draft_costs)
    drafter = AdaptiveDrafter(costs, ModelDrafter(draft, window=16), (2, 4), WIDEST)
    run = decode(target, drafter, prompt, Sampler(Sampling(), prompt, vocab, 0), count, WIDEST - 1)
    assert run.tokens == list(range(60, 200))
    assert {call.width for call in draft_engine.calls} >= {1, 2, 16}

    assert len(said) > 10
    assert np.cumsum(said) == pytest.approx(made, rel=0.02)


# --- a function of the profile and the tokens ------------------------------------------------------------------------


def no_clock(patch: pytest.MonkeyPatch, module: ModuleType = time) -> None:
    def stopped(*_: object) -> float:
        raise AssertionError("somebody looked at a clock")

    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time"):
        patch.setattr(module, name, stopped)
        patch.setattr(module, f"{name}_ns", stopped)


@pytest.mark.parametrize("costs", [FLAT, CLOSE, CHEAP, LINEAR], ids=["flat", "close", "cheap", "linear"])
def test_the_same_tokens_and_profile_give_the_same_choices_and_no_clock_is_read(
    costs: CostProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(3)
    script = rng.integers(0, 4, 300).tolist()
    right = rng.random(300) < 0.7

    def model() -> StubModel:
        return StubModel(lambda text: (script[len(text)] if len(text) < 300 and right[len(text)] else 9, 0.7))

    with monkeypatch.context() as patch:
        no_clock(patch)
        one, other = play(costs, model(), script), play(costs, model(), script)
    assert one == other
    assert costs is LINEAR or sum(turn.accepted for turn in one) > 30


def test_a_request_begins_with_nothing_learnt() -> None:
    script = np.random.default_rng(5).integers(0, 3, 200).tolist()
    another = list(range(200))
    fresh = play(CLOSE, oracle(script), script)
    model = oracle(script)
    drafter = AdaptiveDrafter(CLOSE, model, (2, 4), WIDEST)
    for text in (another, script, script):
        turns = follow(drafter, model, text, 4, WIDEST - 1)
    assert turns == fresh


@pytest.mark.parametrize("p", [[0.5, 0.3, 0.2], [0.9, 0.05, 0.05], [0.34, 0.33, 0.33]], ids=str)
@pytest.mark.parametrize("draft_ms", [0.01, 1.0, 3.0, 5.0, 6.5])
def test_questions_are_never_about_the_draw(p: list[float], draft_ms: float) -> None:
    """A draft whose q_i are the same whatever was drawn is asked the same, and answered the same, on every path."""
    costs = make_costs(lambda width: 10 + 0.2 * width, lambda width: draft_ms)
    seen: set[tuple[tuple[str, bool], ...]] = set()

    class Recorded:
        def __init__(self, plan: DraftPlan) -> None:
            self.plan = plan
            self.answers: list[tuple[str, bool]] = []

        def proposes(self, confidence: float) -> bool:
            self.answers.append(("proposes", self.plan.proposes(confidence)))
            return self.answers[-1][1]

        def goes_on(self) -> bool:
            self.answers.append(("goes on", self.plan.goes_on()))
            return self.answers[-1][1]

    def program(choices: Choices) -> list[int]:
        text = tokens(0, 1, 2, 0)
        chooser = Chooser(costs, NgramIndex(2, 4), 8, room=40)
        chooser.learn(text)
        plan = chooser.choose(4, DraftState(1, 3))
        if not isinstance(plan, DraftPlan):
            return []
        rule = Recorded(plan)
        drafter = ModelDrafter(fake_decoder(fixed(p), 3)[0])
        drafted = drafter.propose(text, plan.most, EnumeratingSampler(choices, Sampling(1.0), [], 3), rule)
        seen.add(tuple(rule.answers))
        assert drafted.tokens.size == sum(1 for kind, yes in rule.answers if kind == "proposes" and yes)
        assert (drafted.q is None) == (drafted.tokens.size == 0)
        return [int(token) for token in drafted.tokens]

    found = outcomes(program)
    assert len(seen) <= 1
    assert len({len(drawn) for drawn in found}) == 1
    assert draft_ms > 1 or len(found) > 1, "a draft that cheap is asked"
