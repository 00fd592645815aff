"""ONNX Runtime sessions: opening one on a device, checking it against the manifest, and what its failures mean.

ONNX Runtime falls back to the CPU in silence, or with a banner on stdout, where its CUDA provider cannot be used. Here
that is an error which names the piece that is missing.
"""

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import io
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from draftc.runtime.devices import DeviceOptions, free_device_memory
from draftc.runtime.errors import (
    BackendUnavailableError,
    BundleError,
    DraftcError,
    DraftcWarning,
    ResourceError,
    UsageError,
)
from draftc.runtime.graphio import GraphSpec
from draftc.runtime.memory import format_bytes

__all__ = [
    "check_io",
    "check_options",
    "cpu_inputs",
    "load_library",
    "load_onnxruntime",
    "note_no_graphs",
    "open_session",
    "out_of_memory",
    "reason",
]

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
CPU_TYPES = {"float32": "tensor(float)", "float16": "tensor(float16)", "int64": "tensor(int64)"}
ORT_TYPES = CPU_TYPES | {"bfloat16": "tensor(bfloat16)"}

HOST_MEMORY = {"Cpu", "CudaPinned"}  # names of ONNX Runtime's allocators
GRAPHS = "enable_cuda_graph"
RESERVED = {
    "device_id": 'the device says it, as in "cuda:1"',
    GRAPHS: "cuda_graph says it",
    "has_user_compute_stream": "draftc has no stream to give",
    "user_compute_stream": "draftc has no stream to give",
    "gpu_external_alloc": "draftc has no allocator to give",
    "gpu_external_free": "draftc has no allocator to give",
    "gpu_external_empty_cache": "draftc has no allocator to give",
}

# What ONNX Runtime 1.31 and 1.32 say; the signatures and file names around it are of no use to anybody.
CUDA_FAILURE = re.compile(r"(?:CUDA|CUBLAS|CUDNN|CURAND) failure \d+: [^;]*[^;\s]")
STATUS = re.compile(r"\[ONNXRuntimeError\] : \d+ : \w+ : ")
NO_MEMORY = re.compile(r"out of memory|Failed to allocate memory|smaller than requested bytes|ALLOC_FAILED")
REQUESTED = re.compile(r"requested (?:buffer of size|bytes of) (\d+)")
BAD_OPTION = re.compile(r'(Unknown|Failed to parse) provider option:? "([^"]*)"')
NO_CAPTURE = re.compile(r"graph capture", re.IGNORECASE)
MISSING_LIBRARY = re.compile(r"^(lib[^:]+): cannot open shared object")


def check_options(options: DeviceOptions) -> None:
    """Raise UsageError unless this backend serves the device and may be given the options."""
    if options.kind not in PROVIDERS or options.device.startswith("cpu:"):
        raise UsageError(f"unknown device {options.device!r}: this backend serves {', '.join(PROVIDERS)}")
    if options.kind == "cpu" and options.provider_options:
        raise UsageError(f"provider option {next(iter(options.provider_options))}: device cpu takes none, cuda does")
    for name in options.provider_options:
        if name in RESERVED:
            raise UsageError(f"provider option {name} is not taken: {RESERVED[name]}")


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


def open_session(path: Path, spec: GraphSpec, options: DeviceOptions) -> tuple[Any, bool]:
    """(session of the graph at `path`, whether it captures CUDA graphs).

    Where ONNX Runtime refuses to capture this graph, that is a warning, and the session runs it kernel by kernel.
    Raises BackendUnavailableError, BundleError, ResourceError, UsageError.
    """
    ort = load_onnxruntime()
    for tensor in spec.inputs:
        if options.kind == "cpu" and tensor.dtype not in CPU_TYPES:
            raise BackendUnavailableError(
                f"ONNX Runtime on cpu has no kernels for {tensor.dtype}: compile with --precision fp32"
            )
    if options.kind == "cpu":
        return _session(ort, path, spec, options, graphs=False), False
    _prepare_cuda(ort, spec)
    if not options.cuda_graph:
        return _session(ort, path, spec, options, graphs=False), False
    try:
        session = _session(ort, path, spec, options, graphs=True)
    except _CannotCaptureError as refusal:
        session = _session(ort, path, spec, options, graphs=False)
        note_no_graphs(path, f"{refusal}{_on_the_cpu(session)}")
        return session, False
    if not (moved := cpu_inputs(session)):
        return session, True
    del session  # first: there may be no room for the weights twice
    note_no_graphs(path, f"ONNX Runtime reads {', '.join(sorted(moved))} on the CPU, where no replay looks again")
    return _session(ort, path, spec, options, graphs=False), False


class _CannotCaptureError(Exception):
    """ONNX Runtime will not capture this graph; the message is its reason."""


def _session(ort: Any, path: Path, spec: GraphSpec, options: DeviceOptions, *, graphs: bool) -> Any:
    settings = ort.SessionOptions()
    # Draft and target alternate. Without this, the idle session's pool spins through the other one's call.
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    settings.log_severity_level = 4 if graphs else 3  # its refusal to capture is reported here, not logged
    if options.threads is not None:
        settings.intra_op_num_threads = options.threads
    providers: list[Any] = [PROVIDERS["cpu"]]
    if options.kind == "cuda":
        settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        own = dict(options.provider_options)
        if options.index:  # ONNX Runtime logs a warning where it is given, even as 0
            own["device_id"] = str(options.index)
        if graphs:
            own[GRAPHS] = "1"
        providers.insert(0, (PROVIDERS["cuda"], own))
    try:
        session = ort.InferenceSession(str(path), settings, providers=providers, enable_fallback=0)
    except Exception as error:  # onnxruntime raises its own classes, which share no base but Exception
        if graphs and NO_CAPTURE.search(str(error)):
            raise _CannotCaptureError(reason(error)) from error
        raise _opening_failure(error, ort, path, spec, options) from error
    if PROVIDERS[options.kind] not in session.get_providers():
        raise BackendUnavailableError(f"{_why_no_cuda(ort)}; {_instead(spec)}")
    return session


def _opening_failure(error: Exception, ort: Any, path: Path, spec: GraphSpec, options: DeviceOptions) -> DraftcError:
    said = reason(error)
    if problem := out_of_memory(error, options, f"the weights of {path.name}"):
        return problem
    if CUDA_FAILURE.search(str(error)):
        return BackendUnavailableError(f"device {options.device} cannot be used ({said}); {_instead(spec)}")
    if option := BAD_OPTION.search(str(error)):
        name = option[2]
        if name == "device_id":
            return BackendUnavailableError(f"there is no {options.device} here ({said})")
        if option[1] == "Unknown":
            return UsageError(f"provider option {name!r} is unknown to ONNX Runtime {ort.__version__}'s CUDA provider")
        return UsageError(f"provider option {name}: ONNX Runtime cannot read {options.provider_options.get(name)!r}")
    return BundleError(f"ONNX Runtime {ort.__version__} cannot load {path.name}: {said}")


def reason(error: Exception) -> str:
    """What ONNX Runtime says went wrong, on one line."""
    text = str(error).strip()
    if failure := CUDA_FAILURE.search(text):
        return failure.group()
    lines = STATUS.split(text)[-1].strip().splitlines()
    return " ".join(lines[0].split()) if lines else type(error).__name__


def out_of_memory(error: Exception, options: DeviceOptions, what: str) -> ResourceError | None:
    """The error to raise when `error` says that the device had no memory for `what`, else None."""
    if not NO_MEMORY.search(str(error)):
        return None
    requested = REQUESTED.search(str(error))
    free = free_device_memory(options.index) if options.kind == "cuda" else None
    numbers = [f"{format_bytes(int(requested[1]))} more is needed"] if requested else []
    numbers += [f"{format_bytes(free)} is free"] if free is not None else []
    return ResourceError(
        f"{options.device} has no memory for {what} ({', '.join(numbers) or reason(error)}): close other programs, "
        "raise gpu_mem_limit if it was given, or compile with a smaller --max-length"
    )


# What a CUDA session needs


def _prepare_cuda(ort: Any, spec: GraphSpec) -> None:
    """Raise BackendUnavailableError where it is known beforehand that the CUDA provider cannot start."""
    if PROVIDERS["cuda"] not in ort.get_available_providers():
        raise BackendUnavailableError(
            f"device cuda needs onnxruntime-gpu, and the installed onnxruntime {ort.__version__} has the CPU alone: "
            f"pip uninstall -y onnxruntime, then pip install 'draftc[gpu]'; {_instead(spec)}"
        )
    if sys.platform == "linux" and load_library("libcuda.so.1") is not None:
        raise BackendUnavailableError(
            f"device cuda needs an NVIDIA driver, and libcuda.so.1 is not found: install a driver for CUDA "
            f"{ort.cuda_version or '12 or newer'}; {_instead(spec)}"
        )
    if importlib.util.find_spec("nvidia") is not None:  # CUDA from pip lies where only this looks
        with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does not find, needed or not
            ort.preload_dlls()


def load_library(name: str) -> str | None:
    """Load a shared library; None, or why it cannot be loaded."""
    try:
        ctypes.CDLL(name)
    except OSError as error:
        return str(error)
    return None


def _why_no_cuda(ort: Any) -> str:
    """Why ONNX Runtime left its CUDA provider out, found out in the way in which it fails: by loading it."""
    said = load_library(str(Path(ort.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"))
    missing = MISSING_LIBRARY.match(said or "")
    cause = f"{missing[1]} is not found" if missing else said or "it does not say why"
    return (
        f"onnxruntime-gpu {ort.__version__} cannot start its CUDA provider ({cause}): it needs CUDA "
        f"{ort.cuda_version}, as from pip install 'onnxruntime-gpu[cuda,cudnn]'"
    )


def _instead(spec: GraphSpec) -> str:
    foreign = {tensor.dtype for tensor in spec.inputs} - CPU_TYPES.keys()
    return f"device cpu has no kernels for {foreign.pop()}" if foreign else "device cpu works here"


def note_no_graphs(path: Path, cause: str) -> None:
    """Warn that calls of the graph at `path` are not captured."""
    message = f"{path.parent.name}/{path.name} runs without CUDA graphs, so each call costs more: {cause}"
    warnings.warn(message, DraftcWarning, stacklevel=2)


def _on_the_cpu(session: Any) -> str:
    """Which operators ONNX Runtime does not run on the GPU."""
    subgraphs = session.get_provider_graph_assignment_info()
    operators = {node.op_type for part in subgraphs if part.ep_name == PROVIDERS["cpu"] for node in part.get_nodes()}
    return f" (on the CPU: {', '.join(sorted(operators))})" if operators else ""


# What a session expects


def cpu_inputs(session: Any) -> set[str]:
    """Names of the inputs that the graph reads from the host's memory, though it runs on a GPU."""
    infos = zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
    return {tensor.name for tensor, info in infos if info.name in HOST_MEMORY}


def check_io(session: Any, spec: GraphSpec, options: DeviceOptions) -> None:
    """Raise unless the session's inputs and outputs are those of `spec`, and its caches live on its device.

    Raises BundleError and BackendUnavailableError.
    """
    if spec.tail is not None:
        raise BundleError(
            f"the graph has a {spec.tail} tail, which this backend does not run: compile the bundle again"
        )
    for kind, expected, actual in (
        ("input", spec.inputs, session.get_inputs()),
        ("output", spec.outputs, session.get_outputs()),
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
    if options.kind == "cuda":
        # A binding copies what is elsewhere: past and present would be two buffers, and no write would be seen.
        outputs = zip(session.get_outputs(), session.get_output_memory_infos(), strict=True)
        elsewhere = cpu_inputs(session) | {tensor.name for tensor, info in outputs if info.name in HOST_MEMORY}
        for past, present in spec.cache_pairs:
            if {past.name, present.name} & elsewhere:
                raise BackendUnavailableError(
                    f"this ONNX Runtime has no CUDA kernel that writes {past.dtype} caches{_on_the_cpu(session)}: "
                    f"install a newer onnxruntime-gpu, or compile with another --precision; {_instead(spec)}"
                )
