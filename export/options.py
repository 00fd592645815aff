"""What `draftc compile` was asked for, checked before anything is loaded."""

from dataclasses import dataclass, replace
from pathlib import Path

from draftc.export.half import Half
from draftc.export.nbits import NBits
from draftc.export.qdq import Dequantize
from draftc.export.scheme import QuantizationScheme
from draftc.runtime.devices import Role
from draftc.runtime.errors import UsageError
from draftc.runtime.records import INT32_MAX, BackendName, Device, Precision

__all__ = ["CompileOptions"]


@dataclass(frozen=True)
class CompileOptions:
    """One compile.

    `target` and `draft` are sources (a folder, a hub id, a .gguf file); `draft` may be "ngram". `half` is the type that
    graphs compute in, None float32; `scheme` None keeps weights in that type; its `blocks` are the target's.
    `max_length` None is 2048, or the target's context where that is shorter. `sms` are the GPUs that TensorRT-RTX
    engines are built for, `batch` the fewest and the most rows that an engine takes. A licence that the source itself
    names goes before `target_license` and `draft_license`. `draft_vocab` cuts the draft's head to so many tokens, the
    most frequent ones of the text files `draft_corpus`, or of Python's standard library where there are none; 0 keeps
    all. `calibration` is the text file that GPTQ sees, None Python's standard library. Raises UsageError for values out
    of range or that do not go together.
    """

    target: str
    draft: str
    out: Path
    backend: BackendName = "onnxruntime"
    device: Device = "cpu"
    sms: tuple[str, ...] = ()
    batch: tuple[int, int] = (1, 1)
    half: Half | None = None
    scheme: QuantizationScheme | None = None
    calibration: Path | None = None
    num_speculative_tokens: int = 4
    max_length: int | None = None
    max_width: int = 32
    prefill_chunk: int = 256
    min_ngram: int = 2
    max_ngram: int = 6
    draft_vocab: int = 0
    draft_corpus: tuple[Path, ...] = ()
    force: bool = False
    trust_remote_code: bool = False
    name: str | None = None
    target_license: str | None = None
    draft_license: str | None = None

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 8:
            raise UsageError(f"max_length must be 8 or more, got {self.max_length}")
        if not 2 <= self.max_width <= 256:
            raise UsageError(f"max_width must be 2 to 256, got {self.max_width}")
        if self.max_length is not None and self.max_length > INT32_MAX - self.max_width:
            raise UsageError(f"max_length must be {INT32_MAX - self.max_width} or less, got {self.max_length}")
        if not self.bundle_name.strip() or not self.bundle_name.isprintable():
            raise UsageError(f"the bundle's name must be printable text, got {self.bundle_name!r}: pass another --name")
        if not 1 <= self.num_speculative_tokens < self.max_width:
            allowed = f"1 to {self.max_width - 1} (below max_width {self.max_width})"
            raise UsageError(f"num_speculative_tokens must be {allowed}, got {self.num_speculative_tokens}")
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise UsageError(f"n-grams need 1 <= min_ngram <= max_ngram, got {self.min_ngram} and {self.max_ngram}")
        if self.prefill_chunk < 1:
            raise UsageError(f"prefill_chunk must be 1 or more, got {self.prefill_chunk}")
        self._check_draft_vocab()
        self._check_backend()

    def _check_draft_vocab(self) -> None:
        if self.draft_vocab < 0:
            raise UsageError(f"--draft-vocab must be 0 (all tokens) or more, got {self.draft_vocab}")
        if self.draft_corpus and not self.draft_vocab:
            raise UsageError("--draft-corpus says which tokens --draft-vocab keeps: give both")
        if self.draft_vocab and self.draft == "ngram":
            raise UsageError("--draft-vocab cuts a draft model's head, n-grams have none: leave it out")
        if self.draft_vocab and self.engines:
            raise UsageError(f"--draft-vocab is not offered for {self.backend} engines yet: leave it out")

    def _check_backend(self) -> None:
        if self.scheme is not None:
            (Dequantize if self.engines else NBits).check(self.scheme)
        if self.calibration is not None and (self.scheme is None or self.scheme.rounding != "gptq"):
            raise UsageError("--calibration is the text for --rounding gptq: leave it out, or round with gptq")
        fewest, most = self.batch
        if not 1 <= fewest <= most <= 64:
            raise UsageError(f"batch must be 1 to 64 rows, or a range such as 1..4, got {fewest}..{most}")
        if self.engines:
            if self.half is None:
                raise UsageError(
                    f"{self.backend} engines compute in half precision: use --precision fp16, bf16, int8, int4 or fp8"
                )
            if self.device != "cuda":
                raise UsageError(f"{self.backend} engines run on CUDA devices only, got device {self.device!r}")
            return
        if self.sms or self.batch != (1, 1):
            raise UsageError("--sm and --batch describe TensorRT engines: they need --backend tensorrt-rtx or tensorrt")
        if self.half is not None and self.device != "cuda":
            raise UsageError(f"graphs in {self.half} need --device cuda: on the CPU they are slower than fp32")

    @property
    def engines(self) -> bool:
        """Whether graphs become TensorRT engines."""
        return self.backend != "onnxruntime"

    @property
    def bundle_name(self) -> str:
        """The name that was asked for, or that of the output folder."""
        return self.out.resolve().name if self.name is None else self.name

    def scheme_of(self, role: Role) -> QuantizationScheme | None:
        """How one model's weights are rounded: block sizes by name are of the target's."""
        if self.scheme is None or role == "target":
            return self.scheme
        return replace(self.scheme, blocks=())

    @property
    def precision(self) -> Precision:
        """The manifest's word for the weights' type."""
        if self.scheme is None:
            return self.half or "fp32"
        return "fp8" if self.scheme.format == "fp8" else "int4" if self.scheme.bits == 4 else "int8"
