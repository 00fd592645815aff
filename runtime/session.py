"""The embedding API: generate from an open bundle, stream, cancel. `opening` opens one."""

import asyncio
import contextlib
import importlib.metadata
import inspect
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Self, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from draftc.runtime.adaptive import AdaptiveDrafter
from draftc.runtime.costs import CostProfile
from draftc.runtime.decoder import Decoder
from draftc.runtime.devices import DeviceOptions, Role
from draftc.runtime.drafter import Drafter, ModelDrafter
from draftc.runtime.errors import SessionBusyError, UsageError
from draftc.runtime.loop import LoopMaker
from draftc.runtime.manifest import Manifest
from draftc.runtime.profiles import machine_id
from draftc.runtime.reports import Progress
from draftc.runtime.request import Generation, Options, Request, StreamEvent, check_options
from draftc.runtime.text import Tokenizer
from draftc.runtime.tune import BUDGET_S, measure_costs

__all__ = ["VERSION", "GenerationStream", "Message", "Prompt", "Session"]

Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[int] | NDArray[np.integer[Any]]
"""A text, a list of chat messages ({"role", "content"}, through the chat template), or token ids as they are."""

VERSION = importlib.metadata.version("draftc")
T = TypeVar("T")


class GenerationStream(Iterator[str]):
    """Iterates over pieces of text; `events()` over verifications. `result` is there once it is exhausted.

    Leaving it early is fine: `close()` (or the end of a `with` block) makes the session free for the next request.
    """

    def __init__(
        self, events: Generator[StreamEvent, None, None], cancel: threading.Event, result: Callable[[], Generation]
    ) -> None:
        self._events = events
        self._cancel = cancel
        self._result = result

    def __next__(self) -> str:
        for event in self._events:
            if event.text:
                return event.text
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def events(self) -> Iterator[StreamEvent]:
        """The verifications, one by one."""
        return self._events

    @property
    def running(self) -> bool:
        """Whether some thread is in a verification right now."""
        return inspect.getgeneratorstate(self._events) == inspect.GEN_RUNNING

    def cancel(self) -> None:
        """Stop after the verification in progress, with finish_reason "cancelled". May be called from any thread."""
        self._cancel.set()

    def close(self) -> None:
        """End the request now and free the session; where another thread is in it, after its verification."""
        self._cancel.set()
        with contextlib.suppress(ValueError):  # "generator already executing", in another thread: it sees the flag
            self._events.close()

    def drain(self) -> Generation:
        """Run to the end and return the result."""
        for _ in self._events:
            pass
        return self.result

    @property
    def result(self) -> Generation:
        """The whole Generation. Raises UsageError while the stream still runs."""
        return self._result()


class Session:
    """An open bundle. One request at a time: a second thread gets SessionBusyError and should open its own session.

    Between requests the KV caches are kept, so that a prompt which begins like the last one is not prefilled again.
    `drafters` by method; "plain" needs none. `loops` are the backend's own, where it has them. `options` say where each
    graph runs. `costs` is what calls cost on this machine, where that is known: then the drafter "auto" is the default.
    """

    def __init__(
        self,
        manifest: Manifest,
        tokenizer: Tokenizer,
        target: Decoder,
        drafters: Mapping[str, Drafter],
        loops: LoopMaker | None = None,
        options: Mapping[Role, DeviceOptions] = MappingProxyType({}),
        costs: CostProfile | None = None,
    ) -> None:
        self.manifest = manifest
        self.tokenizer = tokenizer
        self.target = target
        self.drafters = drafters
        self.loops = loops
        self.options = options
        self.costs = costs
        self._lock = threading.Lock()
        self._closed = False
        self._streams: weakref.WeakSet[GenerationStream] = weakref.WeakSet()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def decoders(self) -> list[Decoder]:
        """Every graph of the session, the target first."""
        drafts = (decoder for drafter in self.drafters.values() for decoder in drafter.decoders)
        return list(dict.fromkeys((self.target, *drafts)))

    @property
    def max_speculative_tokens(self) -> int:
        """The largest K that the bundle's verification width allows."""
        return self.manifest.max_width - 1

    @property
    def default_method(self) -> str:
        """What drafts where a request does not say: "auto" where the costs of calls are known, else the bundle's."""
        return AdaptiveDrafter.method if AdaptiveDrafter.method in self.drafters else self.manifest.draft.method

    def close(self) -> None:
        """End the streams that are open and release engines and buffers. Calling it twice is allowed.

        Raises SessionBusyError while another thread is in a request.
        """
        for stream in list(self._streams):
            if not stream.running:
                stream.close()
        if not self._closed:
            with self._exclusive():
                self._closed = True
                if self.loops is not None:
                    self.loops.close()
                for decoder in self.decoders:
                    decoder.close()

    def reset(self) -> None:
        """Forget the cached prompt: the next request prefills from the start."""
        with self._exclusive():
            for decoder in self.decoders:
                decoder.cache.clear()

    def measure_costs(self, *, budget_s: float = BUDGET_S, on_progress: Progress | None = None) -> CostProfile:
        """Measure what calls cost, and choose by that from now on; see tune.measure_costs. Nothing is written.

        Raises UsageError where the backend's own loop decodes, which does not choose, or for a budget of 0 or less;
        EngineError.
        """
        if self.loops is not None:
            raise UsageError(
                f"{self.manifest.backend.name} engines decode on the device, by the bundle's own K: no costs"
            )
        with self._exclusive():
            model = next((drafter for drafter in self.drafters.values() if isinstance(drafter, ModelDrafter)), None)
            self.costs = measure_costs(
                self.target,
                None if model is None else model.decoder,
                machine_id(self.manifest, self.options),
                budget_s=budget_s,
                on_progress=on_progress,
            )
            adaptive = AdaptiveDrafter.of(self.manifest, self.costs, model)
            self.drafters = {**self.drafters, adaptive.method: adaptive}
        return self.costs

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt. Raises UsageError for ids outside the vocabulary or a malformed message."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, bytes | bytearray):
            raise UsageError("the prompt is bytes: decode it to text, or give a list of token ids")
        if not isinstance(prompt, Sequence | np.ndarray):
            raise UsageError(f"a prompt is a text, chat messages or token ids, got {prompt!r}")
        items: list[Any] = list(prompt)
        if items and isinstance(items[0], str | list | tuple | np.ndarray):
            raise UsageError("one prompt per call: batches are not served; call generate once for each")
        if items and isinstance(items[0], Mapping):
            return self.tokenizer.apply_chat_template(items)
        for i, token in enumerate(items):
            if not isinstance(token, int | np.integer) or not 0 <= token < self.manifest.vocab_size:
                raise UsageError(f"prompt[{i}] is {token!r}: expected a token id below {self.manifest.vocab_size}")
        return [int(token) for token in items]

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """Decode one prompt to its end; see Options.

        Raises UsageError, CapacityError, SessionBusyError, EngineError.
        """
        with self.stream(prompt, **options) as stream:
            return stream.drain()

    async def agenerate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """`generate` in a worker thread; cancelling the task ends the request and leaves the session usable."""
        with self.stream(prompt, **options) as stream:
            return await _in_thread(stream.drain, stream)

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> GenerationStream:
        """Start a request; see Options. Arguments are checked here, work begins with the first `next`."""
        options = check_options(options)
        drafter = self._choose_drafter(options.get("method"))
        k = self._choose_k(options.get("num_speculative_tokens"), drafter)
        request = Request(self.target, drafter, k, self.tokenizer, self.encode(prompt), options, self.loops)
        cancel = threading.Event()
        stream = GenerationStream(self._run(request, cancel), cancel, lambda: request.result)
        self._streams.add(stream)
        return stream

    async def astream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncIterator[str]:
        """`stream` with each verification in a worker thread."""
        with self.stream(prompt, **options) as stream:
            while (piece := await _in_thread(lambda: next(stream, None), stream)) is not None:
                yield piece

    def _run(self, request: Request, cancel: threading.Event) -> Generator[StreamEvent, None, None]:
        with self._exclusive():
            yield from request.run(cancel)

    def _exclusive(self) -> "_Exclusive":
        if self._closed:
            raise UsageError("this session is closed: open the bundle again")
        return _Exclusive(self._lock)

    def _choose_drafter(self, method: str | None) -> Drafter | None:
        if method is None:
            method = self.default_method
        if method == "plain":
            return None
        if method not in self.drafters:
            known = ", ".join(["plain", *self.drafters])
            raise UsageError(f"unknown method {method!r}: this bundle offers {known}")
        return self.drafters[method]

    def _choose_k(self, k: int | None, drafter: Drafter | None) -> int:
        if k is None:  # one that chooses for itself may go as far as the graphs do
            adaptive = isinstance(drafter, AdaptiveDrafter)
            return self.max_speculative_tokens if adaptive else self.manifest.num_speculative_tokens
        if not isinstance(k, int | np.integer) or not 1 <= k <= self.max_speculative_tokens:
            raise UsageError(
                f"num_speculative_tokens must be 1 to {self.max_speculative_tokens} for this bundle (compiled for "
                f"calls of {self.manifest.max_width}), got {k!r}; method='plain' decodes without speculation"
            )
        return k


class _Exclusive:
    """Holds a session's lock, or says at once that it is taken."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise SessionBusyError("this session is generating: finish or close that stream, or open a second session")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


async def _in_thread(work: Callable[[], T], stream: GenerationStream) -> T:
    """Run `work` in a thread. When the task is cancelled, cancel the stream and wait until the thread let go of it."""
    future = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        stream.cancel()
        while not future.done():  # a second cancellation must not give the session away either
            with suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        raise
