"""What the tests of the loop share: models without weights, an engine that minds its memory, and exact enumeration."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaincc

from draftc.runtime.accept import Proposal
from draftc.runtime.decoder import Decoder, Limits
from draftc.runtime.drafter import Drafter, DraftRule, ModelDrafter
from draftc.runtime.engine import Logits, Tokens
from draftc.runtime.graphio import GraphSpec
from draftc.runtime.kvcache import TokenBuffer
from draftc.runtime.loop import Loop, Step
from draftc.runtime.sampler import Sampler
from draftc.runtime.stats import Stats
from draftc.runtime.warp import Distribution, LogitsMask, Sampling

__all__ = [
    "Choices",
    "DroppingDrafter",
    "EnumeratingSampler",
    "FakeEngine",
    "HashedModel",
    "Model",
    "Outcomes",
    "Run",
    "UnwarpedDrafter",
    "decode",
    "fake_decoder",
    "fixed",
    "goodness_of_fit",
    "joint",
    "outcomes",
    "reference_distribution",
    "tokens",
    "total_variation",
]

Model = Callable[[Tokens], Logits]  # the tokens so far (n,) → the next token's logits (V,)
Outcomes = dict[tuple[int, ...], float]  # tokens → probability
PADDING = 3  # rows of the head above the vocabulary


def tokens(*ids: int) -> Tokens:
    return np.array(ids, np.int64)


def fixed(p: Sequence[float]) -> Model:
    """A model whose next-token distribution is `p`, whatever came before."""
    with np.errstate(divide="ignore"):
        logits = np.log(np.array(p)).astype(np.float32)
    return lambda _: logits


class HashedModel:
    """Logits that depend on every token of the prefix, in order. `like` another model: its logits plus noise."""

    def __init__(self, vocab: int, seed: int = 0, spread: float = 2.0, like: Model | None = None) -> None:
        self.vocab = vocab
        self.seed = seed
        self.spread = spread
        self.like = like
        self._known: dict[bytes, Logits] = {}

    def __call__(self, prefix: Tokens) -> Logits:
        key = prefix.tobytes()
        if key not in self._known:
            # The length too: a seed sequence is padded with zeros, and zero is a token.
            rng = np.random.default_rng([self.seed, prefix.size, *prefix.tolist()])
            logits = (self.spread * rng.standard_normal(self.vocab)).astype(np.float32)
            self._known[key] = logits if self.like is None else self.like(prefix) + logits
        return self._known[key]


@dataclass(frozen=True)
class Call:
    """One engine call."""

    width: int
    start: int
    rows: int


class FakeEngine:
    """Computes logits from the tokens that its memory holds, so that a wrong length or place shows in the output.

    Fails when a call writes past L, leaves a gap, or asks for rows that it has not. The returned buffer is overwritten
    by the next call, unused rows with NaN; padding rows would win every argmax.

    `faults` maps the number of a call, from 0, to what happens in it: an exception, raised when half of the call is
    written, or a number that is put among the first row's logits. NaN and infinity get into the memory too, and as in
    real attention (0 · NaN is NaN) every later call gives NaN until these slots are written over or cleared.
    """

    def __init__(self, model: Model, vocab: int, length: int) -> None:
        self._model = model
        self._vocab = vocab
        self._memory = np.full(length, -1, np.int64)
        self._spoiled = np.zeros(length, bool)
        self._logits = np.empty((length, vocab + PADDING), np.float32)
        self._spec = GraphSpec.decoder([(1, 2, 2)], length, vocab + PADDING, "float32")
        self.calls: list[Call] = []
        self.faults: dict[int, BaseException | float] = {}
        self.cleared = 0
        self.closed = 0

    @property
    def spec(self) -> GraphSpec:
        return self._spec

    @property
    def memory(self) -> Tokens:
        """What is written (L,), -1 where nothing ever was."""
        return self._memory

    def forward(self, tokens: Tokens, start: int, rows: int) -> Logits:
        assert self.closed == 0, "called after close"
        assert tokens.dtype == np.int64
        assert tokens.ndim == 1
        width = tokens.size
        assert width >= 1
        assert 1 <= rows <= width
        assert 0 <= start <= self._memory.size - width, f"{width} tokens at {start} leave {self._memory.size} slots"
        assert (self._memory[:start] >= 0).all(), f"reads a slot below {start} that nothing was written to"
        fault = self.faults.pop(len(self.calls), None)
        self.calls.append(Call(width, start, rows))
        if isinstance(fault, BaseException):
            self._memory[start : start + width // 2] = tokens[: width // 2]
            raise fault
        self._memory[start : start + width] = tokens
        self._spoiled[start : start + width] = False
        self._logits.fill(np.nan)
        if self._spoiled.any():
            return self._logits[:rows]
        for row, end in enumerate(range(start + width - rows + 1, start + width + 1)):
            self._logits[row, : self._vocab] = self._model(self._memory[:end])
            self._logits[row, self._vocab :] = 1e4
        if fault is not None:
            self._logits[0, self._vocab // 2] = fault
            self._spoiled[start : start + width] = not np.isfinite(fault)
        return self._logits[:rows]

    def clear(self) -> None:
        self._memory.fill(-1)
        self._spoiled.fill(False)
        self.cleared += 1

    def close(self) -> None:
        self.closed += 1


def fake_decoder(
    model: Model, vocab: int, *, max_length: int = 64, max_width: int = 8, prefill_chunk: int = 16
) -> tuple[Decoder, FakeEngine]:
    """A decoder over a fake engine, which is returned too, of L = max_length + max_width."""
    engine = FakeEngine(model, vocab, max_length + max_width)
    return Decoder(engine, Limits(max_length, max_width, prefill_chunk, vocab)), engine


@dataclass
class Run:
    """What `decode` produced."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)


def decode(
    target: Decoder,
    drafter: Drafter | None,
    prompt: Sequence[int],
    sampler: Sampler,
    count: int,
    k: int,
    stop: frozenset[int] = frozenset(),
) -> Run:
    """`count` tokens, or fewer where one of `stop` comes first, through the loop. The first step drafts already."""
    run = Run()
    text = TokenBuffer(tokens(*prompt), len(prompt) + count)

    emitted = itertools.count(1)

    def emit(token: int) -> bool:
        return next(emitted) < count and token not in stop

    loop = Loop(target, drafter, text, sampler, emit, run.stats, logprobs=True)
    while len(run.tokens) < count and not stop & set(run.tokens):
        step = loop.step(min(k, count - len(run.tokens) - 1))
        run.steps.append(step)
        run.tokens += step.tokens
        run.logprobs += step.logprobs
    assert text.view.tolist() == [*prompt, *run.tokens]
    return run


class Choices:
    """One path through a program that makes random choices; `siblings` are the paths that branch off from it."""

    def __init__(self, path: tuple[int, ...]) -> None:
        self._prescribed = path
        self._path: tuple[int, ...] = ()
        self.weight = 1.0
        self.siblings: list[tuple[int, ...]] = []

    def choose(self, p: NDArray[np.float64]) -> int:
        """An index of `p`, each of which has its own path."""
        depth = len(self._path)
        if depth < len(self._prescribed):
            index = self._prescribed[depth]
        else:
            index, *others = np.flatnonzero(p).tolist()
            self.siblings += [(*self._path, other) for other in others]
        self._path = (*self._path, index)
        self.weight *= float(p[index])
        return index


def outcomes(program: Callable[[Choices], Sequence[int]]) -> Outcomes:
    """The exact distribution of what `program` returns: every path of its choices is run once, and weighed."""
    total: dict[tuple[int, ...], float] = defaultdict(float)
    pending: list[tuple[int, ...]] = [()]
    while pending:
        choices = Choices(pending.pop())
        total[tuple(program(choices))] += choices.weight
        pending += choices.siblings
    return dict(total)


class Uniform(float):
    """A uniform variable times `scale`: comparing it with a number is a choice, of the probability that it has."""

    __array_ufunc__ = None  # numpy scalars leave the arithmetic to this class

    def __new__(cls, choices: Choices, scale: float = 1.0) -> "Uniform":
        return super().__new__(cls, np.nan)

    def __init__(self, choices: Choices, scale: float = 1.0) -> None:
        self._choices = choices
        self._scale = scale

    def __mul__(self, factor: float) -> "Uniform":
        return Uniform(self._choices, self._scale * factor)

    __rmul__ = __mul__

    def __lt__(self, bound: float) -> bool:
        below = min(1.0, max(0.0, bound / self._scale)) if self._scale > 0 else float(bound > 0)
        return self._choices.choose(np.array([1 - below, below])) == 1

    def __ge__(self, bound: float) -> bool:
        return not self < bound

    __le__ = __lt__  # equality has measure zero
    __gt__ = __ge__


class EnumeratingSampler(Sampler):
    """A Sampler whose every draw is a choice."""

    def __init__(
        self,
        choices: Choices,
        sampling: Sampling,
        prompt: Sequence[int],
        vocab_size: int,
        logits_mask: LogitsMask | None = None,
    ) -> None:
        super().__init__(sampling, prompt, vocab_size, seed=0, logits_mask=logits_mask)
        self._choices = choices

    def draw(self, p: Distribution) -> int:
        return self._choices.choose(p)

    def uniform(self) -> float:
        return Uniform(self._choices)


def reference_distribution(
    logits: Logits,
    sampling: Sampling,
    prompt: Sequence[int],
    generated: Sequence[int],
    mask: LogitsMask | None = None,
) -> Distribution:
    """The warped distribution (V,), spelled out token by token in double precision."""
    scores = logits.astype(np.float64)
    for token in range(scores.size):
        if token in [*prompt, *generated]:
            positive = scores[token] > 0
            scores[token] *= 1 / sampling.repetition_penalty if positive else sampling.repetition_penalty
        if count := list(generated).count(token):
            scores[token] -= sampling.presence_penalty + sampling.frequency_penalty * count
        scores[token] += sampling.logit_bias.get(token, 0.0)
    allowed = mask(generated) if mask else None
    if allowed is not None:
        scores[~allowed] = -np.inf
    if sampling.temperature == 0:
        certain = np.zeros(scores.size)
        certain[scores.argmax()] = 1.0
        return certain
    scores /= sampling.temperature
    ranked = np.argsort(-scores, kind="stable")
    if sampling.top_k:
        scores[ranked[sampling.top_k :]] = -np.inf
    p = np.exp(scores - scores.max())
    p /= p.sum()
    kept, mass = [], 0.0
    for token in ranked:
        if mass < sampling.top_p and p[token] >= sampling.min_p * p.max():
            kept.append(token)
        mass += p[token]
    result = np.zeros(scores.size)
    result[kept] = p[kept] / p[kept].sum()
    return result


def joint(following: Callable[[list[int]], Distribution], count: int) -> Outcomes:
    """The distribution of the next `count` tokens, given that of one token after those before it."""

    def extend(before: list[int], weight: float) -> Iterator[tuple[tuple[int, ...], float]]:
        if len(before) == count:
            yield tuple(before), weight
            return
        p = following(before)
        for token in np.flatnonzero(p).tolist():
            yield from extend([*before, token], weight * float(p[token]))

    return dict(extend([], 1.0))


def total_variation(a: Outcomes, b: Outcomes) -> float:
    """Half the sum of the differences of two distributions."""
    return sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys()) / 2


def goodness_of_fit(counts: Counter[tuple[int, ...]], expected: Outcomes) -> float:
    """The p-value of a G-test of `counts`. Cells of fewer than 5 expected draws are pooled."""
    draws = counts.total()
    if counts.keys() - expected.keys():
        return 0.0  # something came that never could
    cells: list[tuple[float, float]] = []
    pooled = np.zeros(2)
    for key, probability in expected.items():
        cell = (float(counts[key]), draws * probability)
        if cell[1] < 5:
            pooled += cell
        else:
            cells.append(cell)
    if pooled[1] > 0:
        cells.append((pooled[0], pooled[1]))
    g = 2 * sum(seen * np.log(seen / wanted) for seen, wanted in cells if seen > 0)
    return float(gammaincc((len(cells) - 1) / 2, g / 2))  # the upper tail of chi-square


class UnwarpedDrafter(ModelDrafter):
    """Planted fault: draws from the warped distribution and reports the model's own as q."""

    def propose(self, text: Tokens, k: int, sampler: Sampler, rule: DraftRule | None = None) -> Proposal:
        proposal = super().propose(text, k, sampler)
        plain = Sampler(Sampling(temperature=1.0), text.tolist(), self.decoder.limits.vocab_size, seed=0)
        q = []
        for i in range(proposal.tokens.size):
            prefix = np.concatenate((text, proposal.tokens[:i]))
            q.append(plain.distribution(self.decoder.extend(self.decoder.sync(prefix), rows=1)[0]))
        return Proposal(proposal.tokens, q)


class DroppingDrafter(ModelDrafter):
    """Proposes at most one token, and none where `stops(x, q)`. Looking at x is the planted fault, at q it is right."""

    def __init__(self, decoder: Decoder, stops: Callable[[int, Distribution], bool]) -> None:
        super().__init__(decoder)
        self.stops = stops

    def propose(self, text: Tokens, k: int, sampler: Sampler, rule: DraftRule | None = None) -> Proposal:
        proposal = super().propose(text, min(k, 1), sampler)
        q = proposal.q[0] if proposal.q else None
        if q is not None and self.stops(int(proposal.tokens[0]), q):
            return Proposal()
        return proposal
