"""What one column of a model's cache takes, learnt by watching tokens pass through it."""

from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from winnow.errors import UnsupportedModelError
from winnow.models.binding import cache_argument
from winnow.models.damage import first_line


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps of a token: a key and a value for each head."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.num_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@dataclass(frozen=True)
class KVShape:
    """What all layers keep of a token."""

    layers: tuple[LayerShape, ...]

    @cached_property
    def nbytes(self) -> int:
        """Of one token in all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @cached_property
    def largest_layer(self) -> int:
        """Bytes of one token in the layer that takes most."""
        return max(layer.nbytes for layer in self.layers)


def probe_shape(model: PreTrainedModel) -> KVShape:
    """Run two tokens through the model over transformers' own cache, and look at what it kept.

    Raises:
        UnsupportedModelError: the model keeps no cache, or keeps something other than keys and values by token.
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
    # Models of other kinds expect caches of their own, and stumble over this one in ways of their own.
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
