"""The calibration text: spread over the corpus, in ids that the model has, and not what quality is measured on."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from draftc.export import parity
from draftc.export.calibration import calibration_corpus, calibration_tokens
from draftc.export.checkpoint import CheckpointInfo, peek
from draftc.export.draft_vocab import Corpus, language_reference
from draftc.runtime.errors import UsageError
from tests.export.tiny_models import save_folder, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> CheckpointInfo:
    folder = tmp_path_factory.mktemp("model")
    save_folder(folder)
    return peek(str(folder))


def test_a_file_gives_as_many_parts_as_it_has(tmp_path: Path, info: CheckpointInfo) -> None:
    text = "".join(f"line {i} of the text\n" for i in range(4000))
    (tmp_path / "text").write_text(text, encoding="utf-8")
    corpus = calibration_corpus(tmp_path / "text")
    tokens = calibration_tokens(info, corpus)
    assert tokens.shape == (64, 128)  # the model's context is shorter than 256
    assert (tokens[:, 0] == info.tokenizer.bos_token_id).all()
    assert len({row.tobytes() for row in tokens}) == 64
    for row in tokens:
        assert str(info.tokenizer.decode(row[5:-5])) in text
    lines = [int(str(info.tokenizer.decode(row)).split("line ")[1].split()[0]) for row in tokens]
    assert lines == sorted(lines)
    assert max(lines) > 2400  # not only its beginning


def test_the_library_is_the_default_and_gives_the_same_text_each_time(info: CheckpointInfo) -> None:
    tokens = calibration_tokens(info, calibration_corpus(None))
    assert tokens.shape == (64, 128)
    np.testing.assert_array_equal(tokens, calibration_tokens(info, calibration_corpus(None)))
    assert len({row.tobytes() for row in tokens}) == 64
    measured = parity.held_out_tokens(info.tokenizer, 2000)
    windows = np.lib.stride_tricks.sliding_window_view(measured, 40)
    assert not any((windows == row[20:60]).all(axis=1).any() for row in tokens)


def test_the_library_is_half_prose_and_half_of_it_is_shown_as_chats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftc.export.calibration.LENGTH", 512)
    save_folder(tmp_path, tiny_model(max_position_embeddings=512))
    info = peek(str(tmp_path))
    corpus = calibration_corpus(None)
    prose = language_reference()
    assert [piece in prose for piece in corpus.pieces] == [False, True] * 32
    texts = [str(info.tokenizer.decode(row)) for row in calibration_tokens(info, corpus)]
    chats = [index for index, text in enumerate(texts) if "<|im_start|>user" in text]
    assert chats == [index for index in range(64) if index % 4 < 2]
    assert "Sure! Here's how" in texts[0]
    assert not any("Sure! Here's how" in text for text in texts[1:])


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no') }}", "{{"])
def test_without_a_template_that_works_nothing_is_a_chat(template: str | None, tmp_path: Path) -> None:
    save_folder(tmp_path, tokenizer=tiny_tokenizer(chat_template=template))
    info = peek(str(tmp_path))
    tokens = calibration_tokens(info, calibration_corpus(None))
    assert (tokens[:, 0] == info.tokenizer.bos_token_id).all()
    assert not any("<|im_start|>" in str(info.tokenizer.decode(row)) for row in tokens)


def test_ids_without_an_embedding_are_left_out(info: CheckpointInfo) -> None:
    corpus = Corpus("test", ("abc <tool> def\n" * 2000,))
    tool = info.tokenizer.get_vocab()["<tool>"]
    assert tool in calibration_tokens(info, corpus)
    fewer = replace(info, shape=replace(info.shape, vocab_rows=tool))
    assert calibration_tokens(fewer, corpus).max() < tool


@pytest.mark.parametrize("count", [0, 1, 60])
def test_a_text_that_is_too_short_is_refused(count: int, info: CheckpointInfo) -> None:
    with pytest.raises(UsageError, match=r"test: too short to calibrate on: 1024 tokens at least") as caught:
        calibration_tokens(info, Corpus("test", ("the fox and the dog " * count,)))
    assert "\n" not in str(caught.value)
