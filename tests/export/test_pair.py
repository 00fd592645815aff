"""The pair check: which differences are refused, which are told, and the predicted speed against its closed form."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from draftc.export.checkpoint import CheckpointInfo, peek
from draftc.export.pair import check_pair, predicted_speedup, target_length_warning, tokenizer_fingerprint
from draftc.runtime.errors import PairError, UsageError
from tests.export.tiny_models import VOCAB, save_folder, tiny_model, tiny_tokenizer, write_gguf

Make = Callable[..., CheckpointInfo]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def build(tokenizer: PreTrainedTokenizerFast | None = None, **config: Any) -> CheckpointInfo:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        save_folder(folder, tiny_model(**config), tokenizer)
        return peek(str(folder))

    return build


def test_a_fitting_pair_has_no_warnings(make: Make) -> None:
    report = check_pair(make(), make(hidden_size=32), 128)
    assert report.warnings == ()
    assert report.vocab_size == len(tiny_tokenizer())


def test_padded_rows_may_differ(make: Make) -> None:
    report = check_pair(make(vocab_size=384), make(vocab_size=VOCAB), 64)
    assert (report.target_rows, report.draft_rows, report.vocab_size) == (384, VOCAB, len(tiny_tokenizer()))


def test_a_gguf_draft_fits_the_folder_it_was_made_from_whatever_its_padding(make: Make, tmp_path: Path) -> None:
    draft = peek(str(write_gguf(tmp_path / "m.gguf", tiny_model(), unused=VOCAB - len(tiny_tokenizer()))))
    assert check_pair(make(), draft, 64).vocab_size == len(tiny_tokenizer())
    assert tokenizer_fingerprint(make()) == tokenizer_fingerprint(draft)


def test_the_first_token_with_another_id_is_named(make: Make) -> None:
    target, draft = make(tiny_tokenizer(extra=["<a>", "<b>"])), make(tiny_tokenizer(extra=["<b>", "<a>"]))
    ids = target.tokenizer.get_vocab()
    message = (
        rf"differ in 2 of {len(ids)} tokens, first '<a>': id {ids['<a>']} in the target, id {ids['<b>']} in the draft"
    )
    with pytest.raises(PairError, match=message):
        check_pair(target, draft, 64)
    assert tokenizer_fingerprint(target) != tokenizer_fingerprint(draft)


def test_a_token_that_one_side_lacks_is_named(make: Make) -> None:
    with pytest.raises(PairError, match=r"first '<extra>': id \d+ in the target, absent in the draft"):
        check_pair(make(tiny_tokenizer(extra=["<extra>"])), make(), 64)
    with pytest.raises(PairError, match=r"first '<extra>': absent in the target, id \d+ in the draft"):
        check_pair(make(), make(tiny_tokenizer(extra=["<extra>"])), 64)


def test_a_draft_with_too_few_rows_is_refused(make: Make) -> None:
    with pytest.raises(PairError, match=r"the draft's logits have 290 rows, the tokenizer has ids up to \d+"):
        check_pair(make(), make(vocab_size=290), 64)


def test_another_end_token_is_told_but_not_refused(make: Make) -> None:
    draft_tokenizer = tiny_tokenizer()
    draft_tokenizer.eos_token = "<|endoftext|>"
    report = check_pair(make(), make(draft_tokenizer, num_hidden_layers=1), 64)
    assert report.warnings == (
        "eos_token is '<|im_end|>' in the target and '<|endoftext|>' in the draft: the target's is used",
    )


def test_a_context_shorter_than_max_length_is_told(make: Make) -> None:
    report = check_pair(make(), make(max_position_embeddings=100, num_hidden_layers=1), 120)
    assert len(report.warnings) == 1
    assert report.warnings[0].startswith("the draft's context is 100 tokens, shorter than max_length 120")
    told = target_length_warning(make(), 129)
    assert told is not None
    assert told.startswith("the target's context is 128 tokens, shorter than max_length 129")
    assert target_length_warning(make(), 128) is None


def test_a_draft_larger_than_the_target_is_told_with_the_slowdown(make: Make) -> None:
    report = check_pair(make(), make(num_hidden_layers=6), 64, k=4)
    assert report.draft_cost_ratio > 2
    expected = predicted_speedup(0.9, 4, report.draft_cost_ratio)
    assert expected < 1
    assert f"predicted speed is {expected:.2f}x" in report.warnings[0]


def test_cost_ratio_counts_a_tied_table_as_read_and_an_untied_one_as_not(make: Make) -> None:
    layers = 2 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64) + 64  # q, o, k, v, feed-forward, norms
    head = VOCAB * 64
    tied, untied = make(tie_word_embeddings=True), make(tie_word_embeddings=False)
    assert tied.parameters_per_token == untied.parameters_per_token == layers + head
    assert check_pair(untied, tied, 64).draft_cost_ratio == 1


@given(
    acceptance=st.floats(0, 1),
    k=st.integers(1, 12),
    cost=st.floats(0, 3),
)
def test_predicted_speed_is_the_mean_of_the_process_that_the_theorem_describes(
    acceptance: float, k: int, cost: float
) -> None:
    # tokens of one round: i accepted, then one of the target's own, with probability a^i (1 - a), or all k and a bonus
    tokens = sum((i + 1) * acceptance**i * (1 - acceptance) for i in range(k)) + (k + 1) * acceptance**k
    np.testing.assert_allclose(predicted_speedup(acceptance, k, cost), tokens / (k * cost + 1), rtol=1e-6)


def test_report_predicts_for_the_k_that_is_compiled(make: Make) -> None:
    report = check_pair(make(), make(num_hidden_layers=1), 64, k=7)
    assert report.k == 7
    assert [prediction.acceptance for prediction in report.predictions] == [0.6, 0.8, 0.9]
    for prediction in report.predictions:
        assert prediction.speedup == predicted_speedup(prediction.acceptance, 7, report.draft_cost_ratio)


@pytest.mark.parametrize(("acceptance", "k", "cost"), [(-0.1, 4, 0.1), (1.1, 4, 0.1), (0.5, 0, 0.1), (0.5, 4, -1.0)])
def test_predicted_speed_refuses_numbers_out_of_range(acceptance: float, k: int, cost: float) -> None:
    with pytest.raises(UsageError, match="need 0 <= acceptance <= 1"):
        predicted_speedup(acceptance, k, cost)
