"""Every number of every preset and of the papers' variants of them beside its source, apart from the table of presets.

The dense oracle takes its numbers from the presets, so it cannot notice when one of them is no longer its paper's. Here
a change of a preset must name its source again. What is not listed is off: None, False, 0 or empty.

"own" in a source marks a choice of Winnow's, where the paper and its code say nothing or something that does not apply.
"""

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from winnow.config import EvictionConfig
from winnow.eviction import PRESETS, Preset
from winnow.eviction.describe import full_preset
from winnow_lab.evaluate.variants import VARIANTS

Source = str
Number = tuple[object, Source]
Row = dict[str, Number]

_NO_BUDGET_SPLIT = "a budget per head, the same for all"
EQUAL: Row = {
    "budget.class": ("EqualHeads", _NO_BUDGET_SPLIT),
    "budget.layers.class": ("EqualLayers", _NO_BUDGET_SPLIT),
}
COMPETE: Row = {"budget.class": ("AdaptiveRows", "KV-Compress 4.2.2: blocks of all layers and heads compete")}
AFTER_PREFILL: Row = {"when.after_prefill": (True, "one cut, after the prompt")}
EACH_TOKEN: Row = {
    "when.after_prefill": (True, "the prompt is cut to the budget too"),
    "when.decode_every": (1, "a KV goes for each one that comes"),
}

# KV-Compress 4.2.3: "the combination of 3 and 4": after each prefill, all that run, and before a preemption.
KVC_WHEN: Row = {
    "when.after_prefill": (True, "KV-Compress 4.2.3, approach 3"),
    "when.join_prefill": (True, "KV-Compress 4.2.3: a round goes over all running sequences"),
    "when.pressure": (True, "KV-Compress 4.2.3, approach 4"),
}


def kvc_window(size: int, power: int) -> Row:
    return {
        "score.class": ("Window", "KV-Compress eq. 7"),
        "score.size": (size, "KV-Compress 5.1, Table 2: the method's w"),
        "score.power": (power, "KV-Compress 4.3, Table 2: L1 or L2"),
        "score.pool.class": ("Smoothing", "KV-Compress eq. 10"),
        "score.pool.size": (7, "KV-Compress 5.2: p = 7"),
        "score.pool.kind": ("max", "KV-Compress eq. 10; metrics.py max_pool1d"),
        "score.group": (
            "sum",
            "KV-Compress eq. 8: the sum over the query group, before the pooling (ERRATA)",
        ),
        "score.continual": (True, "KV-Compress eq. 20"),
        "keep.recent": (size, "vllm-kvcompress README, KVC-w8: protected = w"),
    }


WINDOW: Row = {
    **kvc_window(32, 2),
    **COMPETE,
    **AFTER_PREFILL,
    "when.pressure": (
        True,
        "KV-Compress 4.2.3, approach 4; approach 3 lets an answer depend on later arrivals",
    ),
    "score.pool.by_text": (True, "own: SnapKV's 7 tokens hold numbers that other tokenizers cut into 21"),
    "score.skip_template": (True, "own: a chat template's tail asks nothing"),
    "keep.sinks": (4, "StreamingLLM: start_size = 4"),
}


def inner(row: Row, **own: Number) -> Row:
    """The row with its score as the inner one of another."""
    return {key.replace("score.", "score.inner.", 1): number for key, number in row.items()} | {
        f"score.{key}": number for key, number in own.items()
    }


SENTENCE: Row = {
    **{
        key.replace("score.inner.pool", "score.pool"): number
        for key, number in inner(
            WINDOW,
            share=(0.25, "own: 1.0 and a quarter alike on needles of seeds 9 and 21; a quarter elsewhere"),
            unit=("sentence", "own: what is asked for is as long as a sentence"),
            **{"class": ("BySentence", "own: docs/eviction.md")},
        ).items()
    }
}
TIMES_KEYS: dict[str, Number] = {
    "power": (0.25, "own: the best of 1, .5, .25 and .125 on needles of seeds 5 and 9"),
    "class": ("ByKeyDeviation", "own: what the question asks of, times keys unlike the others"),
}
SEEN: Row = inner(SENTENCE, **TIMES_KEYS)
SEEN_PD: Row = {
    **inner(SEEN, **{"class": ("KeysWithin", "own: the question is still to come")}),
    "when.prefill_every": (256, "own: as winnow-keys-pd"),
    "when.prefill_compression": (4.0, "own: keys lose nothing of 60 chats at 4x, a third at 8x"),
}
LEVERAGE_SCORE: Row = {
    "score.class": ("Leverage", "own: Compactor's score, exact"),
    "score.ridge": (0.1, "own: docs/eviction.md, searched on seeds 5 and 6"),
    "score.pool.class": ("Smoothing", "own: the same search"),
    "score.pool.size": (3, "own: the same search"),
    "score.pool.kind": ("average", "own: the same search"),
}
LEVERAGE: Row = {
    **LEVERAGE_SCORE,
    **COMPETE,
    "keep.recent": (16, "own: the same search"),
    "when.after_prefill": (True, "own"),
    "when.pressure": (True, "own"),
}


def watched(size: int, source: Source) -> Row:
    """SnapKV's observation."""
    return {
        "score.class": ("Window", "SnapKV: attention of the last w queries"),
        "score.size": (size, source),
        "score.power": (1, "SnapKV: attn_weights.sum over the window"),
        "score.pool.class": ("Smoothing", "SnapKV, LongBench configs"),
        "score.pool.size": (7, "SnapKV, LongBench configs: k = 7; KV-Compress 5.1: p = 7"),
        "score.pool.kind": ("max", "SnapKV, LongBench configs: maxpool"),
        "score.pool.skip_window": (True, "SnapKV: attn_weights[..., :-window_size] is pooled"),
        "score.group": (
            "mean",
            "own for SnapKV, which repeats KVs; kvpress and Ada-KV (gqa_func) take the mean",
        ),
        "keep.recent": (size, "SnapKV: the window is appended"),
        **AFTER_PREFILL,
    }


PER_QUERY_HEAD: Row = {"score.pool.per_query_head": (True, "SnapKV pools each query head")}
_W32 = "SnapKV, LongBench configs: w = 32; Ada-KV README: w = 32"
_W8 = "KV-Compress 5.1: w = 8 for all baselines"
PYRAMID: Row = {
    "budget.class": ("EqualHeads", "PyramidKV: heads of a layer are alike"),
    "budget.layers.class": ("Pyramid", "PyramidKV, pyramidkv_utils.py"),
    "budget.layers.beta": (20, "PyramidKV, pyramidkv_utils.py: beta = 20"),
}
ADAPTIVE: Row = {
    "budget.class": ("AdaptiveHeads", "Ada-KV: heads of a layer compete"),
    "budget.floor": (
        0.2,
        "Ada-KV's scripts for GQA (0.5 in its README for MHA); kvpress alpha_safeguard 0.20",
    ),
}


def h2o(**keep: Number) -> Row:
    return {
        "score.class": ("Cumulative", "H2O: the sum over all queries"),
        "score.power": (1, "H2O: attn_weights.sum"),
        "score.group": ("sum", "own: H2O has no groups; sum and mean rank alike"),
        **{f"keep.{name}": value for name, value in keep.items()},
    }


_HALF: Number = (0.5, "H2O: heavy = recent = 0.1 of the prompt, half of what is kept each")
_SINKS: Number = (4, "StreamingLLM start_size = 4; 'A text on KV cache memory': first k, typically 4")
RECENCY: Row = {"score.class": ("Recency", "the latest stay")}
BATCH_MAX_LOOP: Row = {
    **EQUAL,
    "when.prefill_every": (64, "Batch-Max Algorithm 1: p = 64"),
    "when.decode_every": (64, "Batch-Max Algorithm 1: p = 64"),
    "when.within": (True, "Batch-Max Algorithm 1: |kv| never passes its maximum"),
}
EXTREME: Row = {
    **RECENCY,
    **EQUAL,
    "budget.class": ("Fixed", "Batch-Max Algorithm 2"),
    "budget.kvs": (1, "Batch-Max Algorithm 2 with |kv| = 2: all but the most recent go (ERRATA)"),
}
STREAMING: Row = {
    "kv_budget": (516, "StreamingLLM: start_size 4 + recent_size 512"),
    **RECENCY,
    **EQUAL,
    "keep.sinks": (4, "StreamingLLM: start_size = 4"),
    "when.after_prefill": (True, "StreamingLLM: the cache never passes its size"),
    "when.prefill_every": (256, "own: a chunk on top, so that prompts of any length fit"),
}


FIT: Row = {
    "compact.class": ("Fit", "own: after Attention Matching (arXiv 2602.16284)"),
    "compact.most_queries": (256, "own: every eighth of a replay of 2,048 tokens; 128 lost answers at 32x"),
    "compact.rounds": (25, "own: more fit single queries"),
    "compact.most_bias": (4.0, "own: 55 times a KV's mass at most"),
    "compact.ridge": (1.0, "own: the mean of the Gram matrix's diagonal"),
}

KEYS: Row = {
    "score.class": ("KeyDeviation", "own: keys before rotation against the mean of all seen"),
    **COMPETE,
    "keep.sinks": _SINKS,
    **AFTER_PREFILL,
    "when.pressure": (True, "own: before anything is preempted"),
}
KVZIP: Row = {
    "score.class": (
        "Reconstruction",
        "KVzip: the largest attention over the query group and the replay's queries",
    ),
    "score.asked.class": ("Replay", "KVzip: the context is repeated"),
    "score.asked.chunk": (2048, "kvpress kvzip_press.py chunk_size; KVzip's code has 2000"),
    "score.asked.first": ("Repeat the previous context exactly.", "KVzip model/wrapper.py"),
    "score.asked.later": (
        "Repeat the part of the previous context exactly, starting with",
        "kvpress kvzip_press.py; KVzip's code has a space more",
    ),
    "score.asked.starting": (8, "KVzip model/wrapper.py prev_postfix_size"),
    "score.asked.every": (1, "KVzip: all queries count"),
    "budget.class": (
        "AdaptiveRows",
        "KVzip: all layers and heads compete; by blocks, as in KV-Compress 4.2.2",
    ),
    "keep.sinks": (4, "kvpress kvzip_press.py n_sink"),
    **AFTER_PREFILL,
}

PINNED: dict[str, Row] = {
    "full": {**RECENCY, **EQUAL},
    "winnow": SEEN,
    "winnow-seen": SEEN,
    "winnow-seen-pd": SEEN_PD,
    "winnow-seen-keys": SEEN,
    "winnow-sentence": SENTENCE,
    "winnow-window": WINDOW,
    "winnow-window-keys": inner(WINDOW, **TIMES_KEYS),
    "leverage": LEVERAGE,
    "leverage-pd": {**LEVERAGE, "when.prefill_every": (256, "own"), "when.decode_every": (16, "own")},
    "kv-compress": {**kvc_window(8, 2), **COMPETE, **KVC_WHEN},
    "kv-compress-w32-l2": {**kvc_window(32, 2), **COMPETE, **KVC_WHEN},
    "kv-compress-w32-l1": {**kvc_window(32, 1), **COMPETE, **KVC_WHEN},
    "kv-compress-full": {
        "score.class": ("Cumulative", "KV-Compress eq. 19"),
        "score.power": (2, "KV-Compress eq. 19"),
        "score.exclude_first": (10, "KV-Compress 5.2: v = 10"),
        "score.group": ("sum", "KV-Compress eq. 19"),
        "keep.recent": (32, "vllm-kvcompress README, KVC-full: protected 32"),
        **COMPETE,
        **KVC_WHEN,
    },
    "kv-compress-pd": {
        **kvc_window(8, 2),
        **COMPETE,
        **KVC_WHEN,
        "when.prefill_every": (512, "own: KV-Compress has no rounds within the prompt"),
        "when.decode_every": (16, "own"),
    },
    "kv-compress-steps": {
        **kvc_window(8, 2),
        **COMPETE,
        "when.after_prefill": (True, "KV-Compress 5.5: after every model iteration"),
        "when.every_steps": (1, "KV-Compress 5.5: after every model iteration"),
    },
    "batch-max": {
        "score.class": ("Average", "Batch-Max 3.2"),
        "score.power": (1, "Batch-Max 3.2: the sum of attention weights, averaged"),
        "score.group": ("sum", "own: Batch-Max has no groups; sum and mean rank alike"),
        **BATCH_MAX_LOOP,
    },
    "batch-max-leverage": {**BATCH_MAX_LOOP, **LEVERAGE_SCORE},
    "batch-max-recent": {**BATCH_MAX_LOOP, **RECENCY},
    "extreme-decode": {**EXTREME, **EACH_TOKEN},
    "extreme-decode-65": {
        **EXTREME,
        "when.after_prefill": (True, "Batch-Max Algorithm 2"),
        "when.decode_every": (64, "Batch-Max 4.1: |kv| = 65 was slower there"),
    },
    "h2o": {**h2o(recent=_HALF), **EQUAL, **EACH_TOKEN},
    "h2o-sinks": {**h2o(sinks=_SINKS, recent=_HALF), **EQUAL, **EACH_TOKEN},
    "h2o-once": {
        **h2o(recent=(8, "KV-Compress 5.1: w = 8 for all baselines (KVCache-Factory, H2OKVCluster)")),
        **EQUAL,
        **AFTER_PREFILL,
    },
    "snapkv": {**watched(32, _W32), **PER_QUERY_HEAD, **EQUAL},
    "pyramidkv": {**watched(32, _W32), **PER_QUERY_HEAD, **EQUAL, **PYRAMID},
    "snapkv-w8": {**watched(8, _W8), **PER_QUERY_HEAD, **EQUAL},
    "pyramidkv-w8": {**watched(8, _W8), **PER_QUERY_HEAD, **EQUAL, **PYRAMID},
    "ada-snapkv": {**watched(32, _W32), **EQUAL, **ADAPTIVE},
    "ada-pyramidkv": {**watched(32, _W32), **EQUAL, **PYRAMID, **ADAPTIVE},
    "ada-snapkv-w8": {**watched(8, _W8), **EQUAL, **ADAPTIVE},
    "ada-pyramidkv-w8": {**watched(8, _W8), **EQUAL, **PYRAMID, **ADAPTIVE},
    "tova": {
        "score.class": ("LastQuery", "TOVA: the last query, mean over all heads"),
        **EQUAL,
        **EACH_TOKEN,
    },
    "scissorhands": {
        "score.class": ("BelowAverage", "Scissorhands: attention of at least 1 / len counts"),
        "score.history": (400, "cold-compress cache.py: m = 400"),
        "score.group": ("sum", "own: Scissorhands has no groups"),
        **EQUAL,
        "keep.recent": (10, "cold-compress cache.py: r = 10"),
        "when.after_prefill": (True, "Scissorhands: the prompt is cut to the budget too"),
        "when.decode_every": (64, "own: history is judged anew every 64 tokens"),
    },
    "streaming": {**STREAMING, "when.decode_every": (1, "StreamingLLM: one KV in, one out")},
    "keydiff": {
        "score.class": ("KeyDifference", "KeyDiff"),
        **EQUAL,
        "when.after_prefill": (True, "KeyDiff"),
        "when.prefill_every": (128, "KeyDiff: block_size 128"),
        "when.decode_every": (128, "KeyDiff: block_size 128"),
    },
    "winnow-keys": KEYS,
    "kvzip-keys": {
        **{
            key.replace("score.", "score.inner.", 1): value
            for key, value in KVZIP.items()
            if key.startswith("score.")
        },
        **{key: value for key, value in KVZIP.items() if not key.startswith("score.")},
        "score.class": ("ByKeyDeviation", "own: kvzip's score times winnow-keys'"),
        "score.power": (0.5, "own: the better of .5 and .25 on documents of another seed"),
    },
    "winnow-keys-pd": {
        **KEYS,
        "keep.recent": (32, "own: what chunks to come look at"),
        "when.prefill_every": (256, "own: chunks of 256 lost nothing"),
        "when.decode_every": (64, "own: answers take as much as prompts"),
    },
    "sinks-recent": {
        "score.class": ("Recency", "StreamingLLM"),
        **EQUAL,
        "keep.sinks": _SINKS,
        **AFTER_PREFILL,
    },
    "knorm": {"score.class": ("KeyNorm", "Devoto et al.: low norms stay"), **EQUAL, **AFTER_PREFILL},
    "kvzip": KVZIP,
    "kvzip-part": {
        **KVZIP,
        "score.asked.chunk": (512, "own: a quarter of the context that KVzip's code repeats at a time"),
        "score.asked.own_part": (True, "own: attention is most of what a replay costs"),
    },
    "winnow-fit": {**KVZIP, **FIT},
    "recent": {**RECENCY, **EQUAL, **EACH_TOKEN},
    "random": {"score.class": ("Random", "baseline"), **EQUAL, "keep.sinks": _SINKS, **AFTER_PREFILL},
}
NAMED = {**PRESETS, **{name: Preset(policy, "a variant") for name, policy in VARIANTS.items()}}
# One kind of thing each, whatever the preset.
_CONSTANT = {"keep.class": "Keep", "when.class": "When"}


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from leaves(entry, f"{name}.{key}" if name else key)
    else:
        yield name, value


def differences(preset: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Differences between a preset, as `full_preset` returns it, and its row: what is there and what is pinned."""
    there = {
        key: value
        for key, value in leaves(preset)
        if value and key not in ("name", "paper") and key not in _CONSTANT
    }
    pinned = {key: value for key, (value, _) in PINNED[preset["name"]].items()}
    return {
        key: (there.get(key), pinned.get(key))
        for key in there.keys() | pinned.keys()
        if (there.get(key), type(there.get(key))) != (pinned.get(key), type(pinned.get(key)))
    }


def test_every_preset_has_a_row() -> None:
    assert set(PINNED) == set(NAMED)


@pytest.mark.parametrize("name", NAMED)
def test_a_preset_is_what_its_source_says(name: str) -> None:
    assert differences(full_preset(name, NAMED[name])) == {}, "(there, pinned)"


@pytest.mark.parametrize("name", NAMED)
def test_no_number_can_change_unseen(name: str) -> None:
    preset = full_preset(name, NAMED[name])
    for key, value in leaves(preset):
        if key in ("name", "paper") or key in _CONSTANT:
            continue
        changed = copy.deepcopy(preset)
        *path, last = key.split(".")
        place = changed
        for part in path:
            place = place[part]
        place[last] = (
            not value
            if isinstance(value, bool)
            else f"{value}!"
            if isinstance(value, str)
            else (value or 0) + 1
        )
        assert key in differences(changed)


def test_every_number_names_its_source() -> None:
    assert all(source.strip() for row in PINNED.values() for _, source in row.values())


def test_the_floor_of_every_compression() -> None:
    """KV-Compress 5.2: max-cache-size max(128, L / r) (ERRATA: printed as min)."""
    assert EvictionConfig().kv_floor == 128
