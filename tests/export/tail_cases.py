"""What the tests of the tails share: a decoder whose logits are given, random cases, and the numpy path's answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray
from onnx_ir.tape import Tape

from draftc.export.tails import DraftTail, VerifyTail
from draftc.runtime.accept import Outcome, Proposal, accept, one_hot, residual
from draftc.runtime.graphio import GraphSpec, Tail, TensorSpec
from draftc.runtime.sampler import Sampler
from draftc.runtime.warp import Distribution, Sampling, distances

__all__ = [
    "LAST_BELOW_ONE",
    "LENGTH",
    "PADDING",
    "SLOTS",
    "Case",
    "Replay",
    "Tails",
    "decoder",
    "distribution",
    "draft_margin",
    "expected",
    "random_case",
    "random_logits",
    "random_sampling",
    "random_uniforms",
    "session_of",
    "tails",
    "verify_margin",
]

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
LENGTH = 64  # L
SLOTS = 8  # W, rows of a verification at most
PADDING = 3  # rows of the head above the vocabulary: they would win every argmax
DTYPES = {"float32": ir.DataType.FLOAT, "int64": ir.DataType.INT64}
LAST_BELOW_ONE = np.float32(1 - 2.0**-24)


def decoder(vocab: int, table: F32 | None = None) -> tuple[ir.Model, GraphSpec]:
    """A graph of one layer, which notes its tokens in its cache.

    Its logits are rows of `table` (V, V + padding), by the token alone, or else one more input, "given".
    """
    spec = GraphSpec.decoder([(1, 8, 8)], LENGTH, vocab + PADDING, "float32")
    if table is None:
        given = TensorSpec("given", "float32", ("B", "R", vocab + PADDING))
        spec = GraphSpec((*spec.inputs, given), spec.outputs)
    inputs = [ir.val(tensor.name, DTYPES[tensor.dtype], tensor.shape) for tensor in spec.inputs]
    graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": 24}, name="decoder")
    tape = Tape(graph)

    def constant(array: NDArray[Any]) -> ir.Value:
        return tape.initializer(ir.tensor(array, name=f"constant{len(graph.initializers)}"))

    ids, index, positions, key, value = inputs[:5]
    token = tape.op("Cast", [tape.op("Unsqueeze", [ids, constant(np.array([1, 3]))])], {"to": 1})  # (B, 1, S, 1)
    state = tape.op("Mul", [token, constant(np.ones((1, 1, 1, 8), np.float32))])
    here = tape.op("GatherElements", [ids, positions], {"axis": 1})  # (B, R)
    if table is None:
        here = tape.op("Cast", [tape.op("Unsqueeze", [here, constant(np.array([2]))])], {"to": 1})
        logits = tape.op("Add", [inputs[5], tape.op("Mul", [here, constant(np.zeros(1, np.float32))])])
    else:
        logits = tape.op("Gather", [constant(table), here])
    presents = [tape.op("TensorScatter", [past, state, index], {"axis": 2}) for past in (key, value)]
    for output, tensor in zip([logits, *presents], spec.outputs, strict=True):
        output.name, output.dtype, output.shape = tensor.name, DTYPES[tensor.dtype], ir.Shape(tensor.shape)
        graph.outputs.append(output)
    return ir.Model(graph, ir_version=10), spec


def session_of(model: ir.Model | Path) -> ort.InferenceSession:
    """An ONNX Runtime session of one thread; from a file where weights lie beside it."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    source = model if isinstance(model, Path) else ir.to_proto(model).SerializeToString()
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


@dataclass(frozen=True)
class Case:
    """One row of a batch: everything that decides what a verification emits."""

    sampling: Sampling
    logits: F32  # (R, V)
    x: I64  # (R - 1,)
    q: F32 | None  # (R - 1, V); None where the proposals were chosen
    uniforms: F32  # (R,)


class Replay(Sampler):
    """A sampler whose uniforms are known beforehand."""

    def __init__(self, sampling: Sampling, vocab: int, uniforms: Sequence[float]) -> None:
        super().__init__(sampling, [], vocab, seed=0)
        self.left = [float(u) for u in uniforms]

    def uniform(self) -> float:
        return self.left.pop(0)


class Tails:
    """The given decoder with either tail, as ONNX Runtime sessions."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.sessions: dict[Tail, ort.InferenceSession] = {}
        passes: dict[Tail, type[DraftTail] | type[VerifyTail]] = {"draft": DraftTail, "verify": VerifyTail}
        for tail, attach in passes.items():
            model, _ = decoder(vocab)
            attach(SLOTS, vocab)(model)
            self.sessions[tail] = session_of(model)

    def run(self, tail: Tail, logits: F32, samplings: Sequence[Sampling], **inputs: NDArray[Any]) -> dict[str, Any]:
        """All outputs by name. logits (B, R, V); what `inputs` does not name gets a default."""
        batch, rows, _ = logits.shape
        padded = np.pad(logits, ((0, 0), (0, 0), (0, PADDING)), constant_values=np.float32(3e38))
        feeds: dict[str, NDArray[Any]] = {
            "input_ids": np.zeros((batch, rows), np.int64),
            "write_index": np.zeros(batch, np.int64),
            "logit_positions": np.tile(np.arange(rows), (batch, 1)),
            "past_key_values.0.key": np.zeros((batch, 1, LENGTH, 8), np.float32),
            "past_key_values.0.value": np.zeros((batch, 1, LENGTH, 8), np.float32),
            "given": padded,
            "temperature": np.array([s.temperature for s in samplings], np.float32),
            "top_k": np.array([s.top_k for s in samplings], np.int64),
            "top_p": np.array([s.top_p for s in samplings], np.float32),
            "min_p": np.array([s.min_p for s in samplings], np.float32),
        }
        session = self.sessions[tail]
        values = session.run(None, feeds | inputs)
        return dict(zip((output.name for output in session.get_outputs()), values, strict=True))

    def draft(self, logits: F32, samplings: Sequence[Sampling], uniform: F32) -> tuple[I64, F32]:
        """Tokens (B,) and q (B, V) for logits (B, V)."""
        batch = len(logits)
        past_q = np.full((batch, 1, SLOTS, self.vocab), 7, np.float32)
        out = self.run(
            "draft",
            logits[:, None],
            samplings,
            uniform=uniform,
            slot=np.zeros(batch, np.int64),
            proposal=np.zeros((batch, SLOTS), np.int64),
            past_q=past_q,
        )
        return out["next_token"][:, 0], out["present_q"][:, 0, 0]

    def verify(self, cases: Sequence[Case], pending: int = 0, **inputs: NDArray[Any]) -> dict[str, Any]:
        """All outputs for cases of one number of rows; `pending` tokens of text stand before row 0's."""
        rows = cases[0].uniforms.size
        ids = np.stack([np.concatenate([np.arange(pending + 1) % self.vocab, case.x]) for case in cases])
        draft_q = np.full((len(cases), 1, SLOTS, self.vocab), np.nan, np.float32)
        for slots, case in zip(draft_q[:, 0], cases, strict=True):
            if case.q is not None:
                slots[: rows - 1] = case.q
        feeds: dict[str, NDArray[Any]] = {
            "input_ids": ids,
            "logit_positions": np.tile(np.arange(pending, pending + rows), (len(cases), 1)),
            "uniforms": np.stack([case.uniforms for case in cases]),
            "draft_q": draft_q,
            "one_hot": np.array([case.q is None for case in cases], np.int64),
        }
        logits = np.stack([case.logits for case in cases])
        return self.run("verify", logits, [case.sampling for case in cases], **(feeds | inputs))


@cache
def tails(vocab: int) -> Tails:
    """Sessions are made once for each vocabulary."""
    return Tails(vocab)


# The numpy path


def distribution(logits: F32, sampling: Sampling) -> Distribution:
    """What a row is drawn from: greedy decoding is one-hot."""
    if sampling.greedy:
        return one_hot(int(logits.argmax()), logits.size)
    return Sampler(sampling, [], logits.size, seed=0).distribution(logits)


def expected(case: Case) -> Outcome:
    """What `accept` makes of it, with the same uniforms."""
    proposal = Proposal(case.x, None if case.q is None else list(case.q.astype(np.float64)))
    return accept(proposal, case.logits, Replay(case.sampling, case.logits.shape[1], case.uniforms.tolist()))


# How near a case is to one where the answer turns: all in units of probability


def _draw_margin(p: Distribution, u: float) -> float:
    cumulative = np.cumsum(p[p > 0])
    return float(np.abs(cumulative[:-1] - u * cumulative[-1]).min(initial=1.0))


def _cut_margin(logits: F32, sampling: Sampling) -> float:
    """Of the nucleus and of min-p."""
    if sampling.greedy:
        return 1.0
    y = distances(logits)
    p = distribution(logits, Sampling(sampling.temperature, sampling.top_k))
    order = np.argsort(y)
    last_of_ties = y[order][1:] > y[order][:-1]
    margin = 1.0
    if sampling.top_p < 1:
        margin = float(np.abs(np.cumsum(p[order])[:-1][last_of_ties] - sampling.top_p).min(initial=1.0))
    if sampling.min_p > 0:  # the largest is in it for certain
        margin = min(margin, float(np.abs(p / p.max() - sampling.min_p).min(where=y > 0, initial=1.0)))
    return margin


def draft_margin(logits: F32, sampling: Sampling, uniform: float) -> float:
    """Of one draw from a row of logits (V,)."""
    if sampling.greedy:
        return 1.0
    return min(_cut_margin(logits, sampling), _draw_margin(distribution(logits, sampling), uniform))


def verify_margin(case: Case) -> float:
    """Of a verification: of every cut, test and draw that the numpy path makes."""
    if case.sampling.greedy:
        return 1.0
    margin = 1.0
    for i, row in enumerate(case.logits):
        margin = min(margin, _cut_margin(row, case.sampling))
        p, u = distribution(row, case.sampling), float(case.uniforms[i])
        if i == case.x.size:
            return min(margin, _draw_margin(p, u))
        x = int(case.x[i])
        q = one_hot(x, p.size) if case.q is None else case.q[i].astype(np.float64)
        margin = min(margin, abs(u * float(q[x]) - float(p[x])))
        if u * q[x] >= p[x]:
            left = np.maximum(p - q, 0).sum()
            return min(margin, _draw_margin(residual(p, q), float(case.uniforms[i + 1])) * (left if left > 0 else 1.0))
    raise AssertionError("the last row has no proposal")


# Random cases


def random_logits(rng: np.random.Generator, vocab: int) -> F32:
    """Rows of all kinds: smooth, tied, peaked, flat, with forbidden tokens, of extreme scale."""
    normal = rng.standard_normal(vocab)
    match int(rng.integers(9)):
        case 0:
            logits = 3 * normal
        case 1:
            logits = 8 * normal
        case 2:
            logits = rng.integers(-3, 4, vocab).astype(np.float64)
        case 3:
            logits = 0.5 * normal - 1.1 * np.log1p(rng.permutation(vocab))
        case 4:
            logits = np.where(rng.random(vocab) < 0.1, 3 * normal, -np.inf)
        case 5:
            logits = np.full(vocab, float(rng.integers(-9, 9)))
        case 6:
            logits = normal * 10.0 ** rng.uniform(-38, 37)
        case 7:
            logits = np.where(rng.random(vocab) < 3 / vocab, 20.0, normal)
        case _:
            logits = 1e4 + np.round(8 * normal, 1)
    if not np.isfinite(logits).any():
        logits[rng.integers(vocab)] = 0
    return logits.astype(np.float32)


def random_sampling(rng: np.random.Generator, vocab: int) -> Sampling:
    """Every parameter on, off, and at its ends. All are float32 numbers, as the graph takes them."""

    def pick(*values: float) -> float:
        return float(np.float32(values[rng.integers(len(values))]))

    return Sampling(
        temperature=pick(0, 1e-30, 1e-6, 0.02, 0.3, 0.7, 1, 1, 1.4, rng.uniform(0.1, 3), 30, 1e6, 1e30),
        top_k=int(pick(0, 0, 0, 1, 2, 3, int(rng.integers(1, vocab + 1)), vocab - 1, vocab, vocab + 9)),
        top_p=min(1.0, max(pick(1, 1, 0.9, 0.5, 0.1, 0.999, 1e-6, 1e-30, rng.random()), 1e-30)),
        min_p=pick(0, 0, 0, 0.02, 0.1, 0.5, 1, rng.random()),
    )


def random_uniforms(rng: np.random.Generator, *shape: int) -> F32:
    """Multiples of 2**-24 in [0, 1); the first and the last of them are frequent."""
    uniforms = (rng.integers(0, 2**24, shape) * 2.0**-24).astype(np.float32)
    ends = rng.random(shape)
    return np.where(ends < 0.03, 0, np.where(ends > 0.97, LAST_BELOW_ONE, uniforms)).astype(np.float32)


def random_case(rng: np.random.Generator, vocab: int, rows: int) -> Case:
    """A draft that resembles the target now more and now less; its proposals drawn from q, or chosen."""
    sampling = random_sampling(rng, vocab)
    logits = np.stack([random_logits(rng, vocab) for _ in range(rows)])
    likeness = rng.choice([0.0, 0.2, 2.0])
    q = np.zeros((rows - 1, vocab), np.float32)
    x = np.zeros(rows - 1, np.int64)
    for i in range(rows - 1):
        like = logits[i] + np.float32(likeness) * rng.standard_normal(vocab).astype(np.float32)
        q[i] = distribution(like if rng.random() < 0.9 else random_logits(rng, vocab), sampling)
        x[i] = np.searchsorted(np.cumsum(q[i], dtype=np.float64) / q[i].sum(dtype=np.float64), rng.random())
        x[i] = min(x[i], vocab - 1)
    chosen = rng.random() < 0.3
    if chosen:
        best = logits[:-1].argmax(1) if rows > 1 else x
        x = np.where(rng.random(rows - 1) < 0.6, best, rng.integers(0, vocab, rows - 1))
    return Case(sampling, logits, x, None if chosen else q, random_uniforms(rng, rows))
