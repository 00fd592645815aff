"""Blocks of a GGUF file reach the compiled graph as they are stored."""

from pathlib import Path

import gguf
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from draftc.export.checkpoint import load, peek
from draftc.export.compile import CompileOptions, compile_bundle
from draftc.export.gguf import GgufFile
from draftc.export.gguf_blocks import stored_blocks
from draftc.export.rounding import RoundedMatrix
from draftc.export.scheme import QuantizationScheme
from draftc.runtime.errors import UsageError
from tests.export.tiny_models import save_folder, tiny_model, write_gguf

Q4_0, Q8_0, Q4_1, F16 = (gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q8_0", "Q4_1", "F16"))


@pytest.mark.parametrize("kind", [Q4_0, Q8_0])
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])  # llama's q and k rows lie in another order
@pytest.mark.parametrize("tied", [True, False])
def test_blocks_stand_for_the_values_that_the_model_is_loaded_with(
    tmp_path: Path, kind: gguf.GGMLQuantizationType, model_type: str, tied: bool
) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model(model_type, tie_word_embeddings=tied), kind=kind)
    checkpoint = load(peek(str(path)))
    rounded = stored_blocks(GgufFile(path), checkpoint.info.config, checkpoint.model)
    matrices = {n: p for n, p in checkpoint.model.named_parameters(remove_duplicate=False) if p.ndim == 2}
    assert set(rounded) == {(name, True) for name in matrices}
    for name, parameter in matrices.items():
        np.testing.assert_array_equal(rounded[name, True].dequantize(), parameter.numpy(), err_msg=name)


def compiled(tmp_path: Path, path: Path, bits: int = 4) -> dict[str, np.ndarray]:
    """{weight: the values (N, K) of its product in the compiled target}."""
    parameters = dict(load(peek(str(path))).model.named_parameters())
    scheme = QuantizationScheme(bits, 32, symmetric=True, rounding="stored")
    options = CompileOptions(
        target=str(path), draft="ngram", out=tmp_path / "out", scheme=scheme, max_length=128, prefill_chunk=32
    )
    compile_bundle(options)
    model = onnx.load(tmp_path / "out" / "target" / "model.onnx")
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    found: dict[str, np.ndarray] = {}
    for node in model.graph.node:
        if node.op_type == "MatMulNBits":
            how = {attribute.name: attribute.i for attribute in node.attribute}
            codes, scales = (tensors[name] for name in node.input[1:3])
            assert len(node.input) == 3
            matrix = RoundedMatrix(how["bits"], how["block_size"], how["K"], codes, scales, None)
            name, values = node.input[1].rsplit("_t_q", 1)[0], matrix.dequantize()
            if node.input[1].endswith("_packed"):  # queries, keys and values are one product
                packed = [name.replace("q_proj", part) for part in ("q_proj", "k_proj", "v_proj")]
                ends = np.cumsum([parameters[part].shape[0] for part in packed])
                found |= dict(zip(packed, np.split(values, ends[:-1]), strict=True))
            else:
                found[name] = values
    return found


def test_a_compiled_graph_multiplies_with_the_stored_weights_bit_for_bit(tmp_path: Path) -> None:
    """A file as llama.cpp writes them: most of it in 4 bits, the head in 8, one tensor in a type that is rounded."""
    kinds = {"output.weight": Q8_0, "blk.0.ffn_up.weight": Q8_0, "blk.1.ffn_down.weight": Q4_1}
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), kind=Q4_0, kinds=kinds)
    parameters = dict(load(peek(str(path))).model.named_parameters())
    products = compiled(tmp_path, path)
    weights = {name for name, value in parameters.items() if value.ndim == 2 and "embed" not in name}
    assert set(products) == weights
    for name, values in products.items():
        if name == "model.layers.1.mlp.down_proj.weight":
            assert not np.array_equal(values, parameters[name].numpy())
        else:
            np.testing.assert_array_equal(values, parameters[name].numpy(), err_msg=name)


def test_other_sources_and_other_blocks_are_refused(tmp_path: Path) -> None:
    save_folder(tmp_path / "folder")
    with pytest.raises(UsageError, match="not a GGUF file, so no blocks are stored: use --rounding gptq"):
        compiled(tmp_path, tmp_path / "folder")
    with pytest.raises(UsageError, match="use --block-size 32 --symmetric"):
        QuantizationScheme(4, 128, rounding="stored")
    assert not (tmp_path / "out").exists()
