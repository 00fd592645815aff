"""onnxruntime-gpu without a GPU: device memory is host memory that is tagged, and every copy to or from it is counted.

The graph itself runs on the real CPU provider, over the addresses that were bound. What is imitated is what the real
package does where a mistake would be silent: a binding copies what is not on the device that reads it, once; memory of
a device starts as garbage; a captured graph is replayed over the addresses of its capture, whatever is bound; a failed
capture leaves the session unusable. Messages are those of onnxruntime-gpu 1.31.1. Every call must fit the signature of
the installed onnxruntime, so that a renamed function or argument fails.
"""

import ctypes
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import onnxruntime as ort
import pytest
from onnxruntime.capi.onnxruntime_inference_collection import IOBinding
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

__all__ = ["Copy", "FakeOnnxRuntime", "install"]

CPU = ("cpu", 0)
PREFIX = "/onnxruntime_src/onnxruntime/core/providers/cuda/cuda_call.cc:154 std::conditional_t<THRW, void> CudaCall() "
SUFFIX = " ; GPU=0 ; hostname=vm ; file=/onnxruntime_src/onnxruntime/core/providers/cuda/x.cc ; line=1 ; expr=f(x); \n"
PARSE = "/onnxruntime_src/onnxruntime/core/providers/cuda/info.cc:63 static onnxruntime::Info onnxruntime::Parse() "
OPTIONS = {"device_id", "enable_cuda_graph", "gpu_mem_limit", "arena_extend_strategy", "use_tf32"}
F = TypeVar("F", bound=Callable[..., Any])


def fits(real: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Raise TypeError unless `real` takes these arguments."""
    inspect.signature(real).bind(*args, **kwargs)


def like(real: Callable[..., Any]) -> Callable[[F], F]:
    """Check, at every call, that the arguments fit `real`, a method."""

    def decorate(fake: F) -> F:
        @functools.wraps(fake)
        def checked(*args: Any, **kwargs: Any) -> Any:
            fits(real, *args, **kwargs)
            return fake(*args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorate


@dataclass(frozen=True)
class Copy:
    """`size` bytes went from a device to another."""

    source: str
    target: str
    size: int


def cuda_failure(number: int, text: str) -> str:
    return f"{PREFIX}CUDA failure {number}: {text}{SUFFIX}"


class Value:
    """An OrtValue on `device`."""

    def __init__(self, fake: "FakeOnnxRuntime", real: ort.OrtValue, device: tuple[str, int]) -> None:
        self.fake = fake
        self.real = real
        self.device = device

    @like(ort.OrtValue.data_ptr)
    def data_ptr(self) -> int:
        return int(self.real.data_ptr())

    @like(ort.OrtValue.numpy)
    def numpy(self) -> Any:
        self.fake.copied(self.device, CPU, self.size)
        return self.real.numpy().copy()

    @like(ort.OrtValue.update_inplace)
    def update_inplace(self, data: "np.ndarray[Any, Any] | Value") -> None:
        if isinstance(data, Value):
            assert data.real.data_type() == self.real.data_type()
            source, address, size = data.device, data.data_ptr(), data.size
        else:
            assert data.flags.c_contiguous
            source, address, size = CPU, data.ctypes.data, data.nbytes
        assert size == self.size, "the real one does not look, and writes over what comes behind"
        ctypes.memmove(self.data_ptr(), address, size)
        self.fake.copied(source, self.device, size)

    @property
    def size(self) -> int:
        return int(self.real.tensor_size_in_bytes())


class Binding:
    """An IOBinding: a real one, over the same addresses."""

    def __init__(self, session: "Session") -> None:
        self.session = session
        self.real = session.real.io_binding()
        self.outputs: list[Value] = []
        self.kept: list[Any] = []

    @like(IOBinding.bind_input)
    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Any, buffer_ptr: int
    ) -> None:
        assert self.required(name) == (device_type, device_id), f"{name} would be copied, now and never again"
        self.real.bind_input(name, "cpu", 0, element_type, shape, buffer_ptr)

    @like(IOBinding.bind_ortvalue_input)
    def bind_ortvalue_input(self, name: str, ortvalue: Value) -> None:
        assert self.required(name) == ortvalue.device, f"{name} would be copied, now and never again"
        self.kept.append(ortvalue)
        self.real.bind_ortvalue_input(name, ortvalue.real)

    @like(IOBinding.bind_output)
    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Any = None,
        buffer_ptr: int | None = None,
    ) -> None:
        assert (device_type, device_id) == self.session.device, f"{name} would be copied, and by no replay"
        assert buffer_ptr is not None
        self.real.bind_output(name, "cpu", 0, element_type, shape, buffer_ptr)
        self.outputs.append(Value(self.session.fake, self.real.get_outputs()[-1], self.session.device))

    @like(IOBinding.bind_ortvalue_output)
    def bind_ortvalue_output(self, name: str, ortvalue: Value) -> None:
        assert self.session.device == ortvalue.device
        self.real.bind_ortvalue_output(name, ortvalue.real)
        self.outputs.append(ortvalue)

    @like(IOBinding.get_outputs)
    def get_outputs(self) -> list[Value]:
        return list(self.outputs)

    def required(self, name: str) -> tuple[str, int]:
        return CPU if name in self.session.fake.on_host else self.session.device


class Session:
    """An InferenceSession on the CPU or on a GPU of `fake`."""

    def __init__(self, fake: "FakeOnnxRuntime", path: str, options: ort.SessionOptions, providers: list[Any]) -> None:
        self.fake = fake
        self.device = CPU
        self.graphs = False
        self.unusable = False
        self.captured: dict[tuple[int, int], Any] = {}
        if isinstance(providers[0], tuple):
            name, own = providers[0]
            assert (name, providers[1:]) == ("CUDAExecutionProvider", ["CPUExecutionProvider"])
            self._start(own)
        self.real = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def _start(self, own: dict[str, str]) -> None:
        fake = self.fake
        if fake.missing_libraries:
            return  # in silence
        for key, value in own.items():
            if key not in OPTIONS:
                raise RuntimeError(
                    f'{PARSE}[ONNXRuntimeError] : 1 : FAIL : p.h:182 Parse Unknown provider option: "{key}".\n'
                )
            if key == "gpu_mem_limit" and not value.isdigit():
                raise RuntimeError(
                    f'{PARSE}[ONNXRuntimeError] : 1 : FAIL : p.h:187 Parse Failed to parse provider option "{key}": '
                    'parse_string.h:116 ParseStringWithClassicLocale Failed to parse value: "0"\n'
                )
        if fake.gpus == 0:
            raise RuntimeError(cuda_failure(100, "no CUDA-capable device is detected"))
        index = int(own.get("device_id", "0"))
        if index >= fake.gpus:
            raise RuntimeError(
                f'{PARSE}[ONNXRuntimeError] : 1 : FAIL : p.h:187 Parse Failed to parse provider option "device_id": '
                f"Invalid device ID: {index}, must be between 0 (inclusive) and {fake.gpus} (exclusive).\n"
            )
        self.device = ("cuda", index)
        self.graphs = own.get("enable_cuda_graph") == "1"
        if self.graphs and fake.cpu_operators:
            raise Fail(
                "[ONNXRuntimeError] : 1 : FAIL : This session cannot use the graph capture feature as requested by the "
                "user  as all compute graph nodes have not been partitioned to the CUDAExecutionProvider"
            )
        fake.allocate(fake.weights)
        weakref.finalize(self, fake.release, fake.weights)

    @like(ort.InferenceSession.get_providers)
    def get_providers(self) -> list[str]:
        return ["CPUExecutionProvider"] if self.device == CPU else ["CUDAExecutionProvider", "CPUExecutionProvider"]

    @like(ort.InferenceSession.get_inputs)
    def get_inputs(self) -> Any:
        return self.real.get_inputs()

    @like(ort.InferenceSession.get_outputs)
    def get_outputs(self) -> Any:
        return self.real.get_outputs()

    @like(ort.InferenceSession.get_input_memory_infos)
    def get_input_memory_infos(self) -> list[Any]:
        return self._memory_infos(self.get_inputs(), self.real.get_input_memory_infos())

    @like(ort.InferenceSession.get_output_memory_infos)
    def get_output_memory_infos(self) -> list[Any]:
        return self._memory_infos(self.get_outputs(), self.real.get_output_memory_infos())

    def _memory_infos(self, tensors: Any, real: Any) -> list[Any]:
        assert {info.name for info in real} == {"Cpu"}
        there = "Cpu" if self.device == CPU else "Cuda"
        return [SimpleNamespace(name="Cpu" if one.name in self.fake.on_host else there) for one in tensors]

    @like(ort.InferenceSession.get_provider_graph_assignment_info)
    def get_provider_graph_assignment_info(self) -> list[Any]:
        if self.device == CPU:
            return list(self.real.get_provider_graph_assignment_info())
        nodes = [node for part in self.real.get_provider_graph_assignment_info() for node in part.get_nodes()]
        parts: dict[str, list[Any]] = {"CPUExecutionProvider": [], "CUDAExecutionProvider": []}
        for node in nodes:
            on_cpu = node.op_type in self.fake.cpu_operators
            parts["CPUExecutionProvider" if on_cpu else "CUDAExecutionProvider"].append(node)
        return [SimpleNamespace(ep_name=name, get_nodes=lambda own=own: own) for name, own in parts.items()]

    @like(ort.InferenceSession.io_binding)
    def io_binding(self) -> Binding:
        return Binding(self)

    @like(ort.InferenceSession.run_with_iobinding)
    def run_with_iobinding(self, iobinding: Binding, run_options: Any = None) -> None:
        fake = self.fake
        graph = 0 if run_options is None else int(run_options.get_run_config_entry("gpu_graph_id"))
        assert iobinding.session is self
        if self.unusable:
            raise Fail(cuda_failure(901, "operation failed due to a previous error during capture"))
        if self.device != CPU and fake.fail_at is not None and len(fake.runs) == fake.fail_at:
            raise Fail(fake.failure)
        if not self.graphs or graph == -1:
            fake.runs.append((self.device[0], "run", graph))
            self.real.run_with_iobinding(iobinding.real)
            return
        key = (threading.get_ident(), graph)
        if key not in self.captured:
            fake.runs.append((self.device[0], "capture", graph))
            if fake.captures_fail:
                self.unusable = True
                self.real.run_with_iobinding(iobinding.real)  # the run before the capture
                raise Fail(cuda_failure(900, "operation not permitted when stream is capturing"))
            for _ in range(2):
                self.real.run_with_iobinding(iobinding.real)
            self.captured[key] = iobinding.real
        else:
            fake.runs.append((self.device[0], "replay", graph))
        self.real.run_with_iobinding(self.captured[key])


@dataclass
class FakeOnnxRuntime:
    """The module. `memory` is bytes per GPU; `runs` and `copies` count from its making or from `reset`."""

    gpus: int = 1
    memory: int = 1 << 40
    weights: int = 0  # bytes that a session takes
    available: tuple[str, ...] = ("CUDAExecutionProvider", "CPUExecutionProvider")
    missing_libraries: bool = False
    cpu_operators: frozenset[str] = frozenset()
    on_host: frozenset[str] = frozenset()  # inputs that the graph reads on the CPU
    captures_fail: bool = False
    fail_at: int | None = None  # the run that raises `failure`
    failure: str = ""
    allocated: int = 0
    preloaded: int = 0
    copies: list[Copy] = field(default_factory=list)
    runs: list[tuple[str, str, int]] = field(default_factory=list)

    __version__ = "1.99.0"
    cuda_version = "13.0"
    __file__ = "/nowhere/onnxruntime/__init__.py"
    SessionOptions = staticmethod(ort.SessionOptions)
    RunOptions = staticmethod(ort.RunOptions)

    @property
    def OrtValue(self) -> Any:  # noqa: N802
        return self

    def reset(self) -> None:
        self.copies.clear()
        self.runs.clear()

    def copied(self, source: tuple[str, int], target: tuple[str, int], size: int) -> None:
        if (source, target) != (CPU, CPU):
            self.copies.append(Copy(source[0], target[0], size))

    def allocate(self, size: int) -> None:
        if self.allocated + size > self.memory:
            raise RuntimeError(cuda_failure(2, "out of memory"))
        self.allocated += size

    def release(self, size: int) -> None:
        self.allocated -= size

    def get_available_providers(self) -> list[str]:
        assert ort.get_available_providers()
        return list(self.available)

    def preload_dlls(self) -> None:
        fits(ort.preload_dlls)
        self.preloaded += 1
        print("Failed to load libcufft.so.12: which nobody needs")

    def InferenceSession(self, path: str, options: Any, *, providers: Any, enable_fallback: int) -> Session:  # noqa: N802
        fits(ort.InferenceSession, path, options, providers=providers)
        assert enable_fallback == 0, "it would print a banner and go on, on the CPU"
        return Session(self, path, options, providers)

    def ortvalue_from_numpy(self, array: Any) -> Value:
        fits(ort.OrtValue.ortvalue_from_numpy, array)
        assert array.flags.c_contiguous
        return Value(self, ort.OrtValue.ortvalue_from_numpy(array), CPU)

    def ortvalue_from_shape_and_type(self, shape: Any, element_type: Any, kind: str, index: int) -> Value:
        fits(ort.OrtValue.ortvalue_from_shape_and_type, shape, element_type, kind, index)
        assert kind == "cuda"
        assert index < self.gpus
        value = Value(self, ort.OrtValue.ortvalue_from_shape_and_type(shape, element_type), (kind, index))
        self.allocate(value.size)
        weakref.finalize(value, self.release, value.size)
        ctypes.memset(value.data_ptr(), 0xFF, value.size)  # NaN, in any float type
        return value


def install(monkeypatch: pytest.MonkeyPatch, free: int | None = None, **fields: Any) -> FakeOnnxRuntime:
    """Let the runtime find onnxruntime-gpu, a driver, and `free` bytes on each GPU."""
    fake = FakeOnnxRuntime(**fields)
    monkeypatch.setitem(sys.modules, "onnxruntime", fake)
    monkeypatch.setattr("draftc.runtime.ort_session.load_library", lambda name: None)
    for module in ("devices", "ort_session"):
        monkeypatch.setattr(f"draftc.runtime.{module}.free_device_memory", lambda index: free)
    return fake
