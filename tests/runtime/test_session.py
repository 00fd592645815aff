"""The embedding API: what a request takes, what it gives, and what it leaves behind."""

import math
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftc.runtime.errors import CapacityError, DraftcError, UsageError
from draftc.runtime.request import Generation, Options
from draftc.runtime.session import Session
from draftc.runtime.text import Tokenizer
from draftc.runtime.warp import Distribution, Sampling
from tests.runtime.fakes import goodness_of_fit, joint, reference_distribution, tokens
from tests.runtime.sessions import MAX_LENGTH, MAX_WIDTH, make_session

PROMPT = "the quick brown fox"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
METHODS = ["draft_model", "ngram", "plain"]


@pytest.fixture(scope="module")
def tokenizer(byte_level_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(byte_level_folder)


@pytest.fixture(scope="module")
def chat_tokenizer(byte_level_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """With a template, and with sampling as the checkpoint's default."""
    folder = tmp_path_factory.mktemp("chat") / "tokenizer"
    shutil.copytree(byte_level_folder, folder)
    (folder / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    (folder / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.8, "top_k": 4, "max_new_tokens": 7, "repetition_penalty": 1.3}',
        encoding="utf-8",
    )
    return Tokenizer.from_folder(folder)


def spell(tokenizer: Tokenizer, *ids: int) -> Any:
    """A logits mask that lets `ids` through, one after another, and anything behind them."""

    def mask(generated: Sequence[int]) -> NDArray[np.bool_] | None:
        if len(generated) >= len(ids):
            return None
        allowed: NDArray[np.bool_] = np.arange(tokenizer.vocab_size) == ids[len(generated)]
        return allowed

    return mask


def same(a: Generation, b: Generation) -> bool:
    return (a.text, a.token_ids, a.finish_reason, a.logprobs) == (b.text, b.token_ids, b.finish_reason, b.logprobs)


# --- what a request gives --------------------------------------------------------------------------------------------


def test_greedy_text_is_plain_decoding_whatever_drafts(tokenizer: Tokenizer) -> None:
    plain = make_session(tokenizer).session.generate(PROMPT, method="plain", max_new_tokens=30, logprobs=True)
    assert plain.text == tokenizer.decode(plain.token_ids)
    assert (len(plain.token_ids), plain.finish_reason) == (30, "length")
    for method in ("draft_model", "ngram"):
        for k in range(1, MAX_WIDTH):
            session = make_session(tokenizer).session
            result = session.generate(PROMPT, method=method, num_speculative_tokens=k, max_new_tokens=30, logprobs=True)
            assert same(result, plain), (method, k)
            if method == "draft_model":
                assert result.stats.accepted > 3, "the test means something only if drafts are accepted"
                assert result.stats.accepted < result.stats.proposed


def test_logprobs_are_the_targets_and_only_on_request(tokenizer: Tokenizer) -> None:
    opened = make_session(tokenizer)
    result = opened.session.generate(PROMPT, temperature=1.0, seed=2, max_new_tokens=20, logprobs=True)
    prompt = tokenizer.encode(PROMPT)
    assert result.logprobs is not None
    for i, (token, logprob) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
        logits = opened.model(tokens(*prompt, *result.token_ids[:i])).astype(np.float64)
        assert logprob == pytest.approx(logits[token] - np.log(np.exp(logits).sum()), rel=1e-6)
    assert opened.session.generate(PROMPT, max_new_tokens=2).logprobs is None


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("echo", [False, True])
def test_streamed_pieces_join_to_the_text(tokenizer: Tokenizer, method: str, echo: bool) -> None:
    """Random tokens of a byte-level vocabulary: characters fall apart all the time."""
    session = make_session(tokenizer).session
    for seed in range(6):
        stream = session.stream(PROMPT, method=method, echo=echo, temperature=1.5, seed=seed, max_new_tokens=25)
        pieces = list(stream)
        assert "".join(pieces) == stream.result.text
        assert all(pieces), "an empty piece was streamed"
        text = tokenizer.decode(stream.result.token_ids)
        assert stream.result.text == (PROMPT if echo else "") + text


@pytest.mark.parametrize("method", METHODS)
def test_kinds_of_tokens_and_figures_agree(tokenizer: Tokenizer, method: str) -> None:
    stream = make_session(tokenizer).session.stream(PROMPT, method=method, max_new_tokens=40)
    events = list(stream.events())
    stats = stream.result.stats
    kinds = Counter(kind for event in events for _, kind in event.pieces)
    assert "".join(event.text for event in events) == stream.result.text
    assert kinds["accepted"] == stats.accepted
    assert kinds.total() == stats.new_tokens == len(stream.result.token_ids) == 40
    assert [kind for _, kind in events[0].pieces] == ["plain"], "the first token comes from the prefill alone"
    assert len(events) == stats.steps + 1
    assert stats.step_tokens == 39
    assert stats.mean_acceptance_length == pytest.approx(39 / stats.steps)
    for event in events:
        step = event.step
        own = "plain" if step.proposed == 0 else "bonus" if step.accepted == step.proposed else "corrected"
        expected = ["accepted"] * step.accepted + [own] * (len(step.tokens) - step.accepted)
        assert [kind for _, kind in event.pieces] == expected
    if method == "draft_model":
        assert kinds.keys() == {"accepted", "corrected", "bonus", "plain"}
    if method == "plain":
        assert set(kinds) == {"plain"}
        assert stats.proposed == 0


def test_calls_and_times_are_counted(tokenizer: Tokenizer) -> None:
    opened = make_session(tokenizer)
    for _ in range(2):  # the second request counts from zero again
        target, draft = len(opened.target.calls), len(opened.draft.calls)
        opened.session.reset()
        stats = opened.session.generate(PROMPT, max_new_tokens=20).stats
        assert stats.target_calls == len(opened.target.calls) - target
        assert stats.draft_calls == len(opened.draft.calls) - draft > 0
        assert stats.prompt_tokens == len(tokenizer.encode(PROMPT))
        assert stats.prefill_s > 0
        assert 0 < stats.engine_s <= stats.draft_s + stats.verify_s <= stats.decode_s
        assert stats.draft_s + stats.verify_s + stats.accept_s + stats.other_s == pytest.approx(stats.decode_s)


def test_times_are_those_of_the_phases_and_leave_the_consumer_out(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only engine calls (1 s each) and the consumer of the stream (100 s a piece) move on."""
    opened = make_session(tokenizer, k=2)
    now = 0.0

    def pass_time(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("time.perf_counter", lambda: now)
    for engine in (opened.target, opened.draft):

        def forward(*args: Any, original: Any = engine.forward) -> Any:
            pass_time(1.0)
            return original(*args)

        monkeypatch.setattr(engine, "forward", forward)
    stream = opened.session.stream([1] * 20, max_new_tokens=15, echo=True)
    for _ in stream.events():
        pass_time(100.0)
    stats = stream.result.stats
    assert stats.prefill_s == stats.ttft == 3, "three chunks"
    assert stats.draft_s == stats.draft_calls > 0
    assert stats.verify_s == stats.target_calls - 3 == stats.steps
    assert stats.decode_s == stats.engine_s == stats.draft_calls + stats.target_calls - 3
    assert stats.accept_s == stats.other_s == 0
    assert stats.tpot == pytest.approx(stats.decode_s / 14)


def test_the_result_is_there_when_the_stream_has_ended(tokenizer: Tokenizer) -> None:
    stream = make_session(tokenizer).session.stream(PROMPT, max_new_tokens=9)
    with pytest.raises(UsageError, match="exhaust it before reading its result"):
        _ = stream.result
    next(stream)
    with pytest.raises(UsageError, match="has not ended"):
        _ = stream.result
    assert len(stream.drain().token_ids) == 9
    assert stream.result is not None
    assert next(stream, None) is None


# --- seeds and the distribution --------------------------------------------------------------------------------------


def test_same_seed_same_text_and_a_fresh_one_is_reported(tokenizer: Tokenizer) -> None:
    def run(seed: int | None) -> Generation:
        return make_session(tokenizer).session.generate(PROMPT, temperature=1.0, seed=seed, max_new_tokens=12)

    assert run(5).token_ids == run(5).token_ids
    assert run(5).seed == 5
    assert run(5).token_ids != run(6).token_ids
    free = run(None)
    assert run(free.seed).token_ids == free.token_ids
    assert run(None).seed != free.seed


def test_draws_fit_the_targets_distribution(tokenizer: Tokenizer) -> None:
    """Through the whole API: the next three tokens of 800 requests, against the product of exact distributions."""
    opened = make_session(tokenizer)
    prompt = tokenizer.encode(PROMPT)
    sampling = Sampling(1.2, top_k=3, repetition_penalty=1.2, frequency_penalty=0.3)

    def following(before: list[int]) -> Distribution:
        return reference_distribution(opened.model(tokens(*prompt, *before)), sampling, prompt, before)

    counts = Counter(
        tuple(
            opened.session.generate(
                prompt,
                temperature=1.2,
                top_k=3,
                repetition_penalty=1.2,
                frequency_penalty=0.3,
                seed=seed,
                max_new_tokens=4,
            ).token_ids[:3]
        )
        for seed in range(800)
    )
    assert goodness_of_fit(counts, joint(following, 3)) > 1e-7


# --- where it ends ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_stop_string_that_spans_proposals(tokenizer: Tokenizer, method: str) -> None:
    """The text ends before it, the tokens with the one that completes it, and nothing is left over."""
    answer = "Hello world! def fib(n): return n"
    ids = tokenizer.encode(answer)
    session = make_session(tokenizer, k=5).session
    for stop in ("fib", "world! def", "(n)", "return n"):
        stream = session.stream(
            PROMPT,
            method=method,
            stop=["unheard of", stop],
            logits_mask=spell(tokenizer, *ids),
            max_new_tokens=38,
            logprobs=True,
        )
        pieces = "".join(stream)
        result = stream.result
        shortest = next(n for n in range(len(ids) + 1) if stop in tokenizer.decode(ids[:n]))
        assert result.token_ids == ids[:shortest]
        assert result.text == pieces == answer[: answer.index(stop)]
        assert result.finish_reason == "stop"
        assert result.logprobs is not None
        assert len(result.logprobs) == result.stats.new_tokens == shortest
        assert result.stats.step_tokens == shortest - 1
        assert result.stats.accepted <= shortest - 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("place", [0, 1, 3, 4])
def test_an_end_token_inside_an_accepted_draft(tokenizer: Tokenizer, method: str, place: int) -> None:
    """Target and draft are forced to say the same, so that every proposal is accepted up to the end token."""
    (end,) = tokenizer.defaults.eos_token_ids
    ids = tokenizer.encode("the lazy dog and then the fox sleeps over")[:8]
    assert len(ids) == 8
    ids[place] = end
    session = make_session(tokenizer, k=5).session
    mask = spell(tokenizer, *ids)
    result = session.generate(PROMPT, method=method, logits_mask=mask, max_new_tokens=30, logprobs=True)
    assert result.token_ids == ids[: place + 1]
    assert result.text == tokenizer.decode(ids[:place])
    assert result.finish_reason == "stop"
    assert result.logprobs is not None
    assert len(result.logprobs) == place + 1
    if method == "draft_model" and place:
        assert result.stats.accepted == place, "the first token is the prefill's"

    ignored = session.generate(PROMPT, method=method, logits_mask=mask, max_new_tokens=12, ignore_eos=True)
    assert ignored.token_ids[:8] == ids
    assert (len(ignored.token_ids), ignored.finish_reason) == (12, "length")


def test_further_stop_ids(tokenizer: Tokenizer) -> None:
    session = make_session(tokenizer).session
    free = session.generate(PROMPT, max_new_tokens=20)
    end = free.token_ids[7]
    first = free.token_ids.index(end)
    result = session.generate(PROMPT, max_new_tokens=20, stop_token_ids=[end])
    assert result.token_ids == free.token_ids[: first + 1]
    assert result.text == tokenizer.decode(free.token_ids[:first])
    assert result.finish_reason == "stop"


def test_a_single_stop_string_needs_no_list(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the fox sleeps")
    session = make_session(tokenizer).session
    assert session.generate(PROMPT, stop="fox", logits_mask=spell(tokenizer, *ids)).text == "the "


@given(
    n=st.integers(1, 30),
    k=st.integers(1, MAX_WIDTH - 1),
    method=st.sampled_from(METHODS),
    temperature=st.sampled_from([0.0, 1.0]),
)
@settings(deadline=None, max_examples=40)
def test_max_new_tokens_is_met_exactly(tokenizer: Tokenizer, n: int, k: int, method: str, temperature: float) -> None:
    stream = make_session(tokenizer).session.stream(
        PROMPT,
        max_new_tokens=n,
        num_speculative_tokens=k,
        method=method,
        temperature=temperature,
        seed=n,
        logprobs=True,
    )
    left = n
    for event in stream.events():
        assert event.step.proposed <= min(k, left - 1), "nothing is proposed that could not be kept"
        left -= len(event.step.tokens)
    result = stream.result
    assert len(result.token_ids) == len(result.logprobs or []) == result.stats.new_tokens == n
    assert result.finish_reason == "length"


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_a_prompt_is_text_or_ids_of_any_kind(tokenizer: Tokenizer) -> None:
    session = make_session(tokenizer).session
    ids = tokenizer.encode(PROMPT)
    expected = session.generate(PROMPT, max_new_tokens=8)
    for prompt in (ids, tuple(ids), np.array(ids), np.array(ids, np.int32), np.array(ids, np.uint16)):
        assert same(session.generate(prompt, max_new_tokens=8), expected)


def test_messages_go_through_the_chat_template(chat_tokenizer: Tokenizer) -> None:
    session = make_session(chat_tokenizer).session
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the fox?"}]
    written = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nthe fox?<|im_end|>\n<|im_start|>assistant\n"
    assert session.encode(messages) == session.encode(written)
    assert same(session.generate(messages, seed=1), session.generate(written, seed=1))


def test_a_checkpoint_without_a_template_refuses_messages(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="template"):
        make_session(tokenizer).session.generate([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, 2, -1], r"prompt\[2\] is -1: expected a token id below \d+"),
        ([10**6], r"prompt\[0\] is 1000000"),
        ([1, 2.0], r"prompt\[1\] is 2\.0"),
        (["the", "fox"], "one prompt per call: batches are not served"),
        ([[1, 2], [3]], "one prompt per call"),
        (np.zeros((2, 2), np.int64), "one prompt per call"),
        (b"the fox", "the prompt is bytes"),
        (None, "a prompt is a text, chat messages or token ids, got None"),
        (5, "a prompt is a text, chat messages or token ids, got 5"),
        ([1, {"role": "user"}], r"prompt\[1\] is \{"),
        ("", "the prompt is empty and this tokenizer adds no BOS token"),
        ([], "the prompt is empty"),
        (np.array([], np.int64), "the prompt is empty"),
    ],
)
def test_a_prompt_that_is_none(tokenizer: Tokenizer, prompt: Any, message: str) -> None:
    opened = make_session(tokenizer)
    with pytest.raises(UsageError, match=message) as caught:
        opened.session.generate(prompt, max_new_tokens=3)
    assert "\n" not in str(caught.value)
    assert opened.target.calls == []


# --- arguments -------------------------------------------------------------------------------------------------------


BAD: list[tuple[dict[str, Any], type[DraftcError], str]] = [
    ({"max_new_tokens": 0}, UsageError, "max_new_tokens must be a whole number of 1 or more, got 0"),
    ({"max_new_tokens": -3}, UsageError, "max_new_tokens must be a whole number of 1 or more, got -3"),
    ({"max_new_tokens": 61}, CapacityError, r"prompt of 4 and max_new_tokens of 61 exceed .* 60: ask for 56 at most"),
    ({"max_new_tokens": 2.5}, UsageError, r"max_new_tokens must be a whole number .*, got 2\.5"),
    ({"temperature": -1.0}, UsageError, r"temperature must be .*, got -1\.0"),
    ({"temperature": math.nan}, UsageError, "temperature must be .*, got nan"),
    ({"top_p": 0.0}, UsageError, r"top_p must be in \(0, 1\], got 0\.0"),
    ({"top_p": 1.5}, UsageError, r"top_p must be in \(0, 1\], got 1\.5"),
    ({"top_k": -1}, UsageError, "top_k must be .*, got -1"),
    ({"min_p": 2.0}, UsageError, r"min_p must be in \[0, 1\], got 2\.0"),
    ({"repetition_penalty": 0.0}, UsageError, "repetition_penalty must be .*, got 0"),
    ({"presence_penalty": math.inf}, UsageError, "presence_penalty must be .*, got inf"),
    ({"frequency_penalty": math.nan}, UsageError, "frequency_penalty must be .*, got nan"),
    ({"logit_bias": {10**6: 1.0}}, UsageError, "logit_bias names token 1000000, outside the vocabulary"),
    ({"logit_bias": {1: math.nan}}, UsageError, "logit_bias must be a map of token ids"),
    ({"seed": -1}, UsageError, "seed must be a whole number of 0 or more, got -1"),
    ({"num_speculative_tokens": 0}, UsageError, r"num_speculative_tokens must be 1 to 5 .*, got 0; method='plain'"),
    ({"num_speculative_tokens": 6}, UsageError, r"num_speculative_tokens must be 1 to 5 .*calls of 6\), got 6"),
    ({"num_speculative_tokens": 2.5}, UsageError, "num_speculative_tokens must be 1 to 5 .*, got 2.5"),
    ({"temprature": 0.5}, UsageError, "there is no option 'temprature'; there are max_new_tokens, temperature"),
    ({"max_tokens": 5}, UsageError, "there is no option 'max_tokens'"),
    ({"max_new_tokens": "3"}, UsageError, "max_new_tokens must be a whole number of 1 or more, got '3'"),
    ({"temperature": "warm"}, UsageError, "temperature must be a number, got 'warm'"),
    ({"top_k": 2.5}, UsageError, "top_k must be a whole number"),
    ({"logit_bias": {"3": 1.0}}, UsageError, "logit_bias must be a map of token ids"),
    ({"logit_bias": [3]}, UsageError, "logit_bias must be a map of token ids"),
    ({"seed": 1.5}, UsageError, r"seed must be a whole number of 0 or more, got 1\.5"),
    ({"stop_token_ids": ["x"]}, UsageError, "stop_token_ids must be token ids"),
    ({"stop_token_ids": 5}, UsageError, "stop_token_ids must be token ids"),
    ({"stop_token_ids": [10**9]}, UsageError, "stop_token_ids must be token ids below"),
    ({"stop": 5}, UsageError, "stop must be a text or a list of texts, got 5"),
    ({"logits_mask": 5}, UsageError, "logits_mask must be callable, got 5"),
    ({"echo": "no"}, UsageError, "echo must be True or False, got 'no'"),
    ({"method": "medusa"}, UsageError, r"unknown method 'medusa': this bundle offers plain, "),
    ({"stop": [""]}, UsageError, "a stop string must be text"),
    ({"stop": [3]}, UsageError, "a stop string must be text"),
    ({"stop_token_ids": [-1]}, UsageError, "stop_token_ids must be token ids"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD, ids=[str(options) for options, *_ in BAD])
def test_a_bad_argument_is_named_before_anything_runs(
    tokenizer: Tokenizer, options: dict[str, Any], error: type[DraftcError], message: str
) -> None:
    opened = make_session(tokenizer)
    prompt = tokenizer.encode(PROMPT)[:4]
    for call in (opened.session.generate, opened.session.stream):
        with pytest.raises(error, match=message) as caught:
            call(prompt, **options)
        assert "\n" not in str(caught.value)
    assert opened.target.calls == []
    assert len(opened.session.generate(prompt, max_new_tokens=3).token_ids) == 3


def test_the_longest_prompt_and_one_more(tokenizer: Tokenizer) -> None:
    session = make_session(tokenizer).session
    full = session.generate([1] * (MAX_LENGTH - 1))
    assert (len(full.token_ids), full.finish_reason) == (1, "length")
    for length in (MAX_LENGTH, MAX_LENGTH + 5):
        with pytest.raises(CapacityError, match=f"the prompt has {length} tokens, the bundle holds {MAX_LENGTH}"):
            session.generate([1] * length)


def test_the_longest_answer_and_one_more(tokenizer: Tokenizer) -> None:
    session = make_session(tokenizer).session
    assert len(session.generate([1] * 50, max_new_tokens=MAX_LENGTH - 50).token_ids) == MAX_LENGTH - 50
    with pytest.raises(
        CapacityError, match=f"prompt of 50 and max_new_tokens of 11 .* max_length of {MAX_LENGTH}.* 10 at"
    ):
        session.generate([1] * 50, max_new_tokens=MAX_LENGTH - 50 + 1)


def test_without_a_length_what_fits_is_generated(tokenizer: Tokenizer) -> None:
    for method in METHODS:
        opened = make_session(tokenizer, k=5)
        result = opened.session.generate([1, 2, 3], method=method)
        assert len(result.token_ids) == MAX_LENGTH - 3
        assert result.finish_reason == "length"
        assert len(opened.session.generate([1, 2, 3], method=method, max_new_tokens=None).token_ids) > 0


def test_the_checkpoints_defaults_hold_until_an_argument_says_otherwise(chat_tokenizer: Tokenizer) -> None:
    opened = make_session(chat_tokenizer)
    session, prompt = opened.session, chat_tokenizer.encode(PROMPT)
    assert len(session.generate(PROMPT).token_ids) == 7

    said = {"temperature": 0.8, "top_k": 4, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.3, "max_new_tokens": 7}
    for seed in range(5):
        explicit = session.generate(PROMPT, seed=seed, **said)  # type: ignore[arg-type]
        assert same(session.generate(PROMPT, seed=seed), explicit)
        assert same(session.generate(PROMPT, seed=seed, temperature=None, top_k=None), explicit)
    assert len({tuple(session.generate(PROMPT, seed=seed).token_ids) for seed in range(5)}) > 1

    greedy = session.generate(PROMPT, temperature=0.0, repetition_penalty=1.0, max_new_tokens=5)
    logits = opened.model(tokens(*prompt))
    assert greedy.token_ids[0] == logits.argmax()


def test_k_and_method_come_from_the_bundle(tokenizer: Tokenizer) -> None:
    def proposals(session: Session, **options: Any) -> tuple[int, int]:
        stream = session.stream([1, 2, 1, 2], max_new_tokens=40, **options)
        return max(event.step.proposed for event in stream.events()), stream.result.stats.draft_calls

    widest, calls = proposals(make_session(tokenizer, k=2).session)
    assert widest == 2
    assert calls > 0
    assert proposals(make_session(tokenizer, k=2).session, num_speculative_tokens=5)[0] == 5
    assert proposals(make_session(tokenizer, k=2).session, method="plain") == (0, 0)
    opened = make_session(tokenizer, method="ngram", k=4)
    stream = opened.session.stream([1, 2, 1, 2], logits_mask=spell(tokenizer, *[1, 2] * 6), max_new_tokens=12)
    assert max(event.step.proposed for event in stream.events()) == 4
    assert opened.draft.calls == []
    with pytest.raises(UsageError, match="unknown method 'draft_model': this bundle offers plain, ngram"):
        opened.session.generate([1], method="draft_model")


# --- between requests ------------------------------------------------------------------------------------------------


def test_a_prompt_that_begins_like_the_last_one_is_not_prefilled_again(tokenizer: Tokenizer) -> None:
    opened = make_session(tokenizer)
    session = opened.session
    first = session.generate([1] * 20, max_new_tokens=10)
    assert first.stats.cached_tokens == 0
    assert [call.width for call in opened.target.calls[:3]] == [8, 8, 4]

    before = len(opened.target.calls)
    longer = [*[1] * 20, *first.token_ids[:6], 2, 3]
    second = session.generate(longer, max_new_tokens=5)
    assert second.stats.cached_tokens == 26
    assert [(call.start, call.width) for call in opened.target.calls[before : before + 1]] == [(26, 2)]
    assert second.token_ids == make_session(tokenizer).session.generate(longer, max_new_tokens=5).token_ids

    again = session.generate(longer, max_new_tokens=5)
    assert again.stats.cached_tokens == len(longer) - 1, "the last token is always run"
    assert again.token_ids == second.token_ids
    assert session.generate([2, 1], max_new_tokens=1).stats.cached_tokens == 0


def test_reset_forgets_the_prefix(tokenizer: Tokenizer) -> None:
    session = make_session(tokenizer).session
    first = session.generate(PROMPT, max_new_tokens=5)
    assert session.generate(PROMPT, max_new_tokens=5).stats.cached_tokens > 0
    session.reset()
    assert [len(decoder.cache) for decoder in session.decoders] == [0, 0]
    after = session.generate(PROMPT, max_new_tokens=5)
    assert after.stats.cached_tokens == 0
    assert same(after, first)


@given(prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=2, max_size=5))
@settings(deadline=None, max_examples=15)
def test_any_request_after_any_others_is_that_of_a_fresh_session(
    tokenizer: Tokenizer, prompts: list[list[int]]
) -> None:
    session = make_session(tokenizer).session
    for i, prompt in enumerate(prompts):
        options: dict[str, Any] = {
            "method": METHODS[i % 3],
            "temperature": i % 2 * 1.0,
            "seed": i,
            "max_new_tokens": 8,
            "logprobs": True,
        }
        assert same(session.generate(prompt, **options), make_session(tokenizer).session.generate(prompt, **options))


def test_none_means_the_default(tokenizer: Tokenizer) -> None:
    options: Any = dict.fromkeys(Options.__annotations__) | {"max_new_tokens": 6}
    session = make_session(tokenizer).session
    expected = session.generate(PROMPT, max_new_tokens=6)
    assert session.generate(PROMPT, **options).token_ids == expected.token_ids


@pytest.mark.parametrize("method", ["plain", "draft_model", "ngram"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_that_allows_nothing_behind_the_end(tokenizer: Tokenizer, method: str, temperature: float) -> None:
    """As a grammar's, which is complete at the end token: no row behind that may be asked about."""
    end = tokenizer.defaults.eos_token_ids[0]
    ids = [*tokenizer.encode("the fox, the fox, the fox"), end]
    asked: list[int] = []

    def mask(generated: Sequence[int]) -> NDArray[np.bool_]:
        asked.append(len(generated))
        allowed: NDArray[np.bool_] = np.zeros(tokenizer.vocab_size, bool)
        if list(generated) == ids[: len(generated)] and len(generated) < len(ids):
            allowed[ids[len(generated)]] = True
        return allowed

    session = make_session(tokenizer).session
    result = session.generate(PROMPT, logits_mask=mask, method=method, temperature=temperature, seed=1)
    assert (result.token_ids, result.finish_reason) == (ids, "stop")
    assert len(ids) - 1 in asked


def test_a_mask_that_is_no_array_of_bool(tokenizer: Tokenizer) -> None:
    mask: Any = lambda generated: [True]  # noqa: E731
    with pytest.raises(UsageError, match="the logits mask must be an array of bool, got list"):
        make_session(tokenizer).session.generate(PROMPT, logits_mask=mask)


def test_closing_ends_the_stream_that_is_open(tokenizer: Tokenizer) -> None:
    """`with open(…) as session:` around a loop that is left early."""
    opened = make_session(tokenizer)
    with opened.session as session:
        for _ in session.stream(PROMPT):
            break
    assert (opened.target.closed, opened.draft.closed) == (1, 1)


def test_close(tokenizer: Tokenizer) -> None:
    opened = make_session(tokenizer)
    with opened.session as session:
        session.generate(PROMPT, max_new_tokens=2)
    assert (opened.target.closed, opened.draft.closed) == (1, 1)
    session.close()
    assert (opened.target.closed, opened.draft.closed) == (1, 1)
    for use in (lambda: session.generate(PROMPT), lambda: list(session.stream(PROMPT)), session.reset):
        with pytest.raises(UsageError, match="this session is closed: open the bundle again"):
            use()
