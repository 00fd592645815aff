"""Tiny random models with a real byte-level tokenizer, saved as Hugging Face folders or as GGUF files."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

TEXT = "the quick brown fox jumps over the lazy dog; 3 dogs, 12 foxes: def fib(n): return n\n\nnaïve café 你好 😀   1\n"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB = 320
IDS = torch.arange(24)[None] * 7 % VOCAB  # (1, 24)


def tiny_tokenizer(
    extra: list[str] | None = None, chat_template: str | None = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """Byte-level BPE of fewer than VOCAB tokens, with ChatML's special tokens and `extra` ones at the end."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False), *(extra or [])])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[0],
        chat_template=chat_template,
    )


def tiny_model(model_type: str = "llama", **config: Any) -> PreTrainedModel:
    """Two layers with weights large enough that every one of them shows in the logits."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    torch.manual_seed(7)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        AutoConfig.for_model(model_type, **(values | config))
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.15 if parameter.ndim > 1 else 0.5))
    model.train(False)
    return model


def save_folder(
    folder: Path,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Save as transformers does; returns the model. options: of save_pretrained."""
    model = model or tiny_model()
    model.save_pretrained(folder, **options)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return model


def save_pair(folder: Path) -> Path:
    """target/ (qwen2, tied, padded head) and draft/ (llama, one layer) with one tokenizer; other/ with another."""
    save_folder(folder / "target", tiny_model("qwen2", tie_word_embeddings=True, vocab_size=336))
    save_folder(folder / "draft", tiny_model("llama", num_hidden_layers=1))
    save_folder(folder / "other", tiny_model("llama"), tiny_tokenizer(["fox jumps", "lazy"]))
    return folder


def logits(model: PreTrainedModel) -> NDArray[np.float32]:
    """Logits of IDS, (24, V)."""
    with torch.no_grad():
        values: NDArray[np.float32] = model(IDS).logits[0].float().numpy()
    return values


Kinds = Mapping[str, gguf.GGMLQuantizationType]
F32 = gguf.GGMLQuantizationType.F32


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast | None = None,
    *,
    kind: gguf.GGMLQuantizationType = F32,
    kinds: Kinds | None = None,
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    tensors: Mapping[str, NDArray[np.float32] | None] | None = None,
    pre: str = "gpt-2",
    unused: int = 0,
) -> Path:
    """Write a model as llama.cpp's converter would: its names, and for llama its order of q and k rows.

    kind, kinds: how matrices are stored, and single tensors by GGUF name. extra: writes more metadata. tensors:
    replaces or adds tensors by GGUF name (None leaves one out). pre: the pre-tokenizer's name. unused: padding tokens
    at the end of the vocabulary.
    """
    config = model.config
    arch = config.model_type
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    _add_tokenizer(writer, tokenizer or tiny_tokenizer(), pre, unused)
    extra(writer)
    for name, values in (_gguf_tensors(model) | dict(tensors or {})).items():
        if values is not None:
            stored_as = (kinds or {}).get(name, kind if values.ndim > 1 else F32)
            writer.add_tensor(name, gguf.quantize(values, stored_as), raw_dtype=stored_as)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_tensors(model: PreTrainedModel) -> dict[str, NDArray[np.float32] | None]:
    config = model.config
    arch = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
    names = gguf.get_tensor_name_map(arch[config.model_type], config.num_hidden_layers)
    found: dict[str, NDArray[np.float32] | None] = {}
    for parameter, value in model.named_parameters():
        stem, _, suffix = parameter.rpartition(".")
        array = value.detach().numpy()
        for projection, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if config.model_type == "llama" and projection in parameter:
                halves = array.reshape(heads, 2, -1, *array.shape[1:])
                array = halves.swapaxes(1, 2).reshape(array.shape)
        found[f"{names.get_name(stem)}.{suffix}"] = np.ascontiguousarray(array)
    return found


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast, pre: str, unused: int) -> None:
    ids = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    added = {index: token.special for index, token in tokenizer.added_tokens_decoder.items()}
    types = [1 if index not in added else 3 if added[index] else 4 for _, index in ids]
    state = tokenizer.backend_tokenizer.model.__getstate__()  # the model as JSON: its merges have no other way out
    merges = [" ".join(pair) for pair in json.loads(state)["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in ids] + [f"[PAD{len(ids) + i}]" for i in range(unused)])
    writer.add_token_types(types + [5] * unused)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
