"""Every codec under policies of every kind: the engine keeps what the dense oracle keeps that reads what is stored."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from lockstep import ANSWERS, Models, ask, compare, small

from winnow.eviction import PRESETS

CODECS: dict[str, dict[str, object]] = {
    "int8": {"kv_cache_dtype": "int8"},
    "int8 rotated": {"kv_cache_dtype": "int8", "kv_rotate": "kv", "kv_group": 8},
    "fp8": {"kv_cache_dtype": "fp8_e4m3"},
    "k8v4": {"kv_cache_dtype": "k=int8,v=int4"},
    "int4": {"kv_cache_dtype": "int4"},
    "int4 unrotated": {"kv_cache_dtype": "int4", "kv_rotate": "none"},
    "int4-outlier": {"kv_cache_dtype": "int4-outlier", "kv_rotate": "kv"},
    "int3": {"kv_cache_dtype": "int3"},
    "v2": {"kv_cache_dtype": "v=int2"},
}
# Attention that is watched, keys, values, rotation, windows, layers that compete, positions that change, no eviction.
POLICIES = ["full", "h2o", "snapkv", "kv-compress", "keydiff", "leverage"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    models = Models(tmp_path_factory.mktemp)
    yield models
    models.close()


# A codec for each policy.
PAIRS = [(policy, list(CODECS)[2 * i % len(CODECS)]) for i, policy in enumerate(POLICIES)]


@pytest.mark.parametrize(("policy", "codec"), PAIRS)
def test_a_codec_under_a_policy(policy: str, codec: str, models: Models) -> None:
    rng = random.Random(f"{policy} {codec}")
    chosen = small(PRESETS[policy].policy, rng)
    asked = [ask(chosen, rng, answer) for answer in ANSWERS]
    asked[1] = replace(asked[1], context_len=len(asked[1].prompt) - rng.randint(1, 12))
    compare(models, sorted(CODECS).index(codec) % 3, asked, **CODECS[codec])
