"""Eviction policies: a score, a budget, protected KVs, and when rounds run."""

from winnow.eviction.budgets import (
    AdaptiveHeads,
    AdaptiveRows,
    Budget,
    EqualHeads,
    EqualLayers,
    Fixed,
    LayerGroups,
    LayerSplit,
    LazyLayers,
    Pyramid,
    Recipes,
)
from winnow.eviction.budgets.recipes import PUNCTUATION, SPECIAL
from winnow.eviction.evict import EvictionTarget, evict
from winnow.eviction.keep import Keep
from winnow.eviction.policy import EvictionPolicy
from winnow.eviction.presets import PRESETS, Preset, find_preset
from winnow.eviction.replay import Instruction, Replay, ReplayPass, replay_passes
from winnow.eviction.resolve import OWN, ResolvedPolicy, resolve_policy
from winnow.eviction.rows import LayerRows
from winnow.eviction.scores import (
    Average,
    BelowAverage,
    ByOutputNorm,
    ByValueNorm,
    ChunkAttention,
    Compactor,
    Cumulative,
    ExpectedAttention,
    Fitted,
    KeyDifference,
    KeyNorm,
    LastQuery,
    Leverage,
    MeanDeviation,
    Random,
    Recency,
    Reconstruction,
    Scorer,
    ValueAware,
    Window,
)
from winnow.eviction.sequence import SequenceEviction
from winnow.eviction.signals import Needs, QueryMoments, Signals
from winnow.eviction.when import When

__all__ = [
    "OWN",
    "PRESETS",
    "PUNCTUATION",
    "SPECIAL",
    "AdaptiveHeads",
    "AdaptiveRows",
    "Average",
    "BelowAverage",
    "Budget",
    "ByOutputNorm",
    "ByValueNorm",
    "ChunkAttention",
    "Compactor",
    "Cumulative",
    "EqualHeads",
    "EqualLayers",
    "EvictionPolicy",
    "EvictionTarget",
    "ExpectedAttention",
    "Fitted",
    "Fixed",
    "Instruction",
    "Keep",
    "KeyDifference",
    "KeyNorm",
    "LastQuery",
    "LayerGroups",
    "LayerRows",
    "LayerSplit",
    "LazyLayers",
    "Leverage",
    "MeanDeviation",
    "Needs",
    "Preset",
    "Pyramid",
    "QueryMoments",
    "Random",
    "Recency",
    "Recipes",
    "Reconstruction",
    "Replay",
    "ReplayPass",
    "ResolvedPolicy",
    "Scorer",
    "SequenceEviction",
    "Signals",
    "ValueAware",
    "When",
    "Window",
    "evict",
    "find_preset",
    "replay_passes",
    "resolve_policy",
]
