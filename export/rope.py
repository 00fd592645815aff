"""Longrope models carry two sets of rotary factors and switch between them by the largest position of a call.

A graph cannot: a wide call would switch earlier than a narrow one, and the rows of a batch would switch together. So
the set is chosen once, by the longest text that the bundle serves, and stays.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

__all__ = ["fixed_rope"]


@contextmanager
def fixed_rope(model: PreTrainedModel, max_length: int) -> Iterator[str | None]:
    """Inside the block `model` keeps one set of longrope factors, whatever positions it sees.

    That set is the one that the model itself would use for a text of `max_length` tokens: short factors up to its
    `original_max_position_embeddings`, long factors beyond. Yields a sentence that says which, or None for a model
    without longrope (which is left alone). A comparison with the eager model belongs into such a block, too.
    """
    rotary = [module for module in model.modules() if getattr(module, "rope_type", None) == "longrope"]
    note = None
    try:
        for module in rotary:
            # One call at the last position lets the model's own code pick the set; any other type then keeps it.
            with torch.no_grad():
                module(torch.zeros(1, dtype=model.dtype), position_ids=torch.tensor([[max_length - 1]]))
            setattr(module, "rope_type", "fixed")  # noqa: B010 (modules declare no such attribute)
            original = model.config.rope_parameters["original_max_position_embeddings"]
            kind, relation = ("long", ">") if max_length > original else ("short", "<=")
            note = f"longrope: {kind} factors at every position (max_length {max_length} {relation} {original})"
        yield note
    finally:
        for module in rotary:
            setattr(module, "rope_type", "longrope")  # noqa: B010
