"""Greedy parity: what speculation writes is what plain decoding writes, or differs only where two tokens tie."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from draftc.runtime.adaptive import AdaptiveDrafter
from draftc.runtime.check_numerics import WidthVariance, rows_of
from draftc.runtime.decoder import Decoder
from draftc.runtime.engine import Logits, Tokens
from draftc.runtime.kvcache import common_prefix
from draftc.runtime.request import Generation
from draftc.runtime.session import Session

__all__ = ["Divergence", "GreedyDetails", "GreedyMode", "check_greedy", "greedy", "triage"]

NEW_TOKENS = 32
ENOUGH_PROPOSALS = 50  # an acceptance of exactly 0 or 1 over so many is worth a warning


@dataclass(frozen=True)
class Divergence:
    """A token that plain decoding, given the same text before it, would not have written.

    `gap` is by how much the plain path's logits favour `plain_token` over the `token` that was written, `margin` how
    far its two best tokens are apart, and `wide_gap` what `gap` is in a call of the loop's width. Up to `near_tie` it
    is a tie that the width of the call decides, above it a fault.
    """

    prompt: str
    position: int  # in the output
    token: int
    plain_token: int
    gap: float
    margin: float
    wide_gap: float
    kind: Literal["near tie", "fault"]


@dataclass(frozen=True)
class GreedyMode:
    """One drafter at one K over all prompts. `divergences` has every one, each after a text forced to be the same.

    `unexplained` counts outputs of a wrong length, and those that differ although plain decoding, asked a second time,
    agrees with them: then the first plain run was wrong.
    """

    method: str
    k: int
    prompts: int
    identical: int
    new_tokens: int
    proposed: int
    accepted: int
    divergences: tuple[Divergence, ...]
    unexplained: int

    @property
    def faults(self) -> int:
        """Divergences that are no ties, and what is unexplained."""
        return self.unexplained + sum(divergence.kind == "fault" for divergence in self.divergences)

    @property
    def name(self) -> str:
        """As in bench: "draft_model-k4"."""
        return f"{self.method}-k{self.k}"


@dataclass(frozen=True)
class GreedyDetails:
    """Every drafter at every K that was tried."""

    near_tie: float
    modes: tuple[GreedyMode, ...]

    @property
    def passed(self) -> bool:
        """Whether every divergence is a near tie."""
        return not any(mode.faults for mode in self.modes)

    @property
    def verdict(self) -> str:
        """One line."""
        runs = sum(mode.prompts for mode in self.modes)
        same = sum(mode.identical for mode in self.modes)
        ties = sum(divergence.kind == "near tie" for mode in self.modes for divergence in mode.divergences)
        ending = f"{ties} near ties (logits within {self.near_tie:.2g})" if ties else "no near ties"
        bad = [mode for mode in self.modes if mode.faults]
        if not bad:
            return f"{same} of {runs} speculative outputs identical to plain decoding, {ending}, no fault"
        first = next((d for mode in bad for d in mode.divergences if d.kind == "fault"), None)
        where = (
            f"first: prompt {first.prompt}, token {first.position}, where the target prefers token {first.plain_token} "
            f"over the {first.token} written by {first.gap:.3g} (a tie is up to {self.near_tie:.2g})"
            if first
            else f"{bad[0].name} wrote too few or too many tokens, or plain decoding did not repeat itself"
        )
        return f"{sum(mode.faults for mode in bad)} faults in {', '.join(mode.name for mode in bad)}; {where}"

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is suspicious without being wrong."""
        found = []
        for mode in self.modes:
            if mode.proposed == 0:
                found.append(f"{mode.name} never proposed anything on these prompts: it is hardly tested")
            elif mode.proposed >= ENOUGH_PROPOSALS and mode.accepted in (0, mode.proposed):
                found.append(
                    f"{mode.name}: acceptance is exactly {mode.accepted / mode.proposed:.0f} over {mode.proposed} "
                    "proposals: unless the draft is the target itself, or unrelated, it sees the wrong tokens"
                )
        return tuple(found)


@dataclass(frozen=True)
class _Run:
    result: Generation
    same: bool
    divergences: tuple[Divergence, ...]


def check_greedy(
    session: Session,
    prompts: Mapping[str, Sequence[int]],
    variance: WidthVariance,
    on_progress: Callable[[float], None],
) -> GreedyDetails:
    """Every drafter at K = 1, the default and a larger one against plain decoding. `prompts` are token ids by id."""
    limits = session.target.limits
    count = min(NEW_TOKENS, limits.max_length // 2)
    modes = [(method, k) for method in session.drafters for k in _speculation_depths(session, method)]
    runs: dict[tuple[str, int], list[_Run]] = {mode: [] for mode in modes}
    for done, (name, ids) in enumerate(prompts.items()):
        prompt = list(ids)[-(limits.max_length - count) :]
        session.reset()
        results = {mode: greedy(session, prompt, *mode, count) for mode in modes}
        # Plain decoding comes last and from an empty cache: its entries must not mend what speculation left behind.
        session.reset()
        plain = greedy(session, prompt, "plain", None, count).token_ids
        for (method, k), result in results.items():
            found = triage(session.target, name, prompt, plain, result.token_ids, k, variance.near_tie)
            runs[method, k].append(_Run(result, result.token_ids == plain, found))
        on_progress((done + 1) / len(prompts))
    return GreedyDetails(
        variance.near_tie,
        tuple(_mode(method, k, results, count) for (method, k), results in runs.items()),
    )


def greedy(session: Session, prompt: Sequence[int], method: str, k: int | None, count: int) -> Generation:
    """`count` tokens by argmax of the logits as they are: a bundle's default penalties would hide the margins."""
    return session.generate(
        prompt,
        method=method,
        num_speculative_tokens=k,
        max_new_tokens=count,
        temperature=0.0,
        repetition_penalty=1.0,
        ignore_eos=True,
    )


def _speculation_depths(session: Session, method: str) -> list[int]:
    """K = 1, the bundle's default, and about twice that; of a drafter that chooses K, the most."""
    if method == AdaptiveDrafter.method:
        return [session.max_speculative_tokens]
    default, most = session.manifest.num_speculative_tokens, session.max_speculative_tokens
    return sorted({1, default, min(most, max(2 * default, 7))})


def _mode(method: str, k: int, runs: list["_Run"], count: int) -> GreedyMode:
    return GreedyMode(
        method=method,
        k=k,
        prompts=len(runs),
        identical=sum(run.same for run in runs),
        new_tokens=sum(len(run.result.token_ids) for run in runs),
        proposed=sum(run.result.stats.proposed for run in runs),
        accepted=sum(run.result.stats.accepted for run in runs),
        divergences=tuple(divergence for run in runs for divergence in run.divergences),
        unexplained=sum(len(run.result.token_ids) != count or (not run.same and not run.divergences) for run in runs),
    )


def triage(
    target: Decoder,
    name: str,
    prompt: Sequence[int],
    plain: Sequence[int],
    written: Sequence[int],
    k: int,
    near_tie: float,
) -> tuple[Divergence, ...]:
    """Where `written` is not what plain decoding would have written after the same text.

    `plain` is what it did write. From the first difference on, one-token calls are made along `written`, so that one
    tie can't hide what comes after it.
    """
    first = common_prefix(np.asarray(plain, np.int64), np.asarray(written, np.int64))
    if first == len(written):
        return ()
    text = np.asarray([*prompt, *written], np.int64)
    target.cache.clear()
    found = []
    for position in range(len(written)):
        row = rows_of(target, text[: len(prompt) + position])[0]  # (V,), one token per call after the prefill
        if position >= first and int(row.argmax()) != written[position]:
            found.append((position, row))
    return tuple(_divergence(target, name, text, len(prompt), position, row, k, near_tie) for position, row in found)


def _divergence(
    target: Decoder, name: str, text: Tokens, prompt: int, position: int, row: Logits, k: int, near_tie: float
) -> Divergence:
    at = prompt + position
    token, best = int(text[at]), int(row.argmax())
    second, first = np.partition(row, row.size - 2)[-2:]
    gap = float(row[best] - row[token])
    # Row 0 of a call as wide as the loop's. What follows a token does not count for it, so near the end it may be any.
    pending = target.sync(text[:at], upcoming=k)
    following = np.resize(text[at:], k)
    wide = target.extend(np.concatenate((pending, following)), rows=k + 1)[0]
    return Divergence(
        prompt=name,
        position=position,
        token=token,
        plain_token=best,
        gap=gap,
        margin=float(first - second),
        wide_gap=float(wide[best] - wide[token]),
        kind="near tie" if gap <= near_tie else "fault",
    )
