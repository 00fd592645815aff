"""A draft whose output head was cut to some of the vocabulary: column i of its logits is token `token_ids[i]`.

The frequency-ranked idea of FR-Spec (Zhao et al. 2025, arXiv 2502.14856): few tokens make up nearly all text, and the
target decides about every token anyway. So the draft may propose from those alone: its q is zero elsewhere.
"""

from pathlib import Path

import numpy as np

from draftc.runtime.bundle import Bundle
from draftc.runtime.engine import Logits, Tokens
from draftc.runtime.errors import BundleError, UsageError
from draftc.runtime.sampler import Sampler
from draftc.runtime.warp import Distribution

__all__ = ["CutVocabulary", "open_vocabulary", "read_token_ids", "write_token_ids"]

STORED = np.dtype("<i4")


class CutVocabulary:
    """Which tokens the columns of a cut head are: `token_ids` (N,) of the `vocab_size` that the target has.

    They are strictly ascending, so that of equal logits the lowest id wins, as in a whole row. Raises UsageError unless
    they are, and lie in [0, vocab_size).
    """

    def __init__(self, token_ids: Tokens, vocab_size: int) -> None:
        if (problem := _problem(token_ids, vocab_size)) is not None:
            raise UsageError(f"token_ids: {problem}")
        self.token_ids = token_ids.astype(np.int64)
        self.vocab_size = vocab_size
        self._whole: Logits = np.full(vocab_size, -np.inf, np.float32)  # outside the cut nothing is ever written

    def argmax(self, row: Logits, sampler: Sampler) -> int:
        """What `sampler` chooses for a row (N,). Raises as Sampler.argmax, and so where it allows none of the cut."""
        if sampler.sees_text:  # penalties, biases and masks speak of token ids
            return sampler.argmax(self.scatter(row))
        return int(self.token_ids[sampler.argmax(row)])

    def distribution(self, row: Logits, sampler: Sampler) -> Distribution:
        """What `sampler` makes of a row (N,): its warped distribution (V,), zero outside the cut. Raises the same."""
        if sampler.sees_text:
            return sampler.distribution(self.scatter(row))
        q = np.zeros(self.vocab_size)
        q[self.token_ids] = sampler.distribution(row)
        return q

    def scatter(self, row: Logits) -> Logits:
        """A row (N,) as one of the whole vocabulary (V,), -inf outside the cut. The next call overwrites it."""
        self._whole[self.token_ids] = row
        return self._whole


def open_vocabulary(bundle: Bundle) -> CutVocabulary | None:
    """The cut vocabulary of a bundle's draft; None where its head is whole. Raises BundleError as `read_token_ids`."""
    manifest, cut = bundle.manifest, bundle.manifest.draft.vocabulary
    if cut is None:
        return None
    token_ids = read_token_ids(bundle.path(cut.path), cut.size, manifest.vocab_size)
    return CutVocabulary(token_ids, manifest.vocab_size)


def write_token_ids(path: Path, token_ids: Tokens) -> None:
    """Write `token_ids` (N,) as little-endian int32."""
    path.write_bytes(token_ids.astype(STORED).tobytes())


def read_token_ids(path: Path, size: int, vocab_size: int) -> Tokens:
    """The `size` token ids (N,) in a file of a bundle.

    Raises BundleError unless they are as many, strictly ascending and below `vocab_size`.
    """
    stored = path.read_bytes()
    name = f"{path.parent.name}/{path.name}"
    if len(stored) != size * STORED.itemsize:
        raise BundleError(
            f"{name}: has {len(stored)} bytes, {size} token ids take {size * STORED.itemsize}: recompile the bundle"
        )
    token_ids = np.frombuffer(stored, STORED).astype(np.int64)
    if (problem := _problem(token_ids, vocab_size)) is not None:
        raise BundleError(f"{name}: {problem}: recompile the bundle")
    return token_ids


def _problem(token_ids: Tokens, vocab_size: int) -> str | None:
    """What is wrong with `token_ids`, if anything is."""
    if token_ids.ndim != 1 or token_ids.size == 0:
        return "there are no token ids"
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        return f"token ids must be from 0 to {vocab_size - 1}, found {token_ids.min()} to {token_ids.max()}"
    falls = np.flatnonzero(np.diff(token_ids) <= 0)
    if falls.size:
        before, after = token_ids[falls[0] : falls[0] + 2]
        return f"token ids must ascend without repeating, found {before} before {after}"
    return None
