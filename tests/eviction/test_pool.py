"""The width over which scores are pooled: as a policy says, as a user says, or as wide as in the papers' text."""

import re
from dataclasses import replace
from typing import Any

import pytest

from winnow.config import EngineConfig, EvictionConfig
from winnow.engine.admission import requested_eviction
from winnow.errors import ConfigError
from winnow.eviction import PRESETS, ByKeyDeviation, ModelTraits, resolve_policy
from winnow.models.model.tokens import text_pool
from winnow.sampling import SamplingParams

SEEN_POLICY = PRESETS["winnow-seen"].policy


class Cutter:
    """A tokenizer that cuts text by a regular expression."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def encode(self, text: str, *, add_special_tokens: bool) -> list[str]:
        assert not add_special_tokens
        return re.findall(self.pattern, text, re.DOTALL)


@pytest.mark.parametrize(
    ("pattern", "width"),
    [
        (r"\d{1,3}|\D{1,6}", 9),  # as Llama 3 cuts digits: numbers of 7 digits take 3 tokens
        (r"\d|\D{1,6}", 21),  # a token for each digit
        (
            r"\d{7}|\D{1,2}",
            17,
        ),  # 2 characters of prose a token, where the papers have 4.3: ceil(15.05), made odd
        (r".", 31),  # bytes: ceil(30.1)
    ],
)
def test_the_width_covers_the_text_of_seven_tokens_in_the_papers(pattern: str, width: int) -> None:
    tokenizer: Any = Cutter(pattern)
    assert text_pool(tokenizer) == width


def test_without_a_tokenizer_the_papers_number_stays() -> None:
    assert text_pool(None) == 7


@pytest.mark.parametrize(
    ("policy", "pool", "size"),
    [
        ("winnow-seen", None, 21),
        ("winnow-seen", 7, 7),
        ("kv-compress", None, 7),
        ("kv-compress", "text", 21),
        ("snapkv", 9, 9),
        ("leverage", None, 3),
        (replace(SEEN_POLICY, score=ByKeyDeviation(SEEN_POLICY.score)), None, 21),
    ],
)
def test_who_says_how_wide(policy: Any, pool: Any, size: int) -> None:
    resolved = resolve_policy(EvictionConfig(eviction=policy, pool=pool), ModelTraits(text_pool=21))
    assert resolved.policy.pool is not None and resolved.policy.pool.size == size
    assert not resolved.policy.pool.by_text


@pytest.mark.parametrize(
    ("policy", "pool", "why"),
    [
        ("snapkv", 8, "pool must be an odd number of tokens, or text, got 8"),
        ("snapkv", "wide", "pool must be .*got 'wide'"),
        ("snapkv", 0, "pool must be .*at least 1"),
        ("knorm", 7, "pool cannot be given: KeyNorm pools no scores, got 7"),
    ],
)
def test_other_widths_are_refused(policy: str, pool: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        resolve_policy(EvictionConfig(eviction=policy, pool=pool))


def test_an_engine_that_evicts_nothing_keeps_a_pool_for_its_requests() -> None:
    config = EvictionConfig(pool=21)
    assert resolve_policy(config).policy.pool is None
    (asked,) = requested_eviction(
        EngineConfig(eviction=config), SamplingParams(eviction="snapkv", compression=4)
    )
    (other,) = requested_eviction(
        EngineConfig(eviction=config), SamplingParams(eviction="knorm", compression=4)
    )
    assert asked.policy.pool is not None and asked.policy.pool.size == 21
    assert other.policy.pool is None


@pytest.mark.parametrize(
    ("knows_rotation", "asked_later", "name"),
    [
        (True, False, "winnow-seen"),
        (True, True, "winnow-keys"),
        (False, False, "winnow-sentence"),
        (False, True, "kvzip"),
    ],
)
def test_an_amount_alone_stands_for_what_suits_the_question(
    knows_rotation: bool, asked_later: bool, name: str
) -> None:
    traits = ModelTraits(knows_rotation=knows_rotation)
    resolved = resolve_policy(EvictionConfig(compression=4.0), traits, asked_later=asked_later)
    assert (resolved.name, resolved.amount.compression) == (name, 4.0)
