"""A prompt that begins with a compressed prefix gives what it gives when nothing is known."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_llama import VOCAB

from winnow import LLM, RequestOutput, SamplingParams
from winnow.config import EngineConfig
from winnow.eviction import PRESETS
from winnow.eviction.scores import BelowAverage
from winnow_inspect import KeptTokens
from winnow_lab.bench.presets import kv_memory_for

BLOCK = 4


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=count)


def greedy(**options: object) -> SamplingParams:
    return SamplingParams(
        **({"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 2} | options)
    )  # type: ignore[arg-type]


def open_llm(directory: Path, **options: object) -> LLM:
    defaults: dict[str, object] = {
        "block_size": BLOCK,
        "kv_memory": "8MiB",
        "num_accumulators": 2,
        "prefill_chunk": 64,
    }
    return LLM(directory, **(defaults | options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def cold(directory: Path) -> Iterator[LLM]:
    with open_llm(directory, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def warm(directory: Path) -> Iterator[LLM]:
    with open_llm(directory) as llm:
        yield llm


def observe(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[RequestOutput, KeptTokens]:
    """Answer a prompt, and say what it kept."""
    observer = KeptTokens()
    request = llm.new_request(llm.tokenize(prompt), params, observer=observer, final_only=True)
    [output] = llm.driver.finish([request])
    output.raise_for_error()
    llm.check_integrity()
    return output, observer


def assert_same(warm: LLM, cold: LLM, prompt: list[int], params: SamplingParams) -> int:
    """Both answer alike, bit for bit. Returns how many tokens the warm one had."""
    found, kept = observe(warm, prompt, params)
    expected, kept_cold = observe(cold, prompt, params)
    for ours, theirs in zip(found.outputs, expected.outputs, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == theirs.logprobs
        reports = ours.eviction, theirs.eviction
        assert reports[0] is not None and reports[1] is not None
        assert (reports[0].kept, reports[0].rounds) == (reports[1].kept, reports[1].rounds)
    assert kept.after_prompt == kept_cold.after_prompt
    assert kept.at_end == kept_cold.at_end
    assert expected.num_cached_tokens == 0
    return found.num_cached_tokens


AMOUNT = {
    name: {} if PRESETS[name].policy.budget.fixed is not None else {"kv_budget": 48} for name in PRESETS
}
# Those that fit what they keep need KVs with a bias: eviction/test_compact.py.
WHOLE = [
    name
    for name, preset in PRESETS.items()
    if preset.policy.when.after_prefill and preset.policy.compact is None
]
WITHIN = [name for name in PRESETS if PRESETS[name].policy.when.in_prefill]


@pytest.mark.parametrize("name", WHOLE)
def test_a_second_question_starts_from_the_compressed_document(warm: LLM, cold: LLM, name: str) -> None:
    policy = PRESETS[name].policy
    if policy.when.in_prefill:
        once = replace(policy.when, prefill_every=None, prefill_compression=None, within=False)
        policy = replace(policy, when=once)
    if name == "scissorhands":
        policy = replace(policy, score=BelowAverage(40))  # queries of one chunk
    document = tokens(149, seed=WHOLE.index(name))
    params = greedy(eviction=policy, context_tokens=149, **AMOUNT[name])
    hits = [assert_same(warm, cold, document + tokens(n, seed=n), params) for n in (9, 30)]
    assert hits == [0, 149]


@pytest.mark.parametrize("name", WITHIN)
def test_prompts_that_begin_alike_go_on_from_a_round_within_them(warm: LLM, cold: LLM, name: str) -> None:
    policy = PRESETS[name].policy
    policy = replace(policy, when=replace(policy.when, prefill_every=32))
    # Prompts of other lengths share rounds that leave the budget, not those that leave a quarter of each.
    budget, last = (48, 144) if policy.when.prefill_compression is None else (72, 104)
    params = greedy(eviction=policy, kv_budget=budget)
    shared = tokens(170, seed=100 + WITHIN.index(name))
    hits = [assert_same(warm, cold, shared + tokens(n, seed=n), params) for n in (50, 70, 90)]
    # Snapshots are taken after rounds at 80 and 144 tokens, or at 104; where the budget includes the tokens to come,
    # also at 48 and 112.
    assert hits == [0, last, last]


@pytest.mark.parametrize(
    "options", [{}, {"eviction": "kvzip", "kv_budget": 48, "context_tokens": 149}], ids=["full", "kvzip"]
)
def test_requests_that_come_together_compute_their_document_once(
    directory: Path, options: dict[str, object]
) -> None:
    document = tokens(149, seed=5)
    prompts = [document + tokens(7 + n, seed=n) for n in range(6)]
    with open_llm(directory) as llm:
        outputs = llm.generate(prompts, greedy(**options))
        llm.check_integrity()
        computed, replayed = llm.stats().prompt_tokens, llm.stats().replay_tokens
    known = 149 if options else 149 // BLOCK * BLOCK
    cached = [each.num_cached_tokens for each in outputs]
    assert cached[0] == 0 and all(known <= each <= 149 for each in cached[1:])
    assert computed == sum(map(len, prompts)) - sum(cached)
    assert replayed == (149 if options else 0)


def test_documents_that_waiting_questions_ask_of_stay_compressed(directory: Path) -> None:
    """In memory for two whole documents, nine compressed ones and one that is being compressed find room."""
    options: dict[str, object] = {"eviction": "kvzip", "kv_budget": 12, "context_tokens": 149}
    documents = [tokens(149, seed=seed) for seed in range(9)]
    prompts = [document + tokens(4 + n, seed=n) for n in range(5) for document in documents]
    random.Random(1).shuffle(prompts)
    shape = {"model": str(directory), "block_size": BLOCK, "num_accumulators": 2, "prefill_chunk": 64}
    memory = kv_memory_for(EngineConfig.from_options(shape), 2, 230)
    with open_llm(directory, kv_memory=memory) as llm:
        llm.generate(prompts, greedy(**options))
        llm.check_integrity()
        assert llm.stats().replay_tokens == 9 * 149, "each document once"


def test_prompts_that_share_little_do_not_wait_for_each_other(directory: Path) -> None:
    beginning = tokens(2 * BLOCK, seed=5)
    with open_llm(directory) as llm:
        for n in range(3):
            llm.submit(beginning + tokens(40, seed=n), greedy())
        llm.step()
        assert llm.stats().num_running == 3


def test_samples_of_one_prompt_start_from_the_compressed_document(warm: LLM, cold: LLM) -> None:
    document, params = tokens(149, seed=77), greedy(eviction="kvzip", kv_budget=48, context_tokens=149, n=3)
    prompts = [document + tokens(n, seed=n) for n in (9, 30)]
    found = [warm.generate([prompt], params)[0] for prompt in prompts]
    warm.check_integrity()
    for ours, prompt in zip(found, prompts, strict=True):
        # Alone too: products of torch differ with the rows of a step.
        [theirs] = cold.generate([prompt], params)
        assert [each.logprobs for each in ours.outputs] == [each.logprobs for each in theirs.outputs]
    assert [each.num_cached_tokens for each in found] == [0, 149]


def test_another_tenant_or_policy_finds_no_compressed_document(warm: LLM) -> None:
    document, params = tokens(149, seed=78), greedy(eviction="h2o", kv_budget=48, context_tokens=149)

    def hits(tenant: str | None, params: SamplingParams) -> int:
        prompt = warm.tokenize(document + tokens(9, seed=1))
        [output] = warm.driver.finish([warm.new_request(prompt, params, tenant=tenant, final_only=True)])
        return output.num_cached_tokens

    assert hits("a", params) == 0
    assert hits("b", params) == hits(None, params) == 0
    assert hits("a", replace(params, kv_budget=44)) == hits("a", replace(params, eviction="tova")) == 0
    assert (
        hits("a", replace(params, protect=((9, 12),))) == hits("a", replace(params, context_tokens=148)) == 0
    )
    assert hits("a", params) == hits("b", params) == hits("a", replace(params, max_tokens=3)) == 149


def test_answers_stand_where_memory_is_short(directory: Path, cold: LLM) -> None:
    """The pool holds two of the prompts: what is known is forgotten, also where it is in use; sequences give way."""
    within = replace(
        PRESETS["batch-max"].policy, when=replace(PRESETS["batch-max"].policy.when, prefill_every=32)
    )
    policies = [None, "kvzip", "h2o", within, "knorm", "streaming"]
    chosen = random.Random(9)
    prompts, params = [], []
    for _ in range(20):
        policy = chosen.choice(policies)
        amount = {} if policy is None else {"kv_budget": 48}
        context = {"context_tokens": 130} if policy is not None and chosen.random() < 0.7 else {}
        prompts.append(
            tokens(130, seed=chosen.randrange(2)) + tokens(chosen.randrange(1, 20), seed=chosen.randrange(3))
        )
        params.append(greedy(eviction=policy, logprobs=None, max_tokens=40, **amount, **context))
    expected = cold.generate(prompts, params)
    with open_llm(directory, kv_memory=120 * 2**10, max_num_seqs=12, max_num_batched_tokens=128) as llm:
        ids = [llm.submit(*each, final_only=True) for each in zip(prompts, params, strict=True)]
        found = {}
        while llm.has_unfinished:
            found |= {each.request_id: each for each in llm.step()}
            llm.check_integrity()
        stats = llm.stats()
    for request_id, theirs in zip(ids, expected, strict=True):
        assert found[request_id].outputs[0].token_ids == theirs.outputs[0].token_ids
    assert stats.num_preemptions and stats.cached_tokens > 500
