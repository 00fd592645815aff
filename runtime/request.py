"""One request: its options, its run through the loop, and what it returns."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, cast

import numpy as np

from draftc.runtime.decoder import Decoder
from draftc.runtime.drafter import Drafter
from draftc.runtime.errors import CapacityError, EngineError, UsageError
from draftc.runtime.kvcache import TokenBuffer, common_prefix
from draftc.runtime.loop import Loop, LoopMaker, Step, Steps
from draftc.runtime.sampler import Sampler
from draftc.runtime.stats import Stats
from draftc.runtime.stops import FinishReason, OutputStream
from draftc.runtime.text import Tokenizer
from draftc.runtime.warp import LogitsMask, Sampling

__all__ = ["Generation", "Options", "Request", "StreamEvent", "TokenKind", "check_options"]

TokenKind = Literal["accepted", "corrected", "bonus", "plain"]


class Options(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`, named as in transformers.

    What is left out, or None, comes from the bundle's generation_config.json as transformers' `generate` reads it:
    where that says nothing, decoding is greedy, and sampling (a temperature above 0) has top_k 50.

    max_new_tokens: at least 1; default: what fits.
    temperature (0 = greedy), top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, logit_bias:
        see warp.Sampling.
    seed: same bundle, seed, settings and cache state → same text. Default: fresh entropy, reported in Generation.seed.
    stop: one string or several; the text ends before the first that appears. stop_token_ids: further ids that end it.
    ignore_eos: do not stop at the model's own end tokens. echo: the text begins with the prompt.
    logprobs: report log p of every token under the target's unwarped distribution.
    logits_mask: called with the tokens generated so far, proposed ones included, returns (V,) bool of allowed ids or
        None for all. It must depend on nothing else: it is asked about texts that are then not chosen.
    num_speculative_tokens: K, 1 up to max_width - 1; default: the bundle's. method: "draft_model", "ngram" or "plain".
    """

    max_new_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    echo: bool
    logprobs: bool
    logits_mask: LogitsMask | None
    num_speculative_tokens: int | None
    method: str | None


@dataclass(frozen=True)
class Generation:
    """What a request produced. Nothing in it goes past the stop.

    `token_ids` and `logprobs` (None unless asked for) include the end token, or the token that completed a stop string;
    `text` shows neither.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[float] | None
    seed: int
    stats: Stats


@dataclass(frozen=True)
class StreamEvent:
    """What one verification added: (text, kind) per kept token. The texts of all events join to Generation.text."""

    pieces: list[tuple[str, TokenKind]]
    step: Step

    @property
    def text(self) -> str:
        """The event's text."""
        return "".join(piece for piece, _ in self.pieces)


class Request:
    """One request, from arguments (checked here) to Generation.

    `loops`: the session's own loops where its backend has them. Raises UsageError for a value out of range,
    CapacityError when prompt and max_new_tokens exceed max_length.
    """

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter | None,
        k: int,
        tokenizer: Tokenizer,
        prompt: list[int],
        options: Options,
        loops: LoopMaker | None = None,
    ) -> None:
        options = check_options(options)
        self._loops = loops
        self._target = target
        self._drafter = drafter
        self._k = k
        self._prompt = np.asarray(prompt, np.int64)
        self._logprobs: list[float] | None = [] if options.get("logprobs") else None
        self._sampler = Sampler(
            _sampling(tokenizer, options),
            prompt,
            target.limits.vocab_size,
            options.get("seed"),
            options.get("logits_mask"),
        )
        defaults = tokenizer.defaults
        self._max_new = _room(
            target.limits.max_length, len(prompt), options.get("max_new_tokens"), defaults.max_new_tokens
        )
        stop = options.get("stop", ())
        ends = options.get("stop_token_ids", ())
        vocabulary = target.limits.vocab_size
        if not (_is_list(ends) and all(isinstance(t, int | np.integer) and 0 <= t < vocabulary for t in ends)):
            raise UsageError(f"stop_token_ids must be token ids below {vocabulary}, got {ends!r}")
        if not isinstance(stop, str) and not _is_list(stop):
            raise UsageError(f"stop must be a text or a list of texts, got {stop!r}")
        for name in ("ignore_eos", "echo", "logprobs"):
            if not isinstance(options.get(name, False), bool | np.bool_):
                raise UsageError(f"{name} must be True or False, got {options.get(name)!r}")
        self._output = OutputStream(
            tokenizer,
            eos_token_ids=() if options.get("ignore_eos") else defaults.eos_token_ids,
            stop_token_ids=tuple(ends),
            stop_strings=(stop,) if isinstance(stop, str) else tuple(stop),
            max_new_tokens=self._max_new,
        )
        self._echo = tokenizer.decode(prompt) if options.get("echo") else ""
        self._pieces: list[str] = []
        self._finish_reason: FinishReason | None = None
        self._stats = Stats(prompt_tokens=len(prompt))

    @property
    def result(self) -> Generation:
        """The Generation. Raises UsageError while the request still runs."""
        if self._finish_reason is None:
            raise UsageError("the stream has not ended: exhaust it before reading its result")
        output = self._output
        text = self._echo + output.text
        return Generation(text, output.token_ids, self._finish_reason, self._logprobs, self._sampler.seed, self._stats)

    def run(self, cancel: threading.Event) -> Iterator[StreamEvent]:
        """Prefill and first token, then speculate until a stop rule speaks or `cancel` is set."""
        try:
            yield from self._decode(cancel)
        except EngineError:
            for decoder in (self._target, *(self._drafter.decoders if self._drafter else ())):
                decoder.mark_broken()  # its buffers may hold NaN, which no mask hides from the next request
            raise

    def _decode(self, cancel: threading.Event) -> Iterator[StreamEvent]:
        stats, target = self._stats, self._target
        text = TokenBuffer(self._prompt, self._prompt.size + self._max_new)
        stats.cached_tokens = min(common_prefix(target.cache.tokens, self._prompt), self._prompt.size - 1)
        loop = self._loop(text)
        if self._echo:
            yield StreamEvent([(self._echo, "plain")], Step([], 0, 0, []))
        meter = _Meter(target, self._drafter)  # only now: what the consumer does with the echo is not prefill
        self._prefill(cancel)
        if cancel.is_set():
            yield self._cancelled()
            return
        # The first token comes from the prefill alone, so that no drafting delays it.
        event = self._event(loop.step(0))
        stats.prefill_s, _ = meter.lap(stats)
        stats.draft_s = stats.verify_s = stats.accept_s = 0.0
        yield event
        while self._finish_reason is None:
            if cancel.is_set():
                yield self._cancelled()
                return
            meter.lap(stats)  # what the consumer of the stream did meanwhile is not decoding
            left = self._max_new - len(self._output.token_ids)
            event = self._event(loop.step(min(self._k, left - 1)))
            wall, engine = meter.lap(stats)
            stats.decode_s += wall
            stats.engine_s += engine
            stats.steps += 1
            stats.step_tokens += len(event.step.tokens)
            yield event

    def _loop(self, text: TokenBuffer) -> Steps:
        """The backend's own loop where it has one that serves this request."""
        arguments = self._target, self._drafter, text, self._sampler, self._emit, self._stats
        wants_logits = self._logprobs is not None
        own = None if self._loops is None or wants_logits else self._loops.loop(*arguments)
        return own or Loop(*arguments, logprobs=wants_logits)

    def _prefill(self, cancel: threading.Event) -> None:
        """All chunks of the prompt but the last, which the first step runs; a cancelled request stops between two."""
        chunk = self._target.limits.prefill_chunk
        for end in range(self._stats.cached_tokens + 2 * chunk, self._prompt.size, chunk):
            if cancel.is_set():
                return
            self._target.sync(self._prompt[:end])

    def _emit(self, token: int) -> bool:
        """Stop rules, token by token: what follows a stop never becomes part of anything."""
        self._finish_reason = self._output.push(token)
        self._pieces.append(self._output.take_text())
        return self._finish_reason is None

    def _event(self, step: Step) -> StreamEvent:
        self._stats.new_tokens = len(self._output.token_ids)
        if self._logprobs is not None:
            self._logprobs.extend(step.logprobs)
        own: TokenKind = "plain" if step.proposed == 0 else "bonus" if step.accepted == step.proposed else "corrected"
        kinds: list[TokenKind] = ["accepted" if i < step.accepted else own for i in range(len(step.tokens))]
        pieces, self._pieces = self._pieces, []
        return StreamEvent([*zip(pieces, kinds, strict=True)], step)

    def _cancelled(self) -> StreamEvent:
        self._finish_reason = self._output.finish("cancelled")
        return StreamEvent([(self._output.take_text(), "plain")], Step([], 0, 0, []))


class _Meter:
    """Wall and engine time since the last lap, and the engine calls of one request."""

    def __init__(self, target: Decoder, drafter: Drafter | None) -> None:
        self._target = target
        self._drafts = drafter.decoders if drafter else ()
        self._calls = target.calls, self._draft_calls()
        self._wall, self._engine = time.perf_counter(), self._engine_seconds()

    def lap(self, stats: Stats) -> tuple[float, float]:
        """(wall, engine) seconds since the last lap; the call counts go into `stats`."""
        stats.target_calls = self._target.calls - self._calls[0]
        stats.draft_calls = self._draft_calls() - self._calls[1]
        wall, engine = time.perf_counter(), self._engine_seconds()
        lap = wall - self._wall, engine - self._engine
        self._wall, self._engine = wall, engine
        return lap

    def _draft_calls(self) -> int:
        return sum(decoder.calls for decoder in self._drafts)

    def _engine_seconds(self) -> float:
        return self._target.seconds + sum(decoder.seconds for decoder in self._drafts)


def _sampling(tokenizer: Tokenizer, options: Options) -> Sampling:
    def pick(name: str) -> Any:
        value = options.get(name)
        return getattr(tokenizer.defaults, name) if value is None else value

    return Sampling(
        temperature=pick("temperature"),
        top_k=pick("top_k"),
        top_p=pick("top_p"),
        min_p=pick("min_p"),
        repetition_penalty=pick("repetition_penalty"),
        presence_penalty=options.get("presence_penalty", 0.0),
        frequency_penalty=options.get("frequency_penalty", 0.0),
        logit_bias=options.get("logit_bias", {}),
    )


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence | np.ndarray | Set) and not isinstance(value, str | bytes)


def check_options(options: Options) -> Options:
    """`options` without those that are None, which mean the default. Raises UsageError for a name that is none."""
    if unknown := options.keys() - Options.__annotations__.keys():
        raise UsageError(f"there is no option {min(unknown)!r}; there are {', '.join(Options.__annotations__)}")
    return cast(Options, {name: value for name, value in options.items() if value is not None})


def _room(max_length: int, prompt: int, asked: int | None, default: int | None) -> int:
    """How many tokens may be generated. Raises UsageError or CapacityError."""
    if prompt == 0:
        raise UsageError("the prompt is empty and this tokenizer adds no BOS token: give at least one token")
    room = max_length - prompt
    if room < 1:
        raise CapacityError(
            f"the prompt has {prompt} tokens, the bundle holds {max_length} with its answer: shorten it"
        )
    if asked is None:
        return min(default or room, room)
    if not isinstance(asked, int | np.integer) or asked < 1:
        raise UsageError(f"max_new_tokens must be a whole number of 1 or more, got {asked!r}")
    if asked > room:
        raise CapacityError(
            f"prompt of {prompt} and max_new_tokens of {asked} exceed the bundle's max_length of {max_length}: "
            f"ask for {room} at most"
        )
    return asked
