"""Tenants, priorities and full queues, through the public face."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import VOCAB

from winnow import LLM, SamplingParams
from winnow.errors import CapacityError, InvalidRequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = [3 + i % (VOCAB - 3) for i in range(70)]


@pytest.fixture
def open_llm(directory: Path, engine_name: str) -> Iterator[Any]:
    opened: list[LLM] = []

    def open_one(**options: Any) -> LLM:
        opened.append(LLM(directory, **{"kv_memory": "4MiB", "engine": engine_name} | options))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


def finish(llm: LLM) -> list[str]:
    """Names of requests in the order in which they end."""
    names = []
    while llm.has_unfinished:
        names += [output.request_id for output in llm.step() if output.finished]
        llm.check_integrity()
    return names


def test_the_same_tenant_hits_and_another_misses(open_llm: Any) -> None:
    llm = open_llm()
    cached = []
    for tenant in ("a", "a", "b", None, "b"):
        [output] = llm.generate(PROMPT, GREEDY, tenant=tenant)
        cached.append(output.num_cached_tokens)
        assert output.outputs[0].token_ids == llm.generate(PROMPT, GREEDY, tenant="z")[0].outputs[0].token_ids
    assert cached == [0, len(PROMPT) - 1, 0, 0, len(PROMPT) - 1]


def test_stats_tell_what_each_tenant_holds_and_got(open_llm: Any) -> None:
    llm = open_llm(tenants={"a": {"guarantee": 0.5}}, max_num_seqs=2, enable_prefix_caching=False)
    assert llm.stats().tenants["a"].guaranteed_blocks > 0
    for tenant in ("a", "b", "b", None):
        llm.submit(PROMPT, GREEDY, tenant=tenant, final_only=True)
    llm.step()
    tenants = llm.stats().tenants
    assert {name: (each.num_running, each.num_waiting) for name, each in tenants.items()} == {
        "a": (1, 0),
        "b": (1, 1),
        "": (0, 1),
    }
    assert tenants["a"].blocks == tenants["b"].blocks == tenants["b"].borrowed_blocks > 0
    finish(llm)
    tenants = llm.stats().tenants
    assert [(tenants[name].prompt_tokens, tenants[name].output_tokens) for name in ("a", "b", "")] == [
        (70, 12),
        (140, 24),
        (70, 12),
    ]
    assert all(each.blocks == 0 for each in tenants.values())


def test_who_names_no_tenant_sees_no_tenants(open_llm: Any) -> None:
    llm = open_llm()
    llm.generate(PROMPT, GREEDY)
    assert llm.stats().tenants == {}


def test_fair_between_tenants(open_llm: Any) -> None:
    llm = open_llm(scheduling_policy="fair", max_num_seqs=1)
    for index, tenant in enumerate("aaabb"):
        llm.submit(PROMPT, GREEDY, request_id=f"{tenant}{index}", tenant=tenant, final_only=True)
    assert finish(llm) == ["a0", "b3", "a1", "b4", "a2"]


@pytest.mark.parametrize(
    ("policy", "order"), [("fcfs", [0, 1, 2]), ("srtf", [2, 0, 1]), ("priority", [1, 0, 2])]
)
def test_scheduling_policies(open_llm: Any, policy: str, order: list[int]) -> None:
    llm = open_llm(scheduling_policy=policy, max_num_seqs=1)
    names = [
        llm.submit(PROMPT[:length], GREEDY, priority=priority, final_only=True)
        for length, priority in ((30, 0), (60, 1), (9, 0))
    ]
    assert finish(llm) == [names[i] for i in order]


def test_an_urgent_request_parks_a_running_one_which_loses_nothing(open_llm: Any) -> None:
    llm = open_llm(max_num_seqs=1)
    expected = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in (PROMPT, PROMPT[:9])]
    low = llm.submit(PROMPT, GREEDY)
    for _ in range(5):
        llm.step()
    high = llm.submit(PROMPT[:9], GREEDY, priority=1)
    first = llm.step()
    assert [(output.request_id, len(output.outputs[0].token_ids)) for output in first] == [(high, 1)]
    ended = {}
    while llm.has_unfinished:
        ended |= {output.request_id: output for output in llm.step() if output.finished}
    assert [ended[name].outputs[0].token_ids for name in (low, high)] == expected
    assert [ended[name].metrics.num_preemptions for name in (low, high)] == [1, 0]


def test_what_exceeds_a_tenants_limit_is_refused_at_once(open_llm: Any) -> None:
    llm = open_llm(tenants={"small": {"limit": 0.01}}, enable_prefix_caching=False)
    with pytest.raises(
        CapacityError, match=r"needs room for 811 KVs a row, tenant small's limit 0.01 of kv_memory"
    ):
        llm.submit([3] * 800, GREEDY, tenant="small")
    assert llm.generate([3] * 800, GREEDY, tenant="other")[0].finished
    assert llm.generate([3] * 9, GREEDY, tenant="small")[0].finished


@pytest.mark.parametrize("tenant", ["", 3])
def test_a_tenant_is_a_name(open_llm: Any, tenant: Any) -> None:
    llm = open_llm()
    with pytest.raises(InvalidRequestError, match="tenant must be a name or None"):
        llm.generate(PROMPT, GREEDY, tenant=tenant)
    with pytest.raises(InvalidRequestError, match="priority must be an integer, got True"):
        llm.generate(PROMPT, GREEDY, priority=True)
