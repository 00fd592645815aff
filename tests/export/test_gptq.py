"""GPTQ against rounding to nearest, the definition of what it minimizes, and a search through all codes."""

import itertools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from draftc.export.gptq import DAMPING, round_matrix, round_model
from draftc.export.rounding import RoundedMatrix
from draftc.runtime.errors import CaptureError
from tests.export.tiny_models import VOCAB, tiny_model

BLOCK = 16


def correlated(rows: int, width: int, seed: int = 0) -> Tensor:
    """Inputs (rows, width) that few directions explain, of unlike sizes, as activations are."""
    generator = torch.Generator().manual_seed(seed)
    few = torch.randn(rows, width // 4, generator=generator) @ torch.randn(width // 4, width, generator=generator)
    noise = torch.randn(rows, width, generator=generator)
    return (few + 0.5 * noise) * torch.logspace(-0.5, 0.5, width)[torch.randperm(width, generator=generator)]


def weights(outputs: int, width: int, seed: int = 1) -> Tensor:
    return torch.randn(outputs, width, generator=torch.Generator().manual_seed(seed))


def values(matrix: RoundedMatrix) -> Tensor:
    return torch.from_numpy(matrix.dequantize())


def error(weight: Tensor, matrix: RoundedMatrix, moments: Tensor) -> float:
    """tr((V - W) H (V - W)ᵀ)."""
    difference = values(matrix) - weight
    return float(((difference @ moments) * difference).sum())


def diagonal(moments: Tensor) -> Tensor:
    return torch.diag(moments.diagonal())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("width", [64, 200])  # 200: more than one step, and a last block that is not full
def test_outputs_change_less_than_by_rounding_to_nearest(bits: int, symmetric: bool, width: int) -> None:
    weight, inputs = weights(40, width), correlated(500, width)
    moments = inputs.T @ inputs / len(inputs)
    how = {"bits": bits, "block_size": BLOCK, "symmetric": symmetric}
    carried = round_matrix(weight, moments, **how)  # type: ignore[arg-type]
    # With a diagonal H nothing is carried on: the same grid, and each weight by itself.
    nearest = round_matrix(weight, diagonal(moments), **how)  # type: ignore[arg-type]
    np.testing.assert_array_equal(carried.scales, nearest.scales)
    assert error(weight, carried, moments) < 0.5 * error(weight, nearest, moments)
    outputs = ((values(carried) - weight) @ inputs.T).square().sum() / len(inputs)
    assert error(weight, carried, moments) == pytest.approx(float(outputs), rel=1e-3)


@pytest.mark.parametrize("symmetric", [True, False])
def test_without_correlations_every_weight_goes_to_its_nearest_code(symmetric: bool) -> None:
    weight = weights(24, 96)
    matrix = round_matrix(weight, torch.eye(96), bits=4, block_size=BLOCK, symmetric=symmetric)
    reachable = [
        RoundedMatrix(
            4, BLOCK, 96, np.full_like(matrix.codes, code * 17), matrix.scales, matrix.zero_points
        ).dequantize()
        for code in range(16)
    ]
    distances = np.abs(np.stack(reachable) - weight.numpy())  # (16, N, K)
    np.testing.assert_allclose(np.abs(matrix.dequantize() - weight.numpy()), distances.min(axis=0), atol=1e-6)


def test_two_correlated_inputs_are_rounded_as_well_as_any_codes_can_be() -> None:
    """Successive rounding is optimal where the second input can make up for the first in full."""
    weight, moments = weights(32, 2), torch.tensor([[4.0, 1.2], [1.2, 0.5]])
    matrix = round_matrix(weight, moments, bits=8, block_size=BLOCK, symmetric=True)
    first = matrix.scales[:, 0] * (np.rint(weight.numpy()[:, 0] / matrix.scales[:, 0]))  # the more important one
    np.testing.assert_allclose(values(matrix)[:, 0], first, atol=1e-6)
    # Given the first, the best second minimizes 2 e₁ h₁₂ e₂ + h₂₂ e₂², that is e₂ = -e₁ h₁₂ / h₂₂ (with the damping).
    damped = float(moments[1, 1] + 0.1 * moments.diagonal().mean())
    wanted = weight.numpy()[:, 1] - (first - weight.numpy()[:, 0]) * float(moments[0, 1]) / damped
    best = matrix.scales[:, 0] * np.clip(np.rint(wanted / matrix.scales[:, 0]), -128, 127)
    np.testing.assert_allclose(values(matrix)[:, 1], best, atol=1e-6)


def test_the_grid_may_be_narrower_than_the_weights_where_that_pays() -> None:
    weight = torch.cat((torch.full((1, BLOCK - 1), 0.31), torch.full((1, 1), 4.0)), dim=1)
    important = torch.diag(torch.cat((torch.full((BLOCK - 1,), 100.0), torch.full((1,), 1e-3))))
    narrow = round_matrix(weight, important, bits=4, block_size=BLOCK, symmetric=True)
    wide = round_matrix(weight, torch.eye(BLOCK), bits=4, block_size=BLOCK, symmetric=True)
    assert abs(narrow.scales[0, 0]) < abs(wide.scales[0, 0]) * 0.95


@pytest.mark.parametrize("count", [64, 256, 1024])  # fewer than there are inputs, as many, more
def test_correlations_that_few_tokens_show_by_chance_hardly_count(count: int) -> None:
    """Inputs without any: on others of their kind GPTQ cannot do better than the nearest codes, nor much worse."""
    weight, width = weights(64, 256), 256
    seen = torch.randn(count, width, generator=torch.Generator().manual_seed(2))
    moments, how = seen.T @ seen / count, {"bits": 4, "block_size": 128, "symmetric": False}
    nearest = error(weight, round_matrix(weight, torch.eye(width), **how), torch.eye(width))  # type: ignore[arg-type]
    damped, trusting = (
        error(weight, round_matrix(weight, moments, damping=damping, **how), torch.eye(width))  # type: ignore[arg-type]
        for damping in (DAMPING * width / count, 0.01)
    )
    assert damped < 1.2 * nearest
    assert damped < 0.95 * trusting


def test_a_position_with_huge_values_counts_like_any_other() -> None:
    def rounded(factor: float) -> dict[tuple[str, bool], RoundedMatrix]:
        model = tiny_model("llama")
        layer = model.get_submodule("model.layers.1.mlp.down_proj")
        scale = torch.ones(1, tokens().shape[1], 1)
        scale[:, 0] = factor
        layer.register_forward_pre_hook(lambda _, arguments: (arguments[0] * scale,))
        return round_model(model, tokens(), bits=4, block_of=lambda _: BLOCK, symmetric=True, head=False)

    name = ("model.layers.1.mlp.down_proj.weight", True)
    assert (rounded(1)[name].codes != rounded(300)[name].codes).mean() < 0.01


def test_inputs_that_are_always_zero_and_weights_of_zero_stay_finite() -> None:
    weight = weights(8, 64)
    weight[:, :BLOCK] = 0
    moments = torch.diag(torch.cat((torch.ones(32), torch.zeros(32))))
    for symmetric in (True, False):
        matrix = round_matrix(weight, moments, bits=4, block_size=BLOCK, symmetric=symmetric)
        assert np.isfinite(matrix.scales).all()
        np.testing.assert_array_equal(values(matrix)[:, :BLOCK], 0)
        assert np.isfinite(matrix.dequantize()).all()
    matrix = round_matrix(weight, torch.zeros(64, 64), bits=4, block_size=BLOCK, symmetric=False)
    assert np.isfinite(matrix.dequantize()).all()


def tokens(count: int = 6, length: int = 40) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, VOCAB, (count, length))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])  # gpt2 keeps its weights as (K, N)
def test_a_model_is_rounded_layer_by_layer_and_left_as_it_was(kind: str) -> None:
    config = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64} if kind == "gpt2" else {}
    model = tiny_model(kind, **config)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    seen: list[tuple[int, int]] = []
    rounded = round_model(
        model,
        tokens(),
        bits=4,
        block_of=lambda _: BLOCK,
        symmetric=False,
        progress=lambda done, total: seen.append((done, total)),
    )
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
    assert torch.get_float32_matmul_precision() == "highest"
    linear = {
        f"{name}.weight": isinstance(module, nn.Linear)
        for name, module in model.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D")
    }
    assert set(linear.items()) <= set(rounded)
    assert seen[-1][0] == seen[-1][1] == len(linear)
    for (name, stored), matrix in rounded.items():
        value = dict(model.named_parameters(remove_duplicate=False))[name].detach()
        weight = value if stored else value.T
        assert matrix.dequantize().shape == tuple(weight.shape)
        assert float((values(matrix) - weight).norm() / weight.norm()) < 0.2


def test_later_layers_see_what_the_rounded_ones_before_them_give() -> None:
    """The second moments of a later layer are those of a model whose earlier layers are rounded."""
    model = tiny_model("llama")
    rounded = round_model(model, tokens(), bits=4, block_of=lambda _: BLOCK, symmetric=True, head=False)
    last = "model.layers.1.mlp.down_proj"
    inputs: list[Tensor] = []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (name, True) in rounded and name != f"{last}.weight":
                parameter.copy_(values(rounded[name, True]))
        module = model.get_submodule(last)
        module.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0].reshape(-1, 96)))
        model(torch.from_numpy(tokens()))
        weight = model.get_parameter(f"{last}.weight")
        rows = inputs[0] / inputs[0].norm(dim=1, keepdim=True)
        damping = DAMPING * 96 / len(rows)
        again = round_matrix(weight, rows.T @ rows, bits=4, block_size=BLOCK, symmetric=True, damping=damping)
    assert (again.codes != rounded[f"{last}.weight", True].codes).mean() < 0.01
    assert ("lm_head.weight", True) not in rounded


def test_some_weights_may_have_blocks_of_another_size() -> None:
    rounded = round_model(
        tiny_model("llama"), tokens(), bits=4, block_of=lambda name: 32 if "up_proj" in name else BLOCK, symmetric=True
    )
    sizes = {name: matrix.block_size for (name, _), matrix in rounded.items()}
    assert {name for name, size in sizes.items() if size == 32} == {
        f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1)
    }
    assert set(sizes.values()) == {BLOCK, 32}


def test_a_layer_that_is_given_no_token_is_left_to_others() -> None:
    """As an expert that no position is sent to."""
    model = tiny_model("llama")
    layer = model.get_submodule("model.layers.1.mlp.down_proj")
    layer.register_forward_pre_hook(lambda _, arguments: (arguments[0][:0],))
    layer.register_forward_hook(lambda _, __, result: torch.zeros(1, 1, result.shape[-1]))
    rounded = round_model(model, tokens(), bits=4, block_of=lambda _: BLOCK, symmetric=True)
    assert ("model.layers.1.mlp.down_proj.weight", True) not in rounded
    assert ("model.layers.1.mlp.up_proj.weight", True) in rounded
    assert all(np.isfinite(matrix.scales).all() for matrix in rounded.values())


def test_a_tied_head_is_rounded_under_both_names() -> None:
    rounded = round_model(
        tiny_model("llama", tie_word_embeddings=True), tokens(), bits=4, block_of=lambda _: BLOCK, symmetric=True
    )
    assert rounded["lm_head.weight", True] is rounded["model.embed_tokens.weight", True]


def test_a_text_that_overflows_the_model_is_refused_and_the_model_is_whole_again() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_parameter("model.layers.1.input_layernorm.weight").fill_(1e30)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(CaptureError, match="use --rounding nearest"):
        round_model(model, tokens(), bits=4, block_of=lambda _: BLOCK, symmetric=True)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_pairs_of_codes_that_are_all_tried_are_not_better_on_average() -> None:
    """Against the optimum over all codes of three inputs (8^3 of them nearby), GPTQ loses little."""
    width = 3
    weight, inputs = weights(16, width), correlated(64, 12)[:, :width]
    moments = inputs.T @ inputs / len(inputs)
    matrix = round_matrix(weight, moments, bits=4, block_size=BLOCK, symmetric=True)
    scale = torch.from_numpy(matrix.scales)  # (N, 1)
    best = torch.full((16,), torch.inf)
    for codes in itertools.product(range(-8, 8), repeat=width):
        difference = torch.tensor(codes) * scale - weight
        best = torch.minimum(best, ((difference @ moments) * difference).sum(1))
    nearest = round_matrix(weight, diagonal(moments), bits=4, block_size=BLOCK, symmetric=True)
    optimum, ours, naive = float(best.sum()), error(weight, matrix, moments), error(weight, nearest, moments)
    assert optimum <= ours <= naive
    assert ours - optimum < 0.5 * (naive - optimum)
