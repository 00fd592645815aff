"""Lengths, against plain lists."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from draftc.runtime.errors import CapacityError, ResourceError
from draftc.runtime.kvcache import KVCache, TokenBuffer, common_prefix
from tests.runtime.fakes import tokens

CAPACITY = 12
IDS = st.lists(st.integers(0, 2), max_size=6)


def shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(a=st.lists(st.integers(0, 1), max_size=8), b=st.lists(st.integers(0, 1), max_size=8))
@settings(deadline=None)
def test_common_prefix(a: list[int], b: list[int]) -> None:
    assert common_prefix(tokens(*a), tokens(*b)) == shared(a, b)


class CacheMachine(RuleBasedStateMachine):
    """A KVCache beside the list of tokens that its buffers hold."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(CAPACITY)
        self.held: list[int] = []

    @rule(ids=IDS)
    def append(self, ids: list[int]) -> None:
        if len(self.held) + len(ids) > CAPACITY:
            with pytest.raises(CapacityError, match=f"{len(self.held) + len(ids)} tokens do not fit into {CAPACITY}"):
                self.cache.append(tokens(*ids))
        else:
            self.cache.append(tokens(*ids))
            self.held += ids

    @rule(keep=st.integers(0, CAPACITY), tail=IDS)
    def align(self, keep: int, tail: list[int]) -> None:
        text = self.held[:keep] + tail
        expected = min(shared(self.held, text), max(len(text) - 1, 0))
        assert self.cache.align(tokens(*text)) == expected
        del self.held[expected:]

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.held = []

    @invariant()
    def holds_the_same(self) -> None:
        assert self.cache.tokens.tolist() == self.held
        assert len(self.cache) == len(self.held)
        assert self.cache.capacity == CAPACITY


CacheMachine.TestCase.settings = settings(deadline=None, max_examples=40, stateful_step_count=30)
TestCache = CacheMachine.TestCase


def test_the_last_token_of_a_text_is_never_kept() -> None:
    cache = KVCache(8)
    cache.append(tokens(5, 6, 7))
    assert cache.align(tokens(5, 6, 7)) == 2
    assert cache.align(tokens(5)) == 0
    assert cache.align(tokens()) == 0


def test_aligning_does_not_bring_back_what_was_forgotten() -> None:
    cache = KVCache(8)
    cache.append(tokens(1, 2, 3, 4))
    assert cache.align(tokens(1, 9)) == 1
    assert cache.align(tokens(1, 2, 3, 4)) == 1


def test_a_token_buffer_is_exactly_full_and_no_fuller() -> None:
    buffer = TokenBuffer(tokens(1, 2), 4)
    buffer.extend([3, 4])
    assert buffer.view.tolist() == [1, 2, 3, 4]
    with pytest.raises(CapacityError, match="5 tokens do not fit into 4: shorten the prompt or max_new_tokens"):
        buffer.extend([5])
    assert buffer.view.tolist() == [1, 2, 3, 4]
    with pytest.raises(CapacityError, match="3 tokens do not fit into 2"):
        TokenBuffer(tokens(1, 2, 3), 2)


@pytest.mark.parametrize("capacity", [2**61, 2**70])
def test_no_memory_for_a_text(capacity: int) -> None:
    with pytest.raises(ResourceError, match=f"no memory for {capacity:,} token ids"):
        KVCache(capacity)


def test_the_view_cannot_be_written_and_is_no_copy() -> None:
    buffer = TokenBuffer(tokens(1, 2), 4)
    view = buffer.view
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 9
    buffer.extend([3])
    assert np.shares_memory(view, buffer.view)


def test_truncating_past_the_end_keeps_all() -> None:
    buffer = TokenBuffer(tokens(1, 2, 3), 4)
    buffer.truncate(9)
    assert len(buffer) == 3
    buffer.truncate(1)
    assert buffer.view.tolist() == [1]
    assert buffer.capacity == 4
