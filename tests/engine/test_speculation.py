"""Tokens proposed by prompt lookup: answers are those without them, in fewer steps."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from tiny_llama import VOCAB

from winnow import LLM, SamplingParams
from winnow.config.scheduler import SpeculativeConfig, parse_speculative
from winnow.engine.scheduling.drafts import look_up
from winnow.errors import ConfigError

NGRAM: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
NGRAM["adaptive"] = False  # so that what is proposed does not depend on time
PROMPTS = [Random(seed).choices(range(4, VOCAB), k=12) * 3 for seed in range(4)]


@pytest.fixture(scope="module")
def pair(directory: Path) -> Iterator[tuple[LLM, LLM]]:
    """An engine that proposes tokens and one that does not, both of small blocks."""
    options: dict[str, Any] = {"kv_memory": "1MiB", "block_size": 4, "max_num_seqs": 8}
    with LLM(directory, speculative_config=NGRAM, **options) as one, LLM(directory, **options) as other:
        yield one, other


def answers(llm: LLM, params: Any, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    """Tokens, logprobs and reasons, with the engine's invariants checked after each step."""
    for number, prompt in enumerate(prompts):
        llm.submit(prompt, params[number] if isinstance(params, list) else params, request_id=str(number))
    finished = {}
    while llm.has_unfinished:
        finished |= {output.request_id: output for output in llm.step() if output.finished}
        llm.check_integrity()
    return [
        [
            (
                each.token_ids,
                each.finish_reason,
                each.logprobs and [list(row) for row in each.logprobs],
                each.eviction and (each.eviction.rounds, each.eviction.kept),
            )
            for each in finished[name].outputs
        ]
        for name in sorted(finished, key=int)
    ]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=40),
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0.3, seed=7, max_tokens=30, n=2),
        SamplingParams(temperature=0, max_tokens=30, min_tokens=20, logit_bias={5: 2.0}),
        SamplingParams(temperature=0, max_tokens=30, eviction="snapkv", kv_budget=34),
        SamplingParams(temperature=0, max_tokens=30, presence_penalty=0.1),
    ],
)
def test_answers_are_those_without(pair: tuple[LLM, LLM], params: SamplingParams) -> None:
    before = [llm.stats() for llm in pair]
    found, expected = (answers(llm, params) for llm in pair)
    assert found == expected
    after = [llm.stats() for llm in pair]
    assert after[0].num_accepted_tokens > before[0].num_accepted_tokens
    assert after[0].num_accepted_tokens <= after[0].num_draft_tokens
    assert after[0].generated_tokens == after[1].generated_tokens


def test_each_accepted_token_saves_a_step(pair: tuple[LLM, LLM]) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for prompt in PROMPTS[:2]:
        before = [llm.stats() for llm in pair]
        assert answers(pair[0], params, [prompt]) == answers(pair[1], params, [prompt])
        steps, plain = (
            llm.stats().num_steps - start.num_steps for llm, start in zip(pair, before, strict=True)
        )
        assert steps + pair[0].stats().num_accepted_tokens - before[0].num_accepted_tokens == plain


def test_nothing_is_proposed_where_rejected_tokens_leave_traces(pair: tuple[LLM, LLM]) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, eviction="h2o", kv_budget=24)
    before = pair[0].stats().num_draft_tokens
    assert answers(pair[0], params) == answers(pair[1], params)
    assert pair[0].stats().num_draft_tokens == before


def test_requests_of_both_kinds_share_steps(pair: tuple[LLM, LLM]) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=30)
    params = [greedy, SamplingParams(temperature=0, max_tokens=30, frequency_penalty=0.5), greedy, greedy]
    assert answers(pair[0], params) == answers(pair[1], params)


def test_shared_prefixes_hold_accepted_tokens_alone(pair: tuple[LLM, LLM]) -> None:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    first = answers(pair[0], params)
    longer = [prompt + tokens[0][0] for prompt, tokens in zip(PROMPTS, first, strict=True)]
    cached = pair[0].stats().cached_tokens
    assert answers(pair[0], params, longer) == answers(pair[1], params, longer)
    assert pair[0].stats().cached_tokens > cached + sum(map(len, PROMPTS))


def test_little_memory(directory: Path) -> None:
    options: dict[str, Any] = {"kv_memory": "96KiB", "block_size": 4, "max_num_seqs": 4}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(directory, speculative_config=NGRAM, **options) as one, LLM(directory, **options) as other:
        assert answers(one, params) == answers(other, params)
        assert one.stats().num_accepted_tokens > 0 < one.stats().num_preemptions


def test_measured_gains_are_reported(directory: Path) -> None:
    config = {"method": "ngram", "prompt_lookup_min": 1}
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM(directory, speculative_config=config, kv_memory="1MiB") as llm:
        answers(llm, params)
        [rates] = [each for each in llm.stats().draft_rates if each.most_running == len(PROMPTS)]
        assert rates.plain and rates.drafted
        assert llm.stats().num_draft_tokens > 0


def test_look_up() -> None:
    config = SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_max=2, prompt_lookup_min=2)

    def found(*tokens: int, most: int = 3) -> list[int]:
        return look_up(np.array(tokens, dtype=np.int32), config, most)

    assert found(1, 2, 3, 4, 5, 6, 9, 2, 3) == [4, 5, 6]
    assert found(1, 2, 3, 4, 5, 6, 9, 2, 3, most=2) == [4, 5]
    assert found(7, 3, 1, 2, 3, 8, 2, 3) == [8, 2, 3]  # the longer match wins
    assert found(1, 3, 4, 2, 3) == [] == found(2, 3)
    assert found(5, 5, 5) == [5]


def test_configuration(directory: Path) -> None:
    assert parse_speculative('{"method": "ngram", "prompt_lookup_max": 5}') == SpeculativeConfig(
        prompt_lookup_max=5, prompt_lookup_min=5
    )
    with pytest.raises(
        ConfigError,
        match="speculative_config: method must be one of ngram, draft_model, mtp, got 'eagle': its heads",
    ):
        parse_speculative({"method": "eagle"})
    with pytest.raises(ConfigError, match="prompt_lookup_min must be at most 2, got 3"):
        SpeculativeConfig(prompt_lookup_max=2, prompt_lookup_min=3)
    with pytest.raises(ConfigError, match="speculative_config is not served with this cache: kv_wide"):
        LLM(directory, speculative_config=NGRAM, kv_cache_dtype="int8", kv_wide="recent=8")
