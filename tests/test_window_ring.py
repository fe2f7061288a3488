"""Rows of layers with a sliding window give back what no later token sees, and answers stay as they are."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from architectures import ARCHITECTURES, VOCAB, generate_alone, save
from tests.extension import needs_extension

from winnow import LLM, SamplingParams
from winnow.cache import CacheSize, Ledger
from winnow.errors import CapacityError

WINDOW = 24
WINDOWED = ("mistral-window", "gemma2", "gemma3", "gpt-oss")
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2)
PROMPTS = [random.Random(length).choices(range(3, VOCAB), k=length) for length in (5, 24, 70, 200)]
BLOCK, CHUNK = 4, 16


@pytest.fixture(scope="module", params=WINDOWED)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp(request.param)
    return path, save(ARCHITECTURES[request.param], path)


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("mistral")
    return path, save(ARCHITECTURES["mistral-window"], path)


def open_llm(path: Path, **options: Any) -> LLM:
    chosen = {"kv_memory": "4MiB", "block_size": BLOCK, "prefill_chunk": CHUNK} | options
    return LLM(path, **chosen)


def ledger_of(llm: LLM) -> Ledger:
    return llm._engine.scheduler.ledger


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
    """Answer them step by step, and look at the rows after each step."""
    ids, found = [llm.submit(prompt, params) for prompt in prompts], {}
    windowed = [window is not None for window in ledger_of(llm).layout.windows]
    while llm.has_unfinished:
        found |= {output.request_id: output for output in llm.step()}
        llm.check_integrity()
        rows = ledger_of(llm).lengths[:, windowed]
        assert rows.max() <= WINDOW - 1 + BLOCK - 1 + CHUNK
    return [found[each] for each in ids]


def test_answers_are_unchanged_and_rows_bounded(case: tuple[Path, Any]) -> None:
    path, model = case
    with open_llm(path) as llm:
        outputs = run(llm, PROMPTS, GREEDY)
        wanted = [generate_alone(model, prompt, 40) for prompt in PROMPTS]
        assert [output.outputs[0].token_ids for output in outputs] == wanted
        assert ledger_of(llm).allocator.num_used == 0


@pytest.mark.parametrize("backend", ["reference", pytest.param("native", marks=needs_extension)])
def test_logprobs_are_as_without_giving_back(
    case: tuple[Path, Any], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for drops in (True, False):
        if not drops:
            monkeypatch.setattr(Ledger, "drop_unseen", lambda self, slots: None)
        with open_llm(case[0], attention_backend=backend) as llm:
            outputs = llm.generate(PROMPTS, GREEDY)
            found.append([answer.logprobs for output in outputs for answer in output.outputs])
            held = ledger_of(llm).peak_blocks
        if drops:
            less = held
    assert less < held
    for with_drops, without in zip(*found, strict=True):
        assert [each.keys() for each in with_drops] == [each.keys() for each in without]
        for one, other in zip(with_drops, without, strict=True):
            values = [each.logprob for each in one.values()], [each.logprob for each in other.values()]
            assert values[0] == pytest.approx(values[1], abs=1e-4)


def test_blocks_come_free_while_a_request_runs(mistral: tuple[Path, Any]) -> None:
    with open_llm(mistral[0], enable_prefix_caching=False) as llm:
        run(llm, [PROMPTS[3]], GREEDY)
        ledger = ledger_of(llm)
        rows = ledger.layout.rows_per_seq
        most = ledger.layout.blocks_seen(len(PROMPTS[3]) + 39)
        assert most == rows * -(-(WINDOW - 1 + BLOCK - 1 + CHUNK) // BLOCK) == rows * 11
        assert ledger.peak_blocks <= most < ledger.layout.blocks_for(239) // 5


def test_more_is_admitted(mistral: tuple[Path, Any]) -> None:
    """A pool for 60 KVs a row serves a prompt of 200 where all layers have a window, and no longer without chunks."""
    with open_llm(mistral[0]) as llm:
        layout = ledger_of(llm).layout
    size = CacheSize.of_blocks(layout, 15 * layout.rows_per_seq, 4, 512)
    options = {"kv_memory": size.nbytes(layout), "max_num_seqs": 4}
    with open_llm(mistral[0], **options) as llm:
        [output] = run(llm, [PROMPTS[3]], GREEDY)
        assert output.outputs[0].token_ids == generate_alone(mistral[1], PROMPTS[3], 40)
    refused = pytest.raises(CapacityError, match="needs room for 240 KVs a row")
    with open_llm(mistral[0], **options | {"prefill_chunk": None}) as llm, refused:
        llm.generate(PROMPTS[3], GREEDY)


def test_prefixes_are_found_whole(case: tuple[Path, Any]) -> None:
    path, model = case
    prompt = PROMPTS[3]
    with open_llm(path) as llm:
        run(llm, [prompt], GREEDY)
        longer = prompt + PROMPTS[1]
        outputs = run(llm, [prompt, longer], GREEDY)
        assert [output.num_cached_tokens for output in outputs] == [199, 200]
        wanted = [generate_alone(model, each, 40) for each in (prompt, longer)]
        assert [output.outputs[0].token_ids for output in outputs] == wanted


def test_what_only_the_index_holds_can_always_be_had(case: tuple[Path, Any]) -> None:
    """The index also holds blocks that a running sequence has given back, of prefixes that it keeps using."""
    path, model = case
    with open_llm(path) as llm:
        layout = ledger_of(llm).layout
    size = CacheSize.of_blocks(layout, layout.blocks_seen(241) + layout.rows_per_seq * 2, 8, 512)
    with open_llm(path, kv_memory=size.nbytes(layout), max_num_seqs=8) as llm:
        prompts = [PROMPTS[3], *([token, *PROMPTS[3][:180]] for token in (7, 8, 9)), PROMPTS[3]]
        outputs = run(llm, prompts, GREEDY)
        wanted = [generate_alone(model, each, 40) for each in prompts]
        assert [output.outputs[0].token_ids for output in outputs] == wanted


@pytest.mark.parametrize("host_memory", [None, "8MiB"], ids=["recompute", "swap"])
def test_samples_forks_and_preemption(case: tuple[Path, Any], host_memory: str | None) -> None:
    path, model = case
    params = replace(GREEDY, n=3)
    with open_llm(path) as llm:
        layout = ledger_of(llm).layout
        parent = llm.submit(PROMPTS[3], GREEDY)
        for _ in range(18):
            llm.step()
        child, found = llm.fork(parent), {}
        while llm.has_unfinished:
            found |= {output.request_id: output.outputs[0].token_ids for output in llm.step()}
            llm.check_integrity()
        assert found[child] == found[parent] == generate_alone(model, PROMPTS[3], 40)
    size = CacheSize.of_blocks(layout, layout.blocks_seen(241) + layout.rows_per_seq * 2, 12, 512)
    options = {"max_num_seqs": 12, "kv_offloading_size": host_memory}
    with open_llm(path, kv_memory=size.nbytes(layout), **options) as llm:
        outputs = run(llm, PROMPTS[2:], params)
        for output, prompt in zip(outputs, PROMPTS[2:], strict=True):
            assert [each.token_ids for each in output.outputs] == [generate_alone(model, prompt, 40)] * 3
        assert llm.stats().num_preemptions > 0, "the pool was meant to be too small"
        assert host_memory is None or llm.stats().num_swaps > 0


def test_under_a_policy_the_policy_decides(mistral: tuple[Path, Any]) -> None:
    """A policy's rows keep what it chose, seen or not; its rounds see all KVs of the prompt."""
    with open_llm(mistral[0]) as llm:
        params = replace(GREEDY, eviction="streaming", kv_budget=64)
        request_id, longest = llm.submit(PROMPTS[3], params), 0
        while llm.has_unfinished:
            llm.step()
            longest = max(longest, int(ledger_of(llm).lengths.max()))
        assert longest >= len(PROMPTS[3]), request_id
