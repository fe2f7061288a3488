"""Scorers of KVs."""

from winnow.eviction.scores.attention import (
    Average,
    BelowAverage,
    Cumulative,
    LastQuery,
    MeanDeviation,
    ValueAware,
    Window,
)
from winnow.eviction.scores.base import Scorer
from winnow.eviction.scores.compactor import Compactor
from winnow.eviction.scores.expected import ChunkAttention, ExpectedAttention
from winnow.eviction.scores.factors import ByKeyDeviation, ByOutputNorm, ByValueNorm
from winnow.eviction.scores.fitted import Fitted
from winnow.eviction.scores.keys import KeyDeviation, KeyDifference, KeyNorm
from winnow.eviction.scores.leverage import Leverage
from winnow.eviction.scores.reconstruction import Reconstruction
from winnow.eviction.scores.tokens import Random, Recency

__all__ = [
    "Average",
    "BelowAverage",
    "ByKeyDeviation",
    "ByOutputNorm",
    "ByValueNorm",
    "ChunkAttention",
    "Compactor",
    "Cumulative",
    "ExpectedAttention",
    "Fitted",
    "KeyDeviation",
    "KeyDifference",
    "KeyNorm",
    "LastQuery",
    "Leverage",
    "MeanDeviation",
    "Random",
    "Recency",
    "Reconstruction",
    "Scorer",
    "ValueAware",
    "Window",
]
