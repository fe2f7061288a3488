"""Positions re-assigned within the cache (StreamingLLM)."""

from typing import Protocol

import torch
from torch import Tensor

from winnow.cache import KVPool
from winnow.eviction.ranking import ranks
from winnow.eviction.signals import RotationTable


class Rotation(Protocol):
    """A model's rotary embedding: rotating a key by a difference of positions moves it to another position."""

    def turn(self, layer: int, keys: Tensor, difference: Tensor) -> Tensor:
        """Return keys of one layer, float32 [..., d], rotated at p, as they would be at p + difference, [...]."""

    def table(self, layer: int, positions: int) -> RotationTable:
        """Return the rotation of a layer's keys at positions below `positions` or more."""


def reassign(pool: KVPool, slot: Tensor, kept: Tensor, rotation: Rotation) -> None:
    """Assign positions 0, 1, 2, ... to the KVs in the first slots of each row, in their order.

    Args:
        slot: int64 [B, L, H, N], the slot of each KV; kept: int64 [B, L, H], KVs of each row.
    """
    most = int(kept.max())
    slot, counts = slot[..., :most], torch.arange(most, device=slot.device) < kept[..., None]
    old = pool.position[pool.numbers.place(slot)]
    new = ranks(old.masked_fill(~counts, torch.iinfo(old.dtype).max)).int()
    for layer in range(slot.shape[1]):
        here = slot[:, layer][counts[:, layer]]
        difference = (new - old)[:, layer][counts[:, layer]]
        kind = pool.of_layer(layer)
        kind.set_keys(here, rotation.turn(layer, kind.keys(here), difference))
    pool.position[pool.numbers.place(slot[counts])] = new[counts]
