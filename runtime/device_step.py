"""One speculative step on the GPU: draft calls and verification, chained through device memory by the graphs' tails.

    host → device   one block: the text's last tokens, where each graph writes, sampling parameters, uniforms
    k draft calls   token, write index and proposal of each are inputs of the next; two sets of buffers, in turn
    verification    takes the last draft call's proposal, and the distributions that all of them left
    device → host   one block: the emitted tokens and how many proposals were accepted

The first draft call runs the text's last two tokens: where everything was accepted, the draft has not seen the last
proposal, and writing a token a second time changes nothing. So every step has the same shapes, and a step that comes
again is captured as one CUDA graph.
"""

import contextlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftc.runtime import graphio
from draftc.runtime.cuda import Block
from draftc.runtime.engine import Engine, Tokens
from draftc.runtime.errors import DraftcWarning, EngineError
from draftc.runtime.tensorrt import TensorRtEngine
from draftc.runtime.warp import TEMPERATURES, Sampling

__all__ = ["Chances", "DeviceStep", "Verified", "is_partner"]

I64, F32 = np.int64, np.float32
SAMPLING = (graphio.TEMPERATURE, graphio.TOP_K, graphio.TOP_P, graphio.MIN_P)
DRAFT_TAIL = 2  # tokens of the text that the first draft call runs
CAPTURED_AT = 3  # the how-manyth time of a step
TEXT, DRAFT_INDEX, TARGET_INDEX, GIVEN, POSITION = "text", "draft_index", "target_index", "given", "position"


@dataclass(frozen=True)
class Chances:
    """Uniforms of a step: one for each drafted token (k or 0,), and those of the verification (k+1,)."""

    draft: NDArray[np.float32]
    verify: NDArray[np.float32]


@dataclass(frozen=True)
class Verified:
    """What a step emitted: the accepted proposals and one token more. `accepted` is -1 where logits were not finite.

    `draft_s` is the device's time from the step's first work to the end of the last draft call.
    """

    tokens: list[int]
    accepted: int
    draft_s: float


@dataclass(frozen=True)
class _Kind:
    """What makes two steps the same work: `k` proposals, drafted here (from `tail` tokens of the text) or given."""

    k: int
    drafted: bool
    tail: int

    @property
    def name(self) -> str:
        return f"{'drafted' if self.drafted else 'given'}{self.k}"


class DeviceStep:
    """The buffers and graphs behind the steps of one session. `draft` None: proposals are always given.

    `note` says why steps are not captured, where they are not. Methods raise EngineError.
    """

    def __init__(self, target: TensorRtEngine, draft: TensorRtEngine | None, max_call: int) -> None:
        shape = target.spec.q_shape
        assert shape is not None
        self.target = target
        self.draft = draft
        self.gpu = target.gpu
        self.note = "" if target.cuda_graph else "switched off"
        width, self._vocabulary = shape
        proposal = draft.proposal_width if draft else 1
        self.gpu.enter()
        with contextlib.ExitStack() as opened:
            self._allocate(opened, width, proposal, max_call)
            self._opened = opened.pop_all()
        self._begun, self._drafted, self._verified = (self.gpu.event() for _ in range(3))
        self._seen: dict[_Kind, int] = {}
        self._graphs: dict[_Kind, Any] = {}
        self.gpu.wait()

    def _allocate(self, opened: contextlib.ExitStack, width: int, proposal: int, max_call: int) -> None:
        def block(fields: Mapping[str, tuple[tuple[int, ...], type[np.generic]]]) -> Block:
            made = Block(self.gpu, fields)
            opened.callback(made.close)
            return made

        self._inputs = block(
            {
                TEXT: ((DRAFT_TAIL,), I64),
                DRAFT_INDEX: ((1,), I64),
                TARGET_INDEX: ((1,), I64),
                POSITION: ((1,), I64),
                graphio.TEMPERATURE: ((1,), F32),
                graphio.TOP_K: ((1,), I64),
                graphio.TOP_P: ((1,), F32),
                graphio.MIN_P: ((1,), F32),
                graphio.UNIFORMS: ((width,), F32),
                **{_uniform(i): ((1,), F32) for i in range(width - 1)},
                GIVEN: ((max(max_call, width),), I64),
            },
        )
        self._constants = block(
            {
                "positions": ((width,), I64),
                "0": ((1,), I64),
                "1": ((1,), I64),
                **{_slot(i): ((1,), I64) for i in range(width - 1)},
            },
        )
        self._constants.host["positions"][:] = np.arange(width)
        self._constants.host["1"][0] = 1
        for i in range(width - 1):
            self._constants.host[_slot(i)][0] = i
        self._constants.upload()
        chain = {"token": ((1,), I64), "index": ((1,), I64), "proposal": ((proposal,), I64)}
        self._chain = (block(chain), block(chain))
        for link in self._chain:
            link.upload()
        self._results = block({graphio.EMITTED: ((width,), I64), graphio.ACCEPTED: ((1,), I64)})

    @property
    def captured(self) -> int:
        """How many kinds of step are replayed as CUDA graphs."""
        return len(self._graphs)

    def run_drafted(self, tail: Tokens, length: int, k: int, sampling: Sampling, chances: Chances) -> Verified:
        """Draft and verify `k` proposals behind a text of `length` tokens, of which `tail` are the last two, or one.

        The draft's cache holds what is before `tail`, the target's what is before its last token.
        """
        host = self._begin(sampling, chances)
        host[TEXT][: tail.size] = tail
        host[DRAFT_INDEX][0] = length - tail.size
        host[TARGET_INDEX][0] = length - 1
        kind = _Kind(k, True, tail.size)
        self._repeat(kind, tail.size == DRAFT_TAIL, lambda fixed, inside: self._queue_drafted(kind, fixed, inside))
        return self._end(k)

    def run_given(self, pending: Tokens, start: int, k: int, sampling: Sampling, chances: Chances) -> Verified:
        """Verify the last `k` of `pending`, which is run from position `start`; they were chosen, not drawn."""
        host = self._begin(sampling, chances)
        host[GIVEN][: pending.size] = pending
        host[TARGET_INDEX][0] = start
        host[POSITION][0] = pending.size - 1
        kind = _Kind(k, False, 0)
        regular = pending.size == k + 1
        assert regular or k == 0
        self._repeat(kind, regular, lambda fixed, inside: self._queue_given(kind, pending.size, fixed, inside))
        return self._end(k)

    def close(self) -> None:
        """Give everything back, before the engines are closed. Calling it twice is allowed."""
        with contextlib.suppress(EngineError):  # after a failure on the device, nothing that was queued is awaited
            self.gpu.enter()
        self._graphs.clear()
        self._opened.close()

    # --- one step -----------------------------------------------------------------------------------------------------

    def _begin(self, sampling: Sampling, chances: Chances) -> dict[str, NDArray[np.generic]]:
        self.gpu.enter()  # also waits for what an interrupted step left running: it reads the same memory
        host = self._inputs.host
        # Within float32 and int64, where the limits mean the same: see warp.
        least, most = TEMPERATURES
        host[graphio.TEMPERATURE][0] = 0.0 if sampling.greedy else min(max(sampling.temperature, least), most)
        host[graphio.TOP_K][0] = min(sampling.top_k, self._vocabulary)
        host[graphio.TOP_P][0] = sampling.top_p
        host[graphio.MIN_P][0] = sampling.min_p
        host[graphio.UNIFORMS][: chances.verify.size] = chances.verify
        for i, uniform in enumerate(chances.draft):
            host[_uniform(i)][0] = uniform
        return host

    def _end(self, k: int) -> Verified:
        self.gpu.wait()
        accepted = int(self._results.host[graphio.ACCEPTED][0])
        tokens = self._results.host[graphio.EMITTED][: min(accepted, k) + 1].tolist()
        return Verified(tokens, accepted, self.gpu.seconds(self._begun, self._drafted))

    def _repeat(self, kind: _Kind, regular: bool, queue: Callable[[bool, bool], None]) -> None:
        """Queue a step: as it comes the first time, then in contexts of its own, and from the third time on captured.

        A context that is captured must have made its calls once before, and must never make others.
        """
        if not regular or self.note:
            queue(False, False)
            return
        seen = self._seen.get(kind, 0)
        if seen + 1 < CAPTURED_AT:
            queue(seen > 0, False)
            self._seen[kind] = seen + 1  # only now: an interrupt in between must not count as a step
            return
        graph = self._graphs.get(kind) or self._capture(kind, lambda: queue(True, True))
        if graph is None:
            queue(False, False)
        else:
            self._graphs[kind] = graph
            self.gpu.launch(graph)

    def _capture(self, kind: _Kind, work: Callable[[], None]) -> Any:
        """The step as a graph; None where that cannot be, and `note` says why."""
        able = self.target.is_capturable(kind.k + 1, kind.k + 1, kind.name) and (
            not kind.drafted
            or (
                self.draft is not None
                and all(self.draft.is_capturable(_draft_width(i), 1, _draft_call(i)) for i in range(kind.k))
            )
        )
        if not able:
            self._run_without_graphs("TensorRT cannot capture this engine")
            return None
        try:
            return self.gpu.capture(work)
        except EngineError as error:
            self._run_without_graphs(str(error))  # steps run as before; what is really broken shows there
            return None

    def _run_without_graphs(self, cause: str) -> None:
        self.note = cause
        message = f"steps on the GPU run without CUDA graphs, so each costs more: {cause}"
        warnings.warn(message, DraftcWarning, stacklevel=2)

    def _queue_drafted(self, kind: _Kind, fixed: bool, captured: bool) -> None:
        assert self.draft is not None
        self._inputs.upload()
        self.gpu.record(self._begun, captured=captured)
        for i in range(kind.k):
            self._queue_draft(self.draft, i, kind.tail, _draft_call(i) if fixed else "")
        self.gpu.record(self._drafted, captured=captured)
        proposal = self._chain[kind.k % 2].address("proposal")
        self._queue_verify(kind, kind.k + 1, proposal, fixed)

    def _queue_given(self, kind: _Kind, width: int, fixed: bool, captured: bool) -> None:
        self._inputs.upload()
        self.gpu.record(self._begun, captured=captured)
        self.gpu.record(self._drafted, captured=captured)
        self._queue_verify(kind, width, self._inputs.address(GIVEN), fixed)

    def _queue_draft(self, draft: TensorRtEngine, i: int, tail: int, fixed: str) -> None:
        before, after = self._chain[i % 2], self._chain[(i + 1) % 2]
        width = tail if i == 0 else 1
        addresses = {
            graphio.INPUT_IDS: self._inputs.address(TEXT) if i == 0 else before.address("token"),
            graphio.WRITE_INDEX: self._inputs.address(DRAFT_INDEX) if i == 0 else before.address("index"),
            graphio.LOGIT_POSITIONS: self._constants.address(str(width - 1)),
            **{name: self._inputs.address(name) for name in SAMPLING},
            graphio.UNIFORM: self._inputs.address(_uniform(i)),
            graphio.SLOT: self._constants.address(_slot(i)),
            graphio.PROPOSAL: before.address("proposal"),
            graphio.NEXT_PROPOSAL: after.address("proposal"),
            graphio.NEXT_TOKEN: after.address("token"),
            graphio.NEXT_INDEX: after.address("index"),
        }
        draft.queue(width, 1, addresses, fixed)

    def _queue_verify(self, kind: _Kind, width: int, ids: int, fixed: bool) -> None:
        rows = kind.k + 1
        positions = self._inputs.address(POSITION) if width != rows else self._constants.address("positions")
        addresses = {
            graphio.INPUT_IDS: ids,
            graphio.WRITE_INDEX: self._inputs.address(TARGET_INDEX),
            graphio.LOGIT_POSITIONS: positions,
            **{name: self._inputs.address(name) for name in (*SAMPLING, graphio.UNIFORMS)},
            graphio.ONE_HOT: self._constants.address("0" if kind.drafted else "1"),
            graphio.EMITTED: self._results.address(graphio.EMITTED),
            graphio.ACCEPTED: self._results.address(graphio.ACCEPTED),
        }
        self.target.queue(width, rows, addresses, kind.name if fixed else "")
        self._results.download()


def _uniform(i: int) -> str:
    return f"uniform{i}"


def _slot(i: int) -> str:
    return f"slot{i}"


def _draft_call(i: int) -> str:
    """Name of the context of the i-th draft call: steps of different k have the same ones."""
    return f"draft{i}"


def _draft_width(i: int) -> int:
    return DRAFT_TAIL if i == 0 else 1


def is_partner(draft: Engine | None, target: TensorRtEngine) -> bool:
    """Whether `draft` leaves its proposals and distributions where `target` finds them."""
    return (
        isinstance(draft, TensorRtEngine)
        and draft.spec.tail == "draft"
        and draft.gpu is target.gpu
        and draft.q_address == target.q_address
    )
