"""Baselines and ablations of the papers that differ from a preset in a number or two; studies take them by name."""

from collections.abc import Mapping
from dataclasses import replace

from winnow.eviction import PRESETS, ByKeyDeviation, EvictionPolicy, Keep, Recency, When, Window


def _window(preset: str, size: int, power: int | None = None) -> EvictionPolicy:
    """The policy of a preset with a window of `size` queries, whose KVs stay."""
    policy = PRESETS[preset].policy
    assert isinstance(policy.score, Window)
    score = replace(policy.score, size=size, power=power or policy.score.power)
    return replace(policy, score=score, keep=Keep(recent=size))


_H2O, _KV_COMPRESS = PRESETS["h2o"].policy, PRESETS["kv-compress"].policy
_WINDOW = PRESETS["winnow-window"].policy
_ED, _BATCH_MAX = PRESETS["extreme-decode"].policy, PRESETS["batch-max"].policy

VARIANTS: Mapping[str, EvictionPolicy] = {
    # The window times keys, without sentences (docs/results/keys.md).
    "winnow-window-keys": replace(_WINDOW, score=ByKeyDeviation(_WINDOW.score, power=0.25)),
    # H2O as KVCache-Factory runs it as a baseline.
    "h2o-once": replace(_H2O, keep=Keep(recent=8), when=When(after_prefill=True)),
    "h2o-sinks": replace(_H2O, keep=Keep(sinks=4, recent=0.5)),
    # KV-Compress (Rehg 2024), 5.1: w = 8 for all baselines.
    "snapkv-w8": _window("snapkv", 8),
    "pyramidkv-w8": _window("pyramidkv", 8),
    "ada-snapkv-w8": _window("ada-snapkv", 8),
    "ada-pyramidkv-w8": _window("ada-pyramidkv", 8),
    # Its ablations of the window and the power of weights (Table 2), and a round after every step (5.5).
    "kv-compress-w32-l1": _window("kv-compress", 32, power=1),
    "kv-compress-w32-l2": _window("kv-compress", 32),
    "kv-compress-steps": replace(_KV_COMPRESS, when=When(after_prefill=True, every_steps=1)),
    # Batch-Max (Metel et al. 2024): ED with |kv| = 65; Algorithm 1 with another score, and as a control with none.
    "extreme-decode-65": replace(_ED, when=replace(_ED.when, decode_every=64)),
    "batch-max-leverage": replace(_BATCH_MAX, score=PRESETS["leverage"].policy.score),
    "batch-max-recent": replace(_BATCH_MAX, score=Recency()),
}
