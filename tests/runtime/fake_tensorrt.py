"""TensorRT without a GPU: an engine is a small file that points to an ONNX graph, and ONNX Runtime's CPU runs it.

It works on the very addresses that were bound, when the fake stream of `fake_cuda_python` gets to it. What the real
ones leave undefined is refused here: a tensor without an address or outside device memory, an output over an input,
scratch memory that is missing or too small, a call outside its profile, a capture of a call that was never made before,
and a graph whose context was given other shapes or addresses since.

`CLASSES` has the fake for each real class; the contract tests compare names and parameters with the installed package.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort

from draftc.runtime.graphio import INPUT_IDS, LOGIT_POSITIONS, PROPOSAL
from tests.runtime.fake_cuda_python import FakeGpu
from tests.runtime.fake_tensorrt_api import (
    DTYPES,
    HEADER,
    MAGIC,
    RTX_ONLY,
    VERSION,
    DataType,
    Dims,
    DynamicShapesKernelSpecializationStrategy,
    EngineInvalidityDiagnostics,
    EngineValidity,
    ExecutionContextAllocationStrategy,
    ILogger,
    IRuntimeCache,
    IRuntimeConfig,
    RtxRuntimeConfig,
    Severity,
    TensorIOMode,
    TensorLocation,
)

__all__ = ["CLASSES", "FakeTensorRt"]

SCRATCH = 4096  # bytes that every context asks for
NUMPY: dict[str, type[np.generic]] = {"FLOAT": np.float32, "HALF": np.float16, "BF16": np.uint16, "INT64": np.int64}


class ICudaEngine:
    fake_config_class: type[IRuntimeConfig] = IRuntimeConfig
    fake_context_class: "type[IExecutionContext]"

    def __init__(self, module: "FakeTensorRt", logger: ILogger, said: dict[str, Any], size: int) -> None:
        self._gpu = module.gpu
        self.fake_module = module
        self.fake_logger = logger
        self.fake_said = said
        self._size = size
        self._gpu.reserved += size
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self.fake_session = ort.InferenceSession(said["graph"], options, providers=["CPUExecutionProvider"])
        self.fake_tensors = {name: (mode, dtype, shape) for name, mode, dtype, shape in said["tensors"]}
        self.num_io_tensors = len(self.fake_tensors)
        self.num_optimization_profiles = len(said["profiles"])
        self.device_memory_size_v2 = SCRATCH

    def __del__(self) -> None:
        self._gpu.reserved -= self._size

    def get_tensor_name(self, index: int) -> str:
        return str(list(self.fake_tensors)[index])

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode[self.fake_tensors[name][0]]

    def get_tensor_dtype(self, name: str) -> DataType:
        return DTYPES[self.fake_tensors[name][1]]

    def get_tensor_shape(self, name: str) -> Dims:
        return Dims(dim if isinstance(dim, int) else -1 for dim in self.fake_tensors[name][2])

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.HOST if name in self.fake_said["host"] else TensorLocation.DEVICE

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Dims]:
        return [Dims(shape) for shape in self.fake_said["profiles"][profile_index][name]]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        aliases: dict[str, str] = self.fake_said["aliases"]
        return aliases.get(name)

    def create_runtime_config(self) -> IRuntimeConfig:
        return self.fake_config_class()

    def create_execution_context(self, runtime_config: IRuntimeConfig | None = None) -> "IExecutionContext | None":
        assert runtime_config is not None
        assert not self._gpu.capturing
        self.fake_module.configs.append(runtime_config)
        return self.fake_context_class(self, runtime_config)


@dataclass(frozen=True)
class Binding:
    """One tensor of a call: where it is and what it is."""

    name: str
    shape: tuple[int, ...]
    dtype: type[np.generic]
    address: int

    @property
    def size(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


class IExecutionContext:
    def __init__(self, engine: ICudaEngine, config: IRuntimeConfig) -> None:
        self._engine = engine
        self._gpu = engine.fake_module.gpu
        self.fake_config = config
        self._profile: int | None = None
        self._memory: tuple[int, int] | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._generation = 0  # goes up with every change of a shape or an address
        self._warm: dict[str, tuple[int, ...]] | None = None  # shapes of the last call outside a capture

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        assert type(stream_handle) is int
        self._profile = profile_index
        self._shapes.clear()
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        assert self.fake_config.fake_strategy == ExecutionContextAllocationStrategy.USER_MANAGED
        assert memory % 256 == 0
        self._gpu.device_bytes(memory, size)
        self._memory = memory, size

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert type(shape) is tuple
        assert self._profile is not None
        low, _, high = self._engine.get_tensor_profile_shape(name, self._profile)
        if len(shape) != len(low) or not all(a <= x <= b for a, x, b in zip(low, shape, high, strict=True)):
            self._engine.fake_logger.log(Severity.ERROR, f"{name}: {shape} is outside profile {self._profile}")
            return False
        self._shapes[name] = shape
        self._changed()
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert type(memory) is int
        assert memory % 256 == 0
        assert name in self._engine.fake_tensors
        self._addresses[name] = memory
        self._changed()
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert type(stream_handle) is int
        engine, gpu = self._engine, self._gpu
        if engine.fake_module.fail_next_execution:
            engine.fake_logger.log(Severity.ERROR, engine.fake_module.fail_next_execution)
            engine.fake_module.fail_next_execution = ""
            return False
        assert self._profile is not None
        assert self._memory is not None, "no scratch memory"
        scratch = gpu.device_bytes(*self._memory)
        assert scratch.size >= engine.device_memory_size_v2
        inputs, outputs = self._bindings()
        for past in outputs:
            for other in inputs:
                overlaps = past.address < other.address + other.size and other.address < past.address + past.size
                aliased = engine.fake_said["aliases"].get(past.name) == other.name
                assert overlaps == aliased, f"{past.name} and {other.name}"
        recording = gpu.streams[stream_handle].fake_recording is not None
        if recording and self._warm != self._shapes:
            engine.fake_logger.log(Severity.ERROR, "the context's shapes changed: run it once before the capture")
            return False
        if not recording:
            self._warm = dict(self._shapes)
        self._compile(recording)
        generation = self._generation

        def work() -> None:
            assert not recording or generation == self._generation, "the context of a graph was changed"
            scratch.fill(0xFF)
            engine.fake_module.calls.append((Path(engine.fake_said["graph"]).stem, self._shapes[INPUT_IDS][1]))
            binding = engine.fake_session.io_binding()
            for tensor in inputs:
                binding.bind_input(tensor.name, "cpu", 0, tensor.dtype, tensor.shape, tensor.address)
            for tensor in outputs:
                binding.bind_output(tensor.name, "cpu", 0, tensor.dtype, tensor.shape, tensor.address)
            engine.fake_session.run_with_iobinding(binding)

        gpu.enqueue(stream_handle, work)
        return True

    def _compile(self, recording: bool) -> None:
        """Kernels are made, or were in the cache."""

    def _changed(self) -> None:
        self._generation += 1
        self._engine.fake_module.changes += 1

    def _bindings(self) -> tuple[list[Binding], list[Binding]]:
        engine = self._engine
        sizes = {
            "B": 1,
            "S": self._shapes[INPUT_IDS][1],
            "R": self._shapes[LOGIT_POSITIONS][1],
            "P": self._shapes.get(PROPOSAL, (1, 0))[1],
        }
        result: tuple[list[Binding], list[Binding]] = [], []
        for name, (mode, dtype, symbolic) in engine.fake_tensors.items():
            shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in symbolic)
            is_input = mode == "INPUT"
            if is_input and shape != tuple(symbolic):
                assert self._shapes[name] == shape, name
            bound = Binding(name, shape, NUMPY[DTYPES[dtype].name], self._addresses[name])
            self._gpu.device_bytes(bound.address, bound.size)
            result[0 if is_input else 1].append(bound)
        return result


class RtxExecutionContext(IExecutionContext):
    fake_config: RtxRuntimeConfig

    def is_stream_capturable(self, stream: int) -> bool:
        assert type(stream) is int
        return bool(self._engine.fake_said["capturable"])

    def _compile(self, recording: bool) -> None:
        strategies = DynamicShapesKernelSpecializationStrategy
        lazy = self.fake_config.dynamic_shapes_kernel_specialization_strategy == strategies.LAZY
        assert not (recording and lazy), "the graph would keep the general kernels"
        if self.fake_config.fake_cache is not None:
            kernel = f"{self._profile}:{'x'.join(map(str, self._shapes[INPUT_IDS]))}"
            if kernel not in self.fake_config.fake_cache.fake_kernels:
                self.fake_config.fake_cache.fake_kernels.add(kernel)
                self._engine.fake_module.compiled += 1


class RtxEngine(ICudaEngine):
    fake_config_class = RtxRuntimeConfig
    fake_context_class = RtxExecutionContext


class StandardEngine(ICudaEngine):
    fake_context_class = IExecutionContext


class Runtime:
    """Made through `FakeTensorRt.Runtime`, which adds the module."""

    fake_engine_class: type[ICudaEngine] = StandardEngine
    fake_module: "FakeTensorRt"

    def __init__(self, logger: ILogger) -> None:
        assert logger.fake_ready
        self.fake_logger = logger

    def deserialize_cuda_engine(self, serialized_engine: Any) -> ICudaEngine | None:
        data = bytes(serialized_engine)
        size = int.from_bytes(data[4:12], "little")
        if len(data) != HEADER + size:
            self.fake_logger.log(Severity.ERROR, "Serialization assertion plan.header.size == blobSize failed.")
            return None
        module = self.fake_module
        if module.gpu.used + len(data) + module.extra_memory > module.gpu.machine.memory:
            self.fake_logger.log(Severity.ERROR, "Error Code 2: OutOfMemory (Requested size was too large.)")
            return None
        return self.fake_engine_class(module, self.fake_logger, json.loads(data[HEADER:]), len(data))


class RtxRuntime(Runtime):
    fake_engine_class = RtxEngine
    engine_header_size = HEADER

    def get_engine_validity(self, buffer: bytes) -> tuple[EngineValidity, int]:
        if len(buffer) < HEADER or not buffer.startswith(MAGIC):
            return EngineValidity.INVALID, EngineInvalidityDiagnostics.MALFORMED_ENGINE.value
        machine = self.fake_module.gpu.machine
        if machine.sm is None:
            self.fake_logger.log(Severity.INTERNAL_ERROR, "Error reading CUDA GPU properties")
            return EngineValidity.INVALID, 0
        if diagnostics := self.fake_module.diagnostics:
            self.fake_logger.log(Severity.ERROR, "The engine cannot run here.")
            return EngineValidity.INVALID, diagnostics
        return EngineValidity.VALID, 0


class FakeTensorRt:
    """One of the two modules, and what a test wants to know of it."""

    def __init__(self, gpu: FakeGpu, *, rtx: bool = True, version: str = VERSION) -> None:
        self.gpu = gpu
        self.calls: list[tuple[str, int]] = []  # (graph's name, width) of every execution
        self.configs: list[IRuntimeConfig] = []  # one for each context
        self.changes = 0  # of shapes and addresses
        self.compiled = 0
        self.diagnostics = 0
        self.extra_memory = 0
        self.fail_next_execution = ""
        runtime = type("Runtime", (RtxRuntime if rtx else Runtime,), {"fake_module": self})
        names: dict[str, Any] = {
            "__version__": version,
            "ILogger": ILogger,
            "Runtime": runtime,
            "TensorIOMode": TensorIOMode,
            "TensorLocation": TensorLocation,
            "ExecutionContextAllocationStrategy": ExecutionContextAllocationStrategy,
        }
        if rtx:
            names |= {kind.__name__: kind for kind in RTX_ONLY}
        self.module = SimpleNamespace(**names)


# Real name → the fake that stands for it.
CLASSES: dict[str, type] = {
    "Runtime": RtxRuntime,
    "ICudaEngine": ICudaEngine,
    "IExecutionContext": RtxExecutionContext,
    "IRuntimeConfig": RtxRuntimeConfig,
    "IRuntimeCache": IRuntimeCache,
    "ILogger": ILogger,
}
