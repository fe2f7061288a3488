"""Baselines and ablations of the papers that differ from a preset in a number or two; studies take them by name."""

from collections.abc import Mapping
from dataclasses import replace

from winnow.eviction import PRESETS, EvictionPolicy, Keep, Recency, When, Window


def _window(preset: str, size: int, power: int | None = None) -> EvictionPolicy:
    """The policy of a preset with a window of `size` queries, whose KVs stay."""
    policy = PRESETS[preset].policy
    assert isinstance(policy.score, Window)
    score = replace(policy.score, size=size, power=power or policy.score.power)
    return replace(policy, score=score, keep=Keep(recent=size))


_H2O, _KV_COMPRESS = PRESETS["h2o"].policy, PRESETS["kv-compress"].policy
# H2O as KVCache-Factory runs it as a baseline.
H2O_ONCE = replace(_H2O, keep=Keep(recent=8), when=When(after_prefill=True))
H2O_SINKS = replace(_H2O, keep=Keep(sinks=4, recent=0.5))
# KV-Compress (Rehg 2024), 5.1: w = 8 for all baselines.
SNAPKV_W8, PYRAMIDKV_W8 = _window("snapkv", 8), _window("pyramidkv", 8)
ADA_SNAPKV_W8, ADA_PYRAMIDKV_W8 = _window("ada-snapkv", 8), _window("ada-pyramidkv", 8)
# Its ablations of the window and the power of weights (Table 2), and a round after every step (5.5).
KV_COMPRESS_W32_L2 = _window("kv-compress", 32)
KV_COMPRESS_W32_L1 = _window("kv-compress", 32, power=1)
KV_COMPRESS_STEPS = replace(_KV_COMPRESS, when=When(after_prefill=True, every_steps=1))
# Batch-Max (Metel et al. 2024): ED with |kv| = 65; Algorithm 1 with another score, and as a control with none.
_ED, _BATCH_MAX = PRESETS["extreme-decode"].policy, PRESETS["batch-max"].policy
EXTREME_DECODE_65 = replace(_ED, when=replace(_ED.when, decode_every=64))
BATCH_MAX_LEVERAGE = replace(_BATCH_MAX, score=PRESETS["leverage"].policy.score)
BATCH_MAX_RECENT = replace(_BATCH_MAX, score=Recency())

VARIANTS: Mapping[str, EvictionPolicy] = {
    "h2o-once": H2O_ONCE,
    "h2o-sinks": H2O_SINKS,
    "snapkv-w8": SNAPKV_W8,
    "pyramidkv-w8": PYRAMIDKV_W8,
    "ada-snapkv-w8": ADA_SNAPKV_W8,
    "ada-pyramidkv-w8": ADA_PYRAMIDKV_W8,
    "kv-compress-w32-l1": KV_COMPRESS_W32_L1,
    "kv-compress-w32-l2": KV_COMPRESS_W32_L2,
    "kv-compress-steps": KV_COMPRESS_STEPS,
    "extreme-decode-65": EXTREME_DECODE_65,
    "batch-max-leverage": BATCH_MAX_LEVERAGE,
    "batch-max-recent": BATCH_MAX_RECENT,
}
