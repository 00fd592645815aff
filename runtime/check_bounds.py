"""Prompt boundaries: one token, the edges of a prefill chunk, exactly full, and one token too many."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from draftc.runtime.check_greedy import greedy, triage
from draftc.runtime.check_numerics import Graph, WidthVariance, difference, recomputed_rows, rows_of
from draftc.runtime.engine import Tokens
from draftc.runtime.errors import CapacityError
from draftc.runtime.session import Session

__all__ = ["BoundsCase", "BoundsDetails", "check_bounds"]

NEW_TOKENS = 4
FULL_SECONDS = 120.0  # a prefill of max_length that takes longer than this, and than the budget, is left out


@dataclass(frozen=True)
class BoundsCase:
    """One prompt length with the number of new tokens asked for. `problem` is "" unless `outcome` is "failed"."""

    name: str
    prompt_tokens: int
    new_tokens: int
    outcome: Literal["passed", "failed", "skipped"]
    problem: str = ""


@dataclass(frozen=True)
class BoundsDetails:
    """All cases, in the order in which they ran."""

    cases: tuple[BoundsCase, ...]

    @property
    def passed(self) -> bool:
        """Whether none failed."""
        return all(case.outcome != "failed" for case in self.cases)

    @property
    def verdict(self) -> str:
        """One line."""
        bad = [case for case in self.cases if case.outcome == "failed"]
        if bad:
            return f"{len(bad)} of {len(self.cases)} boundaries failed: {bad[0].name}: {bad[0].problem}"
        lengths = ", ".join(
            f"{case.prompt_tokens}+{case.new_tokens}" for case in self.cases if case.outcome == "passed"
        )
        return f"prompt + new tokens of {lengths}: as they should be"

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was left out."""
        return tuple(f"{case.name}: {case.problem}" for case in self.cases if case.outcome == "skipped")


def check_bounds(
    session: Session,
    graphs: list[Graph],
    variances: list[WidthVariance],
    corpus: Tokens,
    budget_s: float,
    on_progress: Callable[[float], None],
) -> BoundsDetails:
    """Run every boundary. A prefill is repeated only where the chunks of it are what is tested."""
    run = _Run(session, graphs, variances, np.resize(corpus, session.manifest.max_length))
    length, chunk = session.manifest.max_length, session.manifest.prefill_chunk
    new = min(NEW_TOKENS, length - 1)
    edges = {"one token": 1, "chunk - 1": chunk - 1, "chunk": chunk, "chunk + 1": chunk + 1}
    fitting = {name: size for name, size in edges.items() if 1 <= size <= length - new}
    spent = time.perf_counter()
    for name, size in fitting.items():
        session.reset()
        run.generates(name, size, new, session.manifest.num_speculative_tokens)
        run.chunks_agree(name, size)
        on_progress(0.5 * len(run.cases) / (2 * len(fitting)))
    spent = time.perf_counter() - spent
    # Each of those prompts went through the target about three times.
    estimate = length * spent / (3 * sum(fitting.values()))
    session.reset()
    # K is larger than the room, so that it must be cut to what still fits.
    deepest = session.max_speculative_tokens
    room = min(3, max(1, deepest - 1), length - 1)
    for name, new, k in (("exactly full", 1, 1), ("full, K past the room", room, deepest)):
        size = length - new
        if estimate > max(FULL_SECONDS, budget_s):
            why = f"a prefill of {length} tokens takes about {estimate:.0f} s here: give a larger budget"
            run.cases.append(BoundsCase(name, size, new, "skipped", why))
        else:
            run.generates(name, size, new, k)
    on_progress(0.9)
    run.is_refused("one token over", length - 1, 2)
    run.is_refused("prompt of max_length", length, 1)
    run.generates("after the refusals", 1, new, session.manifest.num_speculative_tokens)
    on_progress(1.0)
    return BoundsDetails(tuple(run.cases))


class _Run:
    def __init__(self, session: Session, graphs: list[Graph], variances: list[WidthVariance], text: Tokens) -> None:
        self.session = session
        self.graphs = graphs
        self.variances = variances
        self.text = text
        default = session.default_method
        self.method = default if default in session.drafters else next(iter(session.drafters))
        self.cases: list[BoundsCase] = []

    def generates(self, name: str, size: int, new: int, k: int) -> None:
        """A prompt of `size` tokens gives exactly `new`, and those of plain decoding but for near ties."""
        prompt = self.text[:size].tolist()
        target, near_tie = self.session.target, self.variances[0].near_tie
        try:
            result = greedy(self.session, prompt, self.method, k, new)
            plain = greedy(self.session, prompt, "plain", None, new)
        except CapacityError as error:
            self._add(name, size, new, f"refused: {error}")
            return
        problem = ""
        written = result.token_ids, result.finish_reason
        if len(result.token_ids) != new or result.finish_reason != "length":
            problem = f"{len(written[0])} tokens, ended by {written[1]}; {new} were asked for"
        else:
            found = triage(target, name, prompt, plain.token_ids, result.token_ids, k, near_tie)
            faults = [divergence for divergence in found if divergence.kind == "fault"]
            if faults:
                problem = f"token {faults[0].position} is not plain decoding's (gap {faults[0].gap:.3g})"
        self._add(name, size, new, problem)

    def chunks_agree(self, name: str, size: int) -> None:
        """The prompt's last logits don't depend on where its prefill is cut into calls."""
        if size < 2:
            return
        text = self.text[:size]
        problem = ""
        for graph, variance in zip(self.graphs, self.variances, strict=True):
            usual = recomputed_rows(graph.decoder, text)
            recomputed_rows(graph.decoder, text[: size // 2])
            found = difference(usual, rows_of(graph.decoder, text))
            if not found.within(variance.limit_for(found, graph.decoder, text, 1)):
                problem = f"{graph.name}: cut elsewhere, logits differ by {found.rms:.3g} rms"
        self._add(f"{name}, cut elsewhere", size, 0, problem)

    def is_refused(self, name: str, size: int, new: int) -> None:
        """The request raises CapacityError."""
        try:
            greedy(self.session, self.text[:size].tolist(), "plain", None, new)
        except CapacityError:
            self._add(name, size, new, "")
        else:
            self._add(name, size, new, f"accepted, though max_length is {self.session.manifest.max_length}")

    def _add(self, name: str, size: int, new: int, problem: str) -> None:
        self.cases.append(BoundsCase(name, size, new, "failed" if problem else "passed", problem))
