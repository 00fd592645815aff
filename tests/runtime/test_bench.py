"""What `draftc bench` runs, in which order, and that its figures are those of the requests it made."""

import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from draftc.runtime.bench import BenchReport, bench
from draftc.runtime.bench_tables import render
from draftc.runtime.errors import CapacityError, UsageError
from draftc.runtime.prompts import PromptCase
from draftc.runtime.request import Generation
from draftc.runtime.session import Session
from draftc.runtime.stats import Stats
from draftc.runtime.text import Tokenizer
from draftc.runtime.warp import Sampling
from tests.runtime.check_fakes import MAX_LENGTH, kv_session

PROMPTS = (PromptCase("fox", prompt="the quick brown fox"), PromptCase("fib", prompt="def fib(n): return n"))


@pytest.fixture(scope="module")
def tokenizer(byte_level_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(byte_level_folder)


@pytest.fixture
def session(tokenizer: Tokenizer) -> Session:
    return kv_session(tokenizer)


Calls = list[tuple[str, dict[str, Any], Generation]]


def recorded(session: Session, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Every call of session.generate from now on: text, options, result."""
    calls: Calls = []
    real = session.generate

    def generate(prompt: Any, **options: Any) -> Generation:
        result = real(prompt, **options)
        calls.append((session.tokenizer.decode(prompt), options, result))
        return result

    monkeypatch.setattr(session, "generate", generate)
    return calls


def test_modes_are_interleaved_and_each_run_prefills(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = recorded(session, monkeypatch)
    seen: list[tuple[str, float]] = []
    bench(
        session,
        prompts=PROMPTS,
        ks=[1, 3],
        methods=["ngram", "draft_model"],
        max_new_tokens=10,
        repeats=2,
        on_progress=lambda what, done: seen.append((what, done)),
    )
    modes = [("plain", None), ("ngram", 1), ("ngram", 3), ("draft_model", 1), ("draft_model", 3)]
    order = [(text, options["method"], options["num_speculative_tokens"]) for text, options, _ in calls]
    warm_up = [("the quick brown fox", *mode) for mode in modes]
    measured = [(case.prompt, *mode) for case in PROMPTS for _ in range(2) for mode in modes]
    assert order == warm_up + measured
    assert all(result.stats.cached_tokens == 0 for _, _, result in calls)
    assert all(options["temperature"] == 0 and options["repetition_penalty"] == 1 for _, options, _ in calls)
    assert [done for _, done in seen] == sorted(done for _, done in seen)
    assert seen[-1][1] == 1.0
    assert ("fib, draft_model-k3") in [what for what, _ in seen]


def test_records_are_the_requests(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = recorded(session, monkeypatch)
    report = bench(session, prompts=PROMPTS, ks=[2], max_new_tokens=12, repeats=3)
    assert [(record.id, record.mode) for record in report.records] == [
        (case.id, mode) for case in PROMPTS for mode in ("plain", "draft_model-k2", "ngram-k2")
    ]
    for record in report.records:
        case = next(case for case in PROMPTS if case.id == record.id)
        method, _, k = record.mode.partition("-k")
        runs = [
            result
            for text, options, result in calls[3:]  # after the warm-up
            if text == case.prompt
            and (options["method"], options["num_speculative_tokens"]) == (method, int(k) if k else None)
        ]
        assert len(runs) == 3
        by_time = sorted(runs, key=lambda run: run.stats.decode_s)
        stats = by_time[1].stats
        assert record.decode_s == stats.decode_s
        assert record.prefill_s == sorted(run.stats.prefill_s for run in runs)[1]
        assert sorted(record.decode_s_runs) == [run.stats.decode_s for run in by_time]
        for name in ("prompt_tokens", "new_tokens", "target_calls", "draft_calls", "proposed", "accepted", "steps"):
            assert getattr(record, name) == getattr(stats, name)
        assert record.token_ids == tuple(runs[0].token_ids)
        assert record.finish_reason == runs[0].finish_reason
        assert record.repeatable
        assert record.identical_to_plain
        parts = record.draft_s + record.verify_s + record.accept_s + record.other_s
        assert parts == pytest.approx(record.decode_s, rel=1e-6, abs=1e-9)
        assert sum(record.accepted_at) == record.accepted
    plain, draft = report.records[:2]
    assert plain.target_calls == plain.new_tokens
    assert plain.draft_calls == plain.proposed == 0
    assert draft.target_calls < draft.new_tokens


def scripted(
    session: Session, monkeypatch: pytest.MonkeyPatch, results: dict[tuple[str, str], list[Generation]]
) -> None:
    """Make session.generate return `results` by (prompt, method), in order; the warm-up gets the first."""
    left = {key: [runs[0], *runs] if key[0] == PROMPTS[0].prompt else list(runs) for key, runs in results.items()}
    monkeypatch.setattr(
        session,
        "generate",
        lambda prompt, **options: left[session.tokenizer.decode(prompt), options["method"]].pop(0),
    )


def generation(tokens: list[int], prefill_s: float, decode_s: float, **stats: Any) -> Generation:
    values = {"steps": len(tokens) - 1, "step_tokens": len(tokens) - 1, "engine_s": decode_s, **stats}
    full = Stats(new_tokens=len(tokens), prefill_s=prefill_s, decode_s=decode_s, **values)
    return Generation("", tokens, "length", None, 0, full)


def test_totals_by_hand(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    fox, fib = (str(case.prompt) for case in PROMPTS)
    phases = {"draft_s": 0.5, "verify_s": 2.0, "accept_s": 0.25, "engine_s": 2.4}
    counts = {"proposed_at": [4, 2], "accepted_at": [3, 1], "steps": 5, "step_tokens": 10}
    scripted(
        session,
        monkeypatch,
        {
            (fox, "plain"): [generation([1] * 11, 1.0, seconds) for seconds in (9.0, 5.0, 4.0)],  # median 5
            (fib, "plain"): [generation([1] * 5, 3.0, 2.0)] * 3,
            (fox, "ngram"): [
                generation([1] * 11, prefill, seconds, **counts, **phases)
                for prefill, seconds in ((1.5, 1.0), (1.1, 2.5), (1.2, 7.0))  # medians 1.2 and 2.5
            ],
            (fib, "ngram"): [generation([2] * 4, 3.0, 2.0, proposed_at=[2], accepted_at=[0])] * 3,
        },
    )
    report = bench(session, prompts=PROMPTS, ks=[2], methods=["ngram"], max_new_tokens=16, repeats=3)
    plain, ngram = report.totals
    assert plain.decode_tokens_per_s == pytest.approx(14 / 7)  # the first token of each comes with the prefill
    assert plain.end_to_end_tokens_per_s == pytest.approx(16 / 11)
    assert (plain.speedup, plain.end_to_end_speedup, plain.identical_to_plain) == (1.0, 1.0, 2)
    assert ngram.mode == "ngram-k2"
    assert ngram.decode_tokens_per_s == pytest.approx(13 / 4.5)
    assert ngram.speedup == pytest.approx((13 / 4.5) / (14 / 7))
    assert ngram.best_speedup == pytest.approx((10 / 2.5) / (10 / 5))
    assert ngram.worst_speedup == pytest.approx((3 / 2) / (4 / 2))
    assert ngram.end_to_end_tokens_per_s == pytest.approx(15 / (4.2 + 4.5))
    assert ngram.mean_acceptance_length == pytest.approx(13 / 8)
    assert ngram.acceptance_rate == pytest.approx(4 / 8)
    assert ngram.acceptance_by_position == (3 / 6, 1 / 2)
    assert ngram.draft_share == pytest.approx(0.5 / 4.5)
    assert ngram.verify_share == pytest.approx(2 / 4.5)
    assert ngram.accept_share == pytest.approx(0.25 / 4.5)
    assert ngram.non_engine_share == pytest.approx(1 - 4.4 / 4.5)
    assert ngram.identical_to_plain == 1
    assert math.isnan(plain.acceptance_rate)


def test_repeats_that_differ_are_reported(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    fox = str(PROMPTS[0].prompt)
    runs = [generation([1, 2, 3], 1.0, 1.0), generation([1, 2, 4], 1.0, 2.0), generation([1, 2, 3], 1.0, 3.0)]
    scripted(session, monkeypatch, {(fox, "plain"): [runs[0]] * 3, (fox, "ngram"): runs})
    report = bench(session, prompts=PROMPTS[:1], ks=[2], methods=["ngram"], max_new_tokens=16, repeats=3)
    assert [record.repeatable for record in report.records] == [True, False]
    assert [record.identical_to_plain for record in report.records] == [True, False]
    assert "different tokens in ngram-k2" in shown(report)


def shown(report: BenchReport) -> str:
    text = io.StringIO()
    Console(file=text, width=250).print(render(report))
    return text.getvalue()


def test_tables_fit_80_columns(session: Session) -> None:
    report = bench(session, prompts=PROMPTS, ks=[7], max_new_tokens=8, repeats=1)
    rows = tuple(
        dataclasses.replace(
            row,
            mode=row.mode.replace("-k7", "-k31"),
            decode_tokens_per_s=1234.56,
            end_to_end_tokens_per_s=1234.56,
            identical_to_plain=164,
            prompts=164,
            draft_share=1.0,
        )
        for row in report.totals
    )
    text = io.StringIO()
    Console(file=text, width=80).print(render(dataclasses.replace(report, totals=rows)))
    tables = [line for line in text.getvalue().splitlines() if line.startswith(("mode", "plain", "draft", "ngram"))]
    assert len(tables) == 2 * (1 + len(rows)), "no row is broken"
    assert "…" not in text.getvalue()
    for row in rows:
        speed, spent = (line for line in tables if line.split()[0] == row.mode)
        assert f"1234.6 ({row.end_to_end_speedup:.2f}x)" in speed
        assert speed.split()[-1] == "164/164"
        assert spent.split()[-1] == f"{row.non_engine_share:.1%}"
        assert "100.0%" in spent


def test_sampling_is_seeded_and_passed_on(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = recorded(session, monkeypatch)
    how = Sampling(temperature=0.9, top_k=7, presence_penalty=0.5, logit_bias={5: -1.0})
    report = bench(session, prompts=PROMPTS, ks=[2], max_new_tokens=20, repeats=2, sampling=how, seed=11)
    for _, options, _ in calls:
        assert {name: options[name] for name in dataclasses.asdict(how)} == dataclasses.asdict(how)
        assert options["seed"] == 11
    assert all(record.repeatable for record in report.records)
    greedy = bench(session, prompts=PROMPTS, ks=[2], max_new_tokens=20, repeats=1)
    assert report.records[0].token_ids != greedy.records[0].token_ids
    assert "temperature 0.9, seed 11" in shown(report)
    assert "greedy" in shown(greedy)


def test_json_has_what_the_document_names(session: Session) -> None:
    report = bench(session, prompts=PROMPTS[:1], ks=[2], max_new_tokens=1, repeats=1)
    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))  # one token: no decoding, so no rates
    assert document["schema"] == "draftc-bench/1"
    assert document["totals"][0]["decode_tokens_per_s"] is None
    assert document["machine"]["cpu_count"] >= 1
    text = (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")
    for keys in (document, document["machine"], document["totals"][0], document["records"][0], document["sampling"]):
        for key in keys:
            assert f"`{key}`" in text, key
    assert "nan" in shown(report)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"ks": [0]}, UsageError, "K must be 1 to 7 for this bundle, got 0"),
        ({"ks": [8]}, UsageError, "K must be 1 to 7"),
        ({"ks": []}, UsageError, "no K to try"),
        ({"methods": ["medusa"]}, UsageError, "unknown method 'medusa': this bundle offers draft_model, ngram"),
        ({"methods": ["plain"]}, UsageError, "plain always runs"),
        ({"repeats": 0}, UsageError, "repeats must be 1 or more"),
        ({"prompts": ()}, UsageError, "no prompts"),
        ({"max_new_tokens": 0}, UsageError, "'fox': max_new_tokens must be a whole number of 1 or more"),
        ({"max_new_tokens": MAX_LENGTH}, CapacityError, "'fox': prompt of"),
        ({"seed": -1}, UsageError, "seed must be a whole number of 0 or more"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(
    session: Session, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    calls = recorded(session, monkeypatch)
    with pytest.raises(error, match=message):
        bench(session, **{"prompts": PROMPTS, "ks": [2], **arguments})
    assert calls == []


def test_plain_alone_needs_no_k(session: Session) -> None:
    report = bench(session, prompts=PROMPTS, ks=[], methods=[], max_new_tokens=4, repeats=1)
    assert [row.mode for row in report.totals] == ["plain"]
