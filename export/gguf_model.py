"""A GGUF file as a Hugging Face model: its config, its tokenizer and its weights.

Only architectures whose every metadata key and every tensor is understood are read (`FAMILIES`): a key that would
change the mathematics is refused, not skipped. Three things differ from a checkpoint in Hugging Face's layout:

* llama.cpp stores the rows of llama's q and k projections in its own rotary order; they are put back.
* A file may store a tied head twice, rounded differently; the two are compared, and tied again when they agree.
* Llama 3's rotary scaling is stored as a tensor of divisors of the frequencies (`rope_freqs.weight`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.initialization import no_init_weights

from draftc.export.gguf import GgufFile, GgufTensor
from draftc.runtime.errors import CheckpointError, UnsupportedModelError

__all__ = [
    "HEAD",
    "build_config",
    "build_generation_config",
    "build_tokenizer",
    "load_model",
    "model_shapes",
    "parameter_tensors",
    "stored_rows",
    "tied_head",
]


@dataclass(frozen=True)
class _Family:
    """How one GGUF architecture maps to a transformers model type."""

    model_type: str
    tensors: gguf.MODEL_ARCH
    interleaved_rotary: bool = False  # q and k rows are stored in llama.cpp's rotary order


FAMILIES = {
    "llama": _Family("llama", gguf.MODEL_ARCH.LLAMA, interleaved_rotary=True),
    "qwen2": _Family("qwen2", gguf.MODEL_ARCH.QWEN2),
    "qwen3": _Family("qwen3", gguf.MODEL_ARCH.QWEN3),
}
# GGUF key (below the architecture's prefix) → (transformers config key, type)
CONFIG_KEYS: dict[str, tuple[str, type]] = {
    "context_length": ("max_position_embeddings", int),
    "block_count": ("num_hidden_layers", int),
    "embedding_length": ("hidden_size", int),
    "feed_forward_length": ("intermediate_size", int),
    "attention.head_count": ("num_attention_heads", int),
    "attention.head_count_kv": ("num_key_value_heads", int),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", float),
}
# Keys that say nothing new (checked against the tensors), or that are handled below.
KNOWN_KEYS = {
    "vocab_size",
    "tensor_data_layout",
    "attention.key_length",
    "attention.value_length",
    "attention.causal",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.finetuned",
}
EMBEDDING, HEAD, ROPE_FREQS = "token_embd.weight", "output.weight", "rope_freqs.weight"
SAMPLED_ROWS = 1024
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # token types
# Names under which published models mark the end of a turn or of a text; a GGUF names only one id.
END_MARKS = {"<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "</s>"}


def _family(file: GgufFile) -> _Family:
    """The file's family; raises UnsupportedModelError with what is supported."""
    architecture = file.get("general.architecture", str)
    if architecture not in FAMILIES:
        raise UnsupportedModelError(
            f"{file.path}: GGUF architecture {architecture!r} is not supported ({', '.join(FAMILIES)} are); "
            "use the model's safetensors folder"
        )
    unknown = {key for key in file.metadata if key.startswith(f"{architecture}.")} - {
        f"{architecture}.{key}" for key in CONFIG_KEYS.keys() | KNOWN_KEYS
    }
    scaling = file.get(f"{architecture}.rope.scaling.type", str, "none")
    if scaling != "none":
        unknown.add(f"{architecture}.rope.scaling.type={scaling}")
    if unknown:
        raise UnsupportedModelError(
            f"{file.path}: GGUF metadata {sorted(unknown)[0]!r} changes the model in a way that draftc does not read; "
            "use the model's safetensors folder"
        )
    return FAMILIES[architecture]


def tied_head(file: GgufFile, step: int = 1) -> bool:
    """Whether head and embedding are one matrix: no head is stored, or every `step`-th row of the two agrees.

    Agreement allows for the roundings that the two stored types may have made, and for no more: a head that training
    has moved away from its embedding is another matrix.
    """
    if HEAD not in file.tensors:
        return True
    if EMBEDDING not in file.tensors or file.tensors[HEAD].shape != file.tensors[EMBEDDING].shape:
        return False
    allowed = _rounding(file.tensors[HEAD]) + _rounding(file.tensors[EMBEDDING])
    for (_, head), (_, embedding) in zip(file.rows(HEAD, step), file.rows(EMBEDDING, step), strict=True):
        length = np.maximum(np.linalg.norm(head, axis=1), np.linalg.norm(embedding, axis=1))
        if np.any(np.linalg.norm(head - embedding, axis=1) > allowed * length):
            return False
    return True


def _rounding(tensor: GgufTensor) -> float:
    """The largest error of a row that storing it as this type may make, as a share of its Euclidean length.

    About 2^(1 - bits) for normally distributed values: 0.6 % in Q8_0, 2 % in Q6_K, 4 % in Q5_0, 9 % in Q4_K, 32 % in
    Q2_K. Half as much again is for rows that are less even, 0.2 % for bfloat16.
    """
    return 1.5 * 2 ** (1 - tensor.bits) + 0.002


def build_config(file: GgufFile) -> Any:
    """The transformers config that the metadata describes (AutoConfig.for_model)."""
    kind, prefix = _family(file), file.get("general.architecture", str)
    if EMBEDDING not in file.tensors:
        raise CheckpointError(f"{file.path}: no {EMBEDDING} in this GGUF; it is not a whole language model")
    values: dict[str, Any] = {
        name: file.get(f"{prefix}.{key}", of_type)
        for key, (name, of_type) in CONFIG_KEYS.items()
        if key != "attention.head_count_kv"
    }
    if values["num_hidden_layers"] > len(file.tensors):
        raise CheckpointError(
            f"{file.path}: corrupt GGUF: {values['num_hidden_layers']} layers, but {len(file.tensors)} tensors; "
            "download it again"
        )
    heads = values["num_attention_heads"]
    values["num_key_value_heads"] = file.get(f"{prefix}.attention.head_count_kv", int, heads)
    head_dim = file.get(f"{prefix}.attention.key_length", int, values["hidden_size"] // max(1, heads))
    rotary = file.get(f"{prefix}.rope.dimension_count", int, head_dim)
    if rotary != head_dim:
        raise UnsupportedModelError(
            f"{file.path}: rotates {rotary} of {head_dim} dimensions, which draftc does not read from GGUF; "
            "use the model's safetensors folder"
        )
    if kind.model_type == "llama":
        values["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        values["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    rows = file.tensors[EMBEDDING].shape[0]
    theta = file.get(f"{prefix}.rope.freq_base", float, 10000.0)
    sampling = max(1, rows // SAMPLED_ROWS)
    return AutoConfig.for_model(
        kind.model_type,
        **values,
        head_dim=head_dim,
        vocab_size=rows,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=tied_head(file, sampling),
        bos_token_id=_special_id(file, "bos"),
        eos_token_id=_special_id(file, "eos"),
        pad_token_id=_special_id(file, "padding"),
    )


def model_shapes(file: GgufFile, tied: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that become parameters; a second rounding of a tied matrix is left out."""
    skipped = {ROPE_FREQS} | ({HEAD} if tied else set())
    names = {EMBEDDING: "embed_tokens.weight", HEAD: "lm_head.weight"}
    return {names.get(name, name): tensor.shape for name, tensor in file.tensors.items() if name not in skipped}


def load_model(file: GgufFile, config: Any, progress: Callable[[int, int], None]) -> PreTrainedModel:
    """The fp32 model, filled tensor by tensor: peak memory is its parameters and one chunk of rows.

    progress: called with (elements done, elements in all). Raises CheckpointError when a parameter has no tensor, a
    tensor has no parameter, or shapes differ.
    """
    config.tie_word_embeddings = tied_head(file)
    model: PreTrainedModel
    with no_init_weights():  # memory that nothing writes to is not resident yet
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.tie_weights()
    sources = parameter_tensors(file, config)
    total = sum(prod(tensor.shape) for tensor in sources.values())
    done = 0
    for name, parameter in model.named_parameters():  # a shared parameter comes once
        tensor = sources.pop(name, None)
        if tensor is None:
            raise CheckpointError(
                f"{file.path}: nothing in this GGUF fills {name}; it is incomplete, download it again"
            )
        if tuple(parameter.shape) != tensor.shape:
            raise CheckpointError(
                f"{file.path}: tensor {tensor.name} is {tensor.shape}, its metadata asks for {tuple(parameter.shape)}"
            )
        with torch.no_grad():
            for where, values in file.rows(tensor.name):
                parameter[where] = torch.from_numpy(values)
                done += values.size
                progress(done, total)
            if _family(file).interleaved_rotary and ".attn_" in tensor.name:
                _restore_rotary_rows(parameter, tensor.name, config)
    if sources:
        raise UnsupportedModelError(
            f"{file.path}: tensor {next(iter(sources.values())).name} has no place in {config.model_type}; "
            "use the model's safetensors folder"
        )
    if ROPE_FREQS in file.tensors:
        _scale_rotary(model, file)
    return model


def parameter_tensors(file: GgufFile, config: Any) -> dict[str, GgufTensor]:
    """{parameter name: tensor}; of a tied matrix that is stored twice, the finer rounding."""
    names = gguf.get_tensor_name_map(_family(file).tensors, config.num_hidden_layers)
    places: dict[str, str] = {}
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    for parameter, _ in skeleton.named_parameters(remove_duplicate=False):
        stem, _, suffix = parameter.rpartition(".")
        stored = names.get_name(stem)
        if stored is not None:
            places[f"{stored}.{suffix}"] = parameter
    tensors = {name: tensor for name, tensor in file.tensors.items() if name != ROPE_FREQS}
    if config.tie_word_embeddings and HEAD in tensors:
        head = tensors.pop(HEAD)
        tensors[EMBEDDING] = max(tensors[EMBEDDING], head, key=lambda tensor: tensor.bits)
    # A tensor without a place keeps its own name: no parameter will ask for it, and `load_model` refuses it.
    return {places.get(name, name): tensor for name, tensor in tensors.items()}


def stored_rows(file: GgufFile, name: str, config: Any) -> NDArray[np.int64]:
    """Which row of the tensor `name` each row of its parameter is."""
    order = torch.arange(file.tensors[name].shape[0])
    if _family(file).interleaved_rotary and ".attn_" in name:
        _restore_rotary_rows(order, name, config)
    rows: NDArray[np.int64] = order.numpy()
    return rows


def _restore_rotary_rows(parameter: torch.Tensor, name: str, config: Any) -> None:
    """Undo llama.cpp's row order: within a head it alternates first and second half, transformers keeps the halves."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is not None:
        pairs = parameter.reshape(heads, -1, 2, *parameter.shape[1:])  # (heads, head_dim / 2, half, …)
        parameter.copy_(pairs.transpose(1, 2).reshape(parameter.shape).clone())


def _scale_rotary(model: PreTrainedModel, file: GgufFile) -> None:
    """Divide the rotary frequencies by the stored factors."""
    factors = torch.cat([torch.from_numpy(values) for _, values in file.rows(ROPE_FREQS)])
    for module in model.modules():
        frequencies = getattr(module, "inv_freq", None)
        if isinstance(frequencies, torch.Tensor):
            if frequencies.shape != factors.shape:
                raise CheckpointError(
                    f"{file.path}: {ROPE_FREQS} has {len(factors)} values, the model rotates {len(frequencies)} pairs"
                )
            module.inv_freq = frequencies / factors


def build_tokenizer(file: GgufFile) -> PreTrainedTokenizerFast:
    """The fast tokenizer that the metadata describes, chat template included.

    Rows that only pad the vocabulary (unused tokens at its end) are left out. Raises UnsupportedModelError for a
    pre-tokenizer that is not known: text would be split differently, without a word.
    """
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    kind = file.get("tokenizer.ggml.model", str)
    special = {
        f"{role}_token": _special_id(file, key)
        for role, key in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items()
    }
    if kind == "llama":
        return _sentencepiece(file)
    if kind != "gpt2":
        raise UnsupportedModelError(
            f"{file.path}: GGUF tokenizer {kind!r} is not supported (gpt2 and llama are); use the safetensors folder"
        )
    pre = file.get("tokenizer.ggml.pre", str, "default")
    splits = {**GGUF_PRE_TOKENIZER_SPLITS, "gpt-2": None, "smollm": None}
    if pre not in splits:
        raise UnsupportedModelError(
            f"{file.path}: GGUF pre-tokenizer {pre!r} is not known; use the model's safetensors folder"
        )
    tokens, types = _vocabulary(file)
    llama3 = splits[pre] is not None and splits[pre] == splits["llama-bpe"]
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges", list)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    # llama.cpp and the published Llama 3 tokenizer take a word that is in the vocabulary whole, whatever the merges say
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=llama3))
    if splits[pre] == splits["qwen2"]:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre, splits[pre])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    for token, code in zip(tokens, types, strict=True):  # in order of ids
        if code in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=code == CONTROL)])
    named = {role: tokens[index] for role, index in special.items() if index is not None and index < len(tokens)}
    if file.get("tokenizer.ggml.add_bos_token", bool, llama3) and "bos_token" in named:
        bos = named["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary[bos])]
        )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        chat_template=file.metadata.get("tokenizer.chat_template"),
        model_max_length=file.get(f"{file.get('general.architecture', str)}.context_length", int),
        clean_up_tokenization_spaces=False,
        **named,
    )


def _vocabulary(file: GgufFile) -> tuple[list[str], list[int]]:
    tokens = file.get("tokenizer.ggml.tokens", list)
    types = file.get("tokenizer.ggml.token_type", list, [1] * len(tokens))
    if len(tokens) != len(types) or len(set(tokens)) != len(tokens):
        raise CheckpointError(f"{file.path}: its tokens repeat, or do not match their types; convert the model again")
    used = max((index for index, code in enumerate(types) if code != UNUSED), default=-1) + 1
    return tokens[:used], types[:used]


def _special_id(file: GgufFile, role: str) -> int | None:
    """The id of a special token; None where the file names none, or one that is not a token."""
    index = file.metadata.get(f"tokenizer.ggml.{role}_token_id")
    count = len(file.get("tokenizer.ggml.tokens", list))
    return index if isinstance(index, int) and 0 <= index < count else None


def _pre_tokenizer(name: str, split: str | None) -> Any:
    if split is not None:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), behavior="isolated"), byte_level])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "smollm":  # every digit is a word of its own
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return byte_level


def _sentencepiece(file: GgufFile) -> PreTrainedTokenizerFast:
    """Llama 2's kind of vocabulary, through transformers' own conversion."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        file.path.parent, gguf_file=file.path.name, local_files_only=True, trust_remote_code=False
    )
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UnsupportedModelError(f"{file.path}: only a slow tokenizer can be made of it; use the safetensors folder")
    return tokenizer


def build_generation_config(file: GgufFile) -> GenerationConfig:
    """Begin, pad and every end id: the one that the file names, then control tokens that mark an end by their name."""
    tokens, types = _vocabulary(file)
    named = [_special_id(file, key) for key in ("eos", "eot", "eom")]
    marks = [
        i for i, (token, code) in enumerate(zip(tokens, types, strict=True)) if code == CONTROL and token in END_MARKS
    ]
    ends = list(dict.fromkeys(index for index in [*named, *marks] if index is not None))
    return GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=_special_id(file, "bos"),
        pad_token_id=_special_id(file, "padding"),
        eos_token_id=ends or None,
    )
