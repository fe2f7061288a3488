"""Splits of a sequence's budget over its layers."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from winnow.errors import ConfigError
from winnow.eviction.costs import RowCosts


@dataclass(frozen=True)
class LayerSplit(ABC):
    """Split of a budget over layers; the mean over layers is the budget, up to rounding."""

    @abstractmethod
    def budgets(self, costs: RowCosts) -> Tensor:
        """Return KVs per row of each layer, int64 [B, L]."""


@dataclass(frozen=True)
class EqualLayers(LayerSplit):
    """The same for all layers."""

    def budgets(self, costs: RowCosts) -> Tensor:
        return costs.round.budget[:, None].expand(-1, costs.num_layers)


@dataclass(frozen=True)
class Pyramid(LayerSplit):
    """Pyramid of budgets: from large shares for the first layers to small ones for the last, in equal steps.

    PyramidKV, without profiling.

    The share above the recent window, on average `base`, falls from 2 base - base // beta to base // beta. The first
    layer gets at most what exists, and prompts shorter than 2 base are split equally.
    """

    beta: int = 20

    def __post_init__(self) -> None:
        if self.beta < 1:
            raise ConfigError(f"beta must be at least 1, got {self.beta}")

    def budgets(self, costs: RowCosts) -> Tensor:
        window, there = costs.round.recent, costs.round.tokens - costs.round.recent
        base = costs.round.budget - window
        least = base // self.beta
        most = 2 * base - least
        least = torch.where(most >= there, 2 * base - there, least)
        most = torch.minimum(most, there)
        step = (most - least) // max(costs.num_layers - 1, 1)
        layer = torch.arange(costs.num_layers, device=base.device)
        steps = most[:, None] - layer * step[:, None] + window[:, None]
        short = costs.round.tokens < 2 * base
        return torch.where(short[:, None], costs.round.budget[:, None], steps)
