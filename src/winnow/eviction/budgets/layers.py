"""Splits of a sequence's budget over its layers."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from winnow.errors import ConfigError
from winnow.eviction.costs import RowCosts


@dataclass(frozen=True)
class LayerSplit(ABC):
    """Split of a budget over layers; the mean over layers is the budget, up to rounding."""

    needs_similarity: ClassVar[bool] = False

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


@dataclass(frozen=True)
class LayerGroups(LayerSplit):
    """Small shares for layers whose attention changes the hidden state little (SqueezeAttention).

    Layers fall into three groups by the cosine similarity of the hidden state before and after attention, the mean
    over the prompt. Each layer of the most similar group gets `share` of the budget; the other layers divide the rest.
    """

    needs_similarity: ClassVar[bool] = True
    share: float = 0.38

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise ConfigError(f"share must be above 0 and at most 1, got {self.share}")

    def budgets(self, costs: RowCosts) -> Tensor:
        device = costs.round.budget.device
        similar = torch.from_numpy(
            np.stack([most_similar(row) for row in costs.round.similarity.double().cpu().numpy()])
        ).to(device)
        total = costs.round.budget[:, None] * costs.num_layers
        poor = (costs.round.budget[:, None].double() * self.share).long()
        num_poor = similar.sum(dim=1, keepdim=True)
        rich = (total - num_poor * poor) // (costs.num_layers - num_poor).clamp_min(1)
        return torch.where(similar, poor, rich)


def most_similar(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Mark the highest of three groups that 3-means finds in `values`, [L].

    In one dimension groups are runs of the sorted values, so trying all splits finds the optimum without a seed. Of
    fewer than three values none is marked.
    """
    if len(values) < 3:
        return np.zeros(len(values), dtype=bool)
    ordered = np.sort(values)

    def spread(i: int, j: int) -> float:
        part = ordered[i:j]
        return float(((part - part.mean()) ** 2).sum())

    ends = combinations(range(1, len(values)), 2)
    _, first = min((spread(0, i) + spread(i, j) + spread(j, len(values)), j) for i, j in ends)
    return values >= ordered[first]
