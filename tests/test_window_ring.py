"""Rows of layers with a sliding window give back what no later token sees, and answers stay as they are."""

import random
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, VOCAB, save
from tests.extension import needs_extension

from winnow import LLM, SamplingParams
from winnow.cache import CacheSize, Ledger
from winnow.errors import CapacityError

WINDOW = 24
WINDOWED = ("mistral-window", "gemma2", "gemma3", "gpt-oss")
# All layers with a window, and one of two: what the ledger does depends on no more.
KINDS = ("mistral-window", "gemma3")
ANSWER, LONGEST = 28, 120
GREEDY = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True, logprobs=2)
PROMPTS = [random.Random(length).choices(range(3, VOCAB), k=length) for length in (5, 24, 70, LONGEST)]
BLOCK, CHUNK = 4, 16


@pytest.fixture(scope="module", params=WINDOWED)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return save_two_layers(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return save_two_layers("mistral-window", tmp_path_factory.mktemp("mistral"))


def save_two_layers(name: str, path: Path) -> tuple[Path, Any]:
    """Save a model of two layers, the first of which has a window."""
    config = deepcopy(ARCHITECTURES[name])
    config.num_hidden_layers = 2
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    return path, save(config, path)


def check_greedy(model: Any, prompt: list[int], answer: list[int]) -> None:
    """Assert that each token is what transformers says after those before it."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
    assert answer == logits.argmax(dim=-1).tolist() and len(answer) == ANSWER


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
        for prompt, output in zip(PROMPTS, run(llm, PROMPTS, GREEDY), strict=True):
            check_greedy(model, prompt, output.outputs[0].token_ids)
        assert ledger_of(llm).allocator.num_used == 0


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        ("gemma3", "reference"),
        pytest.param("mistral-window", "native", marks=needs_extension),
        pytest.param("gpt-oss", "native", marks=needs_extension),
    ],
    indirect=["case"],
)
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
        most = ledger.layout.blocks_seen(LONGEST + ANSWER - 1)
        assert most == rows * -(-(WINDOW - 1 + BLOCK - 1 + CHUNK) // BLOCK) == rows * 11
        assert ledger.peak_blocks <= most < ledger.layout.blocks_for(LONGEST + ANSWER - 1) // 3


def test_more_is_admitted(mistral: tuple[Path, Any]) -> None:
    """A pool for 60 KVs a row serves a prompt of 120 where all layers have a window, and no longer without chunks."""
    with open_llm(mistral[0]) as llm:
        layout = ledger_of(llm).layout
    size = CacheSize.of_blocks(layout, 15 * layout.rows_per_seq, 4, 512)
    options = {"kv_memory": size.nbytes(layout), "max_num_seqs": 4}
    with open_llm(mistral[0], **options) as llm:
        [output] = run(llm, [PROMPTS[3]], GREEDY)
        check_greedy(mistral[1], PROMPTS[3], output.outputs[0].token_ids)
    refused = pytest.raises(CapacityError, match="needs room for 148 KVs a row")
    with open_llm(mistral[0], **options | {"prefill_chunk": None}) as llm, refused:
        llm.generate(PROMPTS[3], GREEDY)


@pytest.mark.parametrize("case", KINDS, indirect=True)
def test_prefixes_are_found_whole(case: tuple[Path, Any]) -> None:
    path, model = case
    prompt = PROMPTS[3]
    with open_llm(path) as llm:
        run(llm, [prompt], GREEDY)
        longer = prompt + PROMPTS[1]
        outputs = run(llm, [prompt, longer], GREEDY)
        assert [output.num_cached_tokens for output in outputs] == [LONGEST - 1, LONGEST]
        for each, output in zip((prompt, longer), outputs, strict=True):
            check_greedy(model, each, output.outputs[0].token_ids)


@pytest.mark.parametrize("case", KINDS, indirect=True)
def test_what_only_the_index_holds_can_always_be_had(case: tuple[Path, Any]) -> None:
    """The index also holds blocks that a running sequence has given back, of prefixes that it keeps using."""
    path, model = case
    with open_llm(path) as llm:
        layout = ledger_of(llm).layout
    size = CacheSize.of_blocks(
        layout, layout.blocks_seen(LONGEST + ANSWER + 1) + layout.rows_per_seq * 2, 8, 512
    )
    with open_llm(path, kv_memory=size.nbytes(layout), max_num_seqs=8) as llm:
        prompts = [PROMPTS[3], *([token, *PROMPTS[3][:108]] for token in (7, 8, 9)), PROMPTS[3]]
        for prompt, output in zip(prompts, run(llm, prompts, GREEDY), strict=True):
            check_greedy(model, prompt, output.outputs[0].token_ids)


@pytest.mark.parametrize("case", KINDS, indirect=True)
def test_forks(case: tuple[Path, Any]) -> None:
    path, model = case
    with open_llm(path) as llm:
        parent = llm.submit(PROMPTS[3], GREEDY)
        for _ in range(13):
            llm.step()
        child, found = llm.fork(parent), {}
        while llm.has_unfinished:
            found |= {output.request_id: output.outputs[0].token_ids for output in llm.step()}
            llm.check_integrity()
        check_greedy(model, PROMPTS[3], found[parent])
        assert found[child] == found[parent]


@pytest.mark.parametrize(
    ("case", "host_memory"),
    [("gemma3", None), ("gemma3", "8MiB"), ("mistral-window", "8MiB")],
    indirect=["case"],
)
def test_samples_and_preemption(case: tuple[Path, Any], host_memory: str | None) -> None:
    path, model = case
    with open_llm(path) as llm:
        layout = ledger_of(llm).layout
    size = CacheSize.of_blocks(
        layout, layout.blocks_seen(LONGEST + ANSWER + 1) + layout.rows_per_seq * 2, 12, 512
    )
    options = {"max_num_seqs": 12, "kv_offloading_size": host_memory}
    with open_llm(path, kv_memory=size.nbytes(layout), **options) as llm:
        outputs = run(llm, PROMPTS[2:], replace(GREEDY, n=3))
        for output, prompt in zip(outputs, PROMPTS[2:], strict=True):
            check_greedy(model, prompt, output.outputs[0].token_ids)
            assert [each.token_ids for each in output.outputs] == [output.outputs[0].token_ids] * 3
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
