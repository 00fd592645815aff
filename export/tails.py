"""The tails of `runtime/graphio.py` as passes: they turn a decoder graph's logits into tokens inside the graph.

What a tail computes is `runtime/warp.py` and `runtime/accept.py`, in float32. The logits stay an output, for requests
that edit them: those are sampled on the host.
"""

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from draftc.export.tail_ops import FLOAT, INT64, Grid, Ops, draw, row_at, total_of, warp
from draftc.runtime import graphio
from draftc.runtime.errors import UsageError
from draftc.runtime.graphio import GraphSpec, Tail

__all__ = ["DraftTail", "VerifyTail"]

DTYPES = {"float32": FLOAT, "int64": INT64}
SAMPLING = (graphio.TEMPERATURE, graphio.TOP_K, graphio.TOP_P, graphio.MIN_P)


class _AttachTail(InPlacePass):
    """What both tails share: their inputs and outputs go behind those of the graph, as `GraphSpec.with_tail` has them.

    slots, vocab_size: as in `GraphSpec.with_tail`. Legal for a captured decoder graph (opset 24, float32 logits) that
    has no tail, and a head of vocab_size rows or more. Raises UsageError for any other.
    """

    tail: Tail

    def __init__(self, slots: int, vocab_size: int) -> None:
        super().__init__()
        self.slots = slots
        self.grid = Grid(vocab_size)

    def call(self, model: ir.Model) -> PassResult:
        """Attach the tail."""
        graph = model.graph
        added = GraphSpec((), ()).with_tail(self.tail, self.slots, self.grid.vocab_size)
        self._require_fit(graph)
        graph.inputs.extend(ir.val(tensor.name, DTYPES[tensor.dtype], tensor.shape) for tensor in added.inputs)
        results = self.results(Ops(graph), {value.name or "": value for value in (*graph.inputs, *graph.outputs)})
        for tensor in added.outputs:
            value = results[tensor.name]
            value.name, value.dtype, value.shape = tensor.name, DTYPES[tensor.dtype], ir.Shape(tensor.shape)
            graph.outputs.append(value)
        return PassResult(model, modified=True)

    def results(self, op: Ops, of: dict[str, ir.Value]) -> dict[str, ir.Value]:
        """The tail's outputs by name, from the graph's inputs and outputs by name."""
        raise NotImplementedError

    def _require_fit(self, graph: ir.Graph) -> None:
        if any(value.name in SAMPLING for value in graph.inputs):
            raise UsageError("the graph has a tail already; attach one to the captured graph")
        head = next((value.shape for value in graph.outputs if value.name == graphio.LOGITS), None)
        rows = head[2] if head is not None and len(head) == 3 else None
        if not isinstance(rows, int) or rows < self.grid.vocab_size:
            raise UsageError(f"the head has {rows} rows, too few for a vocabulary of {self.grid.vocab_size}")


class DraftTail(_AttachTail):
    """Draws the next token from the last row's distribution q, and notes q and the token at `slot`.

    Where the row is not finite, q is NaN, which the verify tail finds, and the token is any.
    """

    tail = "draft"

    def results(self, op: Ops, of: dict[str, ir.Value]) -> dict[str, ir.Value]:
        """See `_AttachTail.results`."""
        last_row = op.Slice(of[graphio.LOGITS], [-1], [2**31 - 1], [1])  # (B, 1, rows of the head)
        q = warp(op, self.grid, last_row, [of[name] for name in SAMPLING])
        uniform = op.Unsqueeze(of[graphio.UNIFORM], [1])  # (B, 1)
        token = draw(op, self.grid, op.Squeeze(q.weights, [1]), uniform)  # (B, 1)

        row = self.grid.flatten(op, op.Div(q.weights, q.total))  # (B, 1, V)
        row = op.Where(op.Unsqueeze(q.finite, [2]), row, float("nan"))
        slot = of[graphio.SLOT]  # (B,)
        # A Reshape, not an Unsqueeze: TensorRT must see that the update is as wide as the buffer.
        row = op.Reshape(row, [0, 1, 1, self.grid.vocab_size])
        present_q = op.TensorScatter(of[graphio.PAST_Q], row, slot, axis=2)

        proposal = of[graphio.PROPOSAL]  # (B, P)
        place = op.Sub(_arange(op, proposal, 1), op.Unsqueeze(slot, [1]))  # (B, P), relative to the slot
        last = op.Slice(of[graphio.INPUT_IDS], [-1], [2**31 - 1], [1])  # (B, 1)
        proposal = op.Where(op.Equal(place, 0), last, op.Where(op.Equal(place, 1), token, proposal))
        return {
            graphio.PRESENT_Q: present_q,
            graphio.NEXT_PROPOSAL: proposal,
            graphio.NEXT_TOKEN: token,
            graphio.NEXT_INDEX: op.Add(of[graphio.WRITE_INDEX], op.Shape(of[graphio.INPUT_IDS], start=1, end=2)),
        }


class VerifyTail(_AttachTail):
    """Accepts proposals, and draws the one token that follows the accepted ones: `runtime.accept.accept`.

    Every row is computed, but only what is found in row n and before it has an influence, n being the number of
    accepted proposals.
    """

    tail = "verify"

    def results(self, op: Ops, of: dict[str, ir.Value]) -> dict[str, ir.Value]:
        """See `_AttachTail.results`."""
        ids, positions, uniforms = of[graphio.INPUT_IDS], of[graphio.LOGIT_POSITIONS], of[graphio.UNIFORMS]
        p = warp(op, self.grid, of[graphio.LOGITS], [of[name] for name in SAMPLING])
        q = op.Squeeze(of[graphio.DRAFT_Q], [1])  # (B, W, V)
        chosen = op.Equal(op.Unsqueeze(of[graphio.ONE_HOT], [1]), 1)  # (B, 1)
        row = _arange(op, positions, 1)  # (R,)
        last_row = op.Sub(op.Shape(positions, start=1, end=2), 1)  # (1,)
        last_position = op.Sub(op.Shape(ids, start=1, end=2), 1)  # (1,)

        # The proposal that each row decides on. Behind the last row there is none, and whatever is found will do.
        x = op.GatherElements(ids, op.Min(op.Add(positions, 1), last_position), axis=1)  # (B, R)
        p_x = op.Div(_pick(op, op.Reshape(p.weights, [0, -1]), row, x, self.grid.places), op.Squeeze(p.total, [2, 3]))
        q_x = op.Where(chosen, 1.0, _pick(op, op.Reshape(q, [0, -1]), row, x, self.grid.vocab_size))  # (B, R)
        proposed = op.Less(row, last_row)  # (R,)
        sound = op.And(p.finite, op.Or(op.Less(q_x, float("inf")), op.Not(proposed)))  # not so where q_x is NaN
        stands = op.And(op.And(proposed, sound), op.Less(op.Mul(uniforms, q_x), p_x))  # (B, R)
        n = op.ReduceMin(op.Where(stands, last_row, row), [1])  # (B, 1)

        def at_n(values: ir.Value) -> ir.Value:
            """(B, R) → (B, 1)."""
            return op.GatherElements(values, n, axis=1)

        # The token behind the accepted ones, from the residual distribution or, behind all proposals, from p.
        p_n = op.Div(row_at(op, p.weights, n), row_at(op, p.total, n))  # (B, blocks, width)
        q_n = op.Squeeze(self.grid.lay_out(op, op.Unsqueeze(row_at(op, q, n), [1]), 0.0), [1])
        x_n = op.Unsqueeze(op.Cast(at_n(x), to=FLOAT), [2])  # (B, 1, 1)
        one_hot = op.Cast(op.Equal(x_n, self.grid.ids()), to=FLOAT)
        residual = op.Max(op.Sub(p_n, op.Where(op.Unsqueeze(chosen, [2]), one_hot, q_n)), 0.0)
        rejected = op.Unsqueeze(op.Less(n, last_row), [2])  # (B, 1, 1)
        weights = op.Where(op.And(rejected, op.Greater(total_of(op, residual), 0.0)), residual, p_n)
        uniform = op.GatherElements(uniforms, op.Min(op.Add(n, 1), last_row), axis=1)  # (B, 1)
        token = draw(op, self.grid, weights, uniform)  # (B, 1)

        accepted = op.Where(op.Equal(at_n(op.Cast(sound, to=INT64)), 1), n, -1)
        place = at_n(positions)  # (B, 1): where in `ids` the last token is that stands
        last_index = op.Add(of[graphio.WRITE_INDEX], op.Squeeze(place, [1]))  # (B,)
        return {
            graphio.EMITTED: op.Where(op.Less(row, n), x, op.Where(op.Equal(row, n), token, -1)),
            graphio.ACCEPTED: op.Squeeze(accepted, [1]),
            graphio.NEXT_INDEX: op.Add(last_index, 1),
            graphio.NEXT_TOKENS: op.Concat(op.GatherElements(ids, place, axis=1), token, axis=1),
            graphio.NEXT_DRAFT_INDEX: last_index,
        }


def _arange(op: Ops, values: ir.Value, axis: int) -> ir.Value:
    """0, 1, … for the places along `axis` of `values`."""
    return op.Range(0, op.Squeeze(op.Shape(values, start=axis, end=axis + 1)), 1)


def _pick(op: Ops, flat: ir.Value, row: ir.Value, x: ir.Value, size: int) -> ir.Value:
    """flat[b, row[r] · size + x[b, r]] as (B, R), of flat (B, rows · size). Too large an x takes the row's last."""
    return op.GatherElements(flat, op.Add(op.Mul(row, size), op.Min(x, size - 1)), axis=1)
