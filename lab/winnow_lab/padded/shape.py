"""Shape of a token's KVs in each layer of a model, found by running tokens through it."""

from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from winnow.errors import UnsupportedModelError
from winnow.models.bind.binding import cache_argument
from winnow.models.load.damage import first_line


@dataclass(frozen=True)
class LayerShape:
    """A token's KVs in one layer: a key and a value per head."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.num_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@dataclass(frozen=True)
class KVShape:
    """A token's KVs in all layers."""

    layers: tuple[LayerShape, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one token in all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @cached_property
    def largest_layer(self) -> int:
        """Bytes of one token in the largest layer."""
        return max(layer.nbytes for layer in self.layers)


def probe_shape(model: PreTrainedModel) -> KVShape:
    """Run two tokens through the model with transformers' own cache, and read the shapes of the KVs.

    Raises:
        UnsupportedModelError: the model has no cache, or one of other contents than keys and values by token.
    """
    name = type(model).__name__
    for part in model.modules():
        if getattr(part, "is_causal", True) is False and hasattr(part, "layer_idx"):
            raise UnsupportedModelError(
                f"{name} is not supported: {type(part).__name__} is not causal, and Winnow generates token by token"
            )
    cache = DynamicCache(config=model.config)
    tokens = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
    try:
        with torch.inference_mode():
            model(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                use_cache=True,
                **{cache_argument(model): cache},
            )
    # Models of other kinds expect caches of other classes, and fail on this one with any exception.
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} is not supported: it does not run over a cache ({first_line(error)})"
        ) from error
    for index, layer in enumerate(cache.layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or layer.keys is None:
            raise UnsupportedModelError(
                f"{name} is not supported: layer {index} keeps no keys and values by token ({type(layer).__name__})"
            )
    if not cache.layers:
        raise UnsupportedModelError(f"{name} is not supported: it keeps no cache")
    return KVShape(
        tuple(
            LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3], layer.keys.dtype)
            for layer in cache.layers
        )
    )
