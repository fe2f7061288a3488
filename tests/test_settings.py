"""`EngineConfig.settings()`: every option of every part, as JSON values."""

import json

import pytest
from options import NAMES, base_options, other_value

from winnow.config import EFFECTS, EngineConfig
from winnow.errors import ConfigError
from winnow.eviction import EvictionPolicy, KeyNorm, When


@pytest.mark.parametrize(("part", "name"), NAMES)
def test_every_option_is_among_the_settings(part: str, name: str) -> None:
    base = base_options(part, name)
    before = EngineConfig.from_options(base).settings()
    after = EngineConfig.from_options({**base, name: other_value(part, name)}).settings()
    changed = {each for each in before if before[each] != after[each]}
    # An amount to keep brings the preset that stands for an eviction that was left out, and a number counts bytes, for
    # which a format is found; bytes stand for a GPU's share.
    brings = {"compression": {"eviction", "kv_cache_dtype"}, "kv_budget": {"eviction"}}
    brings["kv_memory"] = {"gpu_memory_utilization"}
    assert changed == {name} | brings.get(name, set())
    assert before.keys() == after.keys() == EFFECTS.keys()
    assert json.loads(json.dumps(after)) == after


def test_a_policy_without_a_name_is_described_in_full() -> None:
    def eviction(policy: EvictionPolicy) -> object:
        return EngineConfig.from_options({"eviction": policy}).settings()["eviction"]

    once = eviction(EvictionPolicy(score=KeyNorm(), when=When(after_prefill=True)))
    assert json.loads(json.dumps(once)) == once
    assert once != eviction(EvictionPolicy(score=KeyNorm(), when=When(after_prefill=True, pressure=True)))


@pytest.mark.parametrize("amount", [{"compression": 4}, {"kv_budget": 64}])
def test_an_amount_without_a_policy_means_winnow(amount: dict[str, float]) -> None:
    assert EngineConfig().eviction.chosen == "full"
    assert EngineConfig.from_options(amount).eviction.chosen == "winnow"
    assert EngineConfig.from_options({**amount, "eviction": "snapkv"}).eviction.chosen == "snapkv"
    [(name, value)] = amount.items()
    with pytest.raises(ConfigError, match=f"eviction=full keeps every KV and {name}={value} asks for fewer"):
        EngineConfig.from_options({**amount, "eviction": "full"})


def test_every_count_has_a_limit() -> None:
    with pytest.raises(ConfigError, match="kv_budget must be at most 2147483647, got"):
        EngineConfig.from_options({"kv_budget": 2**31})
