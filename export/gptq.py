"""GPTQ: weights are rounded one input at a time, and those still to come make up for the error (Frantar et al. 2022,
arXiv 2210.17323).

Rounding W (N, K) to V changes the outputs over calibration inputs X (T, K) by tr((V - W) H (V - W)ᵀ), H = XᵀX. With H =
U D Uᵀ, U unit upper triangular, that is Σ_k D_k |r_k|², where r_k = (V - W)_k + Σ_{j<k} U_jk (V - W)_j. So column k is
rounded to the grid value nearest to W_k - Σ_{j<k} U_jk (V - W)_j. This form, LDLQ, is GPTQ without an inverse of H
(Chee et al. 2023, arXiv 2307.13304). Without correlations, U is the identity, and GPTQ rounds to nearest.

The rows of X are brought to one length before. A few positions, often a text's first, have values a hundred times as
large as others; their outputs are as large, and the next normalization takes it back.

The inputs that matter most are rounded first ("act-order"). Scales and zero points are found before, block by block: of
a grid of ranges, narrower than the block's own, the one with the least error weighted by diag(H). So the codes are in
the blocks of any other rounding, and kernels do not see a difference.

One pass over the calibration text rounds a model: as the pass reaches a linear layer, H is taken of its input, its
weight is rounded, and it computes with the rounded weight, so that what follows is calibrated on what the quantized
graph will compute. Then it gets its float weight back. That needs one H and one layer's float weight at a time,
whatever the model's family, and leaves the model as it was: capture and the float graph's parity stay what they are
without GPTQ. The quantizer takes the codes by the weight's name; nothing is rounded twice.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from draftc.export.rounding import Rounded, RoundedMatrix, pack_matrix, parameter_names
from draftc.runtime.errors import CaptureError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["round_matrix", "round_model"]

# Of the mean of diag(H), times inputs over tokens: the fewer tokens, the more of what H says of correlations is chance.
# The paper takes 0.01 and 262,144 tokens; with two tokens for each input, that made outputs on other texts worse.
DAMPING = 1.5
RATIOS = [1 - 0.04 * i for i in range(11)]  # of a block's range; beyond 40 % off nothing was chosen
ZERO_STEPS = (-1, 0, 1)  # around the zero point that a range asks for
# Outputs are rounded in parts, a thread each. The parts are so small that torch runs each operation in the thread that
# asks for it: a loop over thousands of inputs would wait for all cores at every step, most of all on a busy machine.
OUTPUTS = 1024
GRID_OUTPUTS = 256
STEP = 32  # inputs whose errors are carried on one by one, before one product carries them to all that follow
COLUMNS = 1024  # of H made at a time: it is symmetric, so only the blocks above the diagonal are


class _Done(Exception):  # noqa: N818
    """The head was reached: its logits are not needed."""


def round_model(
    model: "PreTrainedModel",
    tokens: NDArray[np.int64],
    *,
    bits: int,
    block_of: Callable[[str], int],
    symmetric: bool,
    head: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Rounded:
    """Round every linear layer that `tokens` (B, T) reach, the output head too if `head`.

    block_of: gives the block size of a weight by its name. progress: called with (layers done, layers in all). The
    model is unchanged afterwards. Raises CaptureError where the calibration text drives a layer's inputs out of
    float32.
    """
    names = parameter_names(model)
    layers: dict[nn.Module, str] = {
        module: f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and f"{name}.weight" in names
    }
    output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    rounded: Rounded = {}
    moments = _Moments()

    def before(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        weight = layer.weight
        assert isinstance(weight, Tensor)
        stored = not isinstance(layer, Conv1D)  # Conv1D keeps (K, N)
        aliases = [(alias, stored) for alias in names[layers[layer]]]
        reached = arguments[0].numel() > 0  # an expert may have been given no token
        if aliases[0] not in rounded and reached and (head or layer is not output):
            progress(len(rounded), len(layers))
            matrix = weight.data if stored else weight.data.T
            result = round_matrix(
                matrix,
                moments.of(arguments[0]),
                bits=bits,
                block_size=block_of(layers[layer]),
                symmetric=symmetric,
                damping=DAMPING * matrix.shape[1] / tokens.size,
            )
            rounded.update(dict.fromkeys(aliases, result))
        if layer is output:
            raise _Done
        if aliases[0] in rounded:
            values = torch.from_numpy(rounded[aliases[0]].dequantize())
            floats[layer] = weight.data
            weight.data = values if stored else values.T

    def after(layer: nn.Module, *_: Any) -> None:
        if layer in floats:
            layer.weight.data = floats.pop(layer)

    floats: dict[nn.Module, Tensor] = {}
    with ExitStack() as hooks, torch.no_grad(), _fast_products():
        for layer in layers:
            hooks.callback(layer.register_forward_pre_hook(before).remove)
            hooks.callback(layer.register_forward_hook(after).remove)
        try:
            model(input_ids=torch.from_numpy(tokens), use_cache=False)
        except _Done:
            pass
        finally:
            for left in list(floats):
                after(left)
    progress(len(layers), len(layers))
    return rounded


@contextmanager
def _fast_products() -> Iterator[None]:
    """Products by oneDNN: on some CPUs twice as fast. It may take factors in bf16, which is no matter here."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class _Moments:
    """H of a layer's input; layers that share one input (q, k and v; gate and up) share it."""

    def __init__(self) -> None:
        self._inputs: Tensor | None = None
        self._moments: Tensor | None = None

    def of(self, inputs: Tensor) -> Tensor:
        """H (K, K) of `inputs` (…, K)."""
        if self._moments is None or self._inputs is not inputs:
            self._inputs, self._moments = None, None  # make room first: one H of a large layer is 320 MB
            self._inputs, self._moments = inputs, _second_moments(inputs.reshape(-1, inputs.shape[-1]))
        return self._moments


def _second_moments(rows: Tensor) -> Tensor:
    """XᵀX / T (K, K) of rows X (T, K), each divided by its length."""
    count, width = rows.shape
    result = torch.empty(width, width)
    weights = 1 / torch.linalg.vector_norm(rows, dim=1, keepdim=True).square_().clamp_(min=1e-30)  # (T, 1)
    for start in range(0, width, COLUMNS):
        stop = start + COLUMNS
        result[start:stop, start:] = (rows[:, start:stop] * weights).T @ rows[:, start:]
        result[stop:, start:stop] = result[start:stop, stop:].T
    if not torch.isfinite(result.diagonal()).all():
        raise CaptureError("the calibration text drives a layer's inputs out of float32: use --rounding nearest")
    result /= count
    return result


def round_matrix(
    weight: Tensor, moments: Tensor, *, bits: int, block_size: int, symmetric: bool, damping: float = 0.1
) -> RoundedMatrix:
    """Round `weight` (N, K) under `moments` H (K, K), which is not changed; `damping` is of the mean of diag(H)."""
    order = torch.argsort(moments.diagonal(), descending=True, stable=True)
    importance = moments.diagonal() + damping * moments.diagonal().mean() + 1e-30
    feedback = _feedback(moments[order][:, order], damping)

    def part(start: int) -> list[NDArray[Any]]:
        with torch.no_grad():  # of this thread
            columns = weight[start : start + OUTPUTS].T.contiguous()  # (K, n)
            scales, zeros = _find_grid(columns, importance, bits, block_size, symmetric)
            codes = _carry_errors(columns, order, feedback, scales, zeros, bits, block_size)
            return [array.T.numpy() for array in (codes, scales, zeros.to(torch.uint8))]

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        parts = list(pool.map(part, range(0, weight.shape[0], OUTPUTS)))
    codes, scales, zeros = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return pack_matrix(codes, scales, None if symmetric else zeros, bits=bits, block_size=block_size)


def _feedback(moments: Tensor, damping: float) -> Tensor:
    """U (K, K) of H + damping = U D Uᵀ. In place: H is the caller's copy."""
    damping *= float(moments.diagonal().mean())
    damping = damping or 1.0  # a layer whose inputs are all zero: H = 0
    for attempt in range(5):  # float32 may find a matrix of low rank indefinite
        moments.diagonal().add_(damping * (10**attempt - 10 ** (attempt - 1) if attempt else 1))
        # H with its axes reversed is L Lᵀ; reversing L's axes gives an upper triangle.
        lower, failed = torch.linalg.cholesky_ex(moments.flip(0, 1))
        if not failed:
            upper: Tensor = lower.flip(0, 1)
            upper /= upper.diagonal().clone()
            return upper
    raise CaptureError("the calibration text gives a layer inputs that GPTQ cannot use: use --rounding nearest")


def _find_grid(
    columns: Tensor, importance: Tensor, bits: int, block_size: int, symmetric: bool
) -> tuple[Tensor, Tensor]:
    """Scales and zero points (blocks, N) for `columns` (K, N), whose rows weigh `importance` (K,)."""
    found = []
    for start in range(0, columns.shape[0], block_size):
        weights = importance[start : start + block_size, None]
        blocks = torch.split(columns[start : start + block_size], GRID_OUTPUTS, dim=1)
        found.append(
            [torch.cat(both) for both in zip(*(_find_block(b, weights, bits, symmetric) for b in blocks), strict=True)]
        )
    scales, zeros = zip(*found, strict=True)
    return torch.stack(scales), torch.stack(zeros)


def _find_block(block: Tensor, importance: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scale and zero point (N,) of `block` (block_size, N): of those tried, those with the least weighted error.

    Symmetric codes reach from -2^(bits - 1) to one less: the scale's sign puts the value of the largest size where
    there is more room, as ONNX Runtime's rounding does.
    """
    half, top = 2 ** (bits - 1), 2**bits - 1
    if symmetric:
        extreme = block.gather(0, block.abs().argmax(0, keepdim=True))[0]
        widest, centre = extreme / -half, torch.full_like(extreme, half)
    else:
        low, high = block.amin(0).clamp(max=0), block.amax(0).clamp(min=0)
        widest, centre = (high - low) / top, -low * top / (high - low)
    widest = torch.where(widest == 0, 1.0, widest)  # a block of zeros: its codes are its zero point
    centre = torch.nan_to_num(centre, nan=half).round()  # the share of the range below zero does not depend on a ratio
    best = torch.full_like(widest, torch.inf)
    scale, zero = widest, centre
    for ratio in RATIOS:
        for step in (0,) if symmetric else ZERO_STEPS:
            s, z = widest * ratio, (centre + step).clamp(0, top)
            error = _nearest(block, s, z, top).sub_(z).mul_(s).sub_(block).square_().mul_(importance).sum(0)
            better = error < best
            best = torch.where(better, error, best)
            scale, zero = torch.where(better, s, scale), torch.where(better, z, zero)
    return scale, zero


def _nearest(values: Tensor, scale: Tensor, zero: Tensor, top: int) -> Tensor:
    """The codes (float) nearest to `values`."""
    codes: Tensor = (values / scale).round_().add_(zero).clamp_(0, top)
    return codes


def _carry_errors(
    columns: Tensor, order: Tensor, feedback: Tensor, scales: Tensor, zeros: Tensor, bits: int, block_size: int
) -> Tensor:
    """Codes (K, N) uint8 of `columns` (K, N); `feedback` U is of the inputs in `order`."""
    count, top = columns.shape[0], 2**bits - 1
    errors = torch.empty_like(columns)  # V - W, in order
    codes = torch.empty_like(columns, dtype=torch.uint8)
    for start in range(0, count, STEP):
        stop = min(start + STEP, count)
        wanted = columns[order[start:stop]]  # (STEP, N)
        exact = wanted.clone()
        wanted.addmm_(feedback[:start, start:stop].T, errors[:start], alpha=-1)
        for i, column in enumerate(order[start:stop].tolist()):
            scale, zero = scales[column // block_size], zeros[column // block_size]
            code = _nearest(wanted[i], scale, zero, top)
            codes[column] = code.to(torch.uint8)
            error = errors[start + i]
            torch.sub(code.sub_(zero).mul_(scale), exact[i], out=error)
            wanted[i + 1 :].addr_(feedback[start + i, start + i + 1 : stop], error, alpha=-1)
    return codes
