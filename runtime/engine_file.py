"""A TensorRT engine file, and what must be true of it before it runs. The checks come in the order of what they need:

    files alone     the package is installed, in the version that built the engine; the file begins as an engine does
    a driver        it is new enough; the GPU is one that the engine was built for, and has room
    the engine      its tensors, profiles and aliases are those of bundle.json

TensorRT for RTX (`tensorrt_rtx`) and TensorRT (`tensorrt`) share these calls. What only the first has: a check of the
header, settings for its compiler, which finishes the engine's kernels on the GPU at hand, and a cache of the result.
"""

import contextlib
import hashlib
import importlib
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftc.runtime.errors import BackendUnavailableError, BundleError, BundleVersionError, EngineError, ResourceError
from draftc.runtime.folders import cache_folder
from draftc.runtime.graphio import INPUT_IDS, LOGIT_POSITIONS, PAST_Q, PRESENT_Q, PROPOSAL, GraphSpec
from draftc.runtime.memory import format_bytes
from draftc.runtime.records import Backend, EngineInfo

__all__ = ["MODULES", "EngineFile", "KernelCache", "load_tensorrt"]

MODULES = {"tensorrt-rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}  # backend, which is also the extra → import name
DTYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT64": "int64"}
AGAIN = "compile the bundle again"
KEY_BYTES = 65536  # of an engine, to tell it from others


def load_tensorrt(flavour: str) -> Any:
    """The Python module of "tensorrt-rtx" or "tensorrt". Raises BackendUnavailableError where it is missing."""
    try:
        return importlib.import_module(MODULES[flavour])
    except ImportError as error:
        raise BackendUnavailableError(
            f"this bundle needs {flavour} ({error}): pip install 'draftc[{flavour}]'"
        ) from None


class EngineFile:
    """An engine file with the module that runs it. `logger` must live as long as anything made through it.

    The constructor makes the checks that need files alone. Raises BackendUnavailableError, BundleVersionError,
    BundleError.
    """

    def __init__(self, path: Path, built: Backend) -> None:
        self.path = path
        self.built = built
        self.trt = load_tensorrt(built.name)
        self.is_rtx = built.name == "tensorrt-rtx"
        if self.trt.__version__ != built.version:
            raise BundleVersionError(
                f"this bundle's engines are of {built.name} {built.version}, {self.trt.__version__} is installed: "
                f"pip install '{built.name}=={built.version}', or {AGAIN} with the installed version"
            )
        self.logger = _make_logger(self.trt)
        self.runtime = self.trt.Runtime(self.logger)
        if self.is_rtx:
            self._check_header(only_format=True)

    def cause(self) -> str:
        """What TensorRT complained about first since the last time this was asked, on one line."""
        errors, self.logger.errors = self.logger.errors, []
        return " ".join(errors[0].split()) if errors else "it does not say why"

    def check_gpu(self, sm: str, name: str) -> None:
        """Raise unless a GPU of compute capability `sm` ("89" is 8.9) can run the engine.

        Raises BackendUnavailableError, or what the header says: BundleVersionError, BundleError, ResourceError.
        """
        if self.built.sms and sm not in self.built.sms:
            raise BackendUnavailableError(
                f"this bundle's engines were built for SM {', '.join(self.built.sms)}, {name} has SM {sm}: "
                f"{AGAIN} with --sm {sm}"
            )
        if self.is_rtx:
            self._check_header(only_format=False)

    def _check_header(self, *, only_format: bool) -> None:
        """Without a driver, `only_format` is all that TensorRT for RTX can tell."""
        with self.path.open("rb") as file:
            header = file.read(self.runtime.engine_header_size)
        validity, diagnostics = self.runtime.get_engine_validity(header)
        found = {kind for kind in self.trt.EngineInvalidityDiagnostics.__members__.values() if diagnostics & kind.value}
        kinds = self.trt.EngineInvalidityDiagnostics
        if kinds.MALFORMED_ENGINE in found:
            raise BundleError(f"{self.path.name} is no engine of {self.built.name}: copy the bundle again, or {AGAIN}")
        if only_format or validity != self.trt.EngineValidity.INVALID:
            return
        said = f"{self.built.name} {self.built.version} refuses {self.path.name}: {self.cause()}"
        if kinds.VERSION_MISMATCH in found:
            raise BundleVersionError(f"{said}; {AGAIN}")
        if kinds.INSUFFICIENT_GPU_MEMORY in found:
            raise ResourceError(f"{said}; close other programs")
        raise BackendUnavailableError(f"{said}; update the driver, or {AGAIN} for this GPU")

    def deserialize(self) -> Any:
        """The engine, its weights on the GPU. Raises BundleError, or ResourceError where they do not fit there."""
        self.logger.errors = []
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            engine = self.runtime.deserialize_cuda_engine(data)
        if engine is not None:
            return engine
        cause = self.cause()
        if "memory" in cause.lower():
            size = format_bytes(self.path.stat().st_size)
            raise ResourceError(f"no room on the GPU for {self.path.name}, {size} ({cause}): close other programs")
        raise BundleError(f"{self.path.name} cannot be read ({cause}): copy the bundle again, or {AGAIN}")

    def check_engine(self, engine: Any, spec: GraphSpec, info: EngineInfo) -> None:
        """Raise BundleError unless tensors and profiles of `engine` are those of bundle.json, its caches in place."""
        outputs = self.trt.TensorIOMode.OUTPUT
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        for kind, tensors in (("input", spec.inputs), ("output", spec.outputs)):
            found = {name for name in names if (engine.get_tensor_mode(name) == outputs) == (kind == "output")}
            if found != {tensor.name for tensor in tensors}:
                raise BundleError(f"the {kind}s of {self.path.name} are not those of bundle.json: {AGAIN}")
            for tensor in tensors:
                dtype = DTYPES.get(engine.get_tensor_dtype(tensor.name).name)
                shape = tuple(engine.get_tensor_shape(tensor.name))
                fits = len(shape) == len(tensor.shape) and all(
                    # A batch range of one size makes it a fixed dimension.
                    have == want if isinstance(want, int) else have == -1 or (want == "B" and have >= 1)
                    for have, want in zip(shape, tensor.shape, strict=True)
                )
                if dtype != tensor.dtype or not fits:
                    said = f"bundle.json says {tensor.dtype} {list(tensor.shape)}"
                    raise BundleError(f"{kind} {tensor.name} of {self.path.name} is {dtype} {list(shape)}, {said}")
                if engine.get_tensor_location(tensor.name) != self.trt.TensorLocation.DEVICE:
                    raise BundleError(f"{kind} {tensor.name} of {self.path.name} must be in host memory: {AGAIN}")
        pairs = [(past.name, present.name) for past, present in spec.cache_pairs]
        for past, present in [*pairs, *([(PAST_Q, PRESENT_Q)] if spec.tail == "draft" else [])]:
            if engine.get_aliased_input_tensor(present) != past:
                raise BundleError(f"{self.path.name} does not write {present} in place: {AGAIN}")
        self._check_profiles(engine, info)

    def _check_profiles(self, engine: Any, info: EngineInfo) -> None:
        if engine.num_optimization_profiles != len(info.profiles):
            raise BundleError(f"the profiles of {self.path.name} are not those of bundle.json: {AGAIN}")
        for index, profile in enumerate(info.profiles):
            for name, length in ((INPUT_IDS, profile.tokens), (LOGIT_POSITIONS, profile.rows)):
                shapes = [tuple(shape) for shape in engine.get_tensor_profile_shape(name, index)]
                said = [(getattr(profile.batch, end), getattr(length, end)) for end in ("min", "opt", "max")]
                if shapes != said:
                    raise BundleError(
                        f"profile {profile.name} of {self.path.name} takes {name} of {shapes}, bundle.json says {said}"
                    )

    def proposal_width(self, engine: Any, spec: GraphSpec, index: int) -> int:
        """The widest "P" that profile `index` takes; 1 for a graph without it."""
        if spec.tail != "draft":
            return 1
        return int(tuple(engine.get_tensor_profile_shape(PROPOSAL, index)[2])[1])

    def make_context(self, engine: Any, *, fixed: bool, cache: "KernelCache | None") -> Any:
        """An execution context whose scratch memory the caller provides. Raises EngineError.

        `fixed`: its calls are all of one shape and are captured into a CUDA graph, so that kernels for that shape are
        finished before the first call; others begin with general kernels, and the better ones come when they are ready.
        """
        trt = self.trt
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if self.is_rtx:
            strategies = trt.DynamicShapesKernelSpecializationStrategy
            config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER if fixed else strategies.LAZY
            config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED  # whole steps are captured, not single calls
            if cache is not None:
                cache.attach(config)
        self.logger.errors = []
        context = engine.create_execution_context(runtime_config=config)
        if context is None:
            raise EngineError(f"{self.built.name} cannot prepare {self.path.name}: {self.cause()}")
        return context

    def is_capturable(self, context: Any, stream: int) -> bool:
        """Whether a call of `context` can become part of a CUDA graph; TensorRT's always can, with fixed shapes."""
        return not self.is_rtx or bool(context.is_stream_capturable(stream))


class KernelCache:
    """The kernels that TensorRT for RTX finished on this GPU, kept in the user's cache folder between runs.

    TensorRT refuses a file from another version, driver or GPU; then it begins anew. It must outlive all contexts.
    """

    def __init__(self, engine_path: Path) -> None:
        with engine_path.open("rb") as file:
            key = hashlib.sha256(file.read(KEY_BYTES) + str(engine_path.stat().st_size).encode()).hexdigest()
        self.path = cache_folder() / "tensorrt-rtx" / f"{key[:32]}.bin"
        self._cache: Any = None
        self._loaded = b""

    def attach(self, config: Any) -> None:
        """Make `config`, of a context that is about to be created, use the cache."""
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            with contextlib.suppress(OSError):  # none yet, or not readable: compiled again
                self._loaded = self.path.read_bytes()
            if self._loaded and not self._cache.deserialize(self._loaded):
                self._loaded = b""
        config.set_runtime_cache(self._cache)

    def save(self) -> None:
        """Write the cache's file where its content has changed. A folder that can't be written to costs time alone."""
        if self._cache is None:
            return
        data, self._cache = self._cache.serialize(), None
        if data is None or (data := bytes(data)) == self._loaded:
            return
        with contextlib.suppress(OSError), _replacing(self.path) as part:
            part.write_bytes(data)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` that takes its place at the end: two processes may do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent)
    os.close(handle)
    try:
        yield Path(part)
        os.replace(part, path)
    finally:
        Path(part).unlink(missing_ok=True)


def _make_logger(trt: Any) -> Any:
    """A logger that keeps errors, for the one line that a user reads. TensorRT calls it from any thread."""

    class Errors(trt.ILogger):  # type: ignore[misc]  # a class of the module at hand
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, msg: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(msg)

    return Errors()
