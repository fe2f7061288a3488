"""Named policies with their sources and their papers' default budgets."""

from dataclasses import dataclass, replace

from winnow.attention import Group, Smoothing
from winnow.config import COMPRESSING
from winnow.errors import ConfigError, nearest_name
from winnow.eviction.budgets import AdaptiveHeads, AdaptiveRows, EqualHeads, Fixed, Pyramid
from winnow.eviction.fit import Fit
from winnow.eviction.policy import EvictionPolicy, Keep, When
from winnow.eviction.replay import Replay
from winnow.eviction.scores import (
    Average,
    BelowAverage,
    ByKeyDeviation,
    BySentence,
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
    Window,
)


@dataclass(frozen=True)
class Preset:
    """A policy with a name."""

    policy: EvictionPolicy
    paper: str
    kv_budget: int | None = None
    """The paper's budget, if it has one; used if the user gives none."""


# SnapKV's own settings for LongBench; the pooling is per query head and leaves the window out.
_SNAPKV = Window(32, 1, Smoothing(7, "max", per_query_head=True, skip_window=True), Group.MEAN)
# Ada-KV aggregates the group before it pools.
_ADA = Window(32, 1, Smoothing(7, "max", skip_window=True), Group.MEAN)
_KV_COMPRESS = EvictionPolicy(
    Window(8, 2, Smoothing(7, "max"), continual=True),
    AdaptiveRows(),
    Keep(recent=8),
    When(after_prefill=True, join_prefill=True, pressure=True),
)
# Chosen by a search on the demo model's tasks: see docs/eviction.md.
_LEVERAGE = EvictionPolicy(
    Leverage(pool=Smoothing(3, "average")),
    AdaptiveRows(),
    Keep(recent=16),
    When(after_prefill=True, pressure=True),
)
# KV-Compress, pooled as wide in text, its window at the question's end; no answer depends on who arrives later.
_WINDOW = replace(
    _KV_COMPRESS,
    score=Window(32, 2, Smoothing(7, "max", by_text=True), continual=True, skip_template=True),
    keep=Keep(sinks=4, recent=32),
    when=When(after_prefill=True, pressure=True),
)
_BY_SENTENCE = BySentence(Window(32, 2, continual=True, skip_template=True), pool=_WINDOW.pool)
_SENTENCE = replace(_WINDOW, score=_BY_SENTENCE)
_SEEN = replace(_WINDOW, score=ByKeyDeviation(_BY_SENTENCE, power=0.25))
_ONCE = When(after_prefill=True)
_KVZIP = EvictionPolicy(Reconstruction(), AdaptiveRows(), Keep(sinks=4), _ONCE)
_KVZIP_PART = replace(_KVZIP, score=Reconstruction(asked=Replay(chunk=512, own_part=True)))
_KEYS = EvictionPolicy(KeyDeviation(), AdaptiveRows(), Keep(sinks=4), replace(_ONCE, pressure=True))
_EACH_TOKEN = When(after_prefill=True, decode_every=1)

KEYS = "winnow-keys"
"""The preset for every prompt, whatever is asked of it later."""
SEEN = "winnow-seen"
"""The preset for prompts that end with their question."""
SEEN_PD = "winnow-seen-pd"  # the same for prompts that do not fit into memory
SENTENCE = "winnow-sentence"  # the same for models of few rows, or whose rotation of keys is not known

PRESETS: dict[str, Preset] = {
    "full": Preset(EvictionPolicy(), "no eviction"),
    COMPRESSING: Preset(
        _SEEN, "winnow-seen or winnow-sentence, by the model; winnow-keys where questions come later"
    ),
    SEEN: Preset(
        _SEEN,
        "Winnow's own: the fourth root of winnow-sentence times winnow-keys, for a question that is seen",
    ),
    SEEN_PD: Preset(
        replace(
            _SEEN,
            score=KeysWithin(_SEEN.score),
            when=When(after_prefill=True, prefill_every=256, prefill_compression=4.0, pressure=True),
        ),
        "the same where the prompt ends; within it rounds by keys, which leave a quarter",
    ),
    "winnow-seen-keys": Preset(_SEEN, "an earlier name of winnow-seen"),
    SENTENCE: Preset(_SENTENCE, "Winnow's own: winnow-window, or a share of the sentence's largest"),
    "winnow-window": Preset(_WINDOW, "Winnow's own: KV-Compress with a window that ends with the question"),
    KEYS: Preset(
        _KEYS, "Winnow's own: keys before rotation unlike the mean of all seen; whatever is asked later"
    ),
    "winnow-keys-pd": Preset(
        replace(
            _KEYS,
            keep=Keep(sinks=4, recent=32),
            when=When(after_prefill=True, prefill_every=256, decode_every=64, pressure=True),
        ),
        "the same, in rounds within the prompt and the answer",
    ),
    "leverage": Preset(_LEVERAGE, "leverage of keys (Compactor, exact) under KV-Compress's budget"),
    "leverage-pd": Preset(
        replace(_LEVERAGE, when=When(after_prefill=True, prefill_every=256, decode_every=16, pressure=True)),
        "the same, in rounds within the prompt",
    ),
    "kv-compress": Preset(_KV_COMPRESS, "KV-Compress (Rehg 2024), KVC-w8-L2"),
    "kv-compress-full": Preset(
        replace(_KV_COMPRESS, score=Cumulative(2, exclude_first=10), keep=Keep(recent=32)),
        "KV-Compress (Rehg 2024), KVC-full-L2",
    ),
    "kv-compress-pd": Preset(
        # Short intervals while decoding: KVs above the budget occupy memory that other requests need.
        replace(_KV_COMPRESS, when=replace(_KV_COMPRESS.when, prefill_every=512, decode_every=16)),
        "KV-Compress inside Batch-Max's loop",
    ),
    "batch-max": Preset(
        EvictionPolicy(Average(), EqualHeads(), Keep(), When(prefill_every=64, decode_every=64, within=True)),
        "Batch-Max (Metel et al. 2024), Algorithm 1",
    ),
    "extreme-decode": Preset(
        EvictionPolicy(Recency(), Fixed(kvs=1), Keep(), _EACH_TOKEN), "Batch-Max, Algorithm 2 with |kv| = 2"
    ),
    "h2o": Preset(
        EvictionPolicy(Cumulative(), EqualHeads(), Keep(recent=0.5), _EACH_TOKEN), "H2O (Zhang et al. 2023)"
    ),
    "snapkv": Preset(
        EvictionPolicy(_SNAPKV, EqualHeads(), Keep(recent=32), _ONCE), "SnapKV (Li et al. 2024)"
    ),
    "pyramidkv": Preset(
        EvictionPolicy(_SNAPKV, EqualHeads(Pyramid()), Keep(recent=32), _ONCE), "PyramidKV (Cai et al. 2024)"
    ),
    "ada-snapkv": Preset(
        EvictionPolicy(_ADA, AdaptiveHeads(), Keep(recent=32), _ONCE), "Ada-KV (Feng et al. 2024)"
    ),
    "ada-pyramidkv": Preset(
        EvictionPolicy(_ADA, AdaptiveHeads(layers=Pyramid()), Keep(recent=32), _ONCE),
        "Ada-KV over PyramidKV's layers",
    ),
    "tova": Preset(EvictionPolicy(LastQuery(), EqualHeads(), Keep(), _EACH_TOKEN), "TOVA (Oren et al. 2024)"),
    "scissorhands": Preset(
        EvictionPolicy(
            BelowAverage(400), EqualHeads(), Keep(recent=10), When(after_prefill=True, decode_every=64)
        ),
        "Scissorhands (Liu et al. 2023)",
    ),
    "streaming": Preset(
        EvictionPolicy(Recency(), EqualHeads(), Keep(sinks=4), replace(_EACH_TOKEN, prefill_every=256)),
        "StreamingLLM (Xiao et al. 2024), positions kept",
        516,
    ),
    "keydiff": Preset(
        EvictionPolicy(KeyDifference(), when=When(after_prefill=True, prefill_every=128, decode_every=128)),
        "KeyDiff (Park et al. 2025)",
    ),
    "knorm": Preset(
        EvictionPolicy(KeyNorm(), EqualHeads(), Keep(), _ONCE), "L2 norm of keys (Devoto et al. 2024)"
    ),
    "kvzip": Preset(_KVZIP, "KVzip (Kim et al. 2025), by blocks; asked later"),
    "kvzip-part": Preset(
        _KVZIP_PART,
        "Winnow's own: KVzip in chunks of 512 that attend to their own part of the context; asked later",
    ),
    "kvzip-keys": Preset(
        replace(_KVZIP, score=ByKeyDeviation(Reconstruction())),
        "Winnow's own: kvzip times winnow-keys; asked later",
    ),
    "winnow-fit": Preset(
        replace(_KVZIP, compact=Fit()),
        "Winnow's own: kvzip, and what stays is fitted to the replay's queries; asked later",
    ),
    "sinks-recent": Preset(
        EvictionPolicy(Recency(), EqualHeads(), Keep(sinks=4), _ONCE),
        "baseline: the start and the end, once after the prompt",
    ),
    "recent": Preset(
        EvictionPolicy(Recency(), EqualHeads(), Keep(), _EACH_TOKEN), "baseline: a sliding window"
    ),
    "random": Preset(
        EvictionPolicy(Random(), EqualHeads(), Keep(sinks=4), _ONCE), "baseline: chance in each head"
    ),
}


def find_preset(name: str) -> Preset:
    """Look up a preset. Raises ConfigError: there is no such preset; the message lists all names."""
    if name not in PRESETS:
        hint = f" (did you mean {near}?)" if (near := nearest_name(str(name), PRESETS)) else ""
        raise ConfigError(f"eviction must be one of {', '.join(PRESETS)}, or a policy, got {name!r}{hint}")
    return PRESETS[name]


# Of a conversation's oldest turns, by keys alone, which is known without any query: leverage costs no replay, and no
# accumulators.
AGING = EvictionPolicy(
    Leverage(pool=Smoothing(3, "average")), AdaptiveRows(), Keep(sinks=4), When(after_prefill=True)
)
