"""`LLM.fork`: a request that continues from where another one is."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_llama import VOCAB

from winnow import LLM, SamplingParams
from winnow.errors import InvalidRequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPT = random.Random(5).choices(range(3, VOCAB), k=90)


@pytest.fixture(scope="module", params=[True, False], ids=["prefixes", "no-prefixes"])
def llm(directory: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(
        directory, kv_memory="4MiB", prefill_chunk=32, num_accumulators=1, enable_prefix_caching=request.param
    ) as llm:
        yield llm
        assert llm._engine.scheduler.ledger.allocator.num_used == 0


def run(llm: LLM) -> dict[str, list[int]]:
    found = {}
    while llm.has_unfinished:
        for output in llm.step():
            found[output.request_id] = output.outputs[0].token_ids
        llm.check_integrity()
    return found


def steps(llm: LLM, count: int) -> None:
    for _ in range(count):
        llm.step()
        llm.check_integrity()


# Steps before the fork: queued, within the prompt, and at several points of the answer (blocks hold 16 KVs).
@pytest.mark.parametrize("before", [0, 1, 3, 4, 9, 20])
def test_a_greedy_fork_answers_as_its_parent(llm: LLM, before: int) -> None:
    [alone] = llm.generate(PROMPT, GREEDY)
    parent = llm.submit(PROMPT, GREEDY)
    steps(llm, before)
    child = llm.fork(parent)
    grandchild = llm.fork(child, new_request_id="g")
    found = run(llm)
    assert found == dict.fromkeys([parent, child, "g"], alone.outputs[0].token_ids)
    assert grandchild == "g"


def test_a_fork_takes_no_block_and_computes_no_token_again(llm: LLM) -> None:
    ledger = llm._engine.scheduler.ledger
    parent = llm.submit(PROMPT, GREEDY)
    steps(llm, 5)
    used, computed = ledger.allocator.num_used, llm.stats().prompt_tokens
    children = [llm.fork(parent, replace(GREEDY, temperature=2.0, seed=seed)) for seed in range(3)]
    assert ledger.allocator.num_used == used
    llm.step()
    assert ledger.allocator.num_used == used + 3 * ledger.layout.rows_per_seq, "each has a tail of its own"
    found = run(llm)
    assert len({tuple(found[child]) for child in children}) == 3
    assert all(found[child][:3] == found[parent][:3] for child in children)
    assert llm.stats().prompt_tokens == computed


def test_a_seeded_fork_goes_on_as_a_sample_would(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=20, ignore_eos=True)
    [alone] = llm.generate(PROMPT, params)
    parent = llm.submit(PROMPT, params)
    steps(llm, 8)
    child = llm.fork(parent)
    assert run(llm)[child] == alone.outputs[0].token_ids


@pytest.mark.parametrize(
    ("policy", "before"),
    [(policy, 3) for policy in ("h2o", "snapkv", "batch-max", "winnow", "streaming", "tova", "kvzip")]
    + [(policy, before) for policy in ("h2o", "batch-max", "kvzip") for before in (1, 12)],
)
def test_forks_under_a_policy_own_what_it_changes(llm: LLM, policy: str, before: int) -> None:
    """The parent's answer is what it would be without the fork, and so is the fork's."""
    # batch-max counts the 64 tokens to come as part of its budget.
    params = replace(GREEDY, eviction=policy, kv_budget=72 if policy == "batch-max" else 48)
    [alone] = llm.generate(PROMPT, params)
    parent = llm.submit(PROMPT, params)
    steps(llm, before)
    child = llm.fork(parent)
    other = llm.fork(parent, replace(params, temperature=3.0, seed=5))
    found = run(llm)
    assert found[parent] == found[child] == alone.outputs[0].token_ids
    assert found[other] != found[parent]


def test_a_sample_is_forked(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
    [alone] = llm.generate(PROMPT, params)
    parent = llm.submit(PROMPT, params)
    steps(llm, 8)
    child = llm.fork(parent, replace(GREEDY, max_tokens=12), index=2)
    early = alone.outputs[2].token_ids[:5]
    assert run(llm)[child][:5] == early


def test_logprobs_go_on(llm: LLM) -> None:
    params = replace(GREEDY, logprobs=2)
    [alone] = llm.generate(PROMPT, params)
    parent = llm.submit(PROMPT, params)
    steps(llm, 9)
    child = llm.fork(parent, final_only=True)
    outputs = []
    while llm.has_unfinished:
        outputs += llm.step()
    [output] = [each for each in outputs if each.request_id == child]
    answer = output.outputs[0]
    assert answer.logprobs is not None and len(answer.logprobs) == 24
    assert answer.cumulative_logprob == pytest.approx(alone.outputs[0].cumulative_logprob, abs=1e-4)
    assert output.num_cached_tokens == len(PROMPT)


def test_text_goes_on_and_old_text_ends_nothing() -> None:
    with LLM(kv_memory="8MiB") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        [alone] = llm.generate("The garden was", params)
        parent = llm.submit("The garden was", params)
        steps(llm, 6)
        child = llm.fork(parent)
        outputs = {}
        while llm.has_unfinished:
            outputs |= {each.request_id: each for each in llm.step()}
        assert outputs[child].outputs[0].text == alone.outputs[0].text


def test_without_a_slot_the_fork_waits(directory: Path) -> None:
    with LLM(directory, kv_memory="4MiB", max_num_seqs=1) as llm:
        [alone] = llm.generate(PROMPT, GREEDY)
        parent = llm.submit(PROMPT, GREEDY)
        steps(llm, 5)
        child = llm.fork(parent)
        assert run(llm) == dict.fromkeys([parent, child], alone.outputs[0].token_ids)


def test_the_parent_may_end_first(llm: LLM) -> None:
    [alone] = llm.generate(PROMPT, GREEDY)
    parent = llm.submit(PROMPT, GREEDY)
    steps(llm, 6)
    child = llm.fork(parent)
    llm.abort(parent)
    assert run(llm) == {child: alone.outputs[0].token_ids}


def test_what_cannot_be_forked_is_refused_by_name(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"request_id must be .* unfinished request, got 'nobody'"):
        llm.fork("nobody")
    parent = llm.submit(PROMPT, replace(GREEDY, n=2))
    steps(llm, 5)
    for index in (2, -1):
        with pytest.raises(InvalidRequestError, match=f"index must be between 0 and 1, .* got {index}"):
            llm.fork(parent, index=index)
    for changes, message in [
        ({"n": 2}, "n must be 1 for a fork, got 2"),
        ({"max_tokens": 2}, "max_tokens must be above the . tokens .* got 2"),
        ({"kv_budget": 64}, "kv_budget must be that of .*None, got 64"),
        ({"eviction": "h2o"}, "eviction must be that of .*None, got 'h2o'"),
        ({"logprobs": 1}, "logprobs must be left out .* got 1"),
        ({"prompt_logprobs": 1}, "prompt_logprobs must be left out .* got 1"),
        ({"forced_tokens": [96, 96, 96, 96]}, "forced_tokens must begin with the . tokens"),
    ]:
        with pytest.raises(InvalidRequestError, match=message):
            llm.fork(parent, replace(GREEDY, **changes))
    with pytest.raises(InvalidRequestError, match="in use by an unfinished request"):
        llm.fork(parent, new_request_id=parent)
    run(llm)
    with pytest.raises(InvalidRequestError, match="unfinished request"):
        llm.fork(parent)
