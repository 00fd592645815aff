"""Sampling: the tokens that the speculative loop draws have the target's distribution.

At a few fixed prefixes the real loop, with the bundle's own drafters, is run again and again with other seeds. Three
tests look at the same draws:

* `g`: a G-test of the next tokens at each prefix against reference distributions: of the first token, and of the second
  and third given that the likeliest proposals before them were accepted. The reference comes from its own call of the
  loop's width, since a graph's kernels may differ between widths; how far they do is reported apart.
* `lean`: for every token of every draw, whether it is one that the target favours over the draft, p(x) > q(x), against
  the probability p gives to that, in the very call that the loop made. An error in acceptance, in q or in the residual
  moves mass between these two sides, so this finds it with few draws. Where nothing was proposed, the side is "the
  target's likeliest token".
* `proposal`: whether a drawn proposal is the draft's likeliest token, against the probability q gives to that. All of
  losslessness rests on q being what the proposal was drawn from; an error there is a large one in the proposals and
  a small one in the output. Chosen proposals (n-grams) have no q to test.

Where a backend has a loop of its own (on a GPU's memory), the G-test is made for that one too: nobody sees its logits,
so it has no other test.

The p-values are proven bounds (see gof), so that a sound bundle fails once in 1 / ALPHA runs, over all tests together.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from time import perf_counter

import numpy as np

from draftc.runtime.check_draws import MIN_TOKENS, Bets, DeviceDrawSeries, DrawSeries, tapped
from draftc.runtime.check_greedy import greedy
from draftc.runtime.check_numerics import Difference, rows_of
from draftc.runtime.engine import Tokens
from draftc.runtime.errors import UsageError
from draftc.runtime.gof import betting_p_value, detectable_shift, detectable_tv, g_statistic, g_tail_bound
from draftc.runtime.session import Session
from draftc.runtime.warp import Sampling, softmax

__all__ = [
    "ALPHA",
    "MIN_DRAWS",
    "SETTINGS",
    "GTest",
    "SamplingCase",
    "SamplingDetails",
    "Shift",
    "check_sampling",
    "too_small_for_sampling",
]

ALPHA = 1e-6  # of all tests together
MIN_DRAWS = 60  # per drafter and setting; with fewer, only gross errors could show, and the part does not pass
MAX_DRAWS = 4000
PREFIXES = 3
PREFIX_TOKENS = 24
LEAST_PREFIX = 4  # two tokens of a prompt, two of the target's: its repetition is what an n-gram drafter needs
PLANNED_SHARE = 0.8  # of the budget; the rest is for what takes longer than the pilot did

SETTINGS: Mapping[str, Sampling] = {
    "temperature 1, top-p 0.95, top-k 50": Sampling(temperature=1.0, top_p=0.95, top_k=50),
    # Mild penalties: strong ones leave nothing to accept where a text repeats.
    "temperature 0.7, min-p 0.02, penalties": Sampling(
        temperature=0.7, min_p=0.02, repetition_penalty=1.05, presence_penalty=0.2, frequency_penalty=0.1
    ),
}


@dataclass(frozen=True)
class GTest:
    """The statistic with its degrees of freedom, an upper bound of its p-value, and the total variation it finds."""

    g: float
    dof: int
    p: float
    detects: float


@dataclass(frozen=True)
class Shift:
    """Observed minus expected frequency of `events` events, an upper bound of its p-value, and what shift is found."""

    shift: float
    events: int
    p: float
    detects: float

    @classmethod
    def of(cls, bets: Bets, alpha: float) -> "Shift":
        """The test of `bets` at a false alarm rate of `alpha`."""
        shift = float(np.mean(bets.events) - np.mean(bets.probabilities)) if bets.events else 0.0
        return cls(
            shift,
            len(bets.events),
            betting_p_value(bets.events, bets.probabilities),
            detectable_shift(bets.probabilities, alpha),
        )


@dataclass(frozen=True)
class SamplingCase:
    """One drafter under one setting: `draws` of `tokens` in all, of which `proposed` were offered; and three tests.

    `impossible` counts tokens to which the target gives no probability at all.
    """

    method: str
    setting: str
    k: int
    draws: int
    tokens: int
    proposed: int
    accepted: int
    g: GTest
    lean: Shift
    proposal: Shift
    impossible: int
    passed: bool

    @property
    def smallest_p(self) -> float:
        """Of the three tests."""
        return min(self.g.p, self.lean.p, self.proposal.p)


@dataclass(frozen=True)
class SamplingDetails:
    """All cases, and what was measured on the side.

    `alpha_per_test` is ALPHA over the number of tests (Bonferroni). `width_tv` is the largest total variation between
    the distributions from calls of one token and of the loop's width; `row_dependence` the largest difference of a
    row when later tokens of its call change; `drift` that between the loop's own logits and the reference's, which may
    be `limit`.
    """

    alpha: float
    alpha_per_test: float
    budget_s: float
    seconds_per_draw: float
    prefix_tokens: tuple[int, ...]
    width_tv: float
    row_dependence: Difference
    drift: Difference
    limit: Difference
    cases: tuple[SamplingCase, ...]

    @property
    def enough(self) -> bool:
        """Whether every case had MIN_DRAWS."""
        return all(case.draws >= MIN_DRAWS for case in self.cases)

    @property
    def drifted(self) -> bool:
        """Whether the loop's logits are not the reference's."""
        return self.drift.rms > self.limit.rms or self.drift.spread > self.limit.spread

    @property
    def passed(self) -> bool:
        """Whether every test passed, on enough draws, with logits that are the reference's."""
        return self.enough and not self.drifted and all(case.passed for case in self.cases)

    @property
    def verdict(self) -> str:
        """One line."""
        bad = [case for case in self.cases if not case.passed]
        if bad:
            case = min(bad, key=lambda case: case.smallest_p)
            what = ", ".join(
                f"{name} p ≤ {test.p:.1g}"
                for name, test in (("G", case.g), ("lean", case.lean), ("proposal", case.proposal))
                if test.p < self.alpha_per_test
            )
            if case.impossible:
                what = f"{case.impossible} tokens that the target rules out{what and ', '}{what}"
            return (
                f"the loop does not draw from the target's distribution in {len(bad)} of {len(self.cases)} cases; "
                f"worst: {case.method}, {case.setting}: {what} (alarm below {self.alpha_per_test:.1g})"
            )
        if self.drifted:
            return (
                f"the loop's logits differ from a fresh call's by {self.drift.rms:.3g} rms (allowed "
                f"{self.limit.rms:.2g})"
            )
        fewest = min((case.draws for case in self.cases), default=0)
        if not self.enough:
            return f"not enough draws: {fewest} of the {MIN_DRAWS} that each case needs"
        detects = max(case.lean.detects for case in self.cases if case.lean.events)
        return (
            f"{sum(case.draws for case in self.cases)} draws in {len(self.cases)} cases fit the target's distribution "
            f"(smallest p {min(case.smallest_p for case in self.cases):.2g}; shifts of {detects:.3f} or "
            "more would show)"
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is suspicious without being wrong."""
        return tuple(
            f"{case.method}, {case.setting}: {case.accepted} of {case.proposed} proposals were accepted"
            for case in self.cases
            if case.proposed >= MIN_DRAWS and case.accepted in (0, case.proposed)
        )


def check_sampling(
    session: Session,
    prompts: Mapping[str, Sequence[int]],
    limit: Difference,
    *,
    budget_s: float,
    seed: int,
    draws: int | None = None,
    on_progress: Callable[[float], None],
) -> SamplingDetails:
    """Draw at fixed prefixes with every drafter under every setting. `limit` is a WidthVariance's.

    `draws` per case; default: what `budget_s` seconds allow by a measured step time, MIN_DRAWS to MAX_DRAWS. The same
    seed gives the same draws.
    """
    k = _depth(session)
    prefixes = _choose_prefixes(session, prompts, k)
    runs = [
        DrawSeries(method, drafter, name, sampling, k)
        for method, drafter in session.drafters.items()
        for name, sampling in SETTINGS.items()
    ]
    if session.loops is not None:
        runs += [
            DeviceDrawSeries(method, drafter, f"{name}, on the device", sampling, k, session.loops)
            for method, drafter in session.drafters.items()
            for name, sampling in SETTINGS.items()
            if not sampling.edits_logits
        ]
    session.reset()
    with tapped(session.target) as tap:
        seconds = [run.seconds_per_draw(session.target, tap, prefixes[0]) for run in runs]
        planned = draws or max(MIN_DRAWS, int(min(MAX_DRAWS, PLANNED_SHARE * budget_s / sum(seconds))))
        share, least = (-(-count // len(prefixes)) for count in (planned, MIN_DRAWS))
        seeds = iter(range(seed, seed + share * len(prefixes) * len(runs)))
        blocks = [(prefix, run, cost) for prefix in prefixes for run, cost in zip(runs, seconds, strict=True)]
        for done, (prefix, run, cost) in enumerate(blocks):
            run.open_prefix(session.target, prefix, share)
            # The clock only ends what takes longer than the pilot said: no draw has a say in how many there are.
            deadline = perf_counter() + (share * cost / PLANNED_SHARE if draws is None else float("inf"))
            for i in range(share):
                draw_seed = next(seeds)
                if i < least or perf_counter() < deadline:
                    run.record(run.draw(session.target, tap, prefix, draw_seed))
            on_progress((done + 1) / len(blocks))
    alpha = ALPHA / (3 * len(runs))
    return SamplingDetails(
        alpha=ALPHA,
        alpha_per_test=alpha,
        budget_s=budget_s,
        seconds_per_draw=float(np.mean(seconds)),
        prefix_tokens=tuple(prefix.size for prefix in prefixes),
        width_tv=max(run.width_tv for run in runs),
        row_dependence=reduce(or_, (run.row_dependence for run in runs)),
        drift=reduce(or_, (run.drift for run in runs)),
        limit=limit,
        cases=tuple(_case(run, alpha) for run in runs),
    )


def too_small_for_sampling(session: Session) -> str:
    """Which of the bundle's lengths leaves no room for the shortest prefix; "" where they all do."""
    limits = session.target.limits
    needs = {
        "max_length": 2 * LEAST_PREFIX + 2 * (MIN_TOKENS + _depth(session)),
        "max_width": LEAST_PREFIX,
        "prefill_chunk": LEAST_PREFIX,
    }
    for name, least in needs.items():
        if getattr(limits, name) < least:
            return f"{name} {getattr(limits, name)} is too small for the sampling test (needs {least})"
    return ""


def _depth(session: Session) -> int:
    return min(session.manifest.num_speculative_tokens, 3)


def _choose_prefixes(session: Session, prompts: Mapping[str, Sequence[int]], k: int) -> list[Tokens]:
    """Short prefixes at which a draw says much: the target's own text, and the beginning of its repetition.

    The repetition makes an n-gram drafter propose what followed the first time. It is cut where the target is least
    sure about that token, p (1 - p) at its largest; the best PREFIXES of `prompts` are taken. Raises UsageError where
    none of them has two tokens.
    """
    limits = session.target.limits
    room = (limits.max_length - 2 * (MIN_TOKENS + k)) // 2
    half = min(PREFIX_TOKENS, limits.max_width, limits.prefill_chunk, room) // 2
    scored = []
    for ids in prompts.values():
        start = list(ids)[:half]
        if len(start) < 2:
            continue
        session.reset()
        once = np.asarray(start + greedy(session, start, "plain", None, half).token_ids, np.int64)
        rows_of(session.target, once)
        rows = rows_of(session.target, np.concatenate((once, once)), rows=once.size)  # (n, V): after each repeated one
        places = np.arange(len(start) + 1, once.size)  # at least as many tokens of the repetition as an n-gram has
        p = np.array([softmax(rows[i - 1])[once[i]] for i in places])
        best = int((p * (1 - p)).argmax())
        scored.append((float(p[best] * (1 - p[best])), np.concatenate((once, once[: places[best]]))))
    if not scored:
        raise UsageError("none of the prompts has two tokens: give longer ones")
    scored.sort(key=lambda item: -item[0])
    return [prefix for _, prefix in scored[:PREFIXES]]


def _case(run: DrawSeries, alpha: float) -> SamplingCase:
    """The tests, each at a false alarm rate of `alpha`."""
    dof = sum(node.cells.size for node in run.nodes)
    g = sum(g_statistic(node.table, node.p) for node in run.nodes)
    tests = GTest(g, dof, g_tail_bound(g, dof), detectable_tv(run.draws, dof, alpha))
    lean, proposal = Shift.of(run.output, alpha), Shift.of(run.proposal, alpha)
    return SamplingCase(
        method=run.method,
        setting=run.setting,
        k=run.k,
        draws=run.draws,
        tokens=run.tokens,
        proposed=run.proposed,
        accepted=run.accepted,
        g=tests,
        lean=lean,
        proposal=proposal,
        impossible=run.impossible,
        passed=min(tests.p, lean.p, proposal.p) >= alpha and run.impossible == 0,
    )
