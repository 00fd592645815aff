"""The few numbers that draftc needs from a config, whatever a model family calls them.

Names come from Optimum's NormalizedConfigManager where it knows the model type, else from the config's own attributes.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["ModelShape", "model_shape"]

POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder. `max_positions` is its context length in tokens, None where the config does not limit it."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_rows: int
    max_positions: int | None

    def kv_bytes(self, length: int, itemsize: int = 4) -> int:
        """Bytes of the key and value buffers of one sequence of `length` tokens."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * length * itemsize


def model_shape(config: "PreTrainedConfig") -> ModelShape:
    """Read the sizes from a config; a multimodal one through its text part. Raises AttributeError if one is missing."""
    from optimum.utils import NormalizedConfigManager, NormalizedTextConfig

    text: Any = config.get_text_config()
    try:
        names: Any = NormalizedConfigManager.get_normalized_config_class(text.model_type)(text)
        names.num_layers, names.num_attention_heads, names.hidden_size, names.vocab_size  # noqa: B018 (does it know them?)
    except (KeyError, AttributeError):
        names = NormalizedTextConfig(text)
    heads = int(names.num_attention_heads)
    hidden = int(names.hidden_size)
    limits = [value for name in POSITIONS if isinstance(value := getattr(text, name, None), int) and value > 0]
    return ModelShape(
        num_layers=int(names.num_layers),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(text, "head_dim", None) or hidden // heads),
        vocab_rows=int(names.vocab_size),
        max_positions=limits[0] if limits else None,
    )
