"""Scorers of KVs."""

from winnow.eviction.scores.attention import (
    Average,
    BelowAverage,
    Cumulative,
    LastQuery,
    Reconstruction,
    Window,
)
from winnow.eviction.scores.base import Scorer
from winnow.eviction.scores.factors import ByKeyDeviation, BySentence, ByValueNorm, KeysWithin
from winnow.eviction.scores.keys import KeyDeviation, KeyDifference, KeyNorm, Leverage, Random, Recency

__all__ = [
    "Average", "BelowAverage", "ByKeyDeviation", "BySentence", "ByValueNorm", "Cumulative", "KeyDeviation",
    "KeyDifference", "KeyNorm", "KeysWithin", "LastQuery", "Leverage", "Random", "Recency", "Reconstruction",
    "Scorer", "Window",
]  # fmt: skip
