"""Every family of the support matrix: the captured graph against one eager pass of the model's own code."""

import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
import torch
from transformers import AttentionInterface, PreTrainedModel

from draftc.export.capture import Captured, capture
from draftc.export.rope import fixed_rope
from draftc.export.seams import seams_in_place
from draftc.runtime.errors import CaptureError, UnsupportedModelError, UsageError
from tests.export.family_cases import (
    FAMILIES,
    LOWERED,
    MAX_LENGTH,
    MAX_WIDTH,
    TABLE,
    VOCAB,
    Family,
    capture_tiny,
    eager_logits,
    lower_tiny,
    quantize_tiny,
    rewind_run,
    text,
    tiny_model,
    tolerance,
)

if TYPE_CHECKING:
    from tests.export.conftest import GraphRunner

    CaptureFamily = Callable[[str], tuple[PreTrainedModel, Captured]]


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
    lowered, fused = lower_tiny(captured)
    assert fused == LOWERED[family.model_type]
    for path in (captured.path, lowered):
        for positions, logits in rewind_run(graph_runner(path, captured.spec), tokens):
            np.testing.assert_allclose(
                logits,
                reference[:, positions],
                rtol=0,
                atol=tolerance(reference),
                err_msg=f"{path.name}, positions {positions}",
            )
    # Lowering has nothing to do with rounding: what is rounded stays as it is, to the bit of a float32 sum.
    runs = [rewind_run(graph_runner(path, captured.spec), tokens) for path in quantize_tiny(captured)]
    for (positions, logits), (_, lowered_logits) in zip(*runs, strict=True):
        np.testing.assert_allclose(
            lowered_logits, logits, rtol=0, atol=tolerance(reference), err_msg=f"int4, positions {positions}"
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


@pytest.mark.parametrize("lowered", [False, True], ids=["captured", "lowered"])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2"])
def test_ragged_rows_with_a_rollback(
    model_type: str, lowered: bool, captured_family: "CaptureFamily", graph_runner: type["GraphRunner"]
) -> None:
    """Two rows at different lengths in every call; each row rejects a different number of tokens."""
    model, captured = captured_family(model_type)
    tokens = text(rows=2)
    reference = eager_logits(model, tokens)
    runner = graph_runner(lower_tiny(captured)[0] if lowered else captured.path, captured.spec, batch=2)
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


@pytest.mark.parametrize("model_type", ["gpt2", "gptj"])
def test_slack_behind_the_last_position_is_clamped(
    model_type: str, captured_family: "CaptureFamily", graph_runner: type["GraphRunner"]
) -> None:
    """The widest call at the last position runs past the position table; the token that counts is right all the same.

    gpt2 adds its rows; gptj rotates by them, which lowering takes in as a table that is longer.
    """
    model, captured = captured_family(model_type)
    tokens = np.random.default_rng(2).integers(3, VOCAB, (1, MAX_LENGTH))
    reference = eager_logits(model, tokens)
    padded = np.full((1, MAX_WIDTH), 5)
    padded[0, 0] = tokens[0, -1]
    for path in (captured.path, lower_tiny(captured)[0]):
        runner = graph_runner(path, captured.spec)
        runner.step(tokens[:, : MAX_LENGTH - 1], [0], np.array([[0]]))
        logits = runner.step(padded, [MAX_LENGTH - 1], np.array([[0]]))
        np.testing.assert_allclose(logits[:, 0], reference[:, -1], rtol=0, atol=tolerance(reference))


def test_a_tiny_epsilon_is_not_taken_for_zero(tmp_path: Path, graph_runner: type["GraphRunner"]) -> None:
    """helium's is 1e-8; without it, the norm of a token whose embedding is zero is NaN."""
    model = tiny_model("helium", num_hidden_layers=1, head_dim=16)
    assert model.config.rms_norm_eps == 1e-8
    tokens = text()
    with torch.no_grad():
        table: torch.nn.Parameter = model.get_input_embeddings().weight  # type: ignore[assignment]
        table[int(tokens[0, 3])] = 0
    reference = eager_logits(model, tokens)
    captured = capture_tiny(model, tmp_path)
    for positions, logits in rewind_run(graph_runner(captured.path, captured.spec), tokens):
        np.testing.assert_allclose(logits, reference[:, positions], rtol=0, atol=tolerance(reference))


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
