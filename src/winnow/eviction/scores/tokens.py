"""Scorers that use positions alone."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from winnow.eviction.round_rows import LayerRows
from winnow.eviction.scores.base import Scorer


@dataclass(frozen=True)
class Recency(Scorer):
    """The position; newer KVs stay (StreamingLLM)."""

    factors: ClassVar[bool] = False

    def score(self, rows: LayerRows) -> Tensor:
        return rows.position.float()


@dataclass(frozen=True)
class Random(Scorer):
    """A number drawn for each KV from the seed, its position, layer and head: the same in every batch."""

    seed: int = 0

    def score(self, rows: LayerRows) -> Tensor:
        head = rows.first_head + torch.arange(rows.position.shape[1], device=rows.position.device)
        x = (
            rows.position.long() * 0x9E3779B1
            + (rows.layer * 8191 + head[:, None]) * 0x85EBCA77
            + self.seed * 0xC2B2AE3D
        )
        for bits, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39), (15, 1)):  # Wang-style avalanche on 32 bits
            x = ((x ^ ((x & _MASK) >> bits)) * factor) & _MASK
        return (x >> 8).float() / 2**24


_MASK = 0xFFFFFFFF
