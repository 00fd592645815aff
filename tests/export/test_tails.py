"""The tails against the numpy path, token for token and with the same uniforms; and what TensorRT makes of them.

Float32 and float64 may part where a draw, a test or a cut lies within 1e-5 of the place where the answer turns. Such
cases are counted, and are few; anywhere else no difference is allowed.
"""

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftc.export.capture import capture
from draftc.export.tail_ops import Grid, Ops, draw, invert, threshold
from draftc.export.tails import DraftTail, VerifyTail
from draftc.runtime.accept import Proposal, accept
from draftc.runtime.errors import UsageError
from draftc.runtime.graphio import GraphSpec, Tail
from draftc.runtime.warp import Sampling
from tests.export.tail_cases import (
    LAST_BELOW_ONE,
    LENGTH,
    PADDING,
    SLOTS,
    Case,
    Replay,
    decoder,
    distribution,
    draft_margin,
    expected,
    random_case,
    random_logits,
    random_sampling,
    random_uniforms,
    session_of,
    tails,
    verify_margin,
)
from tests.export.tiny_models import VOCAB, tiny_model

F32 = NDArray[np.float32]
TAILS: list[Tail] = ["draft", "verify"]
PLAIN = Sampling(temperature=1.0)
NEAR = 1e-5


def attach(tail: Tail, vocab: int, table: F32 | None = None) -> tuple[ir.Model, GraphSpec]:
    """The decoder of `tail_cases` with a tail, and the spec that it should have."""
    model, spec = decoder(vocab, table)
    result = (DraftTail if tail == "draft" else VerifyTail)(SLOTS, vocab)(model)
    assert result.modified
    return model, spec.with_tail(tail, SLOTS, vocab)


# The graph


@pytest.mark.parametrize("tail", TAILS)
def test_inputs_and_outputs_are_those_of_the_contract(tail: Tail, tmp_path: Path) -> None:
    model, spec = attach(tail, 11, np.zeros((11, 11 + PADDING), np.float32))
    for values, tensors in ((model.graph.inputs, spec.inputs), (model.graph.outputs, spec.outputs)):
        found = [
            (value.name, value.dtype, [dim if isinstance(dim, int) else dim.value for dim in value.shape or []])
            for value in values
        ]
        assert found == [
            (tensor.name, ir.DataType.FLOAT if tensor.dtype == "float32" else ir.DataType.INT64, list(tensor.shape))
            for tensor in tensors
        ]
    ir.save(model, tmp_path / "model.onnx")
    onnx.checker.check_model(str(tmp_path / "model.onnx"), full_check=True)
    assert spec.tail == tail
    assert spec.q_shape == (SLOTS, 11)


@pytest.mark.parametrize("tail", TAILS)
def test_no_operator_that_a_device_refuses_or_a_cuda_graph_cannot_hold(tail: Tail) -> None:
    model, _ = attach(tail, 1000)
    assert {node.domain for node in model.graph} == {""}
    refused = {"Loop", "If", "Scan", "TopK", "NonZero", "Unique", "Compress", "ArgMax", "Multinomial", "RandomUniform"}
    assert refused & {node.op_type for node in model.graph} == set()


def test_a_graph_takes_one_tail_that_fits_its_head() -> None:
    model, _ = attach("draft", 11)
    with pytest.raises(UsageError, match="has a tail already"):
        VerifyTail(SLOTS, 11)(model)
    model, _ = decoder(11)
    with pytest.raises(UsageError, match="head has 14 rows, too few for a vocabulary of 15"):
        DraftTail(SLOTS, 15)(model)
    DraftTail(SLOTS, 14)(model)


def test_a_captured_model_takes_a_tail(tmp_path: Path) -> None:
    captured = capture(tiny_model(), max_length=32, max_width=4, path=tmp_path / "model.onnx")
    model = ir.load(captured.path)
    DraftTail(SLOTS, VOCAB - 20)(model)
    spec = captured.spec.with_tail("draft", SLOTS, VOCAB - 20)
    ir.save(model, tmp_path / "tail.onnx")
    session = session_of(tmp_path / "tail.onnx")
    assert [value.name for value in session.get_inputs()] == [tensor.name for tensor in spec.inputs]
    sizes = {"B": 1, "S": 5, "R": 1, "P": SLOTS}
    feeds: dict[str, NDArray[Any]] = {
        tensor.name: np.zeros([dim if isinstance(dim, int) else sizes[dim] for dim in tensor.shape], tensor.dtype)
        for tensor in spec.inputs
    }
    feeds |= {"input_ids": np.array([[3, 1, 4, 1, 5]]), "logit_positions": np.array([[4]])}
    values = session.run(None, feeds)
    out = dict(zip((tensor.name for tensor in spec.outputs), values, strict=True))
    best = int(out["logits"][0, 0, : VOCAB - 20].argmax())
    assert out["next_token"].tolist() == [[best]]
    assert np.flatnonzero(out["present_q"][0, 0, 0]).tolist() == [best]


@pytest.mark.parametrize("vocab", [97, 151_665])
@pytest.mark.parametrize("tail", TAILS)
def test_tensorrt_rtx_builds_an_engine(tail: Tail, vocab: int, tmp_path: Path) -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    model, spec = attach(tail, vocab)
    ir.save(model, tmp_path / "model.onnx")
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    assert parser.parse_from_file(str(tmp_path / "model.onnx")), parser.get_error(0).desc()
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    profile = builder.create_optimization_profile()
    largest = {"B": 2, "S": SLOTS, "R": 1 if tail == "draft" else SLOTS, "P": SLOTS}
    for tensor in spec.inputs:
        least, most = (
            [dim if isinstance(dim, int) else bound[dim] for dim in tensor.shape]
            for bound in (dict.fromkeys(largest, 1), largest)
        )
        profile.set_shape(tensor.name, least, most, most)
    config.add_optimization_profile(profile)
    assert builder.build_serialized_network(network, config) is not None

    layers = Counter(network.get_layer(i).type for i in range(network.num_layers))
    assert layers[trt.LayerType.KV_CACHE_UPDATE] == 2 + (tail == "draft"), "q is not written in place"
    assert [network.get_input(i).name for i in range(network.num_inputs)] == [tensor.name for tensor in spec.inputs]
    assert [network.get_output(i).name for i in range(network.num_outputs)] == [t.name for t in spec.outputs]


# The parts


@cache
def threshold_session(counted: bool) -> ort.InferenceSession:
    """y, weights (B, 1, 3, 4), target (B, 1, 1, 1) → t; counted: every weight is 1."""
    shape = ("B", 1, 3, 4)
    y, weights, target = (
        ir.val(name, ir.DataType.FLOAT, dims)
        for name, dims in (("y", shape), ("weights", shape), ("target", ("B", 1, 1, 1)))
    )
    graph = ir.Graph([y, weights, target], [], nodes=[], opset_imports={"": 24}, name="threshold")
    t = threshold(Ops(graph), y, 1.0 if counted else weights, target)
    t.name, t.dtype = "t", ir.DataType.FLOAT
    graph.outputs.append(t)
    return session_of(ir.Model(graph, ir_version=10))


@given(seed=st.integers(0, 2**32), spread=st.integers(0, 31))
@settings(deadline=None, max_examples=200)
@example(seed=0, spread=31)
def test_the_threshold_is_exact_among_all_float32_numbers(seed: int, spread: int) -> None:
    """Numbers that are 2**spread float32 numbers apart or less, about any of them, zero and infinity included."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**31, (32, 1)) + rng.integers(0, 2**spread, (32, 12))
    bits[(bits < 0x00800000) | (rng.random(bits.shape) < 0.05)] = 0
    y = np.minimum(bits, 0x7F800000).astype(np.uint32).view(np.float32)  # (32, 12)
    y[:, 5] = y[:, 0]
    weights = rng.integers(0, 5, y.shape).astype(np.float32)
    targets = rng.integers(1, 30, 32)
    feeds = {"y": y.reshape(32, 1, 3, 4), "weights": weights.reshape(32, 1, 3, 4)}
    feeds["target"] = targets.astype(np.float32).reshape(32, 1, 1, 1)
    for counted in (False, True):
        (found,) = threshold_session(counted).run(None, feeds)
        for row, weight, target, t in zip(y, np.ones_like(y) if counted else weights, targets, found, strict=True):
            enough = [float(value) for value in row if weight[row <= value].sum() >= target]
            assert t.item() == min(enough, default=float("inf"))


@cache
def draw_session(vocab: int) -> ort.InferenceSession:
    """weights (B, V) and uniform (B, 1) → token (B, 1)."""
    weights = ir.val("weights", ir.DataType.FLOAT, ("B", vocab))
    uniform = ir.val("uniform", ir.DataType.FLOAT, ("B", 1))
    graph = ir.Graph([weights, uniform], [], nodes=[], opset_imports={"": 24}, name="draw")
    op, grid = Ops(graph), Grid(vocab)
    token = draw(op, grid, op.Squeeze(grid.lay_out(op, op.Unsqueeze(weights, [1]), 0.0), [1]), uniform)
    token.name, token.dtype = "token", ir.DataType.INT64
    graph.outputs.append(token)
    return session_of(ir.Model(graph, ir_version=10))


def drawn(weights: F32, uniforms: F32) -> list[int]:
    """One token for each uniform."""
    feeds = {"weights": np.tile(weights, (uniforms.size, 1)), "uniform": uniforms[:, None]}
    (token,) = draw_session(weights.size).run(None, feeds)
    return [int(x) for x in token[:, 0]]


@given(weights=st.lists(st.integers(0, 5), min_size=13, max_size=13).filter(any))
@settings(deadline=None, max_examples=100)
def test_each_token_is_drawn_on_an_interval_as_long_as_its_weight(weights: list[int]) -> None:
    """All numbers are multiples of 1/128, so that the ends of the intervals are exact."""
    w = np.array([*weights, 128 - sum(weights)], np.float32)
    ends = np.cumsum(w) / 128
    tokens = np.flatnonzero(w)
    begins = (ends - w / 128)[tokens].astype(np.float32)
    last = np.minimum(np.nextafter(ends[tokens].astype(np.float32), np.float32(0)), LAST_BELOW_ONE)
    assert drawn(w, begins) == tokens.tolist()
    assert drawn(w, last) == tokens.tolist()


@pytest.mark.parametrize("vocab", [1, 2, 3, 16, 17, 1000, 50_257])
def test_a_token_of_weight_zero_is_never_drawn(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    uniforms = np.array([0, 2**-24, *rng.random(20), LAST_BELOW_ONE, 1], np.float32)  # even where 1 should come
    for share in (1.0, 0.5, 1.5 / vocab):
        weights = (rng.exponential(size=vocab) * 10.0 ** rng.uniform(-30, 3, vocab)).astype(np.float32)
        weights[rng.random(vocab) >= share] = 0
        weights[rng.integers(vocab)] = 1
        tokens = drawn(weights, uniforms)
        assert (weights[tokens] > 0).all()
        assert tokens[0] == np.flatnonzero(weights)[0]


def test_a_cumulative_sum_that_falls_or_ends_too_low_does_no_harm() -> None:
    """As a parallel sum's rounding may leave it."""
    mass, cumulative, target = (
        ir.val(name, ir.DataType.FLOAT, ("B", "N")) for name in ("mass", "cumulative", "target")
    )
    graph = ir.Graph([mass, cumulative, target], [], nodes=[], opset_imports={"": 24}, name="invert")
    for name, value in zip(("found", "before"), invert(Ops(graph), mass, cumulative, target, 5), strict=True):
        value.name, value.dtype = name, ir.DataType.FLOAT
        graph.outputs.append(value)
    feeds = {
        "mass": np.tile(np.array([0, 0.5, 0, 0.5, 0], np.float32), (3, 1)),
        "cumulative": np.tile(np.array([0, 0.5, 0.5 + 2**-20, 0.75, 0.75 + 2**-20], np.float32), (3, 1)),
        "target": np.array([[0], [0.5], [0.75]], np.float32),
    }
    found, before = session_of(ir.Model(graph, ir_version=10)).run(None, feeds)
    assert found[:, 0].tolist() == [1, 3, 3]
    assert before[:, 0].tolist() == [0, 0.5 + 2**-20, 0.5 + 2**-20]


# Against the numpy path


@pytest.mark.parametrize(
    ("vocab", "cases", "near"), [(11, 1600, 16), (12, 480, 5), (97, 960, 10), (4096, 320, 4), (151_665, 16, 2)]
)
def test_draft_tail_is_the_numpy_path(vocab: int, cases: int, near: int) -> None:
    rng = np.random.default_rng(vocab)
    differ = 0
    for _ in range(cases // 8):
        logits = np.stack([random_logits(rng, vocab) for _ in range(8)])
        samplings = [random_sampling(rng, vocab) for _ in range(8)]
        uniforms = random_uniforms(rng, 8)
        tokens, q = tails(vocab).draft(logits, samplings, uniforms)
        for b, sampling in enumerate(samplings):
            p = distribution(logits[b], sampling)
            same = int(tokens[b]) == Replay(sampling, vocab, [float(uniforms[b])]).draw(p)
            same &= bool(((q[b] > 1e-30) == (p > 1e-30)).all() and np.allclose(q[b], p, rtol=5e-6, atol=1e-30))
            if not same:
                differ += 1
                assert draft_margin(logits[b], sampling, float(uniforms[b])) < NEAR, (sampling, uniforms[b])
    assert differ <= near


@pytest.mark.parametrize(
    ("vocab", "cases", "near"), [(11, 2400, 24), (12, 640, 6), (97, 1280, 13), (4096, 160, 3), (151_665, 8, 2)]
)
def test_verify_tail_is_the_numpy_path(vocab: int, cases: int, near: int) -> None:
    rng = np.random.default_rng(vocab)
    differ = 0
    accepted: Counter[int] = Counter()
    for _ in range(cases // 8):
        rows = int(rng.integers(1, 6))
        batch = [random_case(rng, vocab, rows) for _ in range(8 if vocab < 100_000 else 2)]
        out = tails(vocab).verify(batch)
        for b, case in enumerate(batch):
            outcome = expected(case)
            accepted[outcome.accepted] += 1
            want = outcome.tokens + [-1] * (rows - len(outcome.tokens))
            if out["emitted"][b].tolist() != want or out["accepted"][b] != outcome.accepted:
                differ += 1
                assert verify_margin(case) < NEAR, (case.sampling, case.uniforms, out["emitted"][b], want)
    assert differ <= near
    assert vocab > 4096 or all(accepted[n] > 5 for n in range(4)), "the cases do not reach far"


@given(seed=st.integers(0, 2**32), vocab=st.sampled_from([11, 12, 97]), rows=st.integers(1, 5))
@settings(deadline=None, max_examples=150)
def test_any_seed(seed: int, vocab: int, rows: int) -> None:
    case = random_case(np.random.default_rng(seed), vocab, rows)
    out = tails(vocab).verify([case])
    outcome = expected(case)
    emitted = out["emitted"][0].tolist()
    same = emitted == outcome.tokens + [-1] * (rows - len(outcome.tokens)) and out["accepted"] == outcome.accepted
    assert same or verify_margin(case) < NEAR


def test_every_k_over_ties() -> None:
    logits = np.array([2, 5, 5, 1, 2, 5, -np.inf, 2, 1, 0, 4], np.float32)
    samplings = [Sampling(t, top_k=k) for t in (1e-30, 0.5, 1e30) for k in range(13)]
    batch = np.tile(logits, (len(samplings), 1))
    _, q = tails(11).draft(batch, samplings, np.zeros(len(samplings), np.float32))
    for row, sampling in zip(q, samplings, strict=True):
        np.testing.assert_allclose(row, distribution(logits, sampling), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize(
    ("largest", "step"),
    [(2.0**-123, 2.0**-126), (2.0**-60, 2.0**-84), (1.0, 2.0**-24), (2.0**100, 2.0**76)],
)
def test_cuts_tell_neighbours_apart_at_any_scale(largest: float, step: float) -> None:
    """Logits one float32 apart, down to the smallest that is not denormal, and as hot as it gets."""
    logits = np.full(11, -np.inf, np.float32)
    logits[:8] = largest - np.arange(8) * step
    samplings = [Sampling(1e30, top_k=k) for k in range(1, 8)]
    samplings += [Sampling(1e30, top_p=k / 8 - 0.01) for k in range(1, 9)]
    _, q = tails(11).draft(np.tile(logits, (15, 1)), samplings, np.zeros(15, np.float32))
    for row, sampling in zip(q, samplings, strict=True):
        np.testing.assert_array_equal(row > 0, distribution(logits, sampling) > 0)
    assert [int((row > 0).sum()) for row in q] == [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 7, 8]


def test_the_emitted_token_has_the_targets_distribution() -> None:
    """Exactly, but for the grid of the uniforms: whatever the draft proposes, and whether it was drawn or chosen."""
    size, count = 5, 48
    rng = np.random.default_rng(3)
    logits = (1.5 * rng.standard_normal((2, size))).astype(np.float32)
    grid = ((np.arange(count) + 0.5) / count).astype(np.float32)
    pairs = np.stack(np.meshgrid(grid, grid), -1).reshape(-1, 2)
    for sampling in (PLAIN, Sampling(0.7, top_k=6, top_p=0.9), Sampling(1.3, min_p=0.2)):
        p = distribution(logits[0], sampling)
        q = rng.dirichlet(np.ones(size)).astype(np.float32)
        for chosen in (False, True):
            found = np.zeros(size)
            for x in range(size):
                cases = [Case(sampling, logits, np.array([x]), None if chosen else q[None], pair) for pair in pairs]
                emitted = tails(size).verify(cases)["emitted"][:, 0]
                found += q[x] * np.bincount(emitted, minlength=size) / len(pairs)
            # Each test and each draw is off by half a step of the grid at most.
            assert 0.5 * np.abs(found - p).sum() < 2 / count


# What matters, and what does not


BROKEN = [np.nan, np.inf, -np.inf]


@pytest.mark.parametrize("sampling", [Sampling(), PLAIN, Sampling(0.8, 5, 0.9, 0.05)])
@pytest.mark.parametrize("value", BROKEN)
def test_a_row_that_is_looked_at_must_be_finite(value: float, sampling: Sampling) -> None:
    vocab = 97
    rng = np.random.default_rng(0)
    whole = np.stack([random_logits(rng, vocab) for _ in range(3)])
    whole[~np.isfinite(whole)] = -5
    q = np.stack([distribution(row, sampling) for row in whole[:2]]).astype(np.float32)
    case = Case(sampling, whole, q.argmax(1), q, np.zeros(3, np.float32))  # all of it is accepted
    cases = [case]
    for row in range(3):
        for place in (0, 40, 96):
            logits = whole.copy()
            logits[row, place if value != -np.inf else slice(None)] = value
            cases.append(replace(case, logits=logits))
    accepted = tails(vocab).verify(cases)["accepted"].tolist()
    assert accepted == [2] + [-1] * 9
    tokens, q = tails(vocab).draft(cases[1].logits, [sampling] * 3, np.zeros(3, np.float32))
    assert np.isnan(q).all(axis=1).tolist() == [True, False, False]
    assert ((tokens >= 0) & (tokens < vocab)).all()


def test_a_forbidden_token_is_no_fault() -> None:
    case = random_case(np.random.default_rng(1), 97, 3)
    case.logits[:, 5] = -np.inf
    assert tails(97).verify([case])["accepted"][0] >= 0


@pytest.mark.parametrize("sampling", [Sampling(), PLAIN])
@pytest.mark.parametrize("value", BROKEN)
def test_nothing_behind_the_first_rejection_matters(value: float, sampling: Sampling) -> None:
    vocab = 97
    rng = np.random.default_rng(5)
    logits = np.stack([random_logits(rng, vocab) for _ in range(5)])
    logits[~np.isfinite(logits)] = -5
    logits[1, 7] = -np.inf  # the second proposal is never accepted
    best = logits.argmax(1)
    q = np.stack([np.eye(vocab, dtype=np.float32)[x] for x in (best[0], 7, best[2], best[3])])
    case = Case(sampling, logits, q.argmax(1), q, np.array([0, 0.5, 0.3, 0.9, 0.7], np.float32))
    sound = tails(vocab).verify([case])
    spoiled_logits, spoiled_q, spoiled_uniforms = logits.copy(), q.copy(), case.uniforms.copy()
    spoiled_logits[2:] = value
    spoiled_q[2:] = value
    spoiled_uniforms[3:] = np.nan
    spoiled = tails(vocab).verify([replace(case, logits=spoiled_logits, q=spoiled_q, uniforms=spoiled_uniforms)])
    assert sound["accepted"].tolist() == [1]
    for name in ("emitted", "accepted", "next_index", "next_tokens", "next_draft_index"):
        np.testing.assert_array_equal(spoiled[name], sound[name])


def test_a_broken_draft_is_found_by_the_verification() -> None:
    case = random_case(np.random.default_rng(0), 97, 3)
    case = replace(case, sampling=PLAIN, q=np.full((2, 97), np.nan, np.float32), x=case.logits[:2].argmax(1))
    assert tails(97).verify([case])["accepted"].tolist() == [-1]
    chosen = replace(case, q=None, uniforms=np.zeros(3, np.float32))
    assert tails(97).verify([chosen])["accepted"].tolist() == [2], "the q of chosen proposals was read"


def test_a_greedy_proposal_may_be_said_to_be_chosen_or_to_have_a_one_hot_q() -> None:
    rng = np.random.default_rng(9)
    cases = []
    for _ in range(200):
        case = random_case(rng, 12, 4)
        cases.append(replace(case, q=np.eye(12, dtype=np.float32)[case.x]))
    said = tails(12).verify([replace(case, q=None) for case in cases])
    read = tails(12).verify(cases)
    np.testing.assert_array_equal(said["emitted"], read["emitted"])
    np.testing.assert_array_equal(said["accepted"], read["accepted"])


@pytest.mark.parametrize("vocab", [11, 16])
def test_a_proposal_outside_of_the_vocabulary_is_rejected(vocab: int) -> None:
    """The head's padding rows have ids, and another model's draft may have more of them."""
    case = Case(PLAIN, np.zeros((2, vocab), np.float32), np.array([vocab]), None, np.array([0, 0.5], np.float32))
    assert tails(vocab).verify([case])["accepted"].tolist() == [0]
    drawn_case = replace(case, x=np.array([vocab + 1]), q=np.full((1, vocab), 1 / vocab, np.float32))
    assert tails(vocab).verify([drawn_case])["accepted"].tolist() == [0]


def test_a_rejection_that_rounding_made_leaves_the_targets_distribution() -> None:
    """q is p and a little more: nothing is left of p - q to draw from."""
    logits = np.random.default_rng(4).standard_normal((2, 11)).astype(np.float32)
    logits[:, 0] = -np.inf
    q = (distribution(logits[0], PLAIN) * (1 + 1e-6)).astype(np.float32)
    for u in (0.0, 0.2, 0.9):
        case = Case(PLAIN, logits, np.array([3]), q[None], np.array([LAST_BELOW_ONE, u], np.float32))
        outcome = expected(case)
        assert outcome.accepted == 0
        assert tails(11).verify([case])["emitted"].tolist() == [[*outcome.tokens, -1]]


# Where things are written, and where the next calls start


@pytest.mark.parametrize("sampling", [Sampling(), PLAIN])
def test_draft_tail_writes_its_slot_in_place(sampling: Sampling) -> None:
    """Two rows of a batch at different slots, and two input tokens."""
    vocab = 12
    session = tails(vocab).sessions["draft"]
    before = np.arange(2 * SLOTS * vocab, dtype=np.float32).reshape(2, 1, SLOTS, vocab)
    buffer = ort.OrtValue.ortvalue_from_numpy(before.copy())
    logits = np.random.default_rng(2).standard_normal((2, 2, vocab)).astype(np.float32)
    feeds = {
        "input_ids": np.array([[3, 4], [5, 6]]),
        "write_index": np.array([7, 9]),
        "logit_positions": np.array([[0, 1], [0, 1]]),
        "past_key_values.0.key": np.zeros((2, 1, LENGTH, 8), np.float32),
        "past_key_values.0.value": np.zeros((2, 1, LENGTH, 8), np.float32),
        "given": np.pad(logits, ((0, 0), (0, 0), (0, PADDING))),
        "temperature": np.full(2, sampling.temperature, np.float32),
        "top_k": np.zeros(2, np.int64),
        "top_p": np.ones(2, np.float32),
        "min_p": np.zeros(2, np.float32),
        "uniform": np.array([0.3, 0.6], np.float32),
        "slot": np.array([0, 5]),
        "proposal": np.full((2, 7), 99),
    }
    binding = session.io_binding()
    for name, values in feeds.items():
        binding.bind_cpu_input(name, np.ascontiguousarray(values))
    binding.bind_ortvalue_input("past_q", buffer)
    binding.bind_ortvalue_output("present_q", buffer)
    names = ["next_proposal", "next_token", "next_index"]
    for name in names:
        binding.bind_output(name)
    session.run_with_iobinding(binding)
    out = dict(zip(["present_q", *names], binding.copy_outputs_to_cpu(), strict=True))

    want = before.copy()
    for b, slot in enumerate((0, 5)):
        want[b, 0, slot] = distribution(logits[b, 1], sampling)  # the last row's
    np.testing.assert_allclose(buffer.numpy(), want, rtol=1e-6)
    first, second = out["next_token"][:, 0].tolist()
    assert out["next_proposal"].tolist() == [[4, first, 99, 99, 99, 99, 99], [99, 99, 99, 99, 99, 6, second]]
    assert out["next_index"].tolist() == [9, 11]


def test_next_calls_start_behind_what_stands_wherever_the_rows_are() -> None:
    """Pending text before the proposals, of different length in each row of the batch, and padding behind them."""
    case = Case(Sampling(), np.eye(11, dtype=np.float32)[[4, 5, 6]], np.array([4, 5]), None, np.zeros(3, np.float32))
    none = replace(case, x=np.array([7, 5]))
    one = replace(case, x=np.array([4, 7]))
    ids = np.array([[1, 2, 3, 4, 5, 0], [3, 7, 5, 0, 0, 0], [1, 3, 4, 7, 0, 0]])
    positions = np.array([[2, 3, 4], [0, 1, 2], [1, 2, 3]])
    write_index = np.array([10, 20, 30])
    out = tails(11).verify([case, none, one], input_ids=ids, logit_positions=positions, write_index=write_index)
    assert out["accepted"].tolist() == [2, 0, 1]
    assert out["emitted"].tolist() == [[4, 5, 6], [4, -1, -1], [4, 5, -1]]
    assert out["next_tokens"].tolist() == [[5, 6], [3, 4], [4, 5]]
    assert out["next_index"].tolist() == [15, 21, 33]
    assert out["next_draft_index"].tolist() == [14, 20, 32]


class Device:
    """Both graphs over Markov chains, driven as a device would be: what a call leaves is the next one's input."""

    def __init__(self, draft: F32, target: F32, samplings: list[Sampling]) -> None:
        vocab = len(draft)
        tables: dict[Tail, F32] = {"draft": draft, "verify": target}
        self.sessions = {tail: session_of(attach(tail, vocab, table)[0]) for tail, table in tables.items()}
        batch = len(samplings)
        self.caches = {tail: [np.full((batch, 1, LENGTH, 8), -1, np.float32) for _ in range(2)] for tail in tables}
        self.q = np.full((batch, 1, SLOTS, vocab), np.nan, np.float32)
        self.settings = {
            "temperature": np.array([s.temperature for s in samplings], np.float32),
            "top_k": np.array([s.top_k for s in samplings], np.int64),
            "top_p": np.array([s.top_p for s in samplings], np.float32),
            "min_p": np.array([s.min_p for s in samplings], np.float32),
        }

    def run(self, tail: Tail, **inputs: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """One call; its cache and q are kept."""
        key, value = self.caches[tail]
        state = {"past_key_values.0.key": key, "past_key_values.0.value": value}
        state |= {"past_q": self.q} if tail == "draft" else {"draft_q": self.q}
        session = self.sessions[tail]
        out = session.run(None, state | self.settings | inputs)
        found = dict(zip((output.name for output in session.get_outputs()), out, strict=True))
        self.caches[tail] = [found["present.0.key"], found["present.0.value"]]
        self.q = found.get("present_q", self.q)
        return found


@pytest.mark.parametrize("k", [1, 3])
def test_chained_calls_are_the_loop(k: int) -> None:
    """Greedy and sampled rows in one batch, which go on at their own pace; caches hold the text but its last token."""
    vocab, batch = 23, 4
    rng = np.random.default_rng(k)
    target = rng.normal(0, 3, (vocab, vocab + PADDING)).astype(np.float32)
    draft = target + rng.normal(0, 1, target.shape).astype(np.float32)
    samplings = [Sampling(), PLAIN, Sampling(0.75, top_p=0.875), Sampling(1.5, top_k=5, min_p=0.0625)]
    device = Device(draft, target, samplings)
    texts = [[1, 2, 3, 4] for _ in range(batch)]
    prompt = np.array(texts)
    width = np.full(batch, prompt.shape[1])
    device.run(
        "draft",
        input_ids=prompt[:, :-1],
        write_index=np.zeros(batch, np.int64),
        logit_positions=np.full((batch, 1), 2),
        uniform=np.zeros(batch, np.float32),
        slot=np.zeros(batch, np.int64),
        proposal=np.zeros((batch, k + 1), np.int64),
    )
    uniforms = random_uniforms(rng, batch, 1)
    out = device.run(
        "verify",
        input_ids=prompt,
        write_index=np.zeros(batch, np.int64),
        logit_positions=width[:, None] - 1,
        uniforms=uniforms,
        one_hot=np.ones(batch, np.int64),
    )

    def numpy_step(b: int, drawn: F32, tested: F32, drafts: int) -> list[int]:
        last, x, q = texts[b][-1], [], []
        for u in drawn[:drafts]:
            q.append(distribution(draft[last, :vocab], samplings[b]))
            last = Replay(samplings[b], vocab, [float(u)]).draw(q[-1])
            x.append(last)
        rows = target[[texts[b][-1], *x], :vocab]
        proposal = Proposal(np.array(x, np.int64), q or None)
        return accept(proposal, rows, Replay(samplings[b], vocab, tested.tolist())).tokens

    for b in range(batch):
        texts[b] += numpy_step(b, uniforms[b], uniforms[b], 0)
        assert texts[b][-1:] == out["emitted"][b].tolist()
    steps = 0
    while max(map(len, texts)) + k + 1 < LENGTH:
        drawn, tested = random_uniforms(rng, batch, k), random_uniforms(rng, batch, k + 1)
        ids, index = out["next_tokens"], out["next_draft_index"]
        target_index = out["next_index"]
        proposal = np.zeros((batch, k + 1), np.int64)
        for j in range(k):
            step = device.run(
                "draft",
                input_ids=ids,
                write_index=index,
                logit_positions=np.full((batch, 1), ids.shape[1] - 1),
                uniform=drawn[:, j],
                slot=np.full(batch, j),
                proposal=proposal,
            )
            ids, index, proposal = step["next_token"], step["next_index"], step["next_proposal"]
        out = device.run(
            "verify",
            input_ids=proposal,
            write_index=target_index,
            logit_positions=np.tile(np.arange(k + 1), (batch, 1)),
            uniforms=tested,
            one_hot=np.zeros(batch, np.int64),
        )
        for b in range(batch):
            tokens = numpy_step(b, drawn[b], tested[b], k)
            texts[b] += tokens
            assert out["emitted"][b].tolist() == tokens + [-1] * (k + 1 - len(tokens))
            assert out["accepted"][b] == len(tokens) - 1
            assert out["next_index"][b] == len(texts[b]) - 1
            for keys, behind in ((device.caches["verify"][0], 1), (device.caches["draft"][0], 2)):
                length = len(texts[b]) - behind
                assert keys[b, 0, :length, 0].tolist() == texts[b][:length]
        steps += 1
    assert steps > 10
    assert max(map(len, texts)) - 4 > 1.3 * steps, "hardly anything was accepted"
