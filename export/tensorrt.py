"""TensorRT engines, ahead of time: one ONNX graph becomes one engine file.

One builder serves both packages: `tensorrt-rtx` builds on any machine for a list of GPU architectures (each GPU
finishes the compilation when it first runs the engine), `tensorrt` builds for the GPU that is present. The parser
accepts some graphs and computes something else, so known forms are refused before it, and what it made is counted.
"""

import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import clear_frames
from typing import Any, Literal

import onnx_ir as ir

from draftc.runtime.engine_file import MODULES
from draftc.runtime.errors import BackendUnavailableError, CaptureError, ResourceError, UsageError
from draftc.runtime.folders import cache_folder
from draftc.runtime.graphio import PRESENT_Q, GraphSpec
from draftc.runtime.records import Profile

__all__ = ["Built", "Flavour", "Progress", "build_engine", "check_forms", "check_sms", "known_sms", "load_tensorrt"]

Flavour = Literal["tensorrt-rtx", "tensorrt"]

# The lowest compute capability with hardware for a type; fp16, and int8 weights that are widened to it, run on all.
FIRST_SM = {"bf16": 80, "int4": 80, "fp8": 89}

# What to do about an operator that the parser refuses; where nothing is known, another backend.
WAYS_OUT = {
    "Attention": "the pass DecomposeAttention writes out the forms that it knows to be refused; this is another one",
    "TopK": "TensorRT selects at most 3840 of a row",
}

_MEMORY = re.compile(r"Total (Weights|Activation) Memory: (\d+) bytes")
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Built:
    """What the network and the plan have: attention and cache layers, bytes of weights, and of activations by profile.

    Bytes are 0 where the builder's log does not tell.
    """

    attention: int
    cache: int
    weights_bytes: int = 0
    activation_bytes: tuple[int, ...] = ()


def load_tensorrt(flavour: Flavour) -> Any:
    """The Python module of `flavour`. Raises BackendUnavailableError when it is missing or broken."""
    try:
        module = importlib.import_module(MODULES[flavour])
    except ImportError as error:
        source = " (it comes from NVIDIA's own package index)" if flavour == "tensorrt" else ""
        raise BackendUnavailableError(
            f"{flavour} is not installed ({error}): pip install 'draftc[{flavour}]'{source}"
        ) from None
    if not hasattr(module, "Builder"):
        raise BackendUnavailableError(f"{flavour} is installed without its libraries: install it again")
    return module


def known_sms(trt: Any) -> tuple[str, ...]:
    """Compute capabilities that the module builds for, as "89" for 8.9; none where it builds for the GPU at hand."""
    members = getattr(getattr(trt, "ComputeCapability", None), "__members__", {})
    found = (re.fullmatch(r"SM(\d+)", name) for name in members)
    return tuple(sorted((match[1] for match in found if match), key=int))


def check_sms(flavour: Flavour, trt: Any, sms: tuple[str, ...], types: tuple[str, ...]) -> tuple[str, ...]:
    """The GPUs to build for, as "89" for 8.9, or a refusal.

    One that the flavour does not know, or without hardware for one of `types` (as "bf16", "int4"), is refused.
    `tensorrt` builds for the GPU at hand: `sms` must be empty, and the answer is that GPU. Raises UsageError, which
    names the GPU, and BackendUnavailableError where there is none.
    """
    if flavour == "tensorrt":
        if sms:
            raise UsageError("tensorrt builds for this machine's GPU: leave out --sm, or use --backend tensorrt-rtx")
        sms = (_sm_at_hand(),)
    else:
        known = known_sms(trt)
        if not sms:
            raise UsageError(f"--sm is missing: name the GPUs to build for, of {', '.join(known)} (89 is 8.9)")
        for sm in sms:
            if sm not in known:
                raise UsageError(f"{flavour} {trt.__version__} does not build for SM {sm}: it knows {', '.join(known)}")
        if len(set(sms)) != len(sms):
            raise UsageError(f"--sm names a GPU twice: {', '.join(sms)}")
    for sm in sms:
        for kind in types:
            if int(sm) < FIRST_SM.get(kind, 0):
                raise UsageError(
                    f"SM {sm} cannot run {kind}: it needs SM {FIRST_SM[kind]} or later; use --precision fp16"
                )
    return sms


def _sm_at_hand() -> str:
    """The compute capability of the first GPU."""
    try:
        from cuda.core import Device
    except ImportError as error:
        raise BackendUnavailableError(f"tensorrt needs cuda-python ({error}): pip install 'draftc[tensorrt]'") from None
    try:
        major, minor = Device(0).compute_capability
    except Exception as error:  # without a driver: classes of cuda.core that share no base
        reason = " ".join(str(error).split()) or type(error).__name__
        raise BackendUnavailableError(
            f"tensorrt builds for the GPU of this machine, and there is none ({reason}): use --backend tensorrt-rtx"
        ) from None
    return f"{major}{minor}"


def check_forms(model: ir.Model) -> None:
    """Raise CaptureError for a form that TensorRT refuses with an unclear message, or accepts and computes wrongly."""
    inputs, outputs = set(model.graph.inputs), set(model.graph.outputs)
    for node in model.graph.all_nodes():
        reason = None
        if node.domain not in ("", "ai.onnx"):
            reason = f"it is an operator of {node.domain}"
        elif node.op_type == "Attention":
            reason = _attention_fault(node)
        elif node.op_type == "TensorScatter":
            cache, written = node.inputs[0], node.outputs[0]
            if cache not in inputs or written not in outputs:
                reason = "the cache that it writes must be an input of the graph, and its result an output"
            elif node.attributes.get_int("axis", -2) not in (2, -2):
                reason = "it writes along another axis than the third of four"
            elif node.attributes.get_string("mode", "linear") != "linear":
                reason = "it wraps around"
        if reason is not None:
            raise CaptureError(f"node {node.name} ({node.op_type}) cannot become a TensorRT layer: {reason}")


def _attention_fault(node: ir.Node) -> str | None:
    extra = [operand for operand in node.inputs[4:] if operand is not None]
    if extra:
        return "it has past, present or length inputs, which TensorRT drops without a word"
    if node.attributes.get_int("is_causal", 0):
        return "is_causal counts from the upper left corner of the cache there: it needs an explicit mask"
    if len(node.inputs) < 4 or node.inputs[3] is None:
        return "it has no mask, so it would read slots of the cache that hold nothing"
    if node.attributes.get_float("softcap", 0.0):
        return "it caps its scores: the pass DecomposeAttention must have written it out"
    return None


def build_engine(
    flavour: Flavour,
    graph: Path,
    spec: GraphSpec,
    profiles: tuple[Profile, ...],
    sms: tuple[str, ...],
    engine: Path,
    log: Path,
    progress: Progress | None = None,
) -> Built:
    """Build `graph` (an ONNX file whose tensors are `spec`) into the file `engine`, with the builder's log in `log`.

    Two builds of a graph have the same size and memory, but not the same bytes. TensorRT-RTX times nothing; TensorRT
    times kernels, and keeps what it found in the user's cache folder. `progress` is told steps of the outermost phase,
    in another thread. Raises BackendUnavailableError, CaptureError when the parser refuses a node or what it made is
    not the graph, ResourceError when the builder fails, and whatever `progress` raises; that, and an interrupt, stop
    the build at its next step.
    """
    trt = load_tensorrt(flavour)
    monitor = _monitor(trt, progress)
    # In a thread of its own: the bindings swallow an interrupt that arrives while a callback runs in the main thread.
    with log.open("w", encoding="utf-8") as file, ThreadPoolExecutor(1) as pool:
        logger = _logger(trt, file, hide=f"{graph.parent}/")
        job = pool.submit(_build, flavour, trt, logger, monitor, graph, spec, profiles, sms, engine)
        try:
            return job.result()
        except BaseException:
            monitor.stopped_by = monitor.stopped_by or CancelledError()
            raise


def _build(*arguments: Any) -> Built:
    """`_build_network`, with no builder left behind by what it raises.

    A traceback would keep it: its weights, and its logger, which parts of TensorRT then go on to use.
    """
    try:
        return _build_network(*arguments)
    except BaseException as error:
        clear_frames(error.__traceback__)
        raise


def _build_network(
    flavour: Flavour,
    trt: Any,
    logger: Any,
    monitor: Any,
    graph: Path,
    spec: GraphSpec,
    profiles: tuple[Profile, ...],
    sms: tuple[str, ...],
    engine: Path,
) -> Built:
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(graph)):
        raise CaptureError(_refusal(flavour, [parser.get_error(i) for i in range(parser.num_errors)]))
    built = _check_network(trt, network, graph, spec)
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)  # what upstream computes in float32 needs more than TF32's 10 bits
    # Without it, a stream with the calls of an engine cannot be captured as a CUDA graph.
    if hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    if flavour == "tensorrt-rtx":
        config.num_compute_capabilities = len(sms)
        for index, sm in enumerate(sms):
            config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), index)
    for profile in profiles:
        config.add_optimization_profile(_profile(builder, network, spec, profile))
    config.progress_monitor = monitor
    with _timings(flavour, trt, config, sms), engine.open("wb") as out:
        writer = _writer(trt, out)
        done = builder.build_serialized_network_to_stream(network, config, writer)
    if (stopped_by := monitor.stopped_by or logger.stopped_by or writer.stopped_by) is not None:
        raise stopped_by
    if not done:
        reason = logger.first_error or "it gave no reason"
        raise ResourceError(
            f"{flavour} {trt.__version__} could not build {graph.name}: {reason}; compile with --backend onnxruntime, "
            "or with a smaller --max-length and --prefill-chunk if memory was short"
        )
    activations = tuple(logger.activation_bytes)
    if len(activations) != len(profiles):
        activations = (0,) * len(profiles)
    return replace(built, weights_bytes=logger.weights_bytes, activation_bytes=activations)


@contextmanager
def _timings(flavour: Flavour, trt: Any, config: Any, sms: tuple[str, ...]) -> Iterator[None]:
    """Let TensorRT reuse the kernel timings of earlier builds on this GPU, and keep those that it takes."""
    if flavour != "tensorrt":
        yield
        return
    path = cache_folder() / flavour / f"timings-{trt.__version__}-sm{'-'.join(sms)}.bin"
    cache = config.create_timing_cache(path.read_bytes() if path.exists() else b"")
    config.set_timing_cache(cache, ignore_mismatch=False)
    yield
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(memoryview(config.get_timing_cache().serialize()))


def _refusal(flavour: Flavour, errors: list[Any]) -> str:
    if not errors:
        return f"{flavour}'s parser cannot read the graph: compile with --backend onnxruntime"
    error = errors[0]
    operator = error.node_operator()
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    way_out = WAYS_OUT.get(operator, "it needs a lowering pass of its own")
    description = " ".join(error.desc().split())
    return (
        f"{flavour}'s parser refuses node {error.node_name() or '?'} ({operator}){more}: {description}; {way_out}; "
        "compile with --backend onnxruntime"
    )


def _check_network(trt: Any, network: Any, graph: Path, spec: GraphSpec) -> Built:
    """Count what the parser made, and refuse a network in which an input feeds nothing: it was dropped on the way."""
    read: set[str] = set()
    kinds: Counter[str] = Counter()
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        kinds[layer.type.name] += 1
        operands = (layer.get_input(i) for i in range(layer.num_inputs))
        read |= {operand.name for operand in operands if operand is not None}
    names = {network.get_input(i).name for i in range(network.num_inputs)}
    expected = {tensor.name for tensor in spec.inputs}
    if unread := sorted((expected - names) | (names - read)):
        raise CaptureError(f"TensorRT's parser dropped the input {unread[0]}: the engine would not compute the graph")
    attention = sum(node.op_type == "Attention" for node in ir.load(graph).graph.all_nodes())
    caches = sum(1 for _ in spec.cache_pairs) + any(tensor.name == PRESENT_Q for tensor in spec.outputs)
    built = Built(kinds["ATTENTION_INPUT"], kinds["KV_CACHE_UPDATE"])
    if built != Built(attention, caches):
        raise CaptureError(
            f"TensorRT's parser made {built.attention} attention and {built.cache} cache layers of {attention} and "
            f"{caches}: the engine would not compute the graph"
        )
    return built


def _profile(builder: Any, network: Any, spec: GraphSpec, profile: Profile) -> Any:
    """TensorRT's optimization profile: every dynamic dimension of every input gets its range.

    A proposal has P = 2 to W tokens in either profile; in a prefill it is bound and means nothing.
    """
    result = builder.create_optimization_profile()
    slots, _ = spec.q_shape or (2, 0)
    proposals = {"min": 2, "opt": max(2, min(slots, profile.tokens.opt)), "max": slots}
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        static = tuple(tensor.shape)
        shapes = []
        for bound in ("min", "opt", "max"):
            batch, tokens, rows = (getattr(r, bound) for r in (profile.batch, profile.tokens, profile.rows))
            dynamic = {
                "input_ids": (batch, tokens),
                "logit_positions": (batch, rows),
                "uniforms": (batch, rows),
                "proposal": (batch, proposals[bound]),
            }
            shapes.append(dynamic.get(tensor.name, (batch, *static[1:])))
        result.set_shape(tensor.name, *shapes)
    return result


def _logger(trt: Any, file: Any, hide: str) -> Any:
    """A logger that writes information, warnings and errors to a file, without the folder `hide`.

    It keeps the first error, which those behind it follow from, and what the builder says of memory.
    """

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.first_error: str | None = None
            self.stopped_by: BaseException | None = None
            self.weights_bytes = 0
            self.activation_bytes: list[int] = []

        def log(self, severity: Any, message: str) -> None:
            try:
                self._log(severity.name, message.replace(hide, ""))
            except BaseException as error:  # a full disk, for one: build_engine raises it
                self.stopped_by = error

        def _log(self, name: str, message: str) -> None:
            if name == "VERBOSE":
                return
            file.write(f"{name}: {message}\n")
            if found := _MEMORY.match(message):
                if found[1] == "Weights":
                    self.weights_bytes = int(found[2])
                else:
                    self.activation_bytes.append(int(found[2]))
            if name in ("ERROR", "INTERNAL_ERROR") and self.first_error is None:
                self.first_error = " ".join(message.split())

    return Logger()


def _writer(trt: Any, file: Any) -> Any:
    """Takes the engine piece by piece, so that it is not in memory as a whole besides the builder's own copy."""

    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.stopped_by: BaseException | None = None

        def write(self, data: bytes) -> int:
            try:
                return int(file.write(data))
            except BaseException as error:  # a full disk: build_engine raises it
                self.stopped_by = error
                return 0

    return Writer()


def _monitor(trt: Any, progress: Progress | None) -> Any:
    """A progress monitor that reports steps of the outermost phase; `stopped_by` ends the build at its next step."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.stopped_by: BaseException | None = None
            self._outer: tuple[str, int] | None = None

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if not parent_phase:
                self._outer = (phase_name, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            try:
                if progress is not None and self._outer is not None and phase_name == self._outer[0]:
                    progress(step + 1, self._outer[1])
            except BaseException as error:  # it must not unwind through the builder; build_engine raises it
                self.stopped_by = error
            return self.stopped_by is None

        def phase_finish(self, phase_name: str) -> None:
            pass

    return Monitor()
