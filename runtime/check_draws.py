"""Draws of the verification's sampling part: the real loop from one prefix, and the tables that its tokens fill."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from draftc.runtime.accept import Proposal, one_hot
from draftc.runtime.check_numerics import Difference, difference, rows_of
from draftc.runtime.decoder import Decoder
from draftc.runtime.drafter import Drafter
from draftc.runtime.engine import Engine, Logits, Tokens
from draftc.runtime.errors import EngineError
from draftc.runtime.gof import total_variation
from draftc.runtime.graphio import GraphSpec
from draftc.runtime.kvcache import TokenBuffer
from draftc.runtime.loop import Loop, LoopMaker
from draftc.runtime.sampler import Sampler
from draftc.runtime.stats import Stats
from draftc.runtime.warp import Distribution, Sampling

__all__ = ["MIN_TOKENS", "Bets", "DeviceDrawSeries", "DrawSeries", "LogitTap", "tapped"]

MIN_TOKENS = 2  # of every draw, so that a rejection is followed by another step
PILOTS = 3  # draws that only measure the time of one
DEPTH = 2  # accepted proposals that a reference distribution goes behind
CELLS = 8
CELL_EXPECTED = 20  # draws; tokens expected less often share one cell
CELL_FLOOR = 1e-6  # so that a token of probability 0 counts much, but not infinitely


class Bets:
    """Events that came true or not, and the probability that each had."""

    def __init__(self) -> None:
        self.events: list[bool] = []
        self.probabilities: list[float] = []

    def add(self, event: bool, probability: float) -> None:
        """Record one event."""
        self.events.append(event)
        self.probabilities.append(probability)


@dataclass(frozen=True)
class _Drawn:
    """One token: the target's p and the draft's q (None: nothing was proposed) of the place that it was drawn for."""

    token: int
    p: Distribution
    q: Distribution | None


@dataclass(frozen=True)
class _Draw:
    """All tokens of one draw, the outcome of its first step, and the first row of logits (1, V) of that step's call."""

    drawn: list[_Drawn]
    proposals: list[Proposal]
    first: list[int]
    accepted: int
    stats: Stats
    row: Logits


@dataclass
class _Node:
    """A place in the tree of outcomes: the tokens accepted before it, its cells, and how often each came up.

    The last cell of `p` (m+1,) is "any other token".
    """

    history: tuple[int, ...]
    cells: Tokens  # (m,)
    p: Distribution
    counts: Counter[int] = field(default_factory=Counter)

    @property
    def table(self) -> list[int]:
        """Counts (m+1,)."""
        inside = [self.counts[token] for token in self.cells.tolist()]
        return [*inside, self.counts.total() - sum(inside)]


class DrawSeries:
    """One drafter under one setting, over all prefixes."""

    def __init__(self, method: str, drafter: Drafter, setting: str, sampling: Sampling, k: int) -> None:
        self.method = method
        self.drafter = _ProposalTap(drafter)
        self.setting = setting
        self.sampling = sampling
        self.k = k
        self.draws = 0
        self.tokens = 0
        self.proposed = 0
        self.accepted = 0
        self.impossible = 0
        self.output = Bets()  # an emitted token is one that the target favours over the draft
        self.proposal = Bets()  # a drawn proposal is the draft's likeliest token
        self.nodes: list[_Node] = []  # of all prefixes
        self.here: dict[tuple[int, ...], _Node] = {}  # of the prefix at hand
        self.reference: Logits = np.empty((1, 0), np.float32)  # (1, V), the first row at the prefix at hand
        self.width_tv = 0.0
        self.row_dependence = Difference()
        self.drift = Difference()

    def open_prefix(self, target: Decoder, prefix: Tokens, draws: int) -> None:
        """Compute the reference at `prefix`, in calls like the loop's, and lay out the cells for `draws` draws."""
        size = target.limits.vocab_size
        judge = Sampler(self.sampling, prefix.tolist(), size, seed=0)
        greedy = Sampler(Sampling(), prefix.tolist(), size, seed=0)
        # The likeliest proposals: behind these, acceptance leads to the next row often enough to be tested.
        proposal = self.drafter.propose(prefix, self.k, greedy).tokens
        rows_of(target, prefix)
        alone = rows_of(target, prefix)[0]  # a call of one token, since the others are in the cache now
        others = _rows_behind(target, prefix, np.resize(prefix, proposal.size))
        rows = _rows_behind(target, prefix, proposal)  # (k+1, V)
        self.reference = rows[:1]
        self.row_dependence |= difference(others[:1], rows[:1])
        self.width_tv = max(self.width_tv, total_variation(judge.distribution(alone), judge.distribution(rows[0])))
        self.here = {}
        reach = float(draws)
        for depth in range(min(DEPTH, proposal.size) + 1):
            history = tuple(proposal[:depth].tolist())
            p = judge.distribution(rows[depth])
            self.here[history] = _node(history, p, reach)
            if depth < proposal.size:
                reach *= float(p[proposal[depth]])
                judge.push(int(proposal[depth]))
        self.nodes += self.here.values()

    def draw(self, target: Decoder, tap: "LogitTap", prefix: Tokens, seed: int) -> _Draw:
        """At least MIN_TOKENS tokens behind `prefix`, through the loop."""
        size = target.limits.vocab_size
        judge = Sampler(self.sampling, prefix.tolist(), size, seed=0)
        sampler = Sampler(self.sampling, prefix.tolist(), size, seed)
        text = TokenBuffer(prefix, prefix.size + MIN_TOKENS + self.k)
        stats = Stats()
        loop = Loop(target, self.drafter, text, sampler, lambda token: True, stats)
        drawn: list[_Drawn] = []
        proposals: list[Proposal] = []
        first = None
        while first is None or len(drawn) < MIN_TOKENS:
            step = loop.step(self.k)
            if first is None:
                first, row = step, tap.rows[:1, :size].copy()
            for i, token in enumerate(step.tokens):
                drawn.append(_Drawn(token, judge.distribution(tap.rows[i, :size]), self.drafter.q(i, size)))
                judge.push(token)
            proposals.append(self.drafter.last)
        return _Draw(drawn, proposals, first.tokens, first.accepted, stats, row)

    def seconds_per_draw(self, target: Decoder, tap: "LogitTap", prefix: Tokens) -> float:
        """Measured after one draw that prefills."""
        self.draw(target, tap, prefix, 0)
        begin = time.perf_counter()
        for seed in range(PILOTS):
            self.draw(target, tap, prefix, seed)
        return (time.perf_counter() - begin) / PILOTS

    def record(self, draw: _Draw) -> None:
        """Count a draw at the prefix at hand."""
        self.draws += 1
        self.tokens += len(draw.drawn) or len(draw.first)
        self.proposed += draw.stats.proposed
        self.accepted += draw.stats.accepted
        self.drift |= difference(draw.row, self.reference)
        for depth, token in enumerate(draw.first):
            node = self.here.get(tuple(draw.first[:depth])) if depth <= draw.accepted else None
            if node is not None:
                node.counts[token] += 1
        for one in draw.drawn:
            side = one.p > one.q if one.q is not None else one.p == one.p.max()
            self.output.add(bool(side[one.token]), float(one.p[side].sum()))
            self.impossible += int(one.p[one.token] == 0)
        for proposal in draw.proposals:
            for x, q in zip(proposal.tokens.tolist(), proposal.q or (), strict=False):
                if q is not None:  # else it was not drawn
                    self.proposal.add(x == int(q.argmax()), float(q.max()))


class DeviceDrawSeries(DrawSeries):
    """Draws through a backend's own loop, whose logits nobody sees: only the tables of tokens are filled."""

    def __init__(
        self, method: str, drafter: Drafter, setting: str, sampling: Sampling, k: int, loops: LoopMaker
    ) -> None:
        super().__init__(method, drafter, setting, sampling, k)
        self._loops = loops
        self._untapped = drafter

    def draw(self, target: Decoder, tap: "LogitTap", prefix: Tokens, seed: int) -> _Draw:
        """The tokens of one step behind `prefix`. Raises EngineError where the backend's loop does not serve them."""
        sampler = Sampler(self.sampling, prefix.tolist(), target.limits.vocab_size, seed)
        text = TokenBuffer(prefix, prefix.size + MIN_TOKENS + self.k)
        stats = Stats()
        with tap.lifted(target):
            loop = self._loops.loop(target, self._untapped, text, sampler, lambda token: True, stats)
            if loop is None:
                raise EngineError(f"the device's loop does not serve {self.method} with {self.setting}")
            step = loop.step(self.k)
        return _Draw([], [], step.tokens, step.accepted, stats, self.reference)


def _node(history: tuple[int, ...], p: Distribution, reach: float) -> _Node:
    """Cells for a place that is reached `reach` times at most. They depend on the reference alone, never on a draw."""
    likely = np.argsort(-p, kind="stable")[:CELLS]
    cells = likely[p[likely] * reach >= CELL_EXPECTED].astype(np.int64)
    table = np.append(p[cells], max(0.0, 1 - p[cells].sum()))
    table = np.maximum(table, CELL_FLOOR)
    return _Node(history, cells, table / table.sum())


def _rows_behind(target: Decoder, prefix: Tokens, proposal: Tokens) -> Logits:
    """Logits (k+1, V) of the call that verifies `proposal` (k,) behind `prefix`."""
    pending = target.sync(prefix, upcoming=proposal.size)
    return target.extend(np.concatenate((pending, proposal)), rows=proposal.size + 1).copy()


class LogitTap:
    """An engine that remembers where its last logits are."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.rows: Logits = np.empty((0, 0), np.float32)  # (R, V)

    @property
    def spec(self) -> GraphSpec:
        """The engine's."""
        return self._engine.spec

    def forward(self, tokens: Tokens, start: int, rows: int) -> Logits:
        """See Engine.forward."""
        self.rows = self._engine.forward(tokens, start, rows)
        return self.rows

    @contextmanager
    def lifted(self, decoder: Decoder) -> Iterator[None]:
        """`decoder` with the engine itself, for a while: a backend's own loop knows its engine by identity."""
        decoder.engine = self._engine
        try:
            yield
        finally:
            decoder.engine = self

    def clear(self) -> None:
        """Clear the engine."""
        self._engine.clear()

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


@contextmanager
def tapped(decoder: Decoder) -> Iterator[LogitTap]:
    """`decoder` with its engine's logits on record, for a while."""
    engine = decoder.engine
    tap = LogitTap(engine)
    decoder.engine = tap
    try:
        yield tap
    finally:
        decoder.engine = engine


class _ProposalTap:
    """A drafter that remembers its last proposal."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.last = Proposal()

    @property
    def method(self) -> str:
        return self._drafter.method

    @property
    def decoders(self) -> Sequence[Decoder]:
        return self._drafter.decoders

    def begin(self, room: int) -> None:
        self._drafter.begin(room)

    def propose(self, text: Tokens, k: int, sampler: Sampler) -> Proposal:
        self.last = self._drafter.propose(text, k, sampler)
        return self.last

    def q(self, i: int, size: int) -> Distribution | None:
        """The distribution (V,) of proposal i: one-hot where it was chosen, None where there is none."""
        if i >= self.last.tokens.size:
            return None
        q = None if self.last.q is None else self.last.q[i]
        return one_hot(int(self.last.tokens[i]), size) if q is None else q
