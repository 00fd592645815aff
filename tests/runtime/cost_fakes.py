"""Cost profiles by formula, and a draft model without an engine, for the tests of what chooses by them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from draftc.runtime.accept import Proposal
from draftc.runtime.costs import CostProfile, GraphCosts, MachineId
from draftc.runtime.decoder import Decoder
from draftc.runtime.drafter import DraftRule, DraftState, ModelDrafter
from draftc.runtime.engine import Tokens
from draftc.runtime.kvcache import common_prefix
from draftc.runtime.sampler import Sampler

__all__ = ["FLAT", "LINEAR", "StubModel", "graph_costs", "make_costs", "make_machine", "profiles"]

Cost = Callable[[int], float]  # tokens of a call → milliseconds


def make_machine(**fields: Any) -> MachineId:
    known: dict[str, Any] = {
        "graphs": "0123456789abcdef" * 4,
        "backend": "onnxruntime 1.32.0",
        "devices": {"target": "cpu", "draft": "cpu"},
        "processor": "a processor",
        "cores": 2,
        "threads": 0,
    }
    return MachineId(**known | fields)


def graph_costs(cost: Cost, widths: Sequence[int] = (1, 2, 4, 8), fills: Sequence[int] = (16, 64)) -> GraphCosts:
    return GraphCosts(
        widths=tuple(widths), fills=tuple(fills), ms=tuple(tuple(float(cost(w)) for w in widths) for _ in fills)
    )


def make_costs(target: Cost, draft: Cost | None = None, /, **fields: Any) -> CostProfile:
    known: dict[str, Any] = {
        "draftc_version": "0.1.0",
        "created": "2026-01-31T12:00:00Z",
        "machine": make_machine(),
        "rounds": 3,
        "target": graph_costs(target),
        "draft": None if draft is None else graph_costs(draft),
        "ngram_ms": 0.0,
    }
    return CostProfile(**known | fields)


# Verifying more costs next to nothing, and so does drafting: what is likely at all is worth proposing.
FLAT = make_costs(lambda width: 10 + 0.001 * width, lambda width: 0.01)
# A token in a verification costs what decoding it alone would, and drafting comes on top: nothing can pay.
LINEAR = make_costs(lambda width: 10.0 * width, lambda width: 1.0)


@st.composite
def profiles(draw: st.DrawFn) -> CostProfile:
    """Any that a file may hold: steep, flat, falling, with one fill or one width, dear drafts."""

    def graph() -> GraphCosts:
        widths = (1, *sorted(draw(st.sets(st.integers(2, 12), max_size=4))))
        fills = tuple(sorted(draw(st.sets(st.integers(0, 80), min_size=1, max_size=3))))
        ms = st.one_of(st.floats(0.01, 20.0), st.just(5.0))
        row = st.lists(ms, min_size=len(widths), max_size=len(widths)).map(tuple)
        return GraphCosts(widths=widths, fills=fills, ms=tuple(draw(row) for _ in fills))

    draft = graph() if draw(st.booleans()) else None
    return make_costs(lambda width: 1.0, target=graph(), draft=draft, ngram_ms=draw(st.floats(0, 1)))


class StubModel(ModelDrafter):
    """A draft model without a graph: `says(text)` is its (next token, confidence). `asked` are the texts it ran on."""

    def __init__(self, says: Callable[[list[int]], tuple[int, float]]) -> None:
        self.says = says
        self.asked: list[int] = []  # lengths of the texts
        self.runs = 0
        self._known: Tokens = np.empty(0, np.int64)

    def forget(self) -> None:
        self._known = self._known[:0]

    def state(self, text: Tokens) -> DraftState:
        known = min(common_prefix(self._known, text), text.size - 1)
        return DraftState(text.size - known, known)

    def propose(self, text: Tokens, k: int, sampler: Sampler, rule: DraftRule | None = None) -> Proposal:
        assert rule is not None
        assert k > 0
        self.asked.append(text.size)
        proposed: list[int] = []
        self._known = text.copy()
        while len(proposed) < k:
            self.runs += 1
            token, confidence = self.says([*text.tolist(), *proposed])
            if not rule.proposes(confidence):
                break
            proposed.append(token)
            if not rule.goes_on():
                break
        return Proposal(np.array(proposed, np.int64))

    @property
    def decoders(self) -> Sequence[Decoder]:
        return ()
