"""The numbers of a model's attention layers and states. No transformers."""

from dataclasses import dataclass

from winnow.cache.recurrent import StateShape


@dataclass(frozen=True)
class ModelGeometry:
    """The numbers that the cache and the kernels depend on."""

    num_layers: int
    """Layers that attend, which have KVs: they are numbered from 0, whatever lies between them."""
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    """Sliding window of each layer, None where a layer sees everything."""
    states: tuple[StateShape, ...] = ()
    """States that layers keep in place of KVs, or beside them."""
