"""TensorRT backend: one engine, its KV buffers written in place, an execution context for each kind of call.

The same class runs engines of TensorRT for RTX and of TensorRT; `engine_file` has what differs. Profiles share the
engine's weights, and contexts share one piece of scratch memory: all of a session's calls are on one stream, so no two
run at once. `forward` is the host's path, with logits copied to pinned memory. `queue` is the device's: `device_step`
chains calls through it without the host.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftc.runtime import graphio
from draftc.runtime.cuda import Block, DeviceMemory, Gpu, load_cuda
from draftc.runtime.devices import DeviceOptions
from draftc.runtime.engine import Engine, Logits, Tokens
from draftc.runtime.engine_file import EngineFile, KernelCache
from draftc.runtime.errors import BundleError, DraftcError, EngineError, ResourceError, UsageError
from draftc.runtime.graphio import DTYPE_BYTES, GraphSpec
from draftc.runtime.memory import format_bytes
from draftc.runtime.records import Backend, EngineInfo, Profile

__all__ = ["MemoryUse", "TensorRtEngine", "check_options"]

I64, F32 = np.int64, np.float32


def check_options(backend: str, options: DeviceOptions) -> None:
    """Raise UsageError unless TensorRT serves the device and takes the options."""
    if options.kind != "cuda":
        raise UsageError(f"device {options.device!r}: {backend} runs on cuda, or cuda:1 for the second GPU")
    if options.threads is not None:
        raise UsageError(f"threads are of graphs on the CPU: {backend} has no such setting")
    if options.provider_options:
        raise UsageError(f"provider options are ONNX Runtime's: {backend} has none")


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of device memory that an engine takes: weights, KV buffers, contexts' scratch, logits and distributions."""

    weights: int
    kv: int
    scratch: int
    logits: int
    q: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.weights + self.kv + self.scratch + self.logits + self.q


class TensorRtEngine:
    """Runs one engine for one sequence (B = 1). `beside` is another engine of the session, which shares what it can.

    Nothing is allocated, and no address or shape is set that is in place already, once a kind of call has been made.

    Raises BackendUnavailableError, BundleVersionError, BundleError, ResourceError (memory that the GPU does not have,
    needed and free named, before it is allocated).
    """

    def __init__(
        self,
        path: Path,
        spec: GraphSpec,
        *,
        built: Backend,
        info: EngineInfo,
        max_call: int,
        max_rows: int,
        options: DeviceOptions,
        beside: Engine | None = None,
    ) -> None:
        check_options(built.name, options)
        self._spec = spec
        self._profiles = info.profiles
        self.cuda_graph = options.cuda_graph
        self._file = EngineFile(path, built)
        self._check_limits(max_call, max_rows)
        cuda = load_cuda(built.name)
        cuda.check_driver(f"{built.name} {built.version}")
        partner = beside if isinstance(beside, TensorRtEngine) and beside.gpu.index == options.index else None
        self.gpu: Gpu = partner.gpu if partner else Gpu(cuda, options.index)
        self._contexts: dict[tuple[int, str], _Context] = {}
        with contextlib.ExitStack() as opened:
            self.gpu.users += 1
            opened.callback(self._leave)
            self.gpu.enter()
            self._file.check_gpu(self.gpu.sm, self.gpu.name)
            self._open(opened, info, max_call, max_rows, partner)
            self._opened = opened.pop_all()

    def _open(
        self,
        opened: contextlib.ExitStack,
        info: EngineInfo,
        max_call: int,
        max_rows: int,
        partner: "TensorRtEngine | None",
    ) -> None:
        spec = self._spec
        logits = max_rows * spec.vocab_rows * DTYPE_BYTES["float32"]
        q = 0 if spec.q_shape is None else spec.q_shape[0] * spec.q_shape[1] * DTYPE_BYTES["float32"]
        shared_q = partner.q_address if partner and partner.spec.q_shape == spec.q_shape else 0
        weights = info.weights_bytes or self._file.path.stat().st_size
        planned = max(profile.activation_bytes for profile in info.profiles)
        self._require(MemoryUse(weights, spec.kv_bytes(), planned, logits, 0 if shared_q else q), loaded=False)
        engine = self._file.deserialize()
        opened.callback(self._forget_engine)
        self._engine: Any = engine
        self._file.check_engine(engine, spec, info)
        scratch = int(engine.device_memory_size_v2)
        self.memory = MemoryUse(weights, spec.kv_bytes(), scratch, logits, 0 if shared_q else q)
        self._require(self.memory, loaded=True)

        def allocate(size: int) -> DeviceMemory:
            memory = DeviceMemory(self.gpu, size)
            opened.callback(memory.close)
            return memory

        self._scratch = allocate(scratch)
        self._kv = {  # (1, Hkv, L, D) each; zeros, because masked entries still enter the arithmetic
            past.name: allocate(_bytes(past)) for past, _ in spec.cache_pairs
        }
        self._logits_device = allocate(logits)
        self._logits = self.gpu.pin(logits).view(F32).reshape(max_rows, spec.vocab_rows)  # (R, V)
        self._own_q = None if shared_q or not q else allocate(q)
        self.q_address: int = shared_q or (self._own_q.address if self._own_q else 0)
        indices = range(len(info.profiles))
        self.proposal_width = min(self._file.proposal_width(engine, spec, index) for index in indices)
        if spec.tail == "draft" and spec.q_shape and self.proposal_width < spec.q_shape[0]:
            raise BundleError(
                f"{self._file.path.name}: its profiles take proposals of {self.proposal_width} tokens, bundle.json "
                f"says {spec.q_shape[0]}: compile the bundle again"
            )
        self._inputs = Block(self.gpu, self._input_fields(max_call, max_rows))
        opened.callback(self._inputs.close)
        self._outputs = Block(self.gpu, self._output_fields(max_rows))
        opened.callback(self._outputs.close)
        self._neutral()
        self._inputs.upload()
        self._addresses = self._all_addresses()
        self._kernels = KernelCache(self._file.path) if self._file.is_rtx else None
        for index in indices:
            self._context(index, "")
        self.clear()

    @property
    def spec(self) -> GraphSpec:
        """Inputs and outputs of the graph."""
        return self._spec

    @property
    def kv_addresses(self) -> dict[str, int]:
        """Address of each cache buffer on the device; they never change while the engine is open."""
        return {name: memory.address for name, memory in self._kv.items()}

    # --- the host's path ----------------------------------------------------------------------------------------------

    def forward(self, tokens: Tokens, start: int, rows: int) -> Logits:
        """See Engine.forward. Raises UsageError for a call that no profile takes, before anything is run."""
        self._run(tokens, start, rows)
        logits = self._logits[:rows]
        self.gpu.copy_out(logits, self._logits_device.address)
        self.gpu.wait()
        return logits

    def fill(self, tokens: Tokens, start: int) -> None:
        """`forward` for the sake of the caches alone: no logits are copied to the host."""
        self._run(tokens, start, 1)
        self.gpu.wait()

    def clear(self) -> None:
        """See Engine.clear."""
        self.gpu.enter()
        for memory in self._kv.values():
            memory.zero()
        if self._own_q:
            self._own_q.zero()
        self.gpu.wait()

    def close(self) -> None:
        """Release the engine and its buffers. Calling it twice is allowed."""
        with contextlib.suppress(EngineError):  # after a failure on the device, nothing that was queued is awaited
            self.gpu.enter()
        self._opened.close()

    def _run(self, tokens: Tokens, start: int, rows: int) -> None:
        width = tokens.size
        calls = self._split(width, rows)
        self.gpu.enter()
        done = 0
        for call_width, call_rows in calls:
            if done:
                self.gpu.wait()  # before the host's side of the inputs changes
            host = self._inputs.host
            host[graphio.INPUT_IDS][:call_width] = tokens[done : done + call_width]
            host[graphio.WRITE_INDEX][0] = start + done
            host[graphio.LOGIT_POSITIONS][:call_rows] = np.arange(call_width - call_rows, call_width)
            self._inputs.upload()
            self.queue(call_width, call_rows, {})
            done += call_width

    def _split(self, width: int, rows: int) -> list[tuple[int, int]]:
        """(tokens, rows) of the calls that make up one of `width` tokens: two where it is wide and has several rows."""
        if self._fitting(width, rows) is not None:
            return [(width, rows)]
        before = width - rows
        if before > 0 and self._fitting(before, 1) is not None and self._fitting(rows, rows) is not None:
            return [(before, 1), (rows, rows)]
        limits = "; ".join(
            f"{each.name} takes {each.tokens.max} tokens and {each.rows.max} rows" for each in self._profiles
        )
        raise UsageError(f"a call of {width} tokens and {rows} rows exceeds the engine's profiles: {limits}")

    # --- the device's path --------------------------------------------------------------------------------------------

    def queue(self, width: int, rows: int, addresses: Mapping[str, int], fixed: str = "") -> None:
        """Queue one call of `width` tokens and `rows` rows; the host does not wait for it.

        `addresses` says where tensors are that are not in the engine's own buffers. `fixed` names a context of its own
        for calls that are always of this shape and these addresses, as a captured graph needs.
        """
        index = self._fitting(width, rows)
        if index is None:
            self._split(width, rows)  # says what the limits are
            raise UsageError(f"a call of {width} tokens and {rows} rows is more than one profile takes")
        self._context(index, fixed).queue(width, rows, {**self._addresses, **addresses})

    def is_capturable(self, width: int, rows: int, fixed: str) -> bool:
        """Whether this call can become part of a CUDA graph; it must have been made once."""
        index = self._fitting(width, rows)
        assert index is not None
        return self._file.is_capturable(self._context(index, fixed).context, self.gpu.stream)

    def _fitting(self, width: int, rows: int) -> int | None:
        for index, profile in enumerate(self._profiles):
            if _within(profile, width, rows):
                return index
        return None

    def _context(self, index: int, fixed: str) -> "_Context":
        context = self._contexts.get((index, fixed))
        if context is None:
            raw = self._file.make_context(self._engine, fixed=bool(fixed), cache=self._kernels)
            if not raw.set_optimization_profile_async(index, self.gpu.queued()):
                raise EngineError(f"profile {self._profiles[index].name} cannot be selected: {self._file.cause()}")
            raw.set_device_memory(self._scratch.address, self._scratch.size)
            self.gpu.wait()
            context = _Context(raw, self._file, self._spec, self.gpu, self.proposal_width)
            for past, present in self._spec.cache_pairs:
                for name in (past.name, present.name):
                    context.bind(name, self._kv[past.name].address)
            self._contexts[index, fixed] = context
        return context

    # --- buffers ------------------------------------------------------------------------------------------------------

    def _input_fields(self, max_call: int, max_rows: int) -> dict[str, tuple[tuple[int, ...], type[np.generic]]]:
        """All inputs but caches and distributions; B = 1."""
        own: dict[str, tuple[tuple[int, ...], type[np.generic]]] = {
            graphio.INPUT_IDS: ((max_call,), I64),
            graphio.WRITE_INDEX: ((1,), I64),
            graphio.LOGIT_POSITIONS: ((max_rows,), I64),
            graphio.TEMPERATURE: ((1,), F32),
            graphio.TOP_K: ((1,), I64),
            graphio.TOP_P: ((1,), F32),
            graphio.MIN_P: ((1,), F32),
            graphio.UNIFORM: ((1,), F32),
            graphio.SLOT: ((1,), I64),
            graphio.PROPOSAL: ((self.proposal_width,), I64),
            graphio.UNIFORMS: ((max_rows,), F32),
            graphio.ONE_HOT: ((1,), I64),
        }
        return {tensor.name: own[tensor.name] for tensor in self._spec.inputs if tensor.name in own}

    def _output_fields(self, max_rows: int) -> dict[str, tuple[tuple[int, ...], type[np.generic]]]:
        """All outputs but caches, distributions and logits; the host's path reads none of them."""
        own: dict[str, tuple[tuple[int, ...], type[np.generic]]] = {
            graphio.NEXT_PROPOSAL: ((self.proposal_width,), I64),
            graphio.NEXT_TOKEN: ((1,), I64),
            graphio.NEXT_INDEX: ((1,), I64),
            graphio.EMITTED: ((max_rows,), I64),
            graphio.ACCEPTED: ((1,), I64),
            graphio.NEXT_TOKENS: ((2,), I64),
            graphio.NEXT_DRAFT_INDEX: ((1,), I64),
        }
        return {tensor.name: own[tensor.name] for tensor in self._spec.outputs if tensor.name in own}

    def _neutral(self) -> None:
        """A tail in the host's path: greedy, no filters, nothing of a draft's is read."""
        if self._spec.tail:
            self._inputs.host[graphio.TOP_P][0] = 1.0
        if self._spec.tail == "verify":
            self._inputs.host[graphio.ONE_HOT][0] = 1

    def _all_addresses(self) -> dict[str, int]:
        """Where every tensor is in the host's path; the caches are bound when a context is made."""
        addresses = {graphio.LOGITS: self._logits_device.address}
        addresses |= {name: self._inputs.address(name) for name in self._inputs.host}
        addresses |= {name: self._outputs.address(name) for name in self._outputs.host}
        if self._spec.tail == "draft":
            addresses |= {graphio.PAST_Q: self.q_address, graphio.PRESENT_Q: self.q_address}
        if self._spec.tail == "verify":
            addresses[graphio.DRAFT_Q] = self.q_address
        return addresses

    # --- opening and closing ------------------------------------------------------------------------------------------

    def _check_limits(self, max_call: int, max_rows: int) -> None:
        decode, _ = self._profiles
        if (fewest := max(profile.batch.min for profile in self._profiles)) > 1:
            raise BundleError(
                f"the engine takes {fewest} rows or more at once, and this runtime decodes one: compile with --batch 1"
            )
        smallest = _within(decode, 1, 1) and _within(decode, max_rows, max_rows)
        if not smallest or self._fitting(max_call, 1) is None:
            raise BundleError(
                f"the engine's profiles do not take the bundle's calls of {max_rows} rows and {max_call} tokens: "
                "compile the bundle again"
            )

    def _require(self, use: MemoryUse, *, loaded: bool) -> None:
        parts = {"KV": use.kv, "scratch": use.scratch, "logits": use.logits, "distributions": use.q}
        if not loaded:
            parts = {"weights": use.weights, **parts}
        needed, free = sum(parts.values()), self.gpu.free_memory()
        if needed > free:
            listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
            raise ResourceError(
                f"{self._file.path.name} needs {format_bytes(needed)} more of {self.gpu.name}'s memory ({listed}), "
                f"{format_bytes(free)} is free: close other programs, or compile with a smaller --max-length"
            )

    def _forget_engine(self) -> None:
        self._contexts.clear()  # before the engine, and before the cache that they write to
        if getattr(self, "_kernels", None) is not None:
            assert self._kernels is not None
            with contextlib.suppress(DraftcError):
                self._kernels.save()
        self._engine = None

    def _leave(self) -> None:
        self.gpu.users -= 1
        if self.gpu.users == 0:
            self.gpu.close()


class _Context:
    """An execution context that knows what is set in it, so that only what differs is set again."""

    def __init__(self, context: Any, file: EngineFile, spec: GraphSpec, gpu: Gpu, proposal_width: int) -> None:
        self.context = context
        self._file = file
        self._gpu = gpu
        self._dynamic = [tensor for tensor in spec.inputs if any(isinstance(dim, str) for dim in tensor.shape)]
        self._proposal_width = proposal_width
        self._shape: tuple[int, int] | None = None
        self._addresses: dict[str, int] = {}

    def bind(self, name: str, address: int) -> None:
        """Say where tensor `name` is."""
        if self._addresses.get(name) != address:
            self._addresses.pop(name, None)  # not known until it is set: an interrupt may come in between
            if not self.context.set_tensor_address(name, address):
                raise EngineError(f"tensor {name} cannot be bound: {self._file.cause()}")
            self._addresses[name] = address

    def queue(self, width: int, rows: int, addresses: Mapping[str, int]) -> None:
        """Queue one call."""
        for name, address in addresses.items():
            self.bind(name, address)
        if self._shape != (width, rows):
            self._shape = None  # as above
            sizes = {"B": 1, "S": width, "R": rows, "P": self._proposal_width}
            for tensor in self._dynamic:
                shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in tensor.shape)
                if not self.context.set_input_shape(tensor.name, shape):
                    raise EngineError(f"{tensor.name} cannot be of shape {shape}: {self._file.cause()}")
            self._shape = width, rows
        if not self.context.execute_async_v3(self._gpu.queued()):
            raise EngineError(f"TensorRT failed on {width} tokens: {self._file.cause()}; run `draftc verify`")


def _within(profile: Profile, width: int, rows: int) -> bool:
    return profile.tokens.min <= width <= profile.tokens.max and profile.rows.min <= rows <= profile.rows.max


def _bytes(tensor: graphio.TensorSpec) -> int:
    size = DTYPE_BYTES[tensor.dtype]
    for dim in tensor.shape:
        size *= dim if isinstance(dim, int) else 1
    return size
