"""The speculative loop on GPU memory: `loop.Loop` with one wait per step, and only token ids crossing to the host.

A request takes it when its distributions are functions of the logits alone (no penalties, bias or mask) and nobody
asks for logprobs; others run the same engines through `loop.Loop`, with logits copied to the host. Uniforms come from
the same generator in the same order, so that both write the same text for a seed, up to draws that lie next to a
boundary: the host computes in double precision, the device in single.
"""

import time
from collections.abc import Callable

import numpy as np

from draftc.runtime.accept import EMPTY
from draftc.runtime.decoder import Decoder
from draftc.runtime.device_step import Chances, DeviceStep, Verified, is_partner
from draftc.runtime.drafter import Drafter, ModelDrafter, NgramDrafter
from draftc.runtime.engine import Engine, Tokens
from draftc.runtime.errors import EngineError
from draftc.runtime.kvcache import TokenBuffer
from draftc.runtime.loop import Step
from draftc.runtime.sampler import Sampler
from draftc.runtime.stats import Stats
from draftc.runtime.tensorrt import TensorRtEngine

__all__ = ["DeviceLoop", "DeviceLoops", "open_device_loops"]


def open_device_loops(target: Engine, draft: Engine | None, max_call: int) -> "DeviceLoops | None":
    """What makes the device loops of a session; None for engines that are not made for it. Raises ResourceError."""
    if not isinstance(target, TensorRtEngine) or target.spec.tail != "verify":
        return None
    partner = draft if isinstance(draft, TensorRtEngine) and is_partner(draft, target) else None
    return DeviceLoops(DeviceStep(target, partner, max_call))


class DeviceLoops:
    """Makes the loop of each request that the device can serve."""

    def __init__(self, step: DeviceStep) -> None:
        self.step = step

    @property
    def captured(self) -> int:
        """See LoopMaker.captured."""
        return self.step.captured

    def loop(
        self,
        target: Decoder,
        drafter: Drafter | None,
        text: TokenBuffer,
        sampler: Sampler,
        emit: Callable[[int], bool],
        stats: Stats,
    ) -> "DeviceLoop | None":
        """The device's loop for a request, or None where its tokens must be chosen on the host."""
        served = (
            drafter is None
            or type(drafter) is NgramDrafter
            or (type(drafter) is ModelDrafter and drafter.decoder.engine is self.step.draft)
        )
        if not served or sampler.sees_text or target.engine is not self.step.target:
            return None
        return DeviceLoop(self.step, target, drafter, text, sampler, emit, stats)

    def close(self) -> None:
        """Give the buffers back, before the engines are closed."""
        self.step.close()


class DeviceLoop:
    """Decodes one request; see loop.Loop, whose steps these are."""

    def __init__(
        self,
        device: DeviceStep,
        target: Decoder,
        drafter: Drafter | None,
        text: TokenBuffer,
        sampler: Sampler,
        emit: Callable[[int], bool],
        stats: Stats,
    ) -> None:
        self.device = device
        self.target = target
        self.drafter = drafter
        self.text = text
        self.sampler = sampler
        self.emit = emit
        self.stats = stats

    def step(self, k: int) -> Step:
        """Propose up to `k` tokens, verify them in one target call, emit between 1 and k+1.

        Of the time that the host waits, `draft_s` is what the device's clock gives to the draft calls.
        """
        text = self.text.view
        draft = self.drafter.decoder if isinstance(self.drafter, ModelDrafter) and k else None
        given = EMPTY
        with self.stats.phase("draft_s"):
            if draft is not None:
                # The text may outgrow a draft with a shorter context; then there is nothing to propose.
                k = max(0, min(k, draft.limits.max_length - text.size))
                draft = draft if k else None
            if draft is not None:
                draft.sync_but(min(text.size, 2), text)
            elif self.drafter is not None and not isinstance(self.drafter, ModelDrafter) and k:
                given = self.drafter.propose(text, k, self.sampler).tokens
        verified, proposed = self._drafted(draft, text, k) if draft is not None else self._given(text, given)
        if verified.accepted < 0:
            raise EngineError(
                "the graphs returned NaN or infinity among their logits: the weights or the precision are broken; "
                "run `draftc verify`"
            )
        with self.stats.phase("accept_s"):
            tokens: list[int] = []
            for token in verified.tokens:
                tokens.append(token)
                self.sampler.push(token)
                if not self.emit(token):
                    break
        accepted = min(verified.accepted, len(tokens))
        self.text.extend(tokens)
        self.stats.count_step(proposed, accepted, len(tokens))
        return Step(tokens, accepted, proposed, [])

    def _drafted(self, draft: Decoder, text: Tokens, k: int) -> tuple[Verified, int]:
        with self.stats.phase("verify_s"):
            self.target.sync_but(1, text)
        tail = text[max(0, text.size - 2) :]
        chances = self._draw(k, k)
        begin = time.perf_counter()
        verified = self.device.run_drafted(tail, text.size, k, self.sampler.sampling, chances)
        seconds = time.perf_counter() - begin
        draft_s = min(verified.draft_s, seconds)  # of two clocks
        accepted = self._settle(verified, k)
        # What it wrote behind the last accepted token is not counted; it never ran the last proposal.
        draft.ran(np.concatenate((tail, accepted[: k - 1])), draft_s, calls=k)
        self.target.ran(np.concatenate((text[-1:], accepted)), seconds - draft_s)
        self.stats.draft_s += draft_s
        self.stats.verify_s += seconds - draft_s
        return verified, k

    def _given(self, text: Tokens, given: Tokens) -> tuple[Verified, int]:
        k = given.size
        with self.stats.phase("verify_s"):
            if k:
                self.target.sync_but(1, text)
                pending = text[-1:]
            else:
                pending = self.target.sync(text)  # may be the end of a prompt: its last call draws the first token
            chances = self._draw(0, k)
            begin = time.perf_counter()
            start = len(self.target.cache)
            tokens = np.concatenate((pending, given))
            verified = self.device.run_given(tokens, start, k, self.sampler.sampling, chances)
            accepted = self._settle(verified, k)
            self.target.ran(np.concatenate((pending, accepted)), time.perf_counter() - begin)
        return verified, k

    def _draw(self, drafted: int, k: int) -> Chances:
        if self.sampler.greedy:
            return Chances(np.zeros(drafted, np.float32), np.zeros(k + 1, np.float32))
        uniforms = self.sampler.uniforms(drafted + k + 1)
        return Chances(uniforms[:drafted], uniforms[drafted:])

    def _settle(self, verified: Verified, k: int) -> Tokens:
        """Give back the uniforms that were not used; the accepted proposals (a,)."""
        tests = min(verified.accepted + 1, k)
        if not self.sampler.greedy:
            self.sampler.give_back(k - tests)  # one for each test, and one for the draw
        return np.asarray(verified.tokens[: max(0, verified.accepted)], np.int64)
