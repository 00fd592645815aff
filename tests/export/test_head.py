"""The cut head: its logits are the whole head's at the ids that are kept, in every form that families give a head."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray

from draftc.export.head import CutHead
from draftc.export.lowering import lower
from draftc.export.quantize import QuantizeWeights
from draftc.export.scheme import QuantizationScheme
from draftc.runtime.errors import CaptureError
from tests.export.family_cases import FAMILIES, VOCAB, capture_tiny, eager_logits, text, tiny_model, tolerance

if TYPE_CHECKING:
    from tests.export.conftest import GraphRunner

IDS = np.array([0, 2, 3, 7, 30, 31, 55, VOCAB - 1])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(runner: type["GraphRunner"], path: Path, spec: Any, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    return runner(path, spec).step(tokens, [0], np.arange(tokens.shape[1])[None])


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "model_type", ["llama", "gpt2", "phi", "gptj", "gemma2", "cohere", "granite", "opt", "gpt_neox"]
)
def test_a_cut_head_gives_the_columns_of_the_whole_one(
    model_type: str, tied: bool, tmp_path: Path, graph_runner: type["GraphRunner"]
) -> None:
    """phi and gptj have a bias, gemma2 a soft cap, cohere and granite scalings."""
    config = next(family for family in FAMILIES if family.model_type == model_type).config
    model = tiny_model(model_type, **config | {"tie_word_embeddings": tied})
    captured = capture_tiny(model, tmp_path)
    graph = ir.load(captured.path)
    floats = sum(int(np.prod(value.shape.numpy())) for value in graph.graph.initializers.values() if value.shape)
    CutHead(IDS)(graph)
    left = sum(int(np.prod(value.shape.numpy())) for value in graph.graph.initializers.values() if value.shape)
    width = model.get_output_embeddings().weight.shape[1]  # type: ignore[no-untyped-call]
    assert left - floats == pytest.approx((IDS.size - (0 if tied else VOCAB)) * width, abs=VOCAB)  # and the bias
    cut = tmp_path / "cut.onnx"
    ir.save(graph, cut, external_data="cut.data")
    tokens = text()
    reference = eager_logits(model, tokens)
    logits = run(graph_runner, cut, captured.spec.with_vocab_rows(IDS.size), tokens)
    assert logits.shape[2] == IDS.size
    np.testing.assert_allclose(logits, reference[:, :, IDS], rtol=0, atol=tolerance(reference))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_rounding_a_cut_head_is_cutting_a_rounded_one(
    tied: bool, symmetric: bool, tmp_path: Path, graph_runner: type["GraphRunner"]
) -> None:
    model = tiny_model("phi", tie_word_embeddings=tied)
    captured = capture_tiny(model, tmp_path)
    tokens = text()
    rows = {}
    for name, spec in (("whole", captured.spec), ("cut", captured.spec.with_vocab_rows(IDS.size))):
        graph = ir.load(captured.path)
        if name == "cut":
            CutHead(IDS)(graph)
        # Level 0: activations stay in float32, so that the two kernels differ by the order of their sums alone.
        QuantizeWeights(QuantizationScheme(4, 16, symmetric, accuracy_level=0))(graph)
        lower(graph, "onnxruntime", "cpu")
        ir.save(graph, tmp_path / f"{name}.onnx", external_data=f"{name}.data")
        rows[name] = run(graph_runner, tmp_path / f"{name}.onnx", spec, tokens)
    np.testing.assert_allclose(rows["cut"], rows["whole"][:, :, IDS], rtol=0, atol=10 * tolerance(rows["whole"]))


def test_the_spec_of_a_cut_graph_is_still_a_decoders(tmp_path: Path) -> None:
    captured = capture_tiny(tiny_model("llama"), tmp_path)
    spec = captured.spec.with_vocab_rows(5)
    assert (spec.vocab_rows, captured.spec.vocab_rows) == (5, VOCAB)
    assert spec.inputs == captured.spec.inputs
    assert spec.outputs[1:] == captured.spec.outputs[1:]


@pytest.mark.parametrize("ids", [[0, VOCAB], []])
def test_ids_beyond_the_head_are_refused(ids: list[int], tmp_path: Path) -> None:
    graph = ir.load(capture_tiny(tiny_model("llama"), tmp_path).path)
    with pytest.raises(CaptureError, match="cannot be cut to ids"):
        CutHead(np.array(ids, np.int64))(graph)


def appended(graph: ir.Model, op: str, *operands: NDArray[Any], attributes: dict[str, Any] | None = None) -> None:
    """Put one node more between the head and the logits."""
    logits = graph.graph.outputs[0]
    values = []
    for i, operand in enumerate(operands):
        value = ir.Value(name=f"appended{i}", const_value=ir.tensor(operand, name=f"appended{i}"))
        value.shape, value.type = ir.Shape(operand.shape), ir.TensorType(ir.DataType.from_numpy(operand.dtype))
        graph.graph.register_initializer(value)
        values.append(value)
    node = ir.node(op, [logits, *values], attributes)
    graph.graph.append(node)
    result = node.outputs[0]
    result.shape, result.type = logits.shape, logits.type
    logits.name, result.name = "before", "logits"
    graph.graph.outputs[0] = result


def test_a_constant_along_the_vocabulary_is_cut_too(tmp_path: Path, graph_runner: type["GraphRunner"]) -> None:
    model = tiny_model("llama")
    captured = capture_tiny(model, tmp_path)
    graph = ir.load(captured.path)
    shift = np.linspace(-3, 3, VOCAB, dtype=np.float32)
    appended(graph, "Add", shift)
    CutHead(IDS)(graph)
    ir.save(graph, tmp_path / "cut.onnx", external_data="cut.data")
    tokens = text()
    expected = (eager_logits(model, tokens) + shift)[:, :, IDS]
    logits = run(graph_runner, tmp_path / "cut.onnx", captured.spec.with_vocab_rows(IDS.size), tokens)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance(expected))


@pytest.mark.parametrize(
    ("op", "operands", "attributes", "why"),
    [
        ("Softmax", [], {"axis": -1}, "it goes through Softmax"),  # what a token gets depends on all the others
        ("Gather", [np.arange(VOCAB)[::-1].copy()], {"axis": 2}, "it goes through Gather"),
        ("Mul", [np.ones((1, 1, 2), np.float32)], None, "does not run along the vocabulary"),
    ],
)
def test_what_mixes_tokens_cannot_be_cut(
    op: str, operands: list[NDArray[Any]], attributes: dict[str, Any] | None, why: str, tmp_path: Path
) -> None:
    graph = ir.load(capture_tiny(tiny_model("llama"), tmp_path).path)
    appended(graph, op, *operands, attributes=attributes)
    with pytest.raises(CaptureError, match=f"head cannot be cut.*{why}.*leave out --draft-vocab"):
        CutHead(IDS)(graph)
