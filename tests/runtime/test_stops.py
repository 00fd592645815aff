"""Stop rules against a slow reference: after every token, decode everything so far and look for a stop."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftc.runtime.errors import UsageError
from draftc.runtime.stops import FinishReason, OutputStream
from draftc.runtime.text import Tokenizer


@pytest.fixture(scope="session", params=["byte_level", "llama"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    folder: Path = request.getfixturevalue(f"{request.param}_folder")
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="session")
def chatml(byte_level_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(byte_level_folder)


@pytest.fixture(scope="session")
def llama(llama_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(llama_folder)


class Spelled:
    """A tokenizer whose ids are indices into a list of strings, for cases that need an exact split."""

    def __init__(self, *tokens: str, flush: str = "") -> None:
        self.tokens = tokens
        self.flush = flush

    def detokenizer(self) -> "Spelled":
        return self

    def push(self, token_id: int) -> str:
        return self.tokens[token_id]

    @property
    def held(self) -> str:
        return self.flush

    def finish(self) -> str:
        return self.flush


def run(output: OutputStream, ids: Sequence[int]) -> tuple[FinishReason | None, list[str]]:
    """Push until it ends; returns the reason and the streamed pieces."""
    pieces = []
    for token in ids:
        reason = output.push(token)
        pieces.append(output.take_text())
        if reason is not None:
            return reason, pieces
    return None, pieces


def reference(
    tokenizer: Tokenizer, ids: list[int], ends: set[int], stops: list[str], cap: int
) -> tuple[FinishReason | None, int, str]:
    """(reason, tokens kept, text), by decoding the whole output again after each token."""
    for n in range(1, len(ids) + 1):
        if ids[n - 1] in ends:
            return "stop", n, tokenizer.decode(ids[: n - 1])
        text = tokenizer.decode(ids[:n])
        starts = [start for stop in stops if (start := text.find(stop)) >= 0]
        if starts:
            return "stop", n, text[: min(starts)]
        if n == cap:
            return "length", n, text
    return None, len(ids), tokenizer.decode(ids)


LETTERS = "ab\n 你😀the"


@given(data=st.data())
@settings(deadline=None, max_examples=300)
def test_as_the_reference_for_any_ids_and_stops(tokenizer: Tokenizer, data: st.DataObject) -> None:
    texts = data.draw(st.lists(st.text(st.sampled_from(LETTERS), max_size=6), max_size=5))
    some = [i for text in texts for i in tokenizer.encode(text)]
    ids = data.draw(st.lists(st.one_of(*([st.sampled_from(some)] if some else []), st.integers(0, 300)), max_size=25))
    stops = data.draw(st.lists(st.text(st.sampled_from(LETTERS), min_size=1, max_size=4), max_size=3))
    ends = data.draw(st.sets(st.integers(0, 300), max_size=2))
    cap = data.draw(st.integers(1, 25))

    output = OutputStream(
        tokenizer,
        eos_token_ids=sorted(ends)[:1],
        stop_token_ids=sorted(ends)[1:],
        stop_strings=stops,
        max_new_tokens=cap,
    )
    reason, pieces = run(output, ids)
    expected, kept, text = reference(tokenizer, ids, ends, stops, cap)
    assert (reason, output.token_ids) == (expected, ids[:kept])
    if reason is None:
        # What is out is the beginning of the final text, and what is withheld may still become part of a stop string.
        assert text.startswith("".join(pieces))
        output.finish("cancelled")
        pieces.append(output.take_text())
    assert output.text == text
    assert "".join(pieces) == text


@given(data=st.data())
@settings(deadline=None, max_examples=300)
def test_no_more_is_withheld_than_a_stop_string_could_need(data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=12))
    stops = data.draw(st.lists(st.text("ab", min_size=2, max_size=5), min_size=1, max_size=3))
    output = OutputStream(Spelled(*tokens), stop_strings=stops)
    text = streamed = ""
    for i, token in enumerate(tokens):
        text += token
        if output.push(i) is not None:
            return
        streamed += output.take_text()
        beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}
        withheld = max((len(b) for b in beginnings if text.endswith(b)), default=0)
        assert streamed == text[: len(text) - withheld]


class TestEndTokens:
    def test_end_of_sequence_inside_an_accepted_draft_ends_it(self, chatml: Tokenizer) -> None:
        eos, *rest = chatml.encode("<|im_end|>and then the fox")
        output = OutputStream(chatml, eos_token_ids=[eos])
        ids = [*chatml.encode("the quick"), eos, *rest]
        assert run(output, ids)[0] == "stop"
        assert output.token_ids == [*chatml.encode("the quick"), eos]
        assert output.text == "the quick"

    def test_an_end_token_that_is_no_special_token_shows_no_text_either(self, chatml: Tokenizer) -> None:
        (tool,) = chatml.encode("<tool>")
        for rule in ("eos_token_ids", "stop_token_ids"):
            output = OutputStream(chatml, **{rule: [tool]})  # type: ignore[arg-type]
            assert run(output, [*chatml.encode("fox"), tool])[0] == "stop"
            assert output.text == "fox"

    def test_ignored_it_is_an_ordinary_token_without_text(self, chatml: Tokenizer) -> None:
        eos, *rest = ids = chatml.encode("<|im_end|> then the fox")
        output = OutputStream(chatml, eos_token_ids=(), max_new_tokens=len(ids))
        assert run(output, ids)[0] == "length"
        assert output.token_ids == [eos, *rest]
        assert output.text == " then the fox"

    def test_an_unfinished_character_before_it_is_flushed(self, chatml: Tokenizer) -> None:
        (eos,) = chatml.encode("<|im_end|>")
        start_of_emoji = chatml.encode("🦄")[:1]
        output = OutputStream(chatml, eos_token_ids=[eos])
        assert run(output, [*start_of_emoji, eos]) == ("stop", ["", "\ufffd"])

    def test_a_withheld_beginning_of_a_stop_string_is_released_by_it(self) -> None:
        output = OutputStream(Spelled("one ST", ""), eos_token_ids=[1], stop_strings=["STOP"])
        assert run(output, [0, 1]) == ("stop", ["one ", "ST"])


class TestStopStrings:
    @pytest.mark.parametrize(
        ("tokens", "stops", "text", "kept"),
        [
            (["a", "b", "STOP", "c"], ["STOP"], "ab", 3),
            (["aS", "T", "O", "Pc", "d"], ["STOP"], "a", 4),  # over many tokens, from within one into another
            (["aSTOPb"], ["STOP"], "a", 1),
            (["ST", "ST", "OP"], ["STOP"], "ST", 3),  # the match begins later than the first withheld text
            (["aabaab", "aac"], ["aabaac"], "aab", 2),
            (["one two", " three"], ["two three", "one two t"], "", 2),  # the earliest beginning wins
            (["xab", "c"], ["abc", "b"], "xa", 1),  # but only among those that are complete
            (["\n", "\n"], ["\n\n"], "", 2),
        ],
    )
    def test_the_text_ends_before_it(self, tokens: list[str], stops: list[str], text: str, kept: int) -> None:
        output = OutputStream(Spelled(*tokens), stop_strings=stops)
        reason, pieces = run(output, range(len(tokens)))
        assert (reason, output.text, output.token_ids) == ("stop", text, list(range(kept)))
        assert "".join(pieces) == text

    def test_a_stop_string_of_split_characters(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("fox 🦄🦄 dog")
        output = OutputStream(tokenizer, stop_strings=["🦄🦄"])
        assert run(output, ids)[0] == "stop"
        assert output.text == "fox "
        assert len(output.token_ids) == len(tokenizer.encode("fox 🦄🦄"))

    def test_a_line_feed_that_is_a_byte_token_stops_at_once(self, llama: Tokenizer) -> None:
        """The detokenizer withholds byte tokens; the stop must not wait for the token after it."""
        ids = llama.encode("fox\ndog")
        output = OutputStream(llama, stop_strings=["\n"])
        assert run(output, ids)[0] == "stop"
        assert llama.decode(output.token_ids) == "fox\n"
        assert output.text == "fox"

    def test_completed_only_by_the_flush_of_withheld_bytes(self) -> None:
        output = OutputStream(Spelled("a", "b", flush="\ufffd"), stop_strings=["b\ufffd"])
        assert run(output, [0, 1]) == (None, ["a", ""])
        assert output.finish("length") == "stop"
        assert output.text == "a"

    def test_cut_short_by_the_caller_the_withheld_text_comes_out(self) -> None:
        output = OutputStream(Spelled("one ST"), stop_strings=["STOP"])
        assert run(output, [0]) == (None, ["one "])
        assert output.finish("cancelled") == "cancelled"
        assert output.take_text() == "ST"
        assert (output.text, output.finish_reason) == ("one ST", "cancelled")

    def test_the_scan_never_looks_back_further_than_the_stop_string(self) -> None:
        """Else long outputs cost the square of their length."""

        class Watched(str):
            longest = 0
            __slots__ = ()

            def __radd__(self, other: str) -> str:
                Watched.longest = max(Watched.longest, len(other) + len(self))
                return other + str(self)

        tokens = [Watched("ab" * 4) for _ in range(400)]
        output = OutputStream(Spelled(*tokens), stop_strings=["abababac"])
        assert run(output, range(len(tokens)))[0] is None
        assert 0 < Watched.longest <= 8 + 7


class TestLengthCap:
    def test_it_ends_the_output(self) -> None:
        output = OutputStream(Spelled("a", "b", "c"), max_new_tokens=2)
        assert run(output, [0, 1, 2])[0] == "length"
        assert (output.token_ids, output.text) == ([0, 1], "ab")

    def test_a_stop_on_the_same_token_beats_it(self) -> None:
        stop_string = OutputStream(Spelled("aST", "OP"), stop_strings=["STOP"], max_new_tokens=2)
        assert run(stop_string, [0, 1])[0] == "stop"
        end_token = OutputStream(Spelled("a", ""), eos_token_ids=[1], max_new_tokens=2)
        assert run(end_token, [0, 1])[0] == "stop"
        by_flush = OutputStream(Spelled("a", flush="\ufffd"), stop_strings=["\ufffd"], max_new_tokens=1)
        assert run(by_flush, [0])[0] == "stop"

    def test_what_was_withheld_is_released(self, chatml: Tokenizer) -> None:
        ids = chatml.encode("the 🦄")[:-1]
        output = OutputStream(chatml, stop_strings=[" 🦄"], max_new_tokens=len(ids))
        reason, pieces = run(output, ids)
        assert (reason, "".join(pieces)) == ("length", "the \ufffd")


class TestMisuse:
    @pytest.mark.parametrize("stops", [[""], ["a", ""], [None], [1], [b"a"], "a"])
    def test_stop_strings(self, stops: list[str]) -> None:
        with pytest.raises(UsageError, match="stop string"):
            OutputStream(Spelled(), stop_strings=stops)

    @pytest.mark.parametrize("cap", [0, -1, 1.5, True, "3"])
    def test_max_new_tokens(self, cap: int) -> None:
        with pytest.raises(UsageError, match="max_new_tokens"):
            OutputStream(Spelled(), max_new_tokens=cap)

    @pytest.mark.parametrize("ids", [[-1], ["a"], [1.0], [True]])
    def test_ids(self, ids: list[int]) -> None:
        with pytest.raises(UsageError, match="eos_token_ids"):
            OutputStream(Spelled(), eos_token_ids=ids)
        with pytest.raises(UsageError, match="stop_token_ids"):
            OutputStream(Spelled(), stop_token_ids=ids)

    def test_a_token_after_the_end(self) -> None:
        output = OutputStream(Spelled("a"), max_new_tokens=1)
        output.push(0)
        with pytest.raises(UsageError, match="ended"):
            output.push(0)
        assert output.token_ids == [0]

    def test_finishing_twice_changes_nothing(self) -> None:
        output = OutputStream(Spelled("a", flush="\ufffd"), max_new_tokens=1)
        output.push(0)
        assert output.finish("cancelled") == "length"
        assert output.text == "a\ufffd"
