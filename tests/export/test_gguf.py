"""GGUF files: the container against damage, and the model against the one that was written and transformers' loader."""

import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from draftc.export.checkpoint import load, peek, resolve
from draftc.export.gguf import GgufFile
from draftc.export.gguf_model import build_tokenizer, tied_head
from draftc.runtime.errors import CheckpointError, DraftcError, UnsupportedModelError
from tests.export.tiny_models import TEXT, VOCAB, logits, tiny_model, tiny_tokenizer, write_gguf

Q8_0, Q4_0, F16 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.F16
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_model())


# --- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 24}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_a_model_comes_back_from_gguf_bit_for_bit(tmp_path: Path, model_type: str, config: dict[str, Any]) -> None:
    model = tiny_model(model_type, **config)
    checkpoint = load(resolve(str(write_gguf(tmp_path / "m.gguf", model))))
    parameters = dict(checkpoint.model.named_parameters())
    assert parameters.keys() == dict(model.named_parameters()).keys()
    for name, value in model.named_parameters():
        np.testing.assert_array_equal(parameters[name].numpy(), value.detach().numpy(), err_msg=name)
    np.testing.assert_allclose(logits(checkpoint.model), logits(model), atol=1e-5)
    assert checkpoint.info.parameters == sum(value.numel() for value in model.parameters())
    assert checkpoint.model.dtype == torch.float32
    assert not any(value.requires_grad for value in parameters.values())


@pytest.mark.parametrize(("model_type", "kind"), [("llama", Q8_0), ("llama", F16), ("qwen2", Q4_0)])
def test_quantized_weights_are_those_of_transformers_own_loader(
    tmp_path: Path, model_type: str, kind: gguf.GGMLQuantizationType
) -> None:
    padding = VOCAB - len(tiny_tokenizer())  # transformers takes the number of rows from the number of tokens
    write_gguf(tmp_path / "m.gguf", tiny_model(model_type), kind=kind, unused=padding)
    ours = load(peek(str(tmp_path / "m.gguf"))).model
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    for name, value in theirs.named_parameters():
        np.testing.assert_array_equal(ours.get_parameter(name).numpy(), value.detach().numpy(), err_msg=name)


def test_llama3_rotary_scaling_is_read_from_its_tensor(tmp_path: Path) -> None:
    model = tiny_model(rope_parameters=LLAMA3_ROPE)
    plain = tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    factors = (plain.model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq).numpy()
    assert factors.max() > 2  # the scaling is real
    path = write_gguf(tmp_path / "m.gguf", model, tensors={"rope_freqs.weight": factors})
    checkpoint = load(peek(str(path)))
    np.testing.assert_allclose(logits(checkpoint.model), logits(model), atol=1e-4)
    assert np.abs(logits(plain) - logits(model)).max() > 1e-2
    assert checkpoint.info.parameters == sum(value.numel() for value in model.parameters())


def test_a_matrix_stored_twice_is_tied_again_and_the_finer_rounding_kept(tmp_path: Path) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=True)
    matrix = model.get_parameter("model.embed_tokens.weight").detach().numpy()
    kinds = {"output.weight": Q8_0, "token_embd.weight": Q4_0}
    path = write_gguf(tmp_path / "m.gguf", model, kinds=kinds, tensors={"output.weight": matrix})
    info = peek(str(path))
    checkpoint = load(info)
    assert info.tied
    assert any("tied again" in note for note in info.notes)
    embedding = checkpoint.model.get_parameter("model.embed_tokens.weight")
    assert checkpoint.model.get_parameter("lm_head.weight") is embedding
    assert checkpoint.info.parameters == info.parameters == sum(value.numel() for value in model.parameters())
    finer = gguf.dequantize(gguf.quantize(matrix, Q8_0), Q8_0)
    np.testing.assert_array_equal(embedding.numpy(), finer)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("other", ["F32", "Q8_0", "Q4_0"])
def test_two_roundings_of_one_matrix_are_told_from_a_head_that_was_trained_on(
    tmp_path: Path, kind: str, other: str
) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=True, hidden_size=256, num_attention_heads=16)
    matrix = model.get_parameter("model.embed_tokens.weight").detach().numpy()
    types = {"output.weight": gguf.GGMLQuantizationType[kind], "token_embd.weight": gguf.GGMLQuantizationType[other]}
    noise = np.random.default_rng(1).normal(size=matrix.shape).astype(np.float32) * matrix.std()
    for share, expected in ((0.0, True), (0.35, False)):
        path = write_gguf(
            tmp_path / f"{share}.gguf",
            model,
            kinds=types,
            tensors={"output.weight": (matrix + share * noise).astype(np.float32)},
        )
        assert tied_head(GgufFile(path)) is expected


def test_a_head_that_was_trained_a_little_is_told_where_the_file_is_not_quantized(tmp_path: Path) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=True)
    matrix = model.get_parameter("model.embed_tokens.weight").detach().numpy()
    kinds = dict.fromkeys(("output.weight", "token_embd.weight"), gguf.GGMLQuantizationType.F16)
    assert not tied_head(
        GgufFile(
            write_gguf(tmp_path / "m.gguf", model, kinds=kinds, tensors={"output.weight": np.float32(1.01) * matrix})
        )
    )


def test_a_head_that_differs_in_one_row_stays_untied(tmp_path: Path) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=True)
    head = model.get_parameter("model.embed_tokens.weight").detach().numpy().copy()
    head[200] = -head[200]
    path = write_gguf(tmp_path / "m.gguf", model, tensors={"output.weight": head})
    checkpoint = load(peek(str(path)))
    assert not checkpoint.info.tied
    np.testing.assert_array_equal(checkpoint.model.get_parameter("lm_head.weight").numpy(), head)


def test_progress_counts_every_element_once(tiny_gguf: Path) -> None:
    seen: list[tuple[int, int]] = []
    checkpoint = load(peek(str(tiny_gguf)), progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (checkpoint.info.parameters, checkpoint.info.parameters)


def test_rows_are_the_same_in_pieces_as_at_once(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ((_, whole),) = GgufFile(tiny_gguf).rows("token_embd.weight")
    monkeypatch.setattr("draftc.export.gguf.CHUNK_ELEMENTS", 64 * 7)
    pieces = list(GgufFile(tiny_gguf).rows("token_embd.weight"))
    assert len(pieces) > 40
    for where, values in pieces:
        np.testing.assert_array_equal(values, whole[where])
    sampled = np.concatenate([values for _, values in GgufFile(tiny_gguf).rows("token_embd.weight", step=3)])
    np.testing.assert_array_equal(sampled, whole[::3])


def test_the_licence_is_the_files_own(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model(), extra=lambda writer: writer.add_license("apache-2.0"))
    assert peek(str(path)).licence == "apache-2.0"


# --- the tokenizer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_special_tokens_and_template_survive_and_text_comes_back(tmp_path: Path, pre: str) -> None:
    original = tiny_tokenizer()
    tokenizer = peek(str(write_gguf(tmp_path / "m.gguf", tiny_model(), original, pre=pre))).tokenizer
    assert tokenizer.get_vocab() == original.get_vocab()
    assert tokenizer.chat_template == original.chat_template
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        original.bos_token,
        original.eos_token,
        original.pad_token,
    )
    ids = tokenizer("<|im_start|>user <tool>x<|im_end|>", add_special_tokens=False)["input_ids"]
    assert [original.get_vocab()[token] for token in ("<|im_start|>", "<tool>", "<|im_end|>")] == [
        index for index in ids if index in (1, 2, original.get_vocab()["<tool>"])
    ]
    assert "<tool>" in tokenizer.decode(ids, skip_special_tokens=True)
    assert "<|im_end|>" not in tokenizer.decode(ids, skip_special_tokens=True)
    plain = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(plain) == TEXT


def tokens_of(tmp_path: Path, text: str, **options: Any) -> list[str]:
    tokenizer = build_tokenizer(GgufFile(write_gguf(tmp_path / "m.gguf", tiny_model(), **options)))
    return list(tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]))


def test_smollm_takes_digits_apart_before_spaces(tmp_path: Path) -> None:
    # three spaces before a digit stay together, where GPT-2's rule would leave one of them with the digit
    assert tokens_of(tmp_path, "x   1", pre="smollm")[-1] == "1"
    assert "Ġ1" not in tokens_of(tmp_path, "x 1", pre="smollm")


def test_qwen2_composes_accents(tmp_path: Path) -> None:
    composed = tokens_of(tmp_path, "caf\u00e9", pre="qwen2")
    assert tokens_of(tmp_path, "cafe\u0301", pre="qwen2") == composed
    assert tokens_of(tmp_path, "cafe\u0301", pre="gpt-2") != composed


def test_a_begin_token_is_added_when_the_file_says_so(tmp_path: Path) -> None:
    with_begin = tokens_of(tmp_path, "fox", extra=lambda writer: writer.add_add_bos_token(True))
    without = tokens_of(tmp_path, "fox", extra=lambda writer: writer.add_add_bos_token(False))
    assert with_begin == ["<|endoftext|>", *without]


def test_padding_at_the_end_of_the_vocabulary_is_no_token(tmp_path: Path) -> None:
    info = peek(str(write_gguf(tmp_path / "m.gguf", tiny_model(), unused=9)))
    assert info.token_ids == len(tiny_tokenizer())
    assert not any(token.startswith("[PAD") for token in info.tokenizer.get_vocab())


def test_every_token_that_marks_an_end_is_an_end_id(tmp_path: Path) -> None:
    generation = peek(str(write_gguf(tmp_path / "m.gguf", tiny_model()))).generation_config
    assert generation.eos_token_id == [2, 0]  # <|im_end|>, which the file names, then <|endoftext|>


def test_special_ids_that_are_no_token_are_left_out(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model(), extra=lambda writer: writer.add_eot_token_id((1 << 32) - 1))
    assert peek(str(path)).generation_config.eos_token_id == [2, 0]


# --- what is refused -------------------------------------------------------------------------------------------------

Extra = Callable[[gguf.GGUFWriter], None]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN), "rope.scaling.type=yarn"),
        (lambda writer: writer.add_expert_count(4), "'llama.expert_count' changes the model"),
        (lambda writer: writer.add_sliding_window(16), "'llama.attention.sliding_window' changes the model"),
        (lambda writer: writer.add_logit_scale(0.5), "'llama.logit_scale' changes the model"),
        (lambda writer: writer.add_rope_dimension_count(8), "rotates 8 of 16 dimensions"),
    ],
)
def test_metadata_that_would_change_the_model_is_refused(tmp_path: Path, extra: Extra, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        peek(str(write_gguf(tmp_path / "m.gguf", tiny_model(), extra=extra)))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.1.ffn_up.weight": None}, "nothing in this GGUF fills model.layers.1.mlp.up_proj.weight"),
        ({"token_embd.weight": None}, "no token_embd.weight in this GGUF"),
        ({"blk.0.attn_q.scale": np.ones(4, np.float32)}, "tensor blk.0.attn_q.scale has no place in llama"),
        (
            {"output_norm.weight": np.ones(63, np.float32)},
            r"output_norm.weight is \(63,\), its metadata asks for \(64,\)",
        ),
        ({"rope_freqs.weight": np.ones(3, np.float32)}, "rope_freqs.weight has 3 values, the model rotates 8 pairs"),
    ],
)
def test_tensors_that_do_not_fit_the_model_are_refused(
    tmp_path: Path, tensors: dict[str, NDArray[np.float32] | None], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(peek(str(write_gguf(tmp_path / "m.gguf", tiny_model(), tensors=tensors))))


def test_more_layers_than_tensors_are_refused_before_they_are_built(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model())
    content = path.read_bytes()
    key = b"llama.block_count" + struct.pack("<I", 4)  # a 32-bit number follows
    assert content.count(key) == 1
    path.write_bytes(content.replace(key + struct.pack("<I", 2), key + struct.pack("<I", 1 << 31)))
    with pytest.raises(CheckpointError, match=r"2147483648 layers, but \d+ tensors"):
        peek(str(path))


def test_an_unknown_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="pre-tokenizer 'bloom-x' is not known"):
        peek(str(write_gguf(tmp_path / "m.gguf", tiny_model(), pre="bloom-x")))


def test_an_unsupported_architecture_is_refused_with_those_that_are(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"'mamba' is not supported \(llama, qwen2, qwen3 are\)"):
        peek(str(tmp_path / "m.gguf"))


def test_one_part_of_a_split_file_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model(), extra=lambda writer: writer.add_uint16("split.count", 3))
    with pytest.raises(CheckpointError, match="one part of 3"):
        peek(str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04 zip", "not a GGUF file"),
        (b"GGUF", "truncated or corrupt GGUF header"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1 is not readable"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "truncated or corrupt GGUF header"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 60), "truncated or corrupt GGUF header"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "'general.architecture' is missing"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"a", 99), "unknown value type 99"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 8, 1 << 50), "truncated or corrupt GGUF header"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 4, 1 << 50), "truncated or corrupt GGUF header"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 1 << 30), "truncated or corrupt GGUF header"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 0, 0, 0), "tensor t has shape"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 1 << 62, 0, 0), "truncated GGUF: its header says"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 32, 9999, 0), "tensor t has GGUF type 9999"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        peek(str(path))


def test_a_file_cut_anywhere_is_refused_and_named(tiny_gguf: Path, tmp_path: Path) -> None:
    content = tiny_gguf.read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(4, 200, 13), *range(200, len(content) - 40, len(content) // 25), len(content) - 40]:
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"cut\.gguf: truncated"):
            GgufFile(path)


def test_a_cut_in_the_data_names_both_sizes(tiny_gguf: Path, tmp_path: Path) -> None:
    content = tiny_gguf.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[:-1000])
    with pytest.raises(CheckpointError, match=rf"header says [\d,]+ bytes .*the file has {len(content) - 1000:,}"):
        GgufFile(path)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(changes=st.lists(st.tuples(st.integers(4, 12_000), st.integers(0, 255)), min_size=1, max_size=6))
def test_a_damaged_header_is_read_or_refused_but_never_crashes(
    tiny_gguf: Path, tmp_path: Path, changes: list[tuple[int, int]]
) -> None:
    content = bytearray(tiny_gguf.read_bytes())
    for position, value in changes:
        content[position] = value
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    with suppress(DraftcError):  # any other exception fails the test
        peek(str(path))
