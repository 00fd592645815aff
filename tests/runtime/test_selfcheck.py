"""`draftc verify` must pass what is sound, and each of its parts must fail on the faults that it is there for."""

import dataclasses
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import draftc.runtime.accept
import draftc.runtime.request
from draftc.runtime.accept import Outcome, Proposal
from draftc.runtime.check_cache import fuzz
from draftc.runtime.check_greedy import GreedyDetails, check_greedy, greedy, triage
from draftc.runtime.check_numerics import Difference, Graph, WidthVariance, difference, graphs, measure_variance
from draftc.runtime.check_sampling import MIN_DRAWS, SamplingDetails, check_sampling
from draftc.runtime.decoder import Decoder, Limits
from draftc.runtime.drafter import Drafter, DraftRule, ModelDrafter
from draftc.runtime.engine import Logits, Tokens
from draftc.runtime.errors import UsageError
from draftc.runtime.kvcache import KVCache
from draftc.runtime.manifest import Quantization
from draftc.runtime.prompts import PromptCase, builtin_prompts
from draftc.runtime.sampler import Sampler
from draftc.runtime.selfcheck import VerifyReport, render, verify
from draftc.runtime.session import Session
from draftc.runtime.text import Tokenizer
from draftc.runtime.warp import Distribution
from tests.runtime.check_fakes import (
    CHUNK,
    MAX_LENGTH,
    MAX_WIDTH,
    BlindWideEngine,
    KvEngine,
    LateWriteEngine,
    NanEngine,
    OutlierEngine,
    StaleEngine,
    kv_session,
)
from tests.runtime.fakes import DroppingDrafter, UnwarpedDrafter

Ids = Mapping[str, Sequence[int]]


@pytest.fixture(scope="module")
def tokenizer(byte_level_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(byte_level_folder)


def run(session: Session, draws: int = MIN_DRAWS) -> VerifyReport:
    return verify(session, prompts=builtin_prompts(session), draws=draws)


def passed(report: VerifyReport) -> dict[str, bool]:
    return {part.name: part.passed for part in report.parts}


def encoded(session: Session) -> Ids:
    return {case.id: session.encode(case.content) for case in builtin_prompts(session)}


def quantized(session: Session) -> Session:
    """The same session, whose manifest says that its weights have four bits."""
    how = Quantization(bits=4, block_size=32, symmetric=True, accuracy_level=4, quantized_matmuls=1, float_matmuls=())
    target = dataclasses.replace(session.manifest.target, quantization=how)
    session.manifest = dataclasses.replace(session.manifest, precision="int4", target=target)
    return session


# --- the whole -------------------------------------------------------------------------------------------------------


def test_a_sound_bundle_passes(tokenizer: Tokenizer) -> None:
    session = kv_session(tokenizer)
    seen: list[tuple[str, float]] = []
    report = verify(
        session,
        prompts=builtin_prompts(session),
        draws=MIN_DRAWS,
        seed=3,
        on_progress=lambda part, done: seen.append((part, done)),
    )
    assert passed(report) == {"greedy": True, "sampling": True, "cache": True, "bounds": True}
    assert report.passed
    assert dict(seen) == dict.fromkeys(("greedy", "sampling", "cache", "bounds"), 1.0)
    for part in report.parts:
        done = [at for name, at in seen if name == part.name]
        assert done == sorted(done)
    assert all(len(decoder.cache) == 0 for decoder in session.decoders)

    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert document["schema"] == "draftc-verify/1"
    assert document["passed"] is True
    greedy_part = document["parts"][0]["details"]
    assert {(mode["method"], mode["k"]) for mode in greedy_part["modes"]} == {
        (method, k) for method in ("draft_model", "ngram") for k in (1, 2, 7)
    }
    text = io.StringIO()
    Console(file=text, width=200).print(render(report))
    assert text.getvalue().count("PASS ") == 4
    assert "FAIL" not in text.getvalue()


def test_the_same_seed_gives_the_same_report(tokenizer: Tokenizer) -> None:
    def counts(seed: int) -> list[tuple[float, float, int]]:
        session = kv_session(tokenizer)
        details = sampling(session, seed=seed, draws=30)
        return [(case.g.g, case.lean.shift, case.tokens) for case in details.cases]

    assert counts(1) == counts(1)
    assert counts(1) != counts(2)


ENGINE_FAULTS: dict[str, tuple[Callable[[int], Mapping[str, KvEngine]], set[str]]] = {
    "a row of a wide call is wrong": (lambda vocab: {"target": BlindWideEngine(vocab)}, {"greedy", "cache", "bounds"}),
    "writes one slot too far": (lambda vocab: {"target": LateWriteEngine(vocab)}, {"greedy", "cache", "bounds"}),
    "keeps what was rewound": (lambda vocab: {"target": StaleEngine(vocab)}, {"greedy", "cache", "bounds"}),
    # What a draft gets wrong is caught by the fuzz alone: nothing that it proposes can make the output wrong.
    "draft keeps what was rewound": (lambda vocab: {"draft": StaleEngine(vocab, 5)}, {"cache"}),
    "draft writes one slot too far": (lambda vocab: {"draft": LateWriteEngine(vocab, 5)}, {"cache", "bounds"}),
}


@pytest.mark.parametrize("fault", ENGINE_FAULTS)
def test_broken_engines_fail(tokenizer: Tokenizer, fault: str) -> None:
    engines, failing = ENGINE_FAULTS[fault]
    broken = engines(tokenizer.vocab_size)
    report = run(kv_session(tokenizer, broken.get("target"), broken.get("draft")))
    assert {name for name, ok in passed(report).items() if not ok} == failing
    text = io.StringIO()
    Console(file=text, width=200).print(render(report))
    assert text.getvalue().count("FAIL ") == len(failing)


@pytest.mark.parametrize(("role", "width"), [("target", 1), ("target", 3), ("draft", 1)])
def test_nan_is_a_failed_part_with_a_message(tokenizer: Tokenizer, role: str, width: int) -> None:
    engine = NanEngine(tokenizer.vocab_size, width)
    report = run(kv_session(tokenizer, target=engine) if role == "target" else kv_session(tokenizer, draft=engine))
    assert not report.passed
    for part in report.parts:
        assert not part.passed
        assert part.details is None
        assert "NaN" in part.verdict
        assert ("draft_model" if role == "draft" else "target") in part.verdict
    json.dumps(report.to_dict(), allow_nan=False)


def test_parts_after_a_single_nan_are_not_spoiled_by_it(tokenizer: Tokenizer) -> None:
    class OnceNan(KvEngine):
        """Fault: one entry that is written in the first part is NaN, and enters every call until it is cleared."""

        calls = 0

        def write(self, tokens: Tokens, start: int) -> None:
            super().write(tokens, start)
            self.calls += 1
            if self.calls == 300:
                self._cache[-1] = np.nan

        def row(self, start: int, width: int, end: int) -> Logits:
            logits: Logits = super().row(start, width, end) + 0 * self._cache[-1, 0]
            return logits

    report = run(kv_session(tokenizer, OnceNan(tokenizer.vocab_size)))
    assert passed(report) == {"greedy": False, "sampling": True, "cache": True, "bounds": True}


def test_whatever_breaks_off_a_part_the_others_are_reported(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> SamplingDetails:
        raise UsageError("a prompt that it cannot use")

    monkeypatch.setattr("draftc.runtime.selfcheck.check_sampling", refuse)
    report = run(kv_session(tokenizer))
    assert passed(report) == {"greedy": True, "sampling": False, "cache": True, "bounds": True}
    assert not report.passed
    assert report.parts[1].verdict == "broke off: a prompt that it cannot use"


LEAST_LENGTH = 8 + 2 * (2 + 2)  # of the sampling part at K = 2, as docs/verify.md has it


def test_a_bundle_too_small_for_the_sampling_test_is_told_so(tokenizer: Tokenizer) -> None:
    report = run(kv_session(tokenizer, max_length=LEAST_LENGTH - 1))
    assert passed(report) == {"greedy": True, "sampling": False, "cache": True, "bounds": True}
    assert [part.skipped for part in report.parts] == [False, True, False, False]
    assert report.passed, "a length is no fault"
    why = f"max_length {LEAST_LENGTH - 1} is too small for the sampling test (needs {LEAST_LENGTH})"
    assert report.parts[1].verdict == f"skipped: {why}"
    assert f"sampling was not tested: {why}" in report.warnings
    text = io.StringIO()
    Console(file=text, width=200).print(render(report))
    assert text.getvalue().count("SKIP ") == 1
    assert "no loss was found by the parts that ran" in text.getvalue()


def test_the_smallest_bundle_that_the_sampling_test_fits_into(tokenizer: Tokenizer) -> None:
    report = run(kv_session(tokenizer, max_length=LEAST_LENGTH))
    assert report.parts[1].details is not None
    assert report.parts[1].passed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget_s": 0.0}, "budget_s"),
        ({"budget_s": float("nan")}, "budget_s"),
        ({"seed": -1}, "seed"),
        ({"draws": 0}, "draws"),
        ({"prompts": ()}, "no prompts"),
        ({"prompts": (PromptCase("x", messages=({"role": "user", "content": "hi"},)),)}, "'x'.*chat template"),
        ({"prompts": (PromptCase("x", prompt=""),)}, "'x' has no tokens"),
        ({"prompts": (PromptCase("x", prompt="a"), PromptCase("y", prompt="b"))}, "every prompt has a single token"),
    ],
)
def test_bad_arguments(tokenizer: Tokenizer, arguments: dict[str, object], message: str) -> None:
    session = kv_session(tokenizer)
    with pytest.raises(UsageError, match=message):
        verify(session, **{"prompts": builtin_prompts(session), **arguments})  # type: ignore[arg-type]


# --- numerics --------------------------------------------------------------------------------------------------------


def test_variance_is_what_the_widths_differ_by(tokenizer: Tokenizer) -> None:
    session = kv_session(tokenizer, KvEngine(tokenizer.vocab_size, noise=0.02))
    corpus = np.concatenate([np.asarray(ids) for ids in encoded(session).values()])
    target, draft = graphs(session)
    found = measure_variance(target, corpus, 2)
    assert found.rms == pytest.approx(0.02 / np.sqrt(2), rel=0.05)  # of the sine, which calls of one token lack
    assert 0.02 < found.spread <= 0.041
    assert found.widths == (1, 2, 3, MAX_WIDTH, 64)
    assert not found.sound  # so much is no rounding of float32
    assert found.near_tie < found.spread
    assert measure_variance(draft, corpus, 2).rms < 1e-5
    assert measure_variance(draft, corpus, 2).sound

    coarse = measure_variance(graphs(quantized(session))[0], corpus, 2)
    assert coarse.sound
    assert coarse.near_tie == pytest.approx(4 * coarse.rms)
    assert coarse.limit == Difference(3 * coarse.rms, 3 * coarse.spread)


def test_difference_is_of_what_sampling_sees() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((3, 5000)).astype(np.float32)
    assert difference(rows, rows + np.float32(7)).rms < 1e-5  # a constant changes no probability
    assert difference(rows, rows + np.float32(7)).spread < 1e-5
    noise = (0.1 * rng.standard_normal(rows.shape)).astype(np.float32)
    assert difference(rows, rows + noise).rms == pytest.approx(0.1, rel=0.05)
    one = rows.copy()
    one[1, 17] = 9.0  # one wrong logit drowns in the average, but not when it makes a token likely
    assert difference(rows, one).rms < 0.2
    assert difference(rows, one).spread == pytest.approx(9.0 - rows[1, 17], rel=1e-5)
    assert difference(one, rows).spread == pytest.approx(9.0 - rows[1, 17], rel=1e-5)


# --- greedy parity ---------------------------------------------------------------------------------------------------


def test_ties_are_told_from_faults_and_hide_nothing(tokenizer: Tokenizer) -> None:
    session = kv_session(tokenizer)
    prompt = tokenizer.encode("the quick brown fox")
    plain = greedy(session, prompt, "plain", None, 24).token_ids
    # At two places take the target's second choice, and what plain decoding makes of it in between and after.
    written = list(plain)
    margins = {}
    for place in (6, 15):
        session.reset()
        row = session.target.extend(session.target.sync(np.asarray([*prompt, *written[:place]])), 1)[0]
        second, first = np.argsort(row)[-2:]
        margins[place] = float(row[first] - row[second])
        begin = [*written[:place], int(second)]
        written = begin + greedy(session, [*prompt, *begin], "plain", None, 24 - len(begin)).token_ids
    for near_tie in (0.0, *sorted(margins.values()), 100.0):
        found = triage(session.target, "p", prompt, plain, written, 3, near_tie)
        assert [divergence.position for divergence in found] == [6, 15]
        for divergence in found:
            margin = margins[divergence.position]
            assert divergence.gap == divergence.margin == pytest.approx(margin, abs=1e-5)
            assert divergence.wide_gap == pytest.approx(margin, abs=1e-4)
            assert divergence.token == written[divergence.position]
            assert divergence.kind == ("near tie" if divergence.gap <= near_tie else "fault")


def test_equal_texts_have_no_divergence(tokenizer: Tokenizer) -> None:
    session = kv_session(tokenizer)
    prompt = tokenizer.encode("the quick brown fox")
    plain = greedy(session, prompt, "plain", None, 24).token_ids
    assert triage(session.target, "p", prompt, plain, plain, 3, 0.0) == ()


def parity(session: Session) -> GreedyDetails:
    ids = encoded(session)
    corpus = np.concatenate([np.asarray(tokens) for tokens in ids.values()])
    variance = measure_variance(graphs(session)[0], corpus, 2)
    return check_greedy(session, ids, variance, lambda done: None)


def test_near_ties_of_a_coarse_graph_pass(tokenizer: Tokenizer) -> None:
    details = parity(quantized(kv_session(tokenizer, KvEngine(tokenizer.vocab_size, noise=0.05))))
    divergences = [divergence for mode in details.modes for divergence in mode.divergences]
    assert divergences  # otherwise this tests nothing
    assert all(divergence.kind == "near tie" for divergence in divergences)
    assert all(divergence.gap <= details.near_tie for divergence in divergences)
    assert details.passed
    assert "near ties" in details.verdict


def test_a_fault_behind_a_tie_is_found(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    # As above, and one token in the middle of each output is the target's worst.
    def faulty(proposal: Proposal, logits: Logits, sampler: Sampler, emit: Callable[[int], bool]) -> Outcome:
        row = 25 - len(sampler._generated)
        if proposal.tokens.size and 0 <= row < len(logits):
            logits = logits.copy()
            logits[row] *= -1
        return real(proposal, logits, sampler, emit)

    real = draftc.runtime.accept.accept
    monkeypatch.setattr("draftc.runtime.loop.accept", faulty)
    details = parity(quantized(kv_session(tokenizer, KvEngine(tokenizer.vocab_size, noise=0.05))))
    assert not details.passed
    both = 0
    for mode in details.modes:
        if mode.proposed == 0:
            continue
        for prompt in {divergence.prompt for divergence in mode.divergences}:
            kinds = [divergence.kind for divergence in mode.divergences if divergence.prompt == prompt]
            both += kinds[0] == "near tie" and "fault" in kinds
        assert mode.faults >= 1
    assert both  # a fault behind a tie, in at least one output
    assert "prefers token" in details.verdict


def test_acceptance_of_one_and_zero_are_warned_about(tokenizer: Tokenizer) -> None:
    vocab = tokenizer.vocab_size
    same = parity(kv_session(tokenizer, KvEngine(vocab, 0), KvEngine(vocab, 0)))
    assert same.passed
    assert any("draft_model" in warning and "exactly 1" in warning for warning in same.warnings)
    other = parity(kv_session(tokenizer, KvEngine(vocab, 0), KvEngine(vocab, 1)))
    assert other.passed
    assert any("draft_model" in warning and "exactly 0" in warning for warning in other.warnings)
    silent = parity(kv_session(tokenizer, drafters={"ngram": Silent()}))
    assert silent.passed
    assert any("never proposed" in warning for warning in silent.warnings)
    assert not [warning for warning in parity(kv_session(tokenizer)).warnings if "draft_model" in warning]


class Silent:
    """A drafter with nothing to say."""

    method = "ngram"
    decoders: Sequence[Decoder] = ()

    def begin(self, room: int) -> None:
        """Nothing is learnt."""

    def propose(self, text: Tokens, k: int, sampler: Sampler) -> Proposal:
        return Proposal()


# --- sampling --------------------------------------------------------------------------------------------------------


def sampling(session: Session, *, seed: int = 0, draws: int | None = None, budget_s: float = 60.0) -> SamplingDetails:
    return check_sampling(
        session,
        encoded(session),
        Difference(1e-3, 1e-2),
        budget_s=budget_s,
        seed=seed,
        draws=draws,
        on_progress=lambda done: None,
    )


def draft_decoder(tokenizer: Tokenizer) -> Decoder:
    limits = Limits(MAX_LENGTH, MAX_WIDTH, CHUNK, tokenizer.vocab_size)
    return Decoder(KvEngine(tokenizer.vocab_size, 5, near=0), limits)


def test_sound_sampling_is_not_near_the_alarm(tokenizer: Tokenizer) -> None:
    details = sampling(kv_session(tokenizer), draws=600)
    assert details.passed
    for case in details.cases:
        assert case.smallest_p > 0.01
        assert case.g.dof >= 6
        assert 0.1 < case.accepted / case.proposed < 0.9  # both ways through acceptance were taken, many times
        assert case.impossible == 0
    assert details.drift == Difference()


class _WithoutQ(ModelDrafter):
    """Draws, and says that the proposal was chosen (q one-hot): wasteful, yet the output keeps the distribution p."""

    def propose(self, text: Tokens, k: int, sampler: Sampler, rule: DraftRule | None = None) -> Proposal:
        return Proposal(super().propose(text, k, sampler).tokens, None)


SOUND_DRAFTERS: dict[str, Callable[[Decoder], Drafter]] = {
    "stops by q": lambda decoder: DroppingDrafter(decoder, lambda x, q: bool(q.max() < 0.4)),
    "never proposes": lambda decoder: DroppingDrafter(decoder, lambda x, q: True),
    "does not tell q": _WithoutQ,
}


@pytest.mark.parametrize("kind", SOUND_DRAFTERS)
def test_odd_but_sound_drafters_pass(tokenizer: Tokenizer, kind: str) -> None:
    drafters = {"draft_model": SOUND_DRAFTERS[kind](draft_decoder(tokenizer))}
    assert sampling(kv_session(tokenizer, drafters=drafters), draws=600).passed


DRAFTER_FAULTS: dict[str, Callable[[Decoder], Drafter]] = {
    "q is not the one drawn from": UnwarpedDrafter,
    "stops by what it drew": lambda decoder: DroppingDrafter(decoder, lambda x, q: bool(q[x] < 0.4)),
}


@pytest.mark.parametrize("fault", DRAFTER_FAULTS)
def test_broken_drafters_fail(tokenizer: Tokenizer, fault: str) -> None:
    drafters = {"draft_model": DRAFTER_FAULTS[fault](draft_decoder(tokenizer))}
    details = sampling(kv_session(tokenizer, drafters=drafters), draws=200)
    assert not details.passed
    assert "draft_model" in details.verdict
    assert "proposal" in details.verdict


def _no_residual(p: Distribution, q: Distribution) -> Distribution:
    return p


def _accepts_all(proposal: Proposal, logits: Logits, sampler: Sampler, emit: Callable[[int], bool]) -> Outcome:
    if sampler.greedy:
        return draftc.runtime.accept.accept(proposal, logits, sampler, emit)
    for x in proposal.tokens.tolist():
        sampler.push(x)
    bonus = sampler.draw(sampler.distribution(logits[proposal.tokens.size]))
    sampler.push(bonus)
    return Outcome([*proposal.tokens.tolist(), bonus], proposal.tokens.size)


def _one_seed(sampler: Sampler) -> float:
    return 0.5


ACCEPTANCE_FAULTS: dict[str, tuple[str, object]] = {
    "draws from p after a rejection": ("draftc.runtime.accept.residual", _no_residual),
    "accepts everything": ("draftc.runtime.loop.accept", _accepts_all),
    "every request has the same seed": ("draftc.runtime.sampler.Sampler.uniform", _one_seed),
}


@pytest.mark.parametrize("fault", ACCEPTANCE_FAULTS)
def test_broken_acceptance_fails(tokenizer: Tokenizer, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*ACCEPTANCE_FAULTS[fault])
    details = sampling(kv_session(tokenizer), draws=400)
    assert not details.passed
    assert all(not case.passed for case in details.cases)  # with either drafter and setting


def test_a_ruled_out_token_fails_at_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    # Fault: once in a while the token after a rejection is one outside the nucleus.
    def leaks(p: Distribution, q: Distribution) -> Distribution:
        leaked = real(p, q) * 0.99
        leaked[np.flatnonzero(p == 0)[:1]] = 0.01
        return leaked

    real = draftc.runtime.accept.residual
    monkeypatch.setattr(draftc.runtime.accept, "residual", leaks)
    details = sampling(kv_session(tokenizer), draws=400)
    assert not details.passed
    assert any(case.impossible for case in details.cases)
    assert "rules out" in details.verdict


def test_drift_between_loop_and_reference_fails(tokenizer: Tokenizer) -> None:
    class Wandering(KvEngine):
        """Fault: every call moves the logits a little further."""

        calls = 0

        def row(self, start: int, width: int, end: int) -> Logits:
            self.calls += 1
            logits = super().row(start, width, end)
            return logits * np.float32(1 + 1e-5 * self.calls)

    details = sampling(kv_session(tokenizer, Wandering(tokenizer.vocab_size)), draws=MIN_DRAWS)
    assert not details.passed
    assert details.drifted
    assert "fresh call" in details.verdict


def test_the_least_number_of_draws_is_made_whatever_it_takes(tokenizer: Tokenizer) -> None:
    details = sampling(kv_session(tokenizer), budget_s=1e-9)
    assert details.passed
    assert all(case.draws >= MIN_DRAWS for case in details.cases)


def test_too_few_draws_do_not_pass(tokenizer: Tokenizer) -> None:
    details = sampling(kv_session(tokenizer), draws=MIN_DRAWS // 2)
    assert not details.passed
    assert not details.enough
    assert "not enough draws" in details.verdict
    assert all(case.passed for case in details.cases)  # nothing was found; nothing was looked for


def test_more_draws_find_less(tokenizer: Tokenizer) -> None:
    few, many = (sampling(kv_session(tokenizer), draws=draws).cases[0] for draws in (100, 300))
    assert many.lean.detects < 0.7 * few.lean.detects
    assert many.g.detects < few.g.detects


# --- caches ----------------------------------------------------------------------------------------------------------


def test_fuzz_rewinds_and_compares_every_append(tokenizer: Tokenizer) -> None:
    session = kv_session(tokenizer)
    corpus = np.arange(200, dtype=np.int64)
    graph = graphs(session)[0]
    result = fuzz(graph, measure_variance(graph, corpus, 2), corpus, seed=0)
    assert result.passed
    assert result.calls == 24
    assert result.rewinds >= 8
    assert result.compared > result.calls
    assert result.argmax_changes == 0


@pytest.mark.parametrize("seed", range(4))
def test_fuzz_finds_a_cache_that_keeps_too_much(
    tokenizer: Tokenizer, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Fault: a rewind leaves one token too many, as if it were still part of the text.
    def keeps(self: KVCache, text: Tokens) -> int:
        before = len(self)
        kept = real(self, text)
        if 0 < kept < min(before, text.size - 1):
            self.append(text[kept : kept + 1])
            kept += 1
        return kept

    session = kv_session(tokenizer)
    corpus = np.arange(200, dtype=np.int64)
    graph = graphs(session)[0]
    variance = measure_variance(graph, corpus, 2)
    real = KVCache.align
    monkeypatch.setattr(KVCache, "align", keeps)
    assert not fuzz(graph, variance, corpus, seed).passed


@pytest.mark.parametrize("engine", [BlindWideEngine, LateWriteEngine, StaleEngine])
@pytest.mark.parametrize("seed", range(4))
def test_fuzz_finds_broken_engines_by_itself(tokenizer: Tokenizer, engine: type[KvEngine], seed: int) -> None:
    corpus = np.arange(200, dtype=np.int64)
    sound = graphs(kv_session(tokenizer))[0]
    variance = measure_variance(sound, corpus, 2)
    broken = graphs(kv_session(tokenizer, engine(tokenizer.vocab_size)))[0]
    assert not fuzz(broken, variance, corpus, seed).passed


def test_fuzz_at_low_precision(tokenizer: Tokenizer) -> None:
    corpus = np.arange(200, dtype=np.int64)
    session = kv_session(tokenizer, KvEngine(tokenizer.vocab_size, noise=0.05))
    graph = Graph("target", session.target, ceiling=0.25)
    variance = measure_variance(graph, corpus, 2)
    for seed in range(4):
        assert fuzz(graph, variance, corpus, seed).passed


class StaleOutlierEngine(OutlierEngine, StaleEngine):
    pass


@pytest.mark.parametrize("seed", range(4))
def test_fuzz_tells_a_coarse_place_from_a_stale_cache(
    tokenizer: Tokenizer, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the sample's width variance does not cover, that of the text itself may; a stale entry is beyond both."""
    corpus = np.arange(200, dtype=np.int64)
    vocab = tokenizer.vocab_size
    sound, stale = (
        Graph("target", kv_session(tokenizer, engine).target, ceiling=0.2)
        for engine in (OutlierEngine(vocab), StaleOutlierEngine(vocab))
    )
    variance = measure_variance(sound, corpus, 2)
    assert variance.rms == pytest.approx(0.003 / np.sqrt(2), rel=0.05)
    assert fuzz(sound, variance, corpus, seed).passed
    assert not fuzz(stale, variance, corpus, seed).passed
    monkeypatch.setattr(WidthVariance, "limit_for", lambda self, *_: self.limit)
    assert not fuzz(sound, variance, corpus, seed).passed, "there was no coarse place"


# --- boundaries ------------------------------------------------------------------------------------------------------


def bounds_problems(session: Session) -> dict[str, str]:
    report = run(session)
    (part,) = [part for part in report.to_dict()["parts"] if part["name"] == "bounds"]
    return {case["name"]: case["problem"] for case in part["details"]["cases"] if case["outcome"] == "failed"}


def test_boundaries_are_the_right_lengths(tokenizer: Tokenizer) -> None:
    report = run(kv_session(tokenizer))
    (part,) = [part for part in report.to_dict()["parts"] if part["name"] == "bounds"]
    lengths = {(case["prompt_tokens"], case["new_tokens"]) for case in part["details"]["cases"]}
    assert {(1, 4), (CHUNK - 1, 4), (CHUNK, 4), (CHUNK + 1, 4)} <= lengths
    assert {(MAX_LENGTH - 1, 1), (MAX_LENGTH - 3, 3), (MAX_LENGTH - 1, 2), (MAX_LENGTH, 1)} <= lengths


def test_a_request_over_capacity_must_be_refused(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    real = draftc.runtime.request._room
    monkeypatch.setattr(
        draftc.runtime.request, "_room", lambda length, prompt, asked, default: real(length + 2, prompt, asked, default)
    )
    problems = bounds_problems(kv_session(tokenizer))
    assert set(problems) == {"one token over", "prompt of max_length"}


def test_a_request_that_fits_must_not_be_refused(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    real = draftc.runtime.request._room
    monkeypatch.setattr(
        draftc.runtime.request, "_room", lambda length, prompt, asked, default: real(length - 1, prompt, asked, default)
    )
    problems = bounds_problems(kv_session(tokenizer))
    assert set(problems) == {"exactly full", "full, K past the room"}
    assert "refused" in problems["exactly full"]


class FullChunkEngine(KvEngine):
    """Fault: a call of exactly a prefill chunk loses its first token."""

    def write(self, tokens: Tokens, start: int) -> None:
        super().write(tokens, start)
        if tokens.size == CHUNK:
            self._cache[start] = 0.0


class LastSlotEngine(KvEngine):
    """Fault: the last slot that a text can reach is not written."""

    def write(self, tokens: Tokens, start: int) -> None:
        super().write(tokens, start)
        self._cache[MAX_LENGTH - 2] = 0.0


def test_a_fault_of_full_chunks_is_found(tokenizer: Tokenizer) -> None:
    # Full chunks come in every prefill, so plain and speculative decoding agree with each other.
    report = run(kv_session(tokenizer, FullChunkEngine(tokenizer.vocab_size)))
    assert not passed(report)["bounds"]


def test_a_fault_at_the_end_of_the_buffer_is_found_where_the_cut_of_calls_shows_it(tokenizer: Tokenizer) -> None:
    class OnlyWide(LastSlotEngine):
        def write(self, tokens: Tokens, start: int) -> None:
            if tokens.size > 1:
                super().write(tokens, start)
            else:
                KvEngine.write(self, tokens, start)

    problems = bounds_problems(kv_session(tokenizer, OnlyWide(tokenizer.vocab_size)))
    assert set(problems) <= {"exactly full", "full, K past the room"}
    assert problems


def test_json_has_what_the_document_names(tokenizer: Tokenizer) -> None:
    session = quantized(kv_session(tokenizer, KvEngine(tokenizer.vocab_size, noise=0.05)))
    document = run(session).to_dict()
    text = (Path(__file__).parents[2] / "docs" / "verify.md").read_text(encoding="utf-8")

    def keys(value: object) -> set[str]:
        if isinstance(value, dict):
            return set(value).union(*map(keys, value.values()))
        return set().union(*map(keys, value)) if isinstance(value, list) else set()

    named = keys(document)
    assert {"divergences", "lean", "argmax_changes", "outcome"} <= named  # every part was reached
    assert {key for key in named if f"`{key}`" not in text} == set()
