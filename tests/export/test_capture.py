"""Every family of the support matrix: the captured graph against one eager pass of the model's own code.

Configs are tiny and random, but nothing in them is neutral: scalings are not 1, windows are shorter than the text, and
each `features` entry is shown to change the logits, so that a graph that dropped it would be seen.
"""

import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from draftc.export.capture import Captured, capture
from draftc.export.rope import fixed_rope
from draftc.export.seams import seams_in_place
from draftc.runtime.errors import CaptureError, UnsupportedModelError, UsageError

if TYPE_CHECKING:
    from tests.export.conftest import GraphRunner

    CaptureFamily = Callable[[str], tuple[PreTrainedModel, Captured]]

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


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def captured_family(tmp_path_factory: pytest.TempPathFactory) -> "CaptureFamily":
    """Model and graph of a family; each is captured once for the whole session."""

    @functools.cache
    def of(model_type: str) -> tuple[PreTrainedModel, Captured]:
        family = next(family for family in FAMILIES if family.model_type == model_type)
        model = tiny_model(model_type, **family.config)
        return model, capture_tiny(model, tmp_path_factory.mktemp(model_type))

    return of


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_family_matches_eager_with_a_rewind(
    family: Family, captured_family: "CaptureFamily", graph_runner: type["GraphRunner"]
) -> None:
    model, captured = captured_family(family.model_type)
    tokens = text()
    reference = eager_logits(model, tokens)
    runner = graph_runner(captured.path, captured.spec)
    for positions, logits in rewind_run(runner, tokens):
        np.testing.assert_allclose(
            logits, reference[:, positions], rtol=0, atol=tolerance(reference), err_msg=f"positions {positions}"
        )


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_config_has_no_neutral_feature(family: Family) -> None:
    model = tiny_model(family.model_type, **family.config)
    reference = eager_logits(model, text())
    for feature, neutral in family.features.items():
        plain = tiny_model(family.model_type, **family.config | {feature: neutral})
        plain.load_state_dict(model.state_dict())
        difference = np.abs(eager_logits(plain, text()) - reference).max()
        assert difference > 100 * tolerance(reference), f"a graph without {feature} would pass"


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2"])
def test_ragged_rows_with_a_rollback(
    model_type: str, captured_family: "CaptureFamily", graph_runner: type["GraphRunner"]
) -> None:
    """Two rows at different lengths in every call; each row rejects a different number of tokens."""
    model, captured = captured_family(model_type)
    tokens = text(rows=2)
    reference = eager_logits(model, tokens)
    runner = graph_runner(captured.path, captured.spec, batch=2)
    start = [0, 0]
    for width, kept in ((20, (20, 13)), (5, (1, 4)), (1, (1, 1)), (3, (3, 2))):
        call = np.stack([tokens[row, start[row] : start[row] + width] for row in range(2)])
        for row in range(2):
            call[row, kept[row] :] = (call[row, kept[row] :] + 1) % VOCAB
        last = np.array([[kept[0] - 1, 0], [kept[1] - 1, 0]])  # (B, R): the last kept token and the first, out of order
        logits = runner.step(call, start, last)
        for row in range(2):
            np.testing.assert_allclose(
                logits[row], reference[row, start[row] + last[row]], rtol=0, atol=tolerance(reference)
            )
            start[row] += kept[row]
    assert start == [25, 20]


def test_slack_behind_the_last_position_is_clamped(
    captured_family: "CaptureFamily", graph_runner: type["GraphRunner"]
) -> None:
    """The widest call at the last position runs past gpt2's table; the token that counts is right all the same."""
    model, captured = captured_family("gpt2")
    tokens = np.random.default_rng(2).integers(3, VOCAB, (1, MAX_LENGTH))
    reference = eager_logits(model, tokens)
    runner = graph_runner(captured.path, captured.spec)
    runner.step(tokens[:, : MAX_LENGTH - 1], [0], np.array([[0]]))
    padded = np.full((1, MAX_WIDTH), 5)
    padded[0, 0] = tokens[0, -1]
    logits = runner.step(padded, [MAX_LENGTH - 1], np.array([[0]]))
    np.testing.assert_allclose(logits[:, 0], reference[:, -1], rtol=0, atol=tolerance(reference))


def test_max_length_beyond_the_position_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="max_length 49 exceeds the model's 48 positions; use 48 or less"):
        capture_tiny(tiny_model("gpt2", **TABLE), tmp_path, max_length=MAX_LENGTH + 1)


def test_longrope_regime_is_fixed_by_max_length(
    captured_family: "CaptureFamily", tmp_path: Path, graph_runner: type["GraphRunner"]
) -> None:
    model, short = captured_family("phi3")
    long = capture_tiny(model, tmp_path, max_length=80)
    assert short.rope_note == "longrope: short factors at every position (max_length 48 <= 64)"
    assert long.rope_note == "longrope: long factors at every position (max_length 80 > 64)"
    tokens = text()
    with fixed_rope(model, 80):
        reference = eager_logits(model, tokens)
    assert np.abs(reference - eager_logits(model, tokens)).max() > 100 * tolerance(reference)
    runner = graph_runner(long.path, long.spec)
    for positions, logits in rewind_run(runner, tokens):
        np.testing.assert_allclose(logits, reference[:, positions], rtol=0, atol=tolerance(reference))
    # The model's own choice for a text beyond 64 tokens is the same set of factors.
    longer = np.random.default_rng(3).integers(3, VOCAB, (1, 70))
    with fixed_rope(model, 80):
        fixed = eager_logits(model, longer)
    np.testing.assert_array_equal(fixed, eager_logits(model, longer))


def test_contract_of_the_file(captured_family: "CaptureFamily") -> None:
    """Names, dtypes, symbolic dims, opset, external data; nothing of this machine is left in it."""
    _, captured = captured_family("gemma")
    graph_model = onnx.load(captured.path, load_external_data=False)
    assert [(opset.domain, opset.version) for opset in graph_model.opset_import] == [("", 24)]
    for infos, tensors in (
        (graph_model.graph.input, captured.spec.inputs),
        (graph_model.graph.output, captured.spec.outputs),
    ):
        assert [info.name for info in infos] == [tensor.name for tensor in tensors]
        for info, tensor in zip(infos, tensors, strict=True):
            dims = tuple(dim.dim_param or dim.dim_value for dim in info.type.tensor_type.shape.dim)
            assert dims == tensor.shape
            assert info.type.tensor_type.elem_type == getattr(
                onnx.TensorProto, {"int64": "INT64"}.get(tensor.dtype, "FLOAT")
            )
    assert captured.spec.buffer_length == MAX_LENGTH + MAX_WIDTH
    assert captured.path.with_name("model.onnx.data").is_file()
    assert b"site-packages" not in captured.path.read_bytes()
    onnx.checker.check_model(str(captured.path))


def test_tied_embedding_is_one_initializer(captured_family: "CaptureFamily") -> None:
    model, captured = captured_family("gemma")
    graph = onnx.load(captured.path, load_external_data=False).graph
    tables = [tensor.name for tensor in graph.initializer if sorted(tensor.dims) == [64, VOCAB]]
    assert model.config.tie_word_embeddings
    assert len(tables) == 1
    assert {node.op_type for node in graph.node if tables[0] in node.input} == {"Gather", "Transpose"}
    stored = captured.path.with_name("model.onnx.data").stat().st_size
    assert stored < 4 * sum(parameter.numel() for parameter in model.parameters()) + 4096


def test_weights_keep_their_checkpoint_names(captured_family: "CaptureFamily") -> None:
    model, captured = captured_family("llama")
    graph = onnx.load(captured.path, load_external_data=False).graph
    stored = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for name, tensor in model.state_dict().items():
        assert stored[name] == tuple(tensor.shape)


@pytest.mark.parametrize("fault", ["softcap", "scale", "window"])
def test_comparison_sees_a_silently_wrong_graph(
    fault: str, captured_family: "CaptureFamily", tmp_path: Path, graph_runner: type["GraphRunner"]
) -> None:
    """A graph that runs, and lost one thing: what the family test computes is then far over its tolerance."""
    model, captured = captured_family("gemma2")
    broken = onnx.load(captured.path)
    attention = [node for node in broken.graph.node if node.op_type == "Attention"]
    if fault == "window":
        attention[0].input[3] = attention[1].input[3]
    else:
        kept = [attribute for attribute in attention[0].attribute if attribute.name != fault]
        del attention[0].attribute[:]
        attention[0].attribute.extend(kept)
    onnx.save(broken, tmp_path / "broken.onnx")
    tokens = text()
    reference = eager_logits(model, tokens)
    runner = graph_runner(tmp_path / "broken.onnx", captured.spec)
    worst = max(np.abs(logits - reference[:, kept]).max() for kept, logits in rewind_run(runner, tokens))
    assert worst > 100 * tolerance(reference)


def test_attention_that_goes_round_the_interface_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a remote-code model may do: it claims the interface, yet one layer keeps its own attention."""
    model = tiny_model("llama", num_hidden_layers=1)
    monkeypatch.setattr(AttentionInterface, "get_interface", lambda self, name, default: own_attention)
    with pytest.raises(CaptureError, match=r"past_key_values\.0\.key is not read by Attention nodes alone"):
        capture_tiny(model, tmp_path)
    assert not list(tmp_path.iterdir())


def own_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
    scores = query @ key.transpose(2, 3)
    return (scores.softmax(-1) @ value).transpose(1, 2), None


def test_attention_with_sinks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a family that no list names."""
    monkeypatch.setattr("draftc.export.capture.check_supported", lambda config: None)
    model = tiny_model("gpt_oss", num_local_experts=4, num_experts_per_tok=2, head_dim=16)
    with pytest.raises(UnsupportedModelError, match="gpt_oss: its attention uses 's_aux'"):
        capture_tiny(model, tmp_path)


def test_attention_outside_the_interface_is_refused_before_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("falcon", alibi=False, new_decoder_architecture=True)
    with pytest.raises(UnsupportedModelError, match="falcon"), seams_in_place(model):
        pytest.fail("falcon computes attention in its own code")
    assert model.config._attn_implementation == "eager"


def test_failure_in_torch_export_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = tiny_model("llama", num_hidden_layers=1)

    def data_dependent(module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        if args[0].sum() > 0:
            raise AssertionError

    model.model.norm.register_forward_pre_hook(data_dependent)
    with pytest.raises(CaptureError) as caught:
        capture_tiny(model, tmp_path)
    assert str(caught.value).startswith("capture failed at trace: GuardOnDataDependentSymNode: Could not guard")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_capture_is_quiet_and_leaves_the_model_as_it_was(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = tiny_model("mixtral", num_hidden_layers=1, num_local_experts=2, num_experts_per_tok=1)
    tokens = text()
    before = eager_logits(model, tokens)
    implementations = model.config._attn_implementation, model.config._experts_implementation
    levels = {name: logging.getLogger(name).level for name in ("torch", "torch.onnx", "transformers")}
    stages: list[str] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        capture(model, max_length=16, max_width=4, path=tmp_path / "model.onnx", on_stage=stages.append)
    assert stages == ["trace", "convert", "write"]
    assert capfd.readouterr() == ("", "")
    assert not warned
    assert (model.config._attn_implementation, model.config._experts_implementation) == implementations
    assert {name: logging.getLogger(name).level for name in levels} == levels
    np.testing.assert_array_equal(eager_logits(model, tokens), before)


def test_model_over_2_gib(tmp_path: Path, graph_runner: type["GraphRunner"]) -> None:
    """Past protobuf's limit: the last rows of the last weights, stored beyond 2 GiB, still count."""
    model = tiny_model("llama", num_hidden_layers=1)
    mlp = model.model.layers[0].mlp
    width = 3_000_000  # 3 weights of 64 × 3M float32: 2.3 GB, zero (so they cost no memory) but for the last 8 units
    with torch.no_grad():
        for name, shape in (("gate_proj", (width, 64)), ("up_proj", (width, 64)), ("down_proj", (64, width))):
            weight = torch.zeros(shape)
            tail = weight[-8:] if shape[0] == width else weight[:, -8:]
            tail.copy_(torch.randn(tail.shape, generator=torch.Generator().manual_seed(1)))
            getattr(mlp, name).weight = torch.nn.Parameter(weight)
    tokens = text()[:, :3]
    reference = eager_logits(model, tokens)
    captured = capture(model, max_length=8, max_width=4, path=tmp_path / "model.onnx")
    data = captured.path.with_name("model.onnx.data")
    try:
        assert data.stat().st_size > 2**31
        logits = graph_runner(captured.path, captured.spec).step(tokens, [0], np.array([[0, 1, 2]]))
    finally:
        data.unlink()
    np.testing.assert_allclose(logits, reference, rtol=0, atol=tolerance(reference))
    mlp.gate_proj.weight.detach()[-8:] = 0
    assert np.abs(eager_logits(model, tokens) - reference).max() > 100 * tolerance(reference)
