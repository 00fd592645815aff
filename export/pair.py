"""Do a target and a draft fit together, and is the draft worth running? Answered before any work is done.

The target's tokenizer reads and writes all text; the draft only ever sees ids. So the two must give every token the
same id. Special roles (which token ends a text) may differ: the target's are used.
"""

import hashlib
import json
import math
from dataclasses import dataclass

from draftc.export.checkpoint import CheckpointInfo
from draftc.runtime.errors import PairError, UsageError

__all__ = [
    "PairReport",
    "Prediction",
    "check_pair",
    "predicted_speedup",
    "target_length_warning",
    "tokenizer_fingerprint",
]

ACCEPTANCE_RATES = (0.6, 0.8, 0.9)
ROLES = ("bos_token", "eos_token", "pad_token")


@dataclass(frozen=True)
class Prediction:
    """Speed against plain decoding (1.0 is equal) if each draft token is accepted with probability `acceptance`."""

    acceptance: float
    speedup: float


@dataclass(frozen=True)
class PairReport:
    """What the pair check found.

    vocab_size: ids that both models share; logits rows from there on are padding and are masked.
    draft_cost_ratio: bytes of weights that one draft step reads, over those of one target step, at equal precision.
    """

    vocab_size: int
    target_rows: int
    draft_rows: int
    draft_cost_ratio: float
    k: int
    predictions: tuple[Prediction, ...]
    warnings: tuple[str, ...]


def predicted_speedup(acceptance: float, k: int, cost_ratio: float) -> float:
    """Expected speed against plain decoding: (1 - a^(K+1)) / ((1 - a)(K c + 1)).

    Leviathan, Kalman, Matias 2023, "Fast Inference from Transformers via Speculative Decoding", Theorem 3.8, with
    a = acceptance (probability per token), K = k draft tokens and c = cost_ratio. It counts a verification as one
    target step, so it is an upper estimate where K + 1 tokens cost more than one.

    Raises UsageError when acceptance is outside [0, 1], k < 1 or cost_ratio is negative.
    """
    if not (0 <= acceptance <= 1 and k >= 1 and cost_ratio >= 0):
        raise UsageError(
            f"need 0 <= acceptance <= 1, k >= 1 and cost_ratio >= 0, got {acceptance}, {k} and {cost_ratio}"
        )
    tokens = k + 1 if acceptance == 1 else (1 - acceptance ** (k + 1)) / (1 - acceptance)
    return tokens / (k * cost_ratio + 1)


def check_pair(
    target: CheckpointInfo, draft: CheckpointInfo, max_length: int, k: int = 4, draft_rows: int | None = None
) -> PairReport:
    """Compare tokenizers, vocabulary rows, the draft's context length and cost; its head is cut to `draft_rows`.

    Raises PairError when a token has another id in the draft, or an id of the target has no row in the draft.
    """
    _check_tokens(target, draft)
    if draft.shape.vocab_rows < target.token_ids:
        raise PairError(
            f"the draft's logits have {draft.shape.vocab_rows} rows, the tokenizer has ids up to "
            f"{target.token_ids - 1}; choose a draft of the same family"
        )
    rows = draft.shape.vocab_rows if draft_rows is None else draft_rows
    read = draft.parameters_per_token - (draft.shape.vocab_rows - rows) * draft.shape.hidden_size
    ratio = read / target.parameters_per_token
    warnings = _role_warnings(target, draft)
    limit = draft.shape.max_positions
    if limit is not None and limit < max_length:
        effect = "its proposals past that are rarely accepted; the output stays right"
        warnings.append(_too_short("draft", limit, max_length, effect))
    predictions = tuple(Prediction(rate, predicted_speedup(rate, k, ratio)) for rate in ACCEPTANCE_RATES)
    if ratio >= 1:
        best = predictions[-1]
        warnings.append(
            f"the draft is not smaller than the target ({ratio:.2f} times its weights per token): predicted speed is "
            f"{best.speedup:.2f}x of plain decoding at {best.acceptance:.0%} acceptance; swap the two, or use ngram"
        )
    return PairReport(
        vocab_size=target.token_ids,
        target_rows=target.shape.vocab_rows,
        draft_rows=rows,
        draft_cost_ratio=ratio,
        k=k,
        predictions=predictions,
        warnings=tuple(warnings),
    )


def target_length_warning(target: CheckpointInfo, max_length: int) -> str | None:
    """What to tell when the target's context is shorter than `max_length` tokens, whatever drafts for it."""
    limit = target.shape.max_positions
    if limit is None or limit >= max_length:
        return None
    return _too_short("target", limit, max_length, "its output past that is unreliable; lower --max-length")


def tokenizer_fingerprint(info: CheckpointInfo) -> str:
    """The sha256, as "sha256:…", of the map of token → id: equal exactly where `check_pair` accepts the tokenizers."""
    vocabulary = json.dumps(sorted(info.tokenizer.get_vocab().items()), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(vocabulary.encode()).hexdigest()


def _check_tokens(target: CheckpointInfo, draft: CheckpointInfo) -> None:
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if ours == theirs:
        return
    different = [token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)]

    def where(token: str) -> tuple[float, str]:
        return min(ours.get(token, math.inf), theirs.get(token, math.inf)), token

    first = min(different, key=where)
    left, right = (f"id {ids[first]}" if first in ids else "absent" for ids in (ours, theirs))
    raise PairError(
        f"the tokenizers differ in {len(different)} of {len(ours.keys() | theirs.keys())} tokens, first {first!r}: "
        f"{left} in the target, {right} in the draft; choose a draft of the same family, or ngram"
    )


def _role_warnings(target: CheckpointInfo, draft: CheckpointInfo) -> list[str]:
    found = []
    for role in ROLES:
        ours, theirs = getattr(target.tokenizer, role), getattr(draft.tokenizer, role)
        if ours != theirs:
            found.append(f"{role} is {ours!r} in the target and {theirs!r} in the draft: the target's is used")
    return found


def _too_short(name: str, limit: int, max_length: int, effect: str) -> str:
    return f"the {name}'s context is {limit} tokens, shorter than max_length {max_length}: {effect}"
