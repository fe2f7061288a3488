"""Scores that look at keys alone: no queries, so they hold for any question to come."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from winnow.eviction.rows import LayerRows
from winnow.eviction.scores.base import Score


@dataclass(frozen=True)
class KeyNorm(Score):
    """Keys of small norm attract attention (Devoto et al., "A simple and effective L2 norm-based strategy", 2024)."""

    def worth(self, rows: LayerRows) -> Tensor:
        return -rows.keys().norm(dim=-1)


@dataclass(frozen=True)
class KeyDifference(Score):
    """Keys unlike the mean direction of the row's keys stay (KeyDiff)."""

    def worth(self, rows: LayerRows) -> Tensor:
        direction = F.normalize(rows.keys(), dim=-1)
        anchor = direction.sum(dim=2, keepdim=True) / rows.length[..., None, None]
        return -F.cosine_similarity(direction, anchor, dim=-1)
