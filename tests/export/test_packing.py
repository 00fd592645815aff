"""Projections put side by side: the numbers stay, and what is not exactly of the form stays too."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from draftc.export.lowering import lower
from draftc.export.packing import PackQueryKeyValue
from draftc.export.passes import MICROSOFT
from draftc.export.quantize import QuantizeWeights
from draftc.export.scheme import QuantizationScheme
from tests.export.family_cases import VOCAB, capture_tiny, rewind_run, text, tiny_model, tolerance
from tests.export.sketch import Sketch, count, run

if TYPE_CHECKING:
    from tests.export.conftest import GraphRunner

FLOAT, INT32 = ir.DataType.FLOAT, ir.DataType.INT32
HEADS, KV_HEADS, SIZE, LENGTH, WIDTH = 4, 2, 16, 24, 48  # the input is WIDTH wide
RNG = np.random.default_rng(0)


@dataclass(frozen=True)
class Layer:
    """x (B, S, WIDTH) → three rounded projections → GroupQueryAttention."""

    bits: int = 4
    symmetric: bool = False
    block: int = 32  # two blocks, the second half full
    bias: tuple[bool, bool, bool] = (False, False, False)
    source: tuple[int, int, int] = (0, 0, 0)  # which of two inputs each projection reads
    blocks: tuple[int, int, int] | None = None
    tied: bool = False  # keys and values have one weight
    shown: bool = False  # the queries are an output of the graph as well

    def model(self) -> ir.Model:
        sketch = Sketch()
        sources = [sketch.input(name, FLOAT, ["B", "S", WIDTH]) for name in ("x", "z")]
        pasts = [sketch.input(name, FLOAT, ["B", KV_HEADS, LENGTH, SIZE]) for name in ("past_key", "past_value")]
        lengths = [sketch.input(name, INT32, ["B"]) for name in ("seqlens", "widths")]
        rng = np.random.default_rng(1)
        parts: list[tuple[ir.Value, ir.Value]] = []  # (projection, weight)
        for index, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)):
            matrix = sketch.weight(rng.normal(size=(WIDTH, heads * SIZE)).astype(np.float32) * 0.2)
            if self.tied and index == 2:
                matrix = parts[1][1]
            part = sketch("MatMul", sources[self.source[index]], matrix)
            if self.bias[index]:
                part = sketch("Add", part, rng.normal(size=heads * SIZE).astype(np.float32))
            parts.append((part, matrix))
        outputs = {"logits": parts[0][0]} | {f"y{index}": part for index, (part, _) in enumerate(parts) if index}
        model = sketch.model(**outputs)
        blocks = self.blocks or (self.block,) * 3
        for block in sorted(set(blocks)):
            self._round(model, block, [index for index, own in enumerate(blocks) if own == block])
        self._attend(model, pasts, lengths)
        return model

    def _round(self, model: ir.Model, block: int, which: list[int]) -> None:
        """Round the projections `which`; the others are hidden from the quantizer meanwhile."""
        nodes = [node for node in model.graph if node.op_type in ("MatMul", "MatMulNBits")]
        hidden = [node for index, node in enumerate(nodes) if index not in which and node.op_type == "MatMul"]
        for node in hidden:
            node.op_type = "Hidden"
        QuantizeWeights(QuantizationScheme(self.bits, block, self.symmetric, accuracy_level=0))(model)
        for node in hidden:
            node.op_type = "MatMul"

    def _attend(self, model: ir.Model, pasts: list[ir.Value], lengths: list[ir.Value]) -> None:
        graph = model.graph
        parts = list(graph.outputs)
        graph.outputs.clear()
        total = ir.node("Constant", [], {"value": ir.tensor(np.array(LENGTH, np.int32))})
        inputs = [*parts, *pasts, lengths[0], total.outputs[0], *[None] * 9, lengths[1]]
        numbers = {"num_heads": HEADS, "kv_num_heads": KV_HEADS}
        node = ir.node("GroupQueryAttention", inputs, numbers, domain=MICROSOFT, num_outputs=3)
        graph.extend([total, node])
        names = ("result", "key", "value")
        result, cache = ir.Shape(["B", "S", HEADS * SIZE]), ir.Shape(["B", KV_HEADS, LENGTH, SIZE])
        for output, name, shape in zip(node.outputs, names, (result, cache, cache), strict=True):
            output.name, output.type, output.shape = name, ir.TensorType(FLOAT), shape
        graph.outputs.extend(node.outputs)
        if self.shown:
            graph.outputs.append(parts[0])


def feeds() -> dict[str, NDArray[Any]]:
    given: dict[str, NDArray[Any]] = {name: RNG.normal(size=(2, 3, WIDTH)).astype(np.float32) for name in ("x", "z")}
    caches = {
        name: RNG.normal(size=(2, KV_HEADS, LENGTH, SIZE)).astype(np.float32) for name in ("past_key", "past_value")
    }
    return given | caches | {"seqlens": np.array([7, 4], np.int32), "widths": np.array([3, 3], np.int32)}


PACKED = {
    "zero points": Layer(),
    "symmetric": Layer(symmetric=True),
    "8 bits": Layer(bits=8),
    "an odd number of blocks": Layer(block=16),
    "one block": Layer(block=64),
    "biases": Layer(bias=(True, True, True)),
}
STAYS = {
    "another input": Layer(source=(0, 0, 1)),
    "another block size": Layer(blocks=(32, 32, 16)),
    "one bias missing": Layer(bias=(True, True, False)),
    "one weight for two": Layer(tied=True),
    "queries that others read": Layer(shown=True),
}


@pytest.mark.parametrize("name", PACKED)
def test_one_product_gives_the_same(name: str) -> None:
    model, packed = PACKED[name].model(), PACKED[name].model()
    given = feeds()
    rewrite = PackQueryKeyValue()
    assert rewrite(packed).modified
    assert (rewrite.packed, count(packed, "MatMulNBits"), count(model, "MatMulNBits")) == (1, 1, 3)
    assert sum(value.const_value.nbytes for value in packed.graph.initializers.values() if value.const_value) == sum(
        value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value
    )
    for actual, expected in zip(run(packed, given), run(model, given), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", STAYS)
def test_what_cannot_be_packed_stays(name: str) -> None:
    model = STAYS[name].model()
    run(model, feeds())  # it is a graph that runs
    before = ir.to_proto(model).SerializeToString()
    rewrite = PackQueryKeyValue()
    assert not rewrite(model).modified
    assert (rewrite.packed, ir.to_proto(model).SerializeToString() == before) == (0, True)


@pytest.mark.parametrize("model_type", ["qwen2", "gemma"])
def test_a_rounded_model_is_lowered_without_a_change_of_its_logits(
    model_type: str, tmp_path: Path, graph_runner: type["GraphRunner"]
) -> None:
    """A whole model, quantized and lowered, against the same one that is only quantized: biases, rotation, grouping."""
    captured = capture_tiny(tiny_model(model_type), tmp_path)
    logits = []
    for name in ("rounded", "lowered"):
        graph = ir.load(captured.path)
        QuantizeWeights(QuantizationScheme(4, 32, symmetric=False, accuracy_level=0))(graph)
        if name == "lowered":
            lower(graph, "onnxruntime", "cpu")
            assert count(graph, "MatMulNBits") == 2 * (1 + 4) + 1
        ir.save(graph, tmp_path / f"{name}.onnx", external_data=f"{name}.data")
        runner = graph_runner(tmp_path / f"{name}.onnx", captured.spec)
        logits.append(np.concatenate([rows for _, rows in rewind_run(runner, text())], axis=1))
    assert logits[0].shape[2] == VOCAB
    np.testing.assert_allclose(logits[1], logits[0], rtol=0, atol=10 * tolerance(logits[0]))
