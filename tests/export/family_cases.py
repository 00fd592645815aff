"""The support matrix: a tiny model of every family, and one text with a rewind to run it over.

Configs are tiny and random, but nothing in them is neutral: scalings are not 1, windows are shorter than the text, and
each `features` entry is shown (by `test_capture`) to change the logits, so that a graph that dropped it would be seen.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from onnx_ir.passes import InPlacePass
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from draftc.export.capture import Captured, capture
from draftc.export.fusions import FuseRMSNormalization
from draftc.export.group_query import FuseGroupQueryAttention
from draftc.export.last_rows import SelectRowsEarly
from draftc.export.lowering import LOWERINGS, lower
from draftc.export.quantize import QuantizeWeights
from draftc.export.scheme import QuantizationScheme

if TYPE_CHECKING:
    from tests.export.conftest import GraphRunner

VOCAB = 96
MAX_LENGTH, MAX_WIDTH = 48, 32
PREFILL, VERIFY, REJECTED, REST = 30, 5, 3, 4  # then one more token, then REST

SLIDING = ["sliding_attention", "full_attention"]
THETA = {"rope_theta": 10_000.0}
LONGROPE = {
    **THETA,
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
    "long_factor": [2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0],
    "original_max_position_embeddings": 64,
}
TABLE = {"max_position_embeddings": MAX_LENGTH}  # a position table without a row for the slack behind max_length


@dataclass(frozen=True)
class Family:
    """Config of a tiny model, and for each feature of the family the setting that switches it off."""

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    features: dict[str, Any] = field(default_factory=dict)


FAMILIES = (
    Family(
        "llama",
        {
            "attention_bias": True,
            "rope_parameters": {
                **THETA,
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
        {"rope_parameters": {**THETA, "rope_type": "default"}},
    ),
    Family("mistral", {"sliding_window": 16}, {"sliding_window": None}),
    Family(
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "layer_types": SLIDING},
        {"layer_types": ["full_attention"] * 2},
    ),
    Family(
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 16, "layer_types": SLIDING, "head_dim": 32},
        {"layer_types": ["full_attention"] * 2},
    ),
    Family("gemma", {"head_dim": 32}),
    Family(
        "gemma2",
        {
            "head_dim": 32,
            "sliding_window": 16,
            "query_pre_attn_scalar": 7,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "layer_types": SLIDING,
        },
        {
            "sliding_window": 128,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    Family(
        "gemma3_text",
        {
            "head_dim": 32,
            "sliding_window": 16,
            "query_pre_attn_scalar": 7,
            "final_logit_softcapping": 3.0,
            "layer_types": SLIDING,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", **THETA},
            },
        },
        {
            "sliding_window": 128,
            "query_pre_attn_scalar": 32,
            "final_logit_softcapping": None,
            "rope_parameters": {kind: {"rope_type": "default", **THETA} for kind in SLIDING},
        },
    ),
    Family(
        "phi3",
        {
            "sliding_window": 16,
            "rope_parameters": LONGROPE,
            "max_position_embeddings": 256,
            "original_max_position_embeddings": 64,
        },
        {"sliding_window": None, "rope_parameters": LONGROPE | {"short_factor": LONGROPE["long_factor"]}},
    ),
    Family(
        "phi",
        {"qk_layernorm": True, "rope_parameters": {"rope_type": "default", **THETA, "partial_rotary_factor": 0.5}},
    ),
    Family("gpt2", TABLE | {"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_by_inverse_layer_idx": False}),
    Family("opt", TABLE | {"ffn_dim": 80, "word_embed_proj_dim": 32}),
    Family("gpt_neox", {"use_parallel_residual": True}, {"use_parallel_residual": False}),
    Family("olmo2"),
    Family("olmo3", {"sliding_window": 16, "layer_types": SLIDING}, {"sliding_window": 128}),
    Family("smollm3", {"no_rope_layers": [1, 0]}, {"no_rope_layers": [1, 1]}),
    Family(
        "granite",
        {"embedding_multiplier": 3.0, "logits_scaling": 0.25, "residual_multiplier": 0.5, "attention_multiplier": 0.6},
        {"embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 0.25},
    ),
    Family("starcoder2", {"sliding_window": 16}, {"sliding_window": None}),
    Family("cohere", {"logit_scale": 0.4, "use_qk_norm": True}, {"logit_scale": 1.0}),
    Family(
        "cohere2",
        {"logit_scale": 0.4, "sliding_window": 16, "layer_types": SLIDING},
        {"logit_scale": 1.0, "sliding_window": 128},
    ),
    Family("stablelm", {"use_qkv_bias": True, "qk_layernorm": True}, {}),
    Family("gptj", TABLE | {"rotary_dim": 8}, {"rotary_dim": 4}),
    Family("nemotron"),
    Family("exaone4", {"sliding_window": 16, "layer_types": SLIDING}, {"sliding_window": 128}),
    Family("glm4", {"head_dim": 16}),
    Family(
        "ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {
                **THETA,
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "max_position_embeddings": 128,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    Family("helium", {"head_dim": 16}),
    Family(
        "deepseek_v3",  # what it caches is compressed: keys and values are computed from the buffer
        {
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 2.5,
        },
        {"routed_scaling_factor": 1.0},
    ),
    Family(
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "head_dim": 16,
            "norm_topk_prob": True,
        },
        {"norm_topk_prob": False},
    ),
    Family(
        "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}, {"sliding_window": None}
    ),
)


@dataclass(frozen=True)
class Lowered:
    """How much of a family's two layers ONNX Runtime's passes for the CPU rewrite.

    Attentions, rotations inside them, norms, and products that only the rows go through whose logits are asked for.
    """

    attentions: int = 2
    rotations: int = 2
    norms: int = 5
    products: int = 4


# Where a number is below the number of layers, or a norm is none of the root of a mean square, the comment says why.
LOWERED = {
    "llama": Lowered(),
    "mistral": Lowered(),
    "qwen2": Lowered(),
    "qwen3": Lowered(norms=9),
    "gemma": Lowered(),
    "gemma2": Lowered(norms=9),
    "gemma3_text": Lowered(norms=13),
    "phi3": Lowered(products=3),  # gate and up are one
    "phi": Lowered(rotations=0, norms=0, products=3),  # 8 of 16 channels are rotated: the kernel wants 16; layer norms
    "gpt2": Lowered(rotations=0, norms=0, products=0),  # learned positions; layer norms; rows of all texts in one axis
    "opt": Lowered(rotations=0, norms=0, products=1),  # as gpt2, but for a projection in front of the head
    "gpt_neox": Lowered(rotations=0, norms=0, products=3),  # 4 of 16 channels; layer norms; no gate
    "olmo2": Lowered(norms=9),
    "olmo3": Lowered(norms=9),
    "smollm3": Lowered(rotations=1),  # one layer has no positions
    "granite": Lowered(),
    "starcoder2": Lowered(norms=0, products=3),  # layer norms; no gate
    "cohere": Lowered(norms=3),  # those of queries and keys have a weight for each head
    "cohere2": Lowered(rotations=1, norms=3),  # full attention has no positions
    "stablelm": Lowered(rotations=0, norms=0),  # 4 of 16 channels; layer norms
    "gptj": Lowered(norms=0, products=3),  # layer norms; no gate
    "nemotron": Lowered(rotations=0, norms=0, products=3),  # 8 of 16 channels; layer norms; no gate
    "exaone4": Lowered(rotations=1, norms=9),  # full attention has no positions
    "glm4": Lowered(norms=9, products=3),  # gate and up are one
    "ministral3": Lowered(rotations=0),  # queries are scaled by position, keys are not
    "helium": Lowered(),
    # Keys and values are computed from what is cached; experts that are shared are ordinary products.
    "deepseek_v3": Lowered(attentions=0, rotations=0, norms=9, products=3),
    "qwen3_moe": Lowered(norms=9, products=0),  # a router mixes rows of all texts
    "mixtral": Lowered(products=0),  # a router mixes rows of all texts
}


def tiny_model(model_type: str, **settings: Any) -> PreTrainedModel:
    """A model of two layers with weights large enough for every part to matter, on its own eager attention."""
    config = AutoConfig.for_model(
        model_type,
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 80,
            "max_position_embeddings": 128,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }
        | settings,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")  # type: ignore[no-untyped-call]
    model.eval()  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norm weights and biases are perturbed, so that leaving one out shows.
            scale = 0.15 if parameter.dim() > 1 else 0.3
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    return model


def eager_logits(model: PreTrainedModel, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    """(B, S, V) of one pass without a cache."""
    with torch.no_grad():
        logits: NDArray[np.float32] = model(input_ids=torch.from_numpy(tokens), use_cache=False).logits.numpy()
    return logits


def tolerance(reference: NDArray[np.float32]) -> float:
    """Absolute: float32 rounding at the size of these logits."""
    return 1e-5 * max(1.0, float(np.abs(reference).max()))


def capture_tiny(model: PreTrainedModel, folder: Path, max_length: int = MAX_LENGTH) -> Captured:
    return capture(model, max_length=max_length, max_width=MAX_WIDTH, path=folder / "model.onnx")


def lower_tiny(captured: Captured) -> tuple[Path, Lowered]:
    """The graph as ONNX Runtime on the CPU gets it, beside the captured one, and what the passes say of it."""
    graph = ir.load(captured.path)
    attention, norms, rows = FuseGroupQueryAttention(), FuseRMSNormalization(), SelectRowsEarly()
    counting: dict[type, InPlacePass] = {type(one): one for one in (attention, norms, rows)}
    for make in LOWERINGS["onnxruntime", "cpu"]:
        rewrite = make()
        counting.get(type(rewrite), rewrite)(graph)
    path = captured.path.with_name("lowered.onnx")
    ir.save(graph, path)  # refers to the captured graph's weight file
    return path, Lowered(attention.fused, attention.rotary, norms.fused, rows.moved)


def quantize_tiny(captured: Captured) -> tuple[Path, Path]:
    """The graph with weights of 4 bits that are multiplied in float32, as it is and lowered."""
    graph = ir.load(captured.path)
    QuantizeWeights(QuantizationScheme(4, 32, symmetric=False, accuracy_level=0))(graph)
    paths = captured.path.with_name("int4.onnx"), captured.path.with_name("int4-lowered.onnx")
    ir.save(graph, paths[0], external_data="int4.data")
    ir.save(lower(graph, "onnxruntime", "cpu"), paths[1], external_data="int4-lowered.data")
    return paths


def rewind_run(runner: "GraphRunner", tokens: NDArray[np.int64]) -> Iterator[tuple[range, NDArray[np.float32]]]:
    """Prefill, a verification whose last REJECTED tokens are rejected, one token in their place, and the rest.

    Yields (positions of the text, their logits (1, R, V)) of every call.
    """
    calls = ((PREFILL, range(PREFILL)), (VERIFY, range(VERIFY - REJECTED)), (1, range(1)), (REST, range(REST)))
    start = 0
    for width, kept in calls:
        call = tokens[:, start : start + width].copy()
        call[:, len(kept) :] = (call[:, len(kept) :] + 1) % VOCAB  # rejected: other tokens than the final text has
        yield range(start, start + len(kept)), runner.step(call, [start], np.array([list(kept)]))
        start += len(kept)
    assert start == tokens.shape[1]


def text(rows: int = 1) -> NDArray[np.int64]:
    length = PREFILL + VERIFY - REJECTED + 1 + REST
    return np.random.default_rng(1).integers(3, VOCAB, (rows, length))
