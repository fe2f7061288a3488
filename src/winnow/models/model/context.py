"""The longest sequence that a model serves."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from winnow.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# RoPE kinds that choose their frequencies by the largest position of the whole forward pass. In a packed batch one
# long sequence would change the short ones, so they serve only lengths at which nothing is chosen.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
# RoPE kinds that stretch the positions that a model was trained for by a factor. Of the others, llama3's factor is
# counted in max_position_embeddings already.
_STRETCHING_ROPE = ("linear", "yarn")


@dataclass(frozen=True)
class ContextLimit:
    tokens: int | None  # None: the model's configuration does not say
    reason: str  # reason for the limit, or for none

    def less(self, places: int) -> "ContextLimit":
        """Return the limit of a model whose table of positions begins with places for padding."""
        return self if self.tokens is None or not places else replace(self, tokens=self.tokens - places)

    def take(self, wanted: int | None) -> int:
        """Return the longest sequence served, where `wanted` is what the user asks for. Raises ConfigError: more is
        wanted than the model can do, or nothing is, and the model does not say what it can."""
        if wanted is None:
            if self.tokens is None:
                raise ConfigError(f"max_model_len must be given: {self.reason}")
            return self.tokens
        if self.tokens is not None and wanted > self.tokens:
            raise ConfigError(f"max_model_len must be at most {self.tokens}, {self.reason}, got {wanted}")
        return wanted


def context_limit(config: "PretrainedConfig") -> ContextLimit:
    from winnow.models.model.kinds import sparse_top_k

    text = config.get_text_config()
    named = (getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    limit = next((length for length in named if length), None)
    reason = "the model's max_position_embeddings"
    if limit is None:
        reason = f"{type(config).__name__} names no max_position_embeddings"
    kinds = _rope_kinds(getattr(text, "rope_parameters", None) or {})
    if limit is not None and kinds:
        # Layers of every kind must know a position, so the kind that knows fewest decides: in Gemma 3 the layers with a
        # window are not stretched, since max_position_embeddings counts the factor of the others.
        stretched = min(_stretched(limit, kind) for kind in kinds)
        if stretched > limit:
            name = next(kind["rope_type"] for kind in kinds if kind.get("rope_type") in _STRETCHING_ROPE)
            limit, reason = stretched, f"{reason} times its {name} RoPE's factor"
    for kind in kinds:
        if kind.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            original = kind.get("original_max_position_embeddings")
            limit = min(filter(None, (limit, original)), default=None)
            if limit is not None:
                reason = f"up to which its {kind['rope_type']} RoPE does not depend on the batch"
    if (top_k := sparse_top_k(text)) is not None and (limit is None or top_k < limit):
        limit, reason = top_k, "up to which its sparse attention takes all keys (index_topk)"
    return ContextLimit(limit, reason)


def _rope_kinds(parameters: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    return nested or ([parameters] if parameters else [])


def _stretched(limit: int, rope: Mapping[str, Any]) -> int:
    """Return positions that a set of parameters reaches; at least those that the configuration names."""
    factor = rope.get("factor")
    if rope.get("rope_type") not in _STRETCHING_ROPE or not isinstance(factor, int | float) or factor <= 1:
        return limit
    # YaRN's guides leave max_position_embeddings as it was, or set it to the product: the original tells which.
    original = rope.get("original_max_position_embeddings") or limit
    return max(limit, int(original * factor))
