"""The index of n-grams against a naive search of the text."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftc.runtime.ngrams import LONGEST_MATCH, NgramIndex
from tests.runtime.fakes import tokens

texts = st.lists(st.integers(0, 2), max_size=40)
few = st.lists(st.integers(0, 2), max_size=6)
lengths = st.tuples(st.integers(1, 4), st.integers(0, 4)).map(lambda pair: (pair[0], pair[0] + pair[1]))


def index_of(text: list[int], low: int, high: int) -> NgramIndex:
    index = NgramIndex(low, high)
    index.extend(tokens(*text))
    return index


def naive_match(text: list[int], ahead: list[int], low: int, high: int) -> tuple[int, int] | None:
    """For each length from the longest, for each place from the latest: was the end of the text there before?"""
    tail = [*text, *ahead]
    for n in range(min(high, len(tail)), low - 1, -1):
        for start in range(len(text) - 1, n - 1, -1):
            if text[start - n : start] == tail[-n:]:
                while n < min(len(tail), start, LONGEST_MATCH) and text[start - n - 1] == tail[-n - 1]:
                    n += 1
                return start, n
    return None


@given(text=texts, ahead=few, bounds=lengths)
@settings(deadline=None, max_examples=300)
def test_a_match_is_that_of_a_naive_search(text: list[int], ahead: list[int], bounds: tuple[int, int]) -> None:
    index = index_of(text, *bounds)
    assert index.match(ahead) == naive_match(text, ahead, *bounds)
    assert index.match() == naive_match(text, [], *bounds)
    assert len(index) == len(text)
    assert index.tokens == text, "what is asked about tokens ahead leaves nothing behind"


def test_lengths_of_matches_are_counted_up_to_a_bound() -> None:
    cycle = list(range(10)) * 20
    for repeated in (5, LONGEST_MATCH - 1, LONGEST_MATCH, LONGEST_MATCH + 20):
        text = [*cycle[:repeated], 77, *cycle[:repeated]]
        match = index_of(text, 2, 4).match()
        assert match is not None
        assert match[1] >= min(repeated, 4)
        assert match[1] <= LONGEST_MATCH
    assert index_of([7] * 100, 2, 4).match() == (99, LONGEST_MATCH)
    assert index_of([7] * 10, 2, 4).match([7] * 50) == (9, 9), "no longer than what lies before the place"


@given(text=texts.filter(bool), ahead=few, count=st.integers(0, 50), data=st.data())
@settings(deadline=None)
def test_a_copy_past_the_end_is_of_what_it_copied(
    text: list[int], ahead: list[int], count: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(text) - 1))
    longer = [*text, *ahead]
    for i in range(count):
        longer.append(longer[start + i])
    assert index_of(text, 1, 3).copy(start, count, ahead) == longer[len(text) + len(ahead) :]


def test_copies_of_cycles() -> None:
    index = index_of([5, 6, 5, 6, 5], 1, 4)
    assert index.match() == (3, 3)
    assert index.copy(3, 5) == [6, 5, 6, 5, 6]
    assert index.copy(3, 5, [9]) == [6, 5, 9, 6, 5]
    assert index.copy(0, 2) == [5, 6]


@given(text=texts, ahead=few, bounds=lengths, data=st.data())
@settings(deadline=None)
def test_growing_step_by_step_is_as_good_as_starting_anew(
    text: list[int], ahead: list[int], bounds: tuple[int, int], data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=4).map(sorted))
    index = NgramIndex(*bounds)
    buffer = np.array(text, np.int64)  # the views of one growing text share their memory
    for cut in [*cuts, len(text)]:
        assert index.follow(buffer[:cut]) <= cut
        index.extend(buffer[:cut])
        assert index.match(ahead) == index_of(text[:cut], *bounds).match(ahead)
    assert index.tokens == text


@given(texts=st.lists(texts, min_size=2, max_size=4), ahead=few)
@settings(deadline=None)
def test_another_text_is_seen_to_be_one(texts: list[list[int]], ahead: list[int]) -> None:
    index = NgramIndex(1, 3)
    before: list[int] = []
    for text in texts:
        known = index.follow(tokens(*text))
        assert known == (len(before) if text[: len(before)] == before else 0)
        assert len(index) == known
        index.extend(tokens(*text))
        assert index.tokens == text
        assert index.match(ahead) == index_of(text, 1, 3).match(ahead)
        before = text


@pytest.mark.parametrize("shorter", [[1, 2], [1], []])
def test_a_text_that_was_cut_begins_anew(shorter: list[int]) -> None:
    index = index_of([1, 2, 1, 2], 1, 3)
    assert index.follow(tokens(*shorter)) == 0
    assert len(index) == 0
    index.extend(tokens(*shorter))
    assert index.match() is None


def test_a_cleared_index_knows_nothing() -> None:
    index = index_of([1, 2, 1, 2], 1, 3)
    index.clear()
    assert (len(index), index.match(), index.match([1, 2])) == (0, None, None)
    index.extend(tokens(2, 1))
    assert index.match() is None


def test_token_by_token() -> None:
    index = NgramIndex(2, 3)
    for token in [4, 5, 6, 4, 5]:
        index.append(token)
    assert index.match() == (2, 2)
    assert index.copy(2, 4) == [6, 4, 5, 6]
    assert index.follow(tokens(4, 5, 6, 4, 5, 9)) in (0, 5), "an index that was told tokens may not know their text"
