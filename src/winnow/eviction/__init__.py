"""Eviction policies: a score, a budget, protected KVs, and when rounds run."""

from winnow.eviction.budgets import (
    AdaptiveHeads,
    AdaptiveRows,
    Budget,
    EqualHeads,
    EqualLayers,
    Fixed,
    LayerSplit,
    Pyramid,
)
from winnow.eviction.evict import EvictionTarget, PlannedRound, compact_round, plan_round
from winnow.eviction.fit import Fit
from winnow.eviction.policy import EvictionPolicy, Keep, When
from winnow.eviction.presets import KEYS, PRESETS, SEEN, SEEN_PD, SENTENCE, Preset, find_preset
from winnow.eviction.probes import Probe, Watched
from winnow.eviction.replay import Instruction, Replay, ReplayPass, replay_passes
from winnow.eviction.resolve import (
    OWN,
    PAPER_POOL,
    UNKNOWN_MODEL,
    ModelTraits,
    ResolvedPolicy,
    concrete_preset,
    resolve_policy,
)
from winnow.eviction.round_rows import LayerRows
from winnow.eviction.scores import (
    Average,
    BelowAverage,
    ByKeyDeviation,
    BySentence,
    ByValueNorm,
    Cumulative,
    KeyDeviation,
    KeyDifference,
    KeyNorm,
    KeysWithin,
    LastQuery,
    Leverage,
    Random,
    Recency,
    Reconstruction,
    Scorer,
    Window,
)
from winnow.eviction.sequence import LATE_STEPS, SequenceEviction
from winnow.eviction.signals import KeyDirections, Needs, RotationTable, Signals

__all__ = [
    "KEYS", "LATE_STEPS", "OWN", "PAPER_POOL", "PRESETS", "SEEN", "SEEN_PD", "SENTENCE", "UNKNOWN_MODEL",
    "AdaptiveHeads", "AdaptiveRows", "Average", "BelowAverage", "Budget", "ByKeyDeviation", "BySentence",
    "ByValueNorm", "Cumulative", "EqualHeads", "EqualLayers", "EvictionPolicy", "EvictionTarget", "Fit",
    "Fixed", "Instruction", "Keep", "KeyDeviation", "KeyDifference", "KeyDirections", "KeyNorm", "KeysWithin",
    "LastQuery", "LayerRows", "LayerSplit", "Leverage", "ModelTraits", "Needs", "PlannedRound", "Preset",
    "Probe", "Pyramid", "Random", "Recency", "Reconstruction", "Replay", "ReplayPass", "ResolvedPolicy",
    "RotationTable", "Scorer", "SequenceEviction", "Signals", "Watched", "When", "Window", "compact_round",
    "concrete_preset", "find_preset", "plan_round", "replay_passes", "resolve_policy",
]  # fmt: skip
