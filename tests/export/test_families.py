"""What is refused before any work, with its name and reason; everything else may be tried."""

from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from draftc.export.families import check_supported
from draftc.runtime.errors import UnsupportedModelError

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("bart", {}, "encoder-decoder"),
        ("t5", {}, "encoder-decoder"),
        ("falcon", {}, "attention in its own code"),
        ("bloom", {}, "ALiBi"),
        ("mpt", {}, "ALiBi"),
        ("gpt_oss", {}, "attention sinks"),
        ("deepseek_v2", {}, "complex numbers"),
        ("llama4_text", {}, "complex numbers"),
        ("roberta", {}, "encoder"),
        ("qwen3_5_text", {}, "recurrent state"),
        ("qwen3_next", {}, "recurrent state"),
        ("mamba", {}, "recurrent state"),
        ("jamba", {}, "recurrent state"),
        ("zamba", {}, "recurrent state"),
        ("bamba", {}, "recurrent state"),
        ("rwkv", {}, "recurrent state"),
        ("lfm3", {}, "recurrent state"),  # by its layer types: no entry of its own
        ("axk2", {}, "'indexed_attention'"),
        ("deepseek_v32", {}, "'indexed_attention'"),
        ("gemma3", {}, "vision or audio"),
        ("qwen2_vl", {}, "vision or audio"),
        ("qwen2_audio", {}, "vision or audio"),
        ("fuyu", {}, "vision or audio"),
        ("musicgen", {}, "encoder-decoder"),
        ("llama", {"rope_parameters": DYNAMIC}, "dynamic NTK"),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default"}}},
            "dynamic NTK",
        ),
    ],
)
def test_refused_with_name_and_reason(model_type: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        check_supported(AutoConfig.for_model(model_type, **settings))
    assert str(caught.value).startswith(f"{model_type} is not supported: ")
    assert "\n" not in str(caught.value)


def test_alibi_flag_of_an_unknown_family_is_refused() -> None:
    config = PreTrainedConfig()
    config.alibi = True
    with pytest.raises(UnsupportedModelError, match="ALiBi"):
        check_supported(config)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3_moe", "phi3", "gpt2", "arcee", "cwm"])
def test_everything_else_may_be_tried(model_type: str) -> None:
    check_supported(AutoConfig.for_model(model_type))


def test_unknown_architecture_may_be_tried() -> None:
    check_supported(PreTrainedConfig())
