"""Runs a captured graph as the runtime does: each cache buffer is bound as past and as present at once."""

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from draftc.runtime.graphio import INPUT_IDS, LOGIT_POSITIONS, LOGITS, WRITE_INDEX, GraphSpec


class GraphRunner:
    """One ONNX Runtime CPU session over `batch` rows; `step` may be called at any width, from any write_index."""

    def __init__(self, path: Path, spec: GraphSpec, batch: int = 1) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.spec = spec
        self.binding = self.session.io_binding()
        self.buffers: dict[str, ort.OrtValue] = {}
        for past, present in spec.cache_pairs:
            shape = [batch, *(dim for dim in past.shape[1:] if isinstance(dim, int))]
            # What a slot without a token holds must never matter, so it holds something that would be noticed.
            buffer = ort.OrtValue.ortvalue_from_numpy(np.full(shape, 7.0, dtype=past.dtype))
            self.buffers[past.name] = buffer
            self.binding.bind_ortvalue_input(past.name, buffer)
            self.binding.bind_ortvalue_output(present.name, buffer)

    def step(
        self, tokens: NDArray[np.int64], write_index: list[int], logit_positions: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Write tokens (B, S) at write_index (B); return the logits (B, R, V) of logit_positions (B, R)."""
        self.binding.bind_cpu_input(INPUT_IDS, np.ascontiguousarray(tokens))
        self.binding.bind_cpu_input(WRITE_INDEX, np.array(write_index, dtype=np.int64))
        self.binding.bind_cpu_input(LOGIT_POSITIONS, np.ascontiguousarray(logit_positions))
        self.binding.bind_output(LOGITS)
        self.session.run_with_iobinding(self.binding)
        # Outputs come in the order in which they were first bound: logits after every cache buffer.
        logits: NDArray[np.float32] = self.binding.get_outputs()[-1].numpy()
        return logits


@pytest.fixture(scope="session")
def graph_runner() -> type[GraphRunner]:
    """The class, as a fixture: test modules cannot import their neighbours here."""
    return GraphRunner
