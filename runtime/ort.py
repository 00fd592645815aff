"""ONNX Runtime backend: one decoder graph, its KV buffers allocated once and written in place through IO binding."""

import importlib.metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftc.runtime.engine import Logits, Tokens
from draftc.runtime.errors import BackendUnavailableError, BundleError, EngineError, ResourceError, UsageError
from draftc.runtime.graphio import INPUT_IDS, LOGIT_POSITIONS, LOGITS, WRITE_INDEX, GraphSpec, TensorSpec
from draftc.runtime.memory import format_bytes, require_memory

__all__ = ["OrtEngine", "check_device", "load_onnxruntime"]

PROVIDERS = {"cpu": "CPUExecutionProvider"}
NUMPY_DTYPES = {"float32": np.float32, "float16": np.float16, "int64": np.int64}
ORT_TYPES = {"float32": "tensor(float)", "float16": "tensor(float16)", "int64": "tensor(int64)"}


def check_device(device: str) -> None:
    """Raise UsageError unless `device` is one that this backend serves."""
    if device not in PROVIDERS:
        raise UsageError(f"unknown device {device!r}: this backend serves {', '.join(PROVIDERS)}")


def load_onnxruntime() -> Any:
    """The onnxruntime module. Raises BackendUnavailableError when it is missing or installed twice."""
    installed = [name for name in ("onnxruntime", "onnxruntime-gpu") if _installed(name)]
    if len(installed) > 1:
        raise BackendUnavailableError(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files: "
            "pip uninstall -y onnxruntime onnxruntime-gpu, then install one of them"
        )
    try:
        import onnxruntime
    except ImportError as error:
        raise BackendUnavailableError(
            f"this bundle needs ONNX Runtime ({error}): pip install 'draftc[cpu]' or 'draftc[gpu]'"
        ) from None
    return onnxruntime


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


class OrtEngine:
    """Runs one graph for one sequence (B = 1).

    Past and present are bound to the same memory, once. Small inputs live in preallocated arrays; a binding is made per
    (S, R) and kept for the widths that the loop alternates between, so a step allocates nothing and binds nothing.

    Raises BackendUnavailableError, BundleError (bytes that are no graph, or a graph with other inputs and outputs than
    `spec`), ResourceError (KV buffers that do not fit into memory), UsageError (unknown device, threads < 1).
    """

    def __init__(
        self,
        path: Path,
        spec: GraphSpec,
        *,
        max_call: int,
        max_rows: int,
        device: str = "cpu",
        threads: int | None = None,
    ):
        check_device(device)
        if threads is not None and threads < 1:
            raise UsageError(f"threads must be 1 or more, got {threads}")
        self._spec = spec
        self._device = device
        self._session = self._open_session(path, threads)
        self._check_io()
        require_memory(spec.kv_bytes())
        ort = load_onnxruntime()
        try:
            self._kv = {  # (1, Hkv, L, D) each; zeros, because masked entries still enter the arithmetic
                past.name: ort.OrtValue.ortvalue_from_numpy(_zeros(past), device) for past, _ in spec.cache_pairs
            }
            self._logits = np.empty((max_rows, spec.vocab_rows), np.float32)  # (R, V)
            self._tokens = np.zeros((1, max_call), np.int64)
            self._positions = np.zeros((1, max_rows), np.int64)
        except (MemoryError, ValueError):  # numpy raises ValueError for more bytes than an address has bits for
            raise ResourceError(
                f"no memory for KV buffers of {format_bytes(spec.kv_bytes())} and {max_rows} rows of logits: "
                "compile with a smaller --max-length and --max-width"
            ) from None
        self._write_index = np.zeros(1, np.int64)
        self._bindings: dict[tuple[int, int], Any] = {}

    @property
    def spec(self) -> GraphSpec:
        """Inputs and outputs of the graph."""
        return self._spec

    @property
    def kv_addresses(self) -> dict[str, int]:
        """Address of each cache buffer; they never change while the engine is open."""
        return {name: value.data_ptr() for name, value in self._kv.items()}

    def forward(self, tokens: Tokens, start: int, rows: int) -> Logits:
        """See Engine.forward."""
        width = tokens.size
        self._tokens[0, :width] = tokens
        self._write_index[0] = start
        self._positions[0, :rows] = np.arange(width - rows, width)
        binding = self._bindings.get((width, rows))
        if binding is None:
            binding = self._bind(width, rows)
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # onnxruntime raises its own classes, which share no base but Exception
            raise EngineError(f"ONNX Runtime failed on {width} tokens at {start}: {_first_line(error)}") from error
        return self._logits[:rows]

    def clear(self) -> None:
        """See Engine.clear."""
        for past, _ in self._spec.cache_pairs:
            self._kv[past.name].update_inplace(_zeros(past))

    def close(self) -> None:
        """Release the session and its buffers."""
        self._bindings.clear()
        self._kv.clear()
        self._session = None

    def _open_session(self, path: Path, threads: int | None) -> Any:
        ort = load_onnxruntime()
        options = ort.SessionOptions()
        # Draft and target alternate. Without this, the idle session's pool spins through the other one's call.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.log_severity_level = 3
        if threads is not None:
            options.intra_op_num_threads = threads
        try:
            return ort.InferenceSession(str(path), options, providers=[PROVIDERS[self._device]])
        except Exception as error:  # see above
            raise BundleError(
                f"ONNX Runtime {ort.__version__} cannot load {path.name}: {_first_line(error)}"
            ) from error

    def _check_io(self) -> None:
        for tensor in self._spec.inputs:
            if tensor.dtype not in ORT_TYPES:
                raise BackendUnavailableError(
                    f"ONNX Runtime on {self._device} has no kernels for {tensor.dtype}: compile with --precision fp32"
                )
        for kind, expected, actual in (
            ("input", self._spec.inputs, self._session.get_inputs()),
            ("output", self._spec.outputs, self._session.get_outputs()),
        ):
            found = {tensor.name: tensor for tensor in actual}
            if set(found) != {tensor.name for tensor in expected}:
                raise BundleError(f"the graph's {kind}s are not those of bundle.json: compile the bundle again")
            for tensor in expected:
                node = found[tensor.name]
                fits = len(node.shape) == len(tensor.shape) and all(
                    isinstance(have, str | None) or have == want
                    for have, want in zip(node.shape, tensor.shape, strict=True)
                )
                if node.type != ORT_TYPES[tensor.dtype] or not fits:
                    said = f"{tensor.dtype} {list(tensor.shape)}"
                    raise BundleError(f"{kind} {tensor.name} is {node.type} {node.shape}, bundle.json says {said}")

    def _bind(self, width: int, rows: int) -> Any:
        binding = self._session.io_binding()
        for name, array, shape in (
            (INPUT_IDS, self._tokens, (1, width)),
            (WRITE_INDEX, self._write_index, (1,)),
            (LOGIT_POSITIONS, self._positions, (1, rows)),
        ):
            binding.bind_input(name, "cpu", 0, array.dtype.type, shape, array.ctypes.data)
        for past, present in self._spec.cache_pairs:
            binding.bind_ortvalue_input(past.name, self._kv[past.name])
            binding.bind_ortvalue_output(present.name, self._kv[past.name])
        logits = (1, rows, self._spec.vocab_rows)
        binding.bind_output(LOGITS, "cpu", 0, np.float32, logits, self._logits.ctypes.data)
        if width <= KEPT_BINDINGS_WIDTH:
            self._bindings[width, rows] = binding
        return binding


KEPT_BINDINGS_WIDTH = 64  # wider calls are prefill chunks, whose widths rarely come again


def _zeros(cache: TensorSpec) -> NDArray[Any]:
    shape = tuple(1 if isinstance(dim, str) else dim for dim in cache.shape)  # B = 1
    return np.zeros(shape, NUMPY_DTYPES[cache.dtype])


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
