"""Budgets: how many KVs each row keeps."""

from winnow.eviction.budgets.base import Budget
from winnow.eviction.budgets.heads import AdaptiveHeads, AdaptiveRows, EqualHeads, Fixed, LazyLayers
from winnow.eviction.budgets.layers import EqualLayers, LayerGroups, LayerSplit, Pyramid
from winnow.eviction.budgets.recipes import Recipes

__all__ = [
    "AdaptiveHeads",
    "AdaptiveRows",
    "Budget",
    "EqualHeads",
    "EqualLayers",
    "Fixed",
    "LayerGroups",
    "LayerSplit",
    "LazyLayers",
    "Pyramid",
    "Recipes",
]
