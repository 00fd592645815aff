"""The seam between the loop and a backend: what runs one decoder graph."""

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from draftc.runtime.graphio import GraphSpec

__all__ = ["Engine", "Fills", "Logits", "Tokens"]

Tokens = NDArray[np.int64]
Logits = NDArray[np.float32]


class Engine(Protocol):
    """One decoder graph with its weights and its KV buffers on one device.

    An engine knows nothing of lengths: whoever calls it (kvcache) says where a call starts writing. Tokens of one call
    occupy positions `start … start+S-1`; what a position at or past `start + S` holds is never read.
    """

    @property
    def spec(self) -> GraphSpec:
        """Inputs and outputs of the graph."""

    def forward(self, tokens: Tokens, start: int, rows: int) -> Logits:
        """Run `tokens` (S,) from position `start`; return the logits (rows, V) of the last `rows` tokens, float32.

        The returned array is a view of a buffer that the next call overwrites. `start + S` must not exceed the
        buffer length L. Raises EngineError when the backend fails.
        """

    def clear(self) -> None:
        """Fill the KV buffers with zeros, in place: their addresses stay.

        A masked entry is multiplied by zero, and zero times NaN is NaN: once NaN is in a buffer, every later call that
        does not write over it returns NaN, wherever that call writes. Rewinds don't need this.
        """

    def close(self) -> None:
        """Release the session and its buffers. Calling it twice is allowed."""


@runtime_checkable
class Fills(Protocol):
    """What an engine may have besides, if its logits would have to be fetched from a device."""

    def fill(self, tokens: Tokens, start: int) -> None:
        """`Engine.forward` for the sake of the caches alone."""
