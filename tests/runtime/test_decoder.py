"""What a decoder runs and where it writes: against a text that changes at will."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftc.runtime.decoder import Decoder, Limits
from draftc.runtime.engine import Tokens
from draftc.runtime.errors import EngineError
from tests.runtime.fakes import Call, FakeEngine, HashedModel, fake_decoder, tokens

VOCAB = 5
MODEL = HashedModel(VOCAB, seed=1)
MAX_LENGTH = 30


def small(max_width: int = 4, prefill_chunk: int = 6) -> tuple[Decoder, FakeEngine]:
    return fake_decoder(MODEL, VOCAB, max_length=MAX_LENGTH, max_width=max_width, prefill_chunk=prefill_chunk)


def verify(decoder: Decoder, text: list[int], proposal: list[int]) -> None:
    """One call of the loop: after it, cache, memory and logits must be those of the text and the proposal."""
    pending = decoder.sync(tokens(*text), upcoming=len(proposal))
    assert pending.size >= 1
    logits = decoder.extend(np.concatenate((pending, tokens(*proposal))), rows=len(proposal) + 1)
    everything = text + proposal
    assert decoder.cache.tokens.tolist() == everything
    assert isinstance(decoder.engine, FakeEngine)
    assert decoder.engine.memory[: len(everything)].tolist() == everything
    expected = [MODEL(tokens(*everything[: len(text) + i])) for i in range(len(proposal) + 1)]
    np.testing.assert_array_equal(logits, expected)


@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, MAX_LENGTH),  # how much of the text so far stays
            st.lists(st.integers(0, VOCAB - 1), max_size=20),  # what comes behind it
            st.lists(st.integers(0, VOCAB - 1), max_size=3),  # and is proposed
        ),
        min_size=1,
        max_size=8,
    ),
    max_width=st.integers(4, 9),
    prefill_chunk=st.integers(1, 12),
)
@settings(deadline=None, max_examples=80)
def test_any_text_after_any_other(
    steps: list[tuple[int, list[int], list[int]]], max_width: int, prefill_chunk: int
) -> None:
    """Rewinds, branches and appends: the logits are those of a model that reads the whole text anew."""
    decoder, engine = small(max_width, prefill_chunk)
    text: list[int] = []
    for keep, tail, proposal in steps:
        text = (text[:keep] + tail)[:MAX_LENGTH] or [0]
        held = decoder.cache.tokens.tolist()
        reused = sum(1 for n in range(1, len(text)) if held[:n] == text[:n])  # the last token is always run
        missing = len(text) - reused
        before = len(engine.calls)
        verify(decoder, text, proposal)
        calls = engine.calls[before:]
        assert sum(call.width for call in calls) == missing + len(proposal), "ran more tokens than were missing"
        for call in calls[:-1]:
            assert call.rows == 1
            assert call.width <= prefill_chunk
        assert calls[-1].width <= (max_width if proposal else prefill_chunk)
        assert calls[-1].rows == len(proposal) + 1


@pytest.mark.parametrize(
    ("length", "upcoming", "widths"),
    [
        (1, 0, [1]),
        (6, 0, [6]),  # one chunk, exactly
        (7, 0, [6, 1]),
        (12, 0, [6, 6]),
        (13, 0, [6, 6, 1]),
        (1, 3, [4]),  # max_width, exactly
        (2, 3, [1, 4]),  # the last token stays for the verification
        (6, 2, [5, 3]),
        (8, 2, [6, 4]),
        (9, 2, [6, 2, 3]),
        (MAX_LENGTH, 3, [6, 6, 6, 6, 5, 4]),  # exactly full, proposals in the slack
    ],
)
def test_chunks(length: int, upcoming: int, widths: list[int]) -> None:
    decoder, engine = small()
    verify(decoder, [i % VOCAB for i in range(length)], [1] * upcoming)
    assert [call.width for call in engine.calls] == widths


def test_the_widest_call_at_the_longest_text_ends_within_the_buffer() -> None:
    decoder, engine = small()
    verify(decoder, [1] * MAX_LENGTH, [2] * 3)
    last = engine.calls[-1]
    assert last.start + last.width == MAX_LENGTH + 3 <= engine.spec.buffer_length


def test_a_rewind_costs_no_call_and_the_next_token_one() -> None:
    decoder, engine = small()
    verify(decoder, [1, 2, 3], [4, 4, 4])
    before = len(engine.calls)
    verify(decoder, [1, 2, 3, 4, 0], [])  # one proposal accepted, then a correction
    assert engine.calls[before:] == [Call(width=1, start=4, rows=1)]


def test_padding_rows_of_the_head_are_cut_off() -> None:
    decoder, engine = small()
    assert engine.spec.vocab_rows > VOCAB
    assert decoder.extend(decoder.sync(tokens(1)), rows=1).shape == (1, VOCAB)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), EngineError("broken")])
def test_after_an_interrupt_in_a_call_the_next_one_is_right(error: BaseException) -> None:
    decoder, engine = small()
    verify(decoder, [1, 2, 3, 4, 0, 1, 2, 3], [])
    engine.faults[len(engine.calls)] = error
    pending = decoder.sync(tokens(1, 2, 3, 4, 4), upcoming=2)
    with pytest.raises(type(error)):
        decoder.extend(np.concatenate((pending, tokens(0, 0))), rows=3)
    kept = [] if isinstance(error, EngineError) else [1, 2, 3, 4]
    assert decoder.cache.tokens.tolist() == kept, "what the call would have written is not counted"
    verify(decoder, [1, 2, 3, 4, 0, 1, 2, 3], [3, 3])


def test_after_an_interrupt_in_prefill_the_finished_chunks_count() -> None:
    decoder, engine = small()
    engine.faults[1] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        decoder.sync(tokens(*[1] * 20))
    assert len(decoder.cache) == 6
    verify(decoder, [1] * 20, [])


def test_broken_buffers_are_cleared_once_by_the_next_sync() -> None:
    decoder, engine = small()
    verify(decoder, [1, 2, 3], [4, 4, 4])
    engine.faults[len(engine.calls)] = float("nan")
    decoder.extend(decoder.sync(tokens(1, 2, 3, 0, 0, 0)), rows=1)
    decoder.cache.clear()
    assert np.isnan(decoder.extend(decoder.sync(tokens(1, 2)), rows=1)).all(), "NaN behind the end spoils the call"
    decoder.mark_broken()
    assert len(decoder.cache) == 0, "nothing counts as cached"
    verify(decoder, [1, 2, 3], [3])
    verify(decoder, [1, 2, 4], [])
    assert engine.cleared == 1


def test_rewinds_clear_nothing() -> None:
    decoder, engine = small()
    verify(decoder, [1, 2, 3], [4])
    decoder.cache.clear()
    verify(decoder, [2, 2], [])
    assert engine.cleared == 0


def test_counters() -> None:
    decoder, engine = small()
    verify(decoder, [1] * 8, [2, 2])
    assert decoder.calls == len(engine.calls) == 2
    assert decoder.seconds > 0


def test_close_forgets_and_releases() -> None:
    decoder, engine = small()
    verify(decoder, [1, 2], [])
    decoder.close()
    assert engine.closed == 1
    assert len(decoder.cache) == 0


@given(
    first=st.lists(st.integers(0, VOCAB - 1), max_size=MAX_LENGTH - 2),
    text=st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=MAX_LENGTH),
    count=st.integers(1, 2),
    prefill_chunk=st.integers(1, 12),
)
@settings(deadline=None, max_examples=80)
def test_exactly_the_last_tokens_are_left_to_run(
    first: list[int], text: list[int], count: int, prefill_chunk: int
) -> None:
    decoder, engine = small(prefill_chunk=prefill_chunk)
    if first:
        verify(decoder, first, [])
    decoder.sync_but(count, tokens(*text))
    assert decoder.cache.tokens.tolist() == text[:-count]
    assert engine.memory[: len(text) - count].tolist() == text[:-count]
    assert all(call.width <= max(prefill_chunk, 4) for call in engine.calls)
    logits = decoder.extend(tokens(*text[-count:]), rows=count)
    np.testing.assert_array_equal(logits[-1], MODEL(tokens(*text)))


def test_leaving_tokens_to_run_begins_anew_after_nan() -> None:
    decoder, engine = small()
    verify(decoder, [1, 2, 3], [])
    decoder.mark_broken()
    decoder.sync_but(2, tokens(1, 2, 3, 4))
    assert engine.cleared == 1
    assert decoder.cache.tokens.tolist() == [1, 2]


def test_an_engine_that_can_is_filled_without_logits() -> None:
    class Filling(FakeEngine):
        filled: list[int]

        def fill(self, tokens: Tokens, start: int) -> None:
            if self.faults:
                raise EngineError("broken")
            self.filled.append(tokens.size)
            self.forward(tokens, start, 1)

    engine = Filling(MODEL, VOCAB, 40)
    engine.filled = []
    decoder = Decoder(engine, Limits(MAX_LENGTH, 4, 6, VOCAB))
    assert decoder.sync(tokens(*[1, 2, 3] * 7)).size == 3
    assert engine.filled == [6, 6, 6]
    assert decoder.calls == 3
    assert decoder.seconds > 0
    engine.faults[3] = 0.0
    with pytest.raises(EngineError, match="broken"):
        decoder.sync_but(1, tokens(*[1, 2, 3] * 8))
    assert len(decoder.cache) == 0
