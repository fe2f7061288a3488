"""Budgets: how many KVs each row keeps."""

from winnow.eviction.budgets.base import Budget
from winnow.eviction.budgets.heads import AdaptiveHeads, AdaptiveRows, EqualHeads, Fixed
from winnow.eviction.budgets.layers import EqualLayers, LayerSplit, Pyramid

__all__ = [
    "AdaptiveHeads", "AdaptiveRows", "Budget", "EqualHeads", "EqualLayers", "Fixed", "LayerSplit", "Pyramid",
]  # fmt: skip
