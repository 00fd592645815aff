"""A decoder graph of one layer, small enough to be spelled out in numpy."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from draftc.runtime.engine import Logits, Tokens

__all__ = ["DIM", "TinyModel"]

DIM = 4  # D
PARTS = ("key", "value")


class TinyModel:
    """logits[s] = (Σ_{l <= position of s} weight[l] * (key[l] + value[l])) @ head, for one row (B = 1).

    The weights fall with the place l, so that the order of tokens matters.
    """

    def __init__(self, length: int, vocab: int, seed: int = 0, noise: float = 0.0) -> None:
        rng = np.random.default_rng(seed)
        tables = [rng.standard_normal((vocab, DIM)).astype(np.float32) for _ in range(3)]
        self.keys, self.values, head = tables  # (V, D) each
        self.head = head.T + noise * rng.standard_normal((DIM, vocab)).astype(np.float32)  # (D, V)
        self.weights = np.linspace(1.0, 0.2, length, dtype=np.float32)  # (L,)
        self.length = length
        self.vocab = vocab

    def expected(self, text: Tokens, rows: int) -> Logits:
        """Logits (rows, V) of the last `rows` tokens, from the text (n,) alone."""
        state = (self.keys + self.values)[text] * self.weights[: text.size, None]
        logits: Logits = np.cumsum(state, axis=0)[text.size - rows :] @ self.head
        return logits

    def save(
        self,
        path: Path,
        *,
        rename: dict[str, str] | None = None,
        kv_type: int = TensorProto.FLOAT,
        length: int | str | None = None,
    ) -> Path:
        """Write the graph. `rename` changes names of tensors, `length` what the graph says of L."""
        constants: dict[str, NDArray[Any]] = {
            "keys": self.keys,
            "values": self.values,
            "head": self.head,
            "weights": self.weights,
            "slots": np.arange(self.length, dtype=np.int64),
            "axis1": np.array([1], np.int64),
            "axis0": np.array([0], np.int64),
            "zero": np.array(0, np.int64),
            "one": np.array(1, np.int64),
        }
        node = helper.make_node
        nodes = [
            *(
                step
                for part, table in (("key", "keys"), ("value", "values"))
                for step in (
                    node("Gather", [table, "input_ids"], [f"{part}.rows"]),  # (B, S, D)
                    node("Unsqueeze", [f"{part}.rows", "axis1"], [f"{part}.new"]),  # (B, 1, S, D)
                    node("Cast", [f"{part}.new"], [f"{part}.cast"], to=kv_type),
                    node(
                        "TensorScatter",
                        [f"past_key_values.0.{part}", f"{part}.cast", "write_index"],
                        [f"present.0.{part}"],
                        axis=2,
                    ),
                    node("Cast", [f"present.0.{part}"], [f"{part}.float"], to=1),
                    node("Squeeze", [f"{part}.float", "axis1"], [f"{part}.all"]),  # (B, L, D)
                )
            ),
            node("Add", ["key.all", "value.all"], ["state"]),
            node("Shape", ["input_ids"], ["width"], start=1, end=2),
            node("Squeeze", ["width"], ["width.scalar"]),
            node("Range", ["zero", "width.scalar", "one"], ["offsets"]),
            node("Add", ["offsets", "write_index"], ["positions"]),  # (S,), B = 1
            node("Unsqueeze", ["positions", "axis1"], ["positions.column"]),
            node("LessOrEqual", ["slots", "positions.column"], ["visible"]),  # (S, L)
            node("Cast", ["visible"], ["visible.float"], to=1),
            node("Mul", ["visible.float", "weights"], ["mixing"]),
            node("MatMul", ["mixing", "state"], ["hidden"]),  # (B, S, D)
            node("Squeeze", ["logit_positions", "axis0"], ["chosen"]),  # (R,)
            node("Gather", ["hidden", "chosen"], ["hidden.chosen"], axis=1),  # (B, R, D)
            node("MatMul", ["hidden.chosen", "head"], ["logits"]),
        ]
        cache: list[str | int | None] = ["B", 1, length or self.length, DIM]
        graph = helper.make_graph(
            nodes,
            "tiny",
            [
                helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["B", "S"]),
                helper.make_tensor_value_info("write_index", TensorProto.INT64, ["B"]),
                helper.make_tensor_value_info("logit_positions", TensorProto.INT64, ["B", "R"]),
                *(helper.make_tensor_value_info(f"past_key_values.0.{part}", kv_type, cache) for part in PARTS),
            ],
            [
                helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", "R", self.vocab]),
                *(helper.make_tensor_value_info(f"present.0.{part}", kv_type, cache) for part in PARTS),
            ],
            [numpy_helper.from_array(value, name) for name, value in constants.items()],
        )
        for before, after in (rename or {}).items():
            for step in graph.node:
                step.input[:] = [after if name == before else name for name in step.input]
                step.output[:] = [after if name == before else name for name in step.output]
            for tensor in (*graph.input, *graph.output):
                tensor.name = after if tensor.name == before else tensor.name
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
        onnx.checker.check_model(model)
        onnx.save(model, str(path))
        return path
