"""One request at a time, and whatever ends one early: the session is usable afterwards, and right."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftc.runtime.errors import EngineError, SessionBusyError
from draftc.runtime.text import Tokenizer
from tests.runtime.sessions import Opened, make_session

PROMPT = "the quick brown fox jumps over"
OPTIONS: dict[str, Any] = {"temperature": 0.9, "seed": 4, "max_new_tokens": 14, "logprobs": True}


@pytest.fixture(scope="module")
def tokenizer(byte_level_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(byte_level_folder)


@pytest.fixture
def opened(tokenizer: Tokenizer) -> Opened:
    return make_session(tokenizer)


def check_usable(opened: Opened) -> None:
    """The next request gives what a fresh session gives, after other text and after the same."""
    fresh = make_session(opened.session.tokenizer).session.generate(PROMPT, **OPTIONS)
    again = opened.session.generate(PROMPT, **OPTIONS)
    assert (again.token_ids, again.logprobs, again.text) == (fresh.token_ids, fresh.logprobs, fresh.text)


def wait_for(condition: threading.Event) -> None:
    assert condition.wait(timeout=30)


# --- one at a time ---------------------------------------------------------------------------------------------------


def test_a_second_thread_is_told_that_the_session_is_busy(opened: Opened) -> None:
    opened.gate.shut()
    results: list[Any] = []
    worker = threading.Thread(target=lambda: results.append(opened.session.generate(PROMPT, **OPTIONS)))
    worker.start()
    wait_for(opened.gate.entered)
    uses: list[Callable[[], Any]] = [
        lambda: opened.session.generate(PROMPT, **OPTIONS),
        lambda: next(opened.session.stream(PROMPT)),
        opened.session.reset,
        opened.session.close,
    ]
    for use in uses:
        with pytest.raises(SessionBusyError, match="finish or close that stream, or open a second session"):
            use()
    opened.gate.open.set()
    worker.join()
    assert results[0].token_ids == make_session(opened.session.tokenizer).session.generate(PROMPT, **OPTIONS).token_ids
    check_usable(opened)


def test_an_open_stream_keeps_the_session_busy_in_its_own_thread_too(opened: Opened) -> None:
    stream = opened.session.stream(PROMPT, **OPTIONS)
    opened.session.generate(PROMPT, max_new_tokens=2)  # work begins with the first next
    next(stream)
    for use in (lambda: opened.session.generate(PROMPT), opened.session.reset):
        with pytest.raises(SessionBusyError):
            use()
    assert opened.target.closed == 0
    stream.close()
    check_usable(opened)


def test_leaving_a_stream_early_frees_the_session(opened: Opened) -> None:
    for _ in opened.session.stream(PROMPT, **OPTIONS):
        break
    check_usable(opened)
    with opened.session.stream(PROMPT, **OPTIONS) as stream:
        next(stream)
    check_usable(opened)
    with opened.session.stream(PROMPT, **OPTIONS) as stream:
        pass  # never begun
    check_usable(opened)


def test_an_exception_of_the_consumer_frees_the_session(opened: Opened) -> None:
    def consume() -> None:
        with opened.session.stream(PROMPT, **OPTIONS) as stream:
            for _ in stream:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consume()
    check_usable(opened)


# --- interrupts and broken engines -----------------------------------------------------------------------------------


CALLS = [*(("target", call) for call in range(5)), *(("draft", call) for call in range(8))]


@pytest.mark.parametrize(("which", "call"), CALLS)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), EngineError("the device is gone")], ids=["ctrl-c", "engine"])
def test_an_exception_in_any_engine_call(opened: Opened, which: str, call: int, error: BaseException) -> None:
    """Prefill or decoding, target or draft: what the broken call has half written must not count."""
    engine = getattr(opened, which)
    engine.faults[call] = error
    seen: list[str] = []
    stream = opened.session.stream(PROMPT, **OPTIONS)
    with pytest.raises(type(error)):
        seen += stream
    assert engine.faults == {}, "the call never came"
    check_usable(opened)


def test_an_interrupt_between_two_pieces(opened: Opened) -> None:
    def consume() -> None:
        for _ in opened.session.stream(PROMPT, **OPTIONS):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()
    check_usable(opened)


@pytest.mark.parametrize("which", ["target", "draft"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_broken_logits_are_an_engine_error(opened: Opened, which: str, value: float, temperature: float) -> None:
    for call in (2, 5):
        engine = getattr(opened, which)
        opened.session.reset()
        engine.faults[len(engine.calls) + call] = value
        options = OPTIONS | {"temperature": temperature, "num_speculative_tokens": 1}
        with pytest.raises(EngineError, match=rf"returned {value} among its logits"):
            opened.session.generate(PROMPT, **options)
        check_usable(opened)


def test_a_failing_hook_frees_the_session(opened: Opened) -> None:
    def mask(generated: Any) -> None:
        if len(generated) == 3:
            raise RuntimeError("the grammar has no such state")

    with pytest.raises(RuntimeError, match="no such state"):
        opened.session.generate(PROMPT, logits_mask=mask)
    check_usable(opened)


# --- cancelling ------------------------------------------------------------------------------------------------------


def test_cancelling_from_another_thread(opened: Opened) -> None:
    stream = opened.session.stream(PROMPT, **OPTIONS)
    pieces = [next(stream), next(stream)]
    canceller = threading.Thread(target=stream.cancel)
    canceller.start()
    canceller.join()
    pieces += stream
    result = stream.result
    assert result.finish_reason == "cancelled"
    assert result.text == "".join(pieces) == opened.session.tokenizer.decode(result.token_ids)
    whole = make_session(opened.session.tokenizer).session.generate(PROMPT, **OPTIONS)
    assert 0 < len(result.token_ids) < len(whole.token_ids)
    assert result.token_ids == whole.token_ids[: len(result.token_ids)]
    assert len(result.logprobs or []) == len(result.token_ids) == result.stats.new_tokens
    check_usable(opened)


def test_cancelling_while_an_engine_runs_ends_after_that_verification(opened: Opened) -> None:
    stream = opened.session.stream(PROMPT, **OPTIONS)
    next(stream)
    opened.gate.shut()
    worker = threading.Thread(target=stream.drain)
    worker.start()
    wait_for(opened.gate.entered)
    calls = len(opened.target.calls)
    stream.cancel()
    opened.gate.open.set()
    worker.join()
    assert stream.result.finish_reason == "cancelled"
    assert len(opened.target.calls) == calls
    check_usable(opened)


def test_cancelling_after_the_end_changes_nothing(opened: Opened) -> None:
    stream = opened.session.stream(PROMPT, **OPTIONS)
    stream.drain()
    stream.cancel()
    assert stream.result.finish_reason == "length"


def test_cancelling_before_the_start_runs_nothing(opened: Opened) -> None:
    stream = opened.session.stream(PROMPT, **OPTIONS)
    stream.cancel()
    assert (stream.drain().token_ids, stream.result.text, stream.result.finish_reason) == ([], "", "cancelled")
    assert opened.target.calls == []
    check_usable(opened)


def test_cancelling_in_a_long_prefill_ends_between_two_chunks(opened: Opened) -> None:
    prompt = [*range(1, 42)]  # six chunks of 8
    opened.gate.shut()
    stream = opened.session.stream(prompt, **OPTIONS)
    worker = threading.Thread(target=stream.drain)
    worker.start()
    wait_for(opened.gate.entered)
    stream.cancel()
    opened.gate.open.set()
    worker.join()
    assert (stream.result.token_ids, stream.result.finish_reason) == ([], "cancelled")
    assert len(opened.target.calls) < 4
    check_usable(opened)


def test_closing_a_stream_from_another_thread_ends_it(opened: Opened) -> None:
    stream = opened.session.stream(PROMPT, **OPTIONS)
    next(stream)
    opened.gate.shut()
    worker = threading.Thread(target=stream.drain)
    worker.start()
    wait_for(opened.gate.entered)
    stream.close()
    with pytest.raises(SessionBusyError):
        opened.session.close()
    opened.gate.open.set()
    worker.join()
    assert stream.result.finish_reason == "cancelled"
    check_usable(opened)


# --- async -----------------------------------------------------------------------------------------------------------


def test_async_gives_what_sync_gives(opened: Opened) -> None:
    expected = make_session(opened.session.tokenizer).session.generate(PROMPT, **OPTIONS)

    async def main() -> None:
        assert (await opened.session.agenerate(PROMPT, **OPTIONS)).token_ids == expected.token_ids
        pieces = [piece async for piece in opened.session.astream(PROMPT, **OPTIONS)]
        assert "".join(pieces) == expected.text
        assert len(pieces) > 3

    asyncio.run(main())
    check_usable(opened)


def test_the_event_loop_goes_on_while_an_engine_runs(opened: Opened) -> None:
    async def main() -> None:
        opened.gate.shut()
        task = asyncio.create_task(opened.session.agenerate(PROMPT, **OPTIONS))
        await asyncio.to_thread(wait_for, opened.gate.entered)
        with pytest.raises(SessionBusyError):
            await opened.session.agenerate(PROMPT)
        opened.gate.open.set()
        assert len((await task).token_ids) == 14

    asyncio.run(main())
    check_usable(opened)


async def generate(opened: Opened) -> None:
    await opened.session.agenerate(PROMPT, **OPTIONS)


async def stream(opened: Opened) -> None:
    async with contextlib.aclosing(opened.session.astream(PROMPT, **OPTIONS)) as pieces:  # type: ignore[type-var]
        async for _ in pieces:
            pass


@pytest.mark.parametrize("use", [generate, stream])
@pytest.mark.parametrize("times", [1, 3])
def test_a_cancelled_task_waits_for_its_thread(opened: Opened, use: Any, times: int) -> None:
    """The engine cannot be stopped in mid-call: until it returns, the session must not be given away."""

    async def main() -> None:
        opened.gate.shut()
        task = asyncio.create_task(use(opened))
        await asyncio.to_thread(wait_for, opened.gate.entered)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0.01)
        assert not task.done()
        with pytest.raises(SessionBusyError):
            opened.session.generate(PROMPT)
        opened.gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(opened.target.calls) <= 4, "it went on after it was cancelled"

    asyncio.run(main())
    check_usable(opened)


def test_leaving_an_async_stream_early_frees_the_session(opened: Opened) -> None:
    async def main() -> None:
        async with contextlib.aclosing(opened.session.astream(PROMPT, **OPTIONS)) as pieces:  # type: ignore[type-var]
            async for _ in pieces:
                break
        assert len((await opened.session.agenerate(PROMPT, **OPTIONS)).token_ids) == 14

    asyncio.run(main())
    check_usable(opened)


def test_an_async_error_is_that_of_the_thread(opened: Opened) -> None:
    opened.target.faults[3] = np.nan

    async def main() -> None:
        with pytest.raises(EngineError):
            await opened.session.agenerate(PROMPT, **OPTIONS)

    asyncio.run(main())
    check_usable(opened)
