"""The gate lets rounding through and nothing else."""

import numpy as np
import pytest
from numpy.typing import NDArray

from draftc.export import parity
from draftc.runtime.decoder import Decoder, Limits
from draftc.runtime.engine import Logits, Tokens
from draftc.runtime.errors import ParityError
from draftc.runtime.graphio import GraphSpec
from tests.export.tiny_models import TEXT, logits, tiny_model, tiny_tokenizer

VOCAB = 11


class Recorder:
    """An engine whose logits say what was run where: row = one-hot of the token, plus its position."""

    def __init__(self, forget_rewind: bool = False) -> None:
        self.memory = np.full(64, -1, np.int64)
        self.calls: list[tuple[int, int, int]] = []
        self.forget_rewind = forget_rewind
        self.spec = GraphSpec.decoder([(1, 2, 2)], 64, VOCAB, "float32")

    def forward(self, tokens: Tokens, start: int, rows: int) -> Logits:
        self.calls.append((tokens.size, start, rows))
        if not (self.forget_rewind and tokens.size == 1):  # a stale entry stays where single steps should overwrite it
            self.memory[start : start + tokens.size] = tokens
        out = np.zeros((tokens.size, VOCAB), np.float32)
        for i in range(tokens.size):
            out[i, self.memory[: start + i + 1].sum() % VOCAB] = 1 + start + i
        return out[tokens.size - rows :]

    def clear(self) -> None: ...

    def close(self) -> None: ...


def expected(tokens: Tokens) -> parity.LogitRows:
    rows: parity.LogitRows = {}
    for i in range(tokens.size):
        rows[i] = np.zeros(VOCAB, np.float32)
        rows[i][tokens[: i + 1].sum() % VOCAB] = 1 + i
    return rows


TOKENS = np.random.default_rng(3).integers(0, VOCAB, 48)
LIMITS = Limits(max_length=48, max_width=8, prefill_chunk=16, vocab_size=VOCAB)


def test_graph_logits_run_prefill_verification_rewind_and_single_steps() -> None:
    engine = Recorder()
    rows = parity.graph_logits(Decoder(engine, LIMITS), TOKENS, k=4)
    reference = expected(TOKENS)
    assert set(rows) == set(range(8, 48))  # of the first chunk, the last max_width
    for position, row in rows.items():
        np.testing.assert_array_equal(row, reference[position])
    widths = [width for width, _, _ in engine.calls]
    assert {16, 5, 1, 8} <= set(widths)  # a chunk, a verification, single steps, the widest
    assert all(count <= 8 for _, _, count in engine.calls)
    assert any(after[1] < before[1] + before[0] for before, after in zip(engine.calls, engine.calls[1:], strict=False))


def test_a_graph_that_keeps_rejected_entries_is_found() -> None:
    rows = parity.graph_logits(Decoder(Recorder(forget_rewind=True), LIMITS), TOKENS, k=4)
    result = parity.compare(expected(TOKENS), rows, VOCAB)
    with pytest.raises(ParityError, match="cannot be compiled faithfully"):
        parity.check_capture("tiny", result)


@pytest.mark.parametrize("length", [8, 9, 20])
def test_a_text_shorter_than_a_verification_is_verified_in_a_shorter_one(length: int) -> None:
    limits = Limits(max_length=length, max_width=32, prefill_chunk=length, vocab_size=VOCAB)
    engine = Recorder()
    rows = parity.graph_logits(Decoder(engine, limits), TOKENS[:length], k=20)
    assert all(start + width <= length for width, start, _ in engine.calls)
    reference = expected(TOKENS[:length])
    assert set(rows) == set(range(length))
    for position, row in rows.items():
        np.testing.assert_array_equal(row, reference[position])
    assert engine.calls[1][0] > 2  # a verification with something to reject


def test_compare_against_closed_forms() -> None:
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
    reference: dict[int, NDArray[np.float32]] = {0: np.log(p).astype(np.float32), 1: np.log(p).astype(np.float32)}
    actual = {0: np.log(q).astype(np.float32), 1: (np.log(p) + 7).astype(np.float32), 5: np.zeros(3, np.float32)}
    result = parity.compare(reference, actual, 3)
    assert result.tokens == 2
    assert result.kl == pytest.approx((p * np.log(p / q)).sum() / 2, rel=1e-5)  # a shift of all logits changes nothing
    assert result.greedy_agreement == 0.5
    assert result.max_abs_diff == pytest.approx(7, rel=1e-5)
    assert result.scale == pytest.approx(np.log(4), rel=1e-5)


def test_padding_rows_do_not_count() -> None:
    reference = {0: np.array([1.0, 2.0, 500.0], np.float32)}
    result = parity.compare(reference, {0: np.array([1.0, 2.0, -500.0], np.float32)}, 2)
    assert (result.max_abs_diff, result.greedy_agreement) == (0, 1)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_graph_that_overflows_is_refused(value: float) -> None:
    bad = {0: np.array([0.0, value], np.float32)}
    with pytest.raises(ParityError, match=f"position 0 are {value}: .* use --precision bf16"):
        parity.compare({0: np.zeros(2, np.float32)}, bad, 2)


def test_the_tolerance_follows_the_size_of_the_logits() -> None:
    small = parity.Comparison(tokens=9, max_abs_diff=2e-4, kl=0, greedy_agreement=1, scale=0.5)
    assert parity.check_capture("tiny", small) == pytest.approx(parity.CAPTURE_TOLERANCE)
    large = parity.Comparison(tokens=9, max_abs_diff=9e-3, kl=0, greedy_agreement=1, scale=40)
    assert parity.check_capture("tiny", large) > 9e-3
    with pytest.raises(ParityError):
        parity.check_capture("tiny", parity.Comparison(9, 9e-3, 0, 1, 4))


def test_a_quantized_graph_that_predicts_something_else_is_refused() -> None:
    parity.check_rounded("tiny", "int4", parity.Comparison(9, 11.0, 0.35, 0.7, 40))
    with pytest.raises(ParityError, match=r"the int4 graph .* use --precision int8"):
        parity.check_rounded("tiny", "int4", parity.Comparison(9, 11.0, 1.5, 0.2, 40))
    with pytest.raises(ParityError, match=r"the fp16 graph .* use --precision bf16"):
        parity.check_rounded("tiny", "fp16", parity.Comparison(9, 11.0, float("nan"), 0.2, 40))


def test_eager_logits_are_the_models_own() -> None:
    model = tiny_model()
    rows = parity.eager_logits(model, (np.arange(24) * 7 % 320).astype(np.int64))
    np.testing.assert_allclose(np.stack([rows[i] for i in range(24)]), logits(model), rtol=1e-5, atol=1e-5)


def test_parity_tokens_begin_with_bos_and_repeat_the_text() -> None:
    tokenizer = tiny_tokenizer(extra=[TEXT])
    tokens = parity.parity_tokens(tokenizer, 6000)
    assert tokens.shape == (6000,)
    assert tokens[0] == tokenizer.bos_token_id
    (starts,) = np.nonzero((np.lib.stride_tricks.sliding_window_view(tokens, 40) == tokens[1:41]).all(axis=1))
    assert len(starts) > 1
    period = starts[1] - starts[0]
    np.testing.assert_array_equal(tokens[1 : 6000 - period], tokens[1 + period :])
    assert str(tokenizer.decode(tokens[1:400])).startswith("A lighthouse keeper")


def test_text_logits_are_those_of_every_position_in_calls_of_the_widest_width() -> None:
    engine = Recorder()
    rows = parity.text_logits(Decoder(engine, LIMITS), TOKENS[:27])
    reference = expected(TOKENS[:27])
    assert set(rows) == set(range(27))
    for position, row in rows.items():
        np.testing.assert_array_equal(row, reference[position])
    assert [width for width, _, _ in engine.calls] == [8, 8, 8, 3]


def test_perplexity_against_a_closed_form() -> None:
    p = np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]])
    rows = {7: np.log(p[0]).astype(np.float32), 9: np.append(np.log(p[1]) + 3, 50).astype(np.float32)}
    assert parity.perplexity(rows, {7: 1, 9: 2}, 3) == pytest.approx(1 / np.sqrt(0.25 * 0.8), rel=1e-6)


def test_the_held_out_text_is_not_the_parity_text() -> None:
    tokenizer = tiny_tokenizer()
    held_out, text = parity.held_out_tokens(tokenizer, 6000), parity.parity_tokens(tokenizer, 1000)
    assert 640 <= held_out.size <= 6000
    assert held_out[0] == tokenizer.bos_token_id
    assert parity.held_out_tokens(tokenizer, 100).tolist() == held_out[:100].tolist()
    pieces = np.lib.stride_tricks.sliding_window_view(text, 60)
    assert not any((pieces == held_out[i : i + 60]).all(axis=1).any() for i in range(0, held_out.size - 60, 7))
