"""Under a policy, layers with a sliding window hold what it sees, and rounds act on the other layers alone."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from architectures import ARCHITECTURES, VOCAB, save

from winnow import LLM, SamplingParams
from winnow.cache import CacheSize, Ledger
from winnow.errors import CapacityError
from winnow.eviction import AdaptiveHeads, EvictionPolicy, Keep, KeyNorm, When

WINDOW, BLOCK, CHUNK, ANSWER = 24, 4, 32, 20
PROMPT, SHORT = (random.Random(length).choices(range(3, VOCAB), k=length) for length in (150, 70))
POLICIES: dict[str, dict[str, Any]] = {
    "snapkv": {"compression": 4.0},
    "h2o": {"kv_budget": 40},
    "ada-snapkv": {"compression": 3.0},
    "kvzip": {"compression": 4.0},
    "kv-compress": {"kv_budget": 48},
    "in prefill": {"kv_budget": 64},
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of a window, none, and a window."""
    path = tmp_path_factory.mktemp("gemma3")
    save(ARCHITECTURES["gemma3"], path)
    return path


def open_llm(path: Path, **options: Any) -> LLM:
    chosen = {
        "kv_memory": "4MiB",
        "block_size": BLOCK,
        "prefill_chunk": CHUNK,
        "num_accumulators": 2,
        "kv_floor": 40,
    }
    return LLM(path, **chosen | options)


def scheduler_of(llm: LLM) -> Any:
    return llm._engine.scheduler


IN_PREFILL = EvictionPolicy(
    KeyNorm(), AdaptiveHeads(), Keep(sinks=2), When(prefill_every=32, after_prefill=True, decode_every=8)
)


def asked(policy: str) -> SamplingParams:
    eviction = IN_PREFILL if policy == "in prefill" else policy
    return replace(PARAMS, eviction=eviction, **POLICIES[policy])


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams, *, slides: bool = True) -> list[Any]:
    """Answer them step by step, and look at the rows before each step."""
    ids, found, scheduler = [llm.submit(prompt, params) for prompt in prompts], {}, scheduler_of(llm)
    while llm.has_unfinished:
        found |= {output.request_id: output for output in llm.step()}
        llm.check_integrity()
        for sequence in scheduler.running:
            slot, computed = sequence.kv.running_slot, sequence.kv.num_computed + sequence.kv.replayed
            lengths, positions = scheduler.ledger.lengths[slot], llm._engine._executor.kept_positions(slot)
            # A replay is at most a chunk of these prompts longer than the context.
            most = WINDOW - 1 + BLOCK - 1 + max(CHUNK, sequence.kv.replayed)
            for layer in (0, 2):
                for row in positions[layer]:
                    assert row == list(range(computed - len(row), computed))
                assert not slides or lengths[layer].max() <= most
    return [found[each] for each in ids]


@pytest.fixture(scope="module")
def alone(gemma: Path) -> Callable[[str], list[Any]]:
    """Of each policy, what a request of its own engine answers."""

    @cache
    def answer(policy: str) -> list[Any]:
        with open_llm(gemma) as llm:
            return summary(run(llm, [PROMPT], asked(policy)))

    return answer


def summary(outputs: list[Any]) -> list[Any]:
    return [
        [
            (token, round(entry[token].logprob, 3))
            for token, entry in zip(a.token_ids, a.logprobs, strict=True)
        ]
        for output in outputs
        for a in output.outputs
    ]


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "snapkv"])
def test_answers_are_those_of_rows_that_give_nothing_back(
    gemma: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, held = [], []
    for slides in (True, False):
        if not slides:
            monkeypatch.setattr(Ledger, "drop_unseen", lambda self, slots: None)
        with open_llm(gemma) as llm:
            outputs = run(llm, [PROMPT, SHORT, PROMPT], asked(policy), slides=slides)
            found.append(summary(outputs))
            held.append(scheduler_of(llm).ledger.peak_blocks)
            reports = [output.outputs[0].eviction for output in outputs]
    assert found[0] == found[1]
    assert held[0] < held[1]
    assert reports[0].rounds and sum(reports[0].kept[1]) / 2 < 0.8 * reports[0].num_tokens
    assert all(kept == reports[0].num_tokens for layer in (0, 2) for kept in reports[0].kept[layer])


@pytest.mark.parametrize("policy", POLICIES)
def test_the_budget_is_that_of_the_layers_without_a_window(gemma: Path, policy: str) -> None:
    with open_llm(gemma) as llm:
        layout = scheduler_of(llm).ledger.layout
        request_id = llm.submit(PROMPT, asked(policy))
        seen = []
        while llm.has_unfinished:
            before = {s: s.kv.num_rounds for s in scheduler_of(llm).running}
            llm.step()
            for s in scheduler_of(llm).running:
                if s.kv.num_rounds > before.get(s, 0):
                    # A round, and then at most a chunk.
                    rows = scheduler_of(llm).ledger.lengths[s.kv.running_slot, 1]
                    seen.append((rows.mean() - CHUNK, s.eviction.target))
        assert seen, request_id
        assert all(kvs <= target + BLOCK for kvs, target in seen)
        assert layout.evictable == (1,) and layout.evictable_part.rows_per_seq == layout.num_kv_heads


# Rounds after the prompt, at each token, in the prompt too, and passes that replay it.
@pytest.mark.parametrize("policy", ["ada-snapkv", "h2o", "in prefill", "kvzip"])
def test_bounds_on_blocks_hold_and_count_windows(gemma: Path, policy: str) -> None:
    with open_llm(gemma, enable_prefix_caching=False) as llm:
        request_id = llm.submit(PROMPT, asked(policy))
        [sequence] = list(scheduler_of(llm).waiting)
        layout = scheduler_of(llm).ledger.layout
        most = sequence.eviction.peak_blocks(layout, len(PROMPT) + ANSWER - 1)
        while llm.has_unfinished:
            llm.step()
        assert scheduler_of(llm).ledger.peak_blocks <= most, request_id
        if not sequence.eviction.passes:  # which are computed behind all KVs
            assert most < layout.blocks_for(len(PROMPT) + ANSWER - 1)
        pages = layout.pages_for(512)
    size = CacheSize(most, pages, 1, pages)
    with open_llm(gemma, kv_memory=size.nbytes(layout), max_num_seqs=1, enable_prefix_caching=False) as llm:
        assert scheduler_of(llm).ledger.size.num_blocks == most
        [output] = run(llm, [PROMPT], asked(policy))
        assert len(output.outputs[0].token_ids) == ANSWER
    size = replace(size, num_blocks=most - 1)
    with open_llm(gemma, kv_memory=size.nbytes(layout), max_num_seqs=1) as llm:
        if sequence.eviction.passes:  # what judges in place of the replay needs less
            llm.generate(PROMPT, asked(policy))
            assert llm.stats().num_replays_replaced == 1
            return
        with pytest.raises(CapacityError):
            llm.generate(PROMPT, asked(policy))


@pytest.mark.parametrize(
    ("policy", "host_memory", "steps"),
    [
        # 3 steps are of the prompt, 12 reach into the answer.
        ("h2o", None, 3),
        ("h2o", "8MiB", 12),
        ("kvzip", None, 12),
        ("kvzip", "8MiB", 3),
        ("snapkv", None, 12),
    ],
)
def test_preemption(
    gemma: Path, alone: Callable[[str], list[Any]], policy: str, host_memory: str | None, steps: int
) -> None:
    """A request that gave way, as where blocks lack, answers the same."""
    params = asked(policy)
    with open_llm(gemma, kv_offloading_size=host_memory, enable_prefix_caching=False) as llm:
        llm.submit(PROMPT, params)
        for _ in range(steps):
            llm.step()
        scheduler_of(llm).running.preempt()
        outputs: list[Any] = []
        while llm.has_unfinished:
            outputs = llm.step()
            llm.check_integrity()
        assert summary(outputs) == alone(policy)
        assert llm.stats().num_preemptions == 1


@pytest.mark.parametrize("policy", ["h2o", "kvzip", "kv-compress", "in prefill"])
def test_samples_of_one_prompt(gemma: Path, alone: Callable[[str], list[Any]], policy: str) -> None:
    with open_llm(gemma) as llm:
        assert summary(run(llm, [PROMPT], replace(asked(policy), n=3))) == alone(policy) * 3


def test_snapshots_of_a_round_are_found(gemma: Path) -> None:
    params = replace(asked("snapkv"), context_tokens=140)
    with open_llm(gemma) as llm:
        first = run(llm, [PROMPT], params)
        again = run(llm, [PROMPT], params)
        assert again[0].num_cached_tokens == 140
        assert summary(again) == summary(first)


def test_bytes_of_a_whole_answer_count_windows(gemma: Path) -> None:
    """As reports give them of the full cache: what its last step holds, though its prompt's chunks held more."""
    held = []
    with open_llm(gemma) as llm:
        llm.submit({"prompt_token_ids": PROMPT}, PARAMS)
        while llm.has_unfinished:
            held.append(llm.stats().kv_bytes_held)
            llm.step()
        found, block = llm.kv_bytes(len(PROMPT) + ANSWER - 1), llm.kv_bytes(BLOCK)
    # A block behind the window goes before the next step.
    assert abs(held[-1] - found) <= block
    assert held[-1] < max(held)
