"""The small classes of the fake TensorRT: enums, the logger, and how contexts are configured. See fake_tensorrt."""

import enum
from typing import TypeAlias

__all__ = [
    "DTYPES",
    "ENUMS",
    "HEADER",
    "MAGIC",
    "RTX_ONLY",
    "VERSION",
    "CudaGraphStrategy",
    "DataType",
    "Dims",
    "DynamicShapesKernelSpecializationStrategy",
    "EngineInvalidityDiagnostics",
    "EngineValidity",
    "ExecutionContextAllocationStrategy",
    "IHostMemory",
    "ILogger",
    "IRuntimeCache",
    "IRuntimeConfig",
    "RtxRuntimeConfig",
    "Severity",
    "TensorIOMode",
    "TensorLocation",
]

VERSION = "1.7.1.116"
MAGIC = b"vtrt"  # of an engine file
HEADER = 64  # bytes


class DataType(enum.Enum):
    FLOAT = 0
    HALF = 1
    BF16 = 7
    INT64 = 8


class TensorIOMode(enum.Enum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


class TensorLocation(enum.Enum):
    DEVICE = 0
    HOST = 1


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC = 0
    USER_MANAGED = 2


class CudaGraphStrategy(enum.Enum):
    DISABLED = 0
    WHOLE_GRAPH_CAPTURE = 1


class DynamicShapesKernelSpecializationStrategy(enum.Enum):
    LAZY = 0
    EAGER = 1
    NONE = 2


class EngineValidity(enum.Enum):
    VALID = 0
    SUBOPTIMAL = 1
    INVALID = 2


class EngineInvalidityDiagnostics(enum.Enum):
    VERSION_MISMATCH = 1
    UNSUPPORTED_CC = 2
    OLD_CUDA_DRIVER = 4
    OLD_CUDA_RUNTIME = 8
    INSUFFICIENT_GPU_MEMORY = 16
    MALFORMED_ENGINE = 32
    CUDA_ERROR = 64


class Severity(enum.Enum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2


DTYPES = {"float32": DataType.FLOAT, "float16": DataType.HALF, "bfloat16": DataType.BF16, "int64": DataType.INT64}


class ILogger:
    Severity: TypeAlias = Severity

    def __init__(self) -> None:
        self.fake_ready = True

    def log(self, severity: Severity, msg: str) -> None:
        raise NotImplementedError


class Dims(tuple[int, ...]):
    __slots__ = ()


class IHostMemory(bytes):
    __slots__ = ()


class IRuntimeCache:
    """Holds a count of the kernels that contexts had to make."""

    def __init__(self) -> None:
        self.fake_kernels: set[str] = set()

    def deserialize(self, blob: bytes) -> bool:
        if not blob.startswith(b"kernels:"):
            return False
        self.fake_kernels = set(blob.removeprefix(b"kernels:").decode().split())
        return True

    def serialize(self) -> IHostMemory:
        return IHostMemory(b"kernels:" + " ".join(sorted(self.fake_kernels)).encode())


class IRuntimeConfig:
    def __init__(self) -> None:
        self.fake_strategy = ExecutionContextAllocationStrategy.STATIC

    def set_execution_context_allocation_strategy(
        self, strategy: ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy.STATIC
    ) -> None:
        self.fake_strategy = strategy


class RtxRuntimeConfig(IRuntimeConfig):
    cuda_graph_strategy = CudaGraphStrategy.DISABLED
    dynamic_shapes_kernel_specialization_strategy = DynamicShapesKernelSpecializationStrategy.LAZY
    fake_cache: IRuntimeCache | None = None

    def create_runtime_cache(self) -> IRuntimeCache:
        return IRuntimeCache()

    def set_runtime_cache(self, cache: IRuntimeCache | None = None) -> bool:
        self.fake_cache = cache
        return True


RTX_ONLY: tuple[type[enum.Enum], ...] = (
    CudaGraphStrategy,
    DynamicShapesKernelSpecializationStrategy,
    EngineInvalidityDiagnostics,
    EngineValidity,
)
ENUMS: tuple[type[enum.Enum], ...] = (
    *RTX_ONLY,
    DataType,
    TensorIOMode,
    TensorLocation,
    ExecutionContextAllocationStrategy,
)
