"""Which models draftc refuses, and why. There is no list of accepted models: what is not refused here is tried, and
the parity gate refuses what comes out different from the checkpoint.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

from draftc.runtime.errors import UnsupportedModelError

__all__ = ["REFUSED", "check_supported"]

_OWN_ATTENTION = "it computes attention in its own code, which the exporter cannot replace by ONNX Attention"
_ALIBI = "its positions are ALiBi biases on the attention scores, which the exporter does not carry"
_SINKS = "its attention sinks have no counterpart in the ONNX Attention operator"
_RECURRENT = "it keeps a recurrent state, which cannot be rolled back when a draft token is rejected"
_COMPLEX = "its rotary positions are computed in complex numbers, which ONNX lacks"
_ENCODER = "it is an encoder, which sees the tokens to its right"
_MULTIMODAL = "it is a vision or audio model; compile a text-only causal language model"

# Families that were tried and do not work, by `model_type`, where no property of the config gives them away.
REFUSED: Mapping[str, str] = {
    "falcon": _OWN_ATTENTION,
    "bloom": _ALIBI,
    "mpt": _ALIBI,
    "gpt_oss": _SINKS,
    "llama4": _COMPLEX,
    "llama4_text": _COMPLEX,
    "deepseek_v2": _COMPLEX,
    **dict.fromkeys(
        (
            *("mamba", "mamba2", "falcon_mamba", "falcon_h1", "bamba", "jamba", "zamba", "zamba2", "nemotron_h"),
            *("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "granitemoehybrid"),
            *("kimi_linear", "lfm2", "lfm2_moe", "minimax", "olmo_hybrid", "recurrent_gemma", "rwkv", "xlstm"),
        ),
        _RECURRENT,
    ),
    **dict.fromkeys(
        (
            *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
            *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl"),
        ),
        _ENCODER,
    ),
}

# Kinds of layers (`config.layer_types`) whose only state is a cache of keys and values.
_CACHED_LAYERS = frozenset({"full_attention", "sliding_attention", "dense", "sparse"})
_RECURRENT_LAYERS = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})


def check_supported(config: PreTrainedConfig) -> None:
    """Return when the model may be tried. Needs no weights, so it comes before any long work.

    Raises UnsupportedModelError with the model type and the reason.
    """
    reason = _reason(config)
    if reason is not None:
        raise UnsupportedModelError(f"{config.model_type or 'this model'} is not supported: {reason}")


def _reason(config: PreTrainedConfig) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder; speculative decoding here needs a decoder-only model"
    if config.model_type in REFUSED:
        return REFUSED[config.model_type]
    if config.sub_configs or any(hasattr(config, part) for part in ("vision_config", "audio_config")):
        return _MULTIMODAL
    if getattr(config, "alibi", False) or getattr(config, "use_alibi", False):
        return _ALIBI
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - _CACHED_LAYERS)
    if _RECURRENT_LAYERS.intersection(strange):
        return _RECURRENT
    if strange:
        return f"its layers of type {', '.join(map(repr, strange))} are not captured yet"
    if any("dynamic" in rope_type for rope_type in _rope_types(config)):
        return "dynamic NTK rotary positions change with the length of the text, which one graph cannot express"
    return None


def _rope_types(config: PreTrainedConfig) -> Iterator[str]:
    """The rope types in use: one for the whole model, or one per kind of layer."""
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):
        if isinstance(parameters, Mapping) and isinstance(parameters.get("rope_type"), str):
            yield parameters["rope_type"]
