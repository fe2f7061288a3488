"""Values on a tier through the whole engine: answers, memory, pressure, and what fails."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from architectures import ARCHITECTURES, save
from tiny_llama import VOCAB, save_tiny_llama

from winnow import LLM, SamplingParams
from winnow.cache import BlockCount
from winnow.engine.memory.swap_costs import SwapCosts
from winnow.errors import ConfigError
from winnow.values.value_tier import ValueTier

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "kv_memory": "2MiB",
    "kv_floor": 1,
    "prefill_chunk": 48,
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), seed=3, num_hidden_layers=3)


def prompts(count: int = 3) -> list[list[int]]:
    chance = random.Random(1)
    return [[chance.randint(3, VOCAB - 1) for _ in range(chance.randint(60, 110))] for _ in range(count)]


def scheduler_of(llm: LLM) -> Any:
    engine: Any = llm._engine
    return engine.scheduler


def answers(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    """Of all prompts, step by step, with the invariants checked."""
    ids = [llm.submit(tokens, params) for tokens in prompts()]
    found = {}
    while llm.has_unfinished:
        for output in llm.step():
            if output.finished:
                assert output.error is None
                found[output.request_id] = output.outputs[0].token_ids
        llm.check_integrity()
    return [found[request_id] for request_id in ids]


def answers_under_preemption(llm: LLM) -> list[list[int]]:
    """As `answers`, while every third step a sequence gives way, by a copy where there is room for one."""
    scheduler, step = scheduler_of(llm), llm.step
    scheduler.memory.swap.costs = SwapCosts(1e-15, 1.0)

    def disturbed() -> Any:
        outputs = step()
        if len(scheduler.running) > 1 and llm.stats().num_steps % 3 == 0:
            scheduler.running.preempt(scheduler.running[-1])
        return outputs

    llm.step = disturbed  # type: ignore[method-assign]
    found = answers(llm)
    assert llm.stats().num_preemptions > 3
    return found


def run(directory: Path, params: SamplingParams = GREEDY, **options: Any) -> list[list[int]]:
    with LLM(directory, **OPTIONS | options) as llm:
        return answers(llm, params)


# -- the option --------------------------------------------------------------------------------------------------


def test_the_option_is_read_and_written() -> None:
    for text in ("host:L=1,N=128", "disk:/some:where:L=0,N=7,as-softmaxed,size=4.0GiB"):
        tier = ValueTier.parse(text)
        assert str(tier) == text and ValueTier.parse(str(tier)) == tier
    assert ValueTier.parse("host:N=8") == ValueTier("host", layers=1, top_n=8)
    assert ValueTier.parse("host:N=8,renormalize") == ValueTier("host", layers=1, top_n=8, renormalize=True)
    assert ValueTier.parse(None) is None


NO_TIERS = ["", "host", "host:L=1", "host:L=1,N=0", "host:N=8,N=9", "host:dir:N=8", "disk:N=8", "tape:N=8"]
NO_TIERS += [
    "host:N=8,K=1",
    "host:N=-8",
    "host:N=8,size=0",
    "host:N=8,renormalize=1",
    "host:N=8,renormalize,as-softmaxed",
    "host:N=8,select=pages",
    "host:N=8,keys",
]


@pytest.mark.parametrize("text", NO_TIERS)
def test_what_is_no_tier_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="value_tier"):
        LLM(value_tier=text)


def test_what_does_not_go_together_is_refused(directory: Path, tmp_path: Path) -> None:
    for options, named in (
        ({"value_tier": "host:L=3,N=8"}, "value_tier: L must be fewer layers than the model's 3, got 3"),
        ({"kv_wide": "sinks=4", "kv_cache_dtype": "int8"}, "value_tier does not go with kv_wide"),
        ({"value_tier": "host:N=8,size=1"}, "value_tier: size must be at least .* got 1 B"),
        ({"value_tier": f"disk:{tmp_path / 'file'}:N=8"}, "must hold a file"),
    ):
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match=named):
            LLM(directory, **OPTIONS | {"value_tier": "host:N=8"} | options)


# -- answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss", "mistral-window"])
def test_enough_values_give_the_same_answers(name: str, tmp_path: Path) -> None:
    save(ARCHITECTURES[name], tmp_path)
    expected = run(tmp_path)
    for tier in ("host:L=1,N=1000", "host:L=0,N=1000,as-softmaxed", f"disk:{tmp_path}:L=2,N=1000"):
        assert run(tmp_path, value_tier=tier) == expected


@pytest.mark.parametrize("policy", ["full", "kv-compress", "leverage-pd", "kvzip"])
def test_backends_agree_on_few_values(directory: Path, policy: str) -> None:
    """In lockstep with eviction: what goes leaves both tiers."""
    amount: dict[str, Any] = {"eviction": policy} | ({} if policy == "full" else {"kv_budget": 40})
    found = [
        run(directory, value_tier="host:L=1,N=6", attention_backend=backend, **amount)
        for backend in ("reference", "auto")
    ]
    assert found[0] == found[1]
    assert run(directory, value_tier="host:L=1,N=1000", **amount) == run(directory, **amount)


@pytest.mark.parametrize("kv_format", ["k=int8,v=int4", "bfloat16"])
def test_codecs_lie_on_either_tier(directory: Path, kv_format: str) -> None:
    assert run(directory, value_tier="host:L=1,N=1000", kv_cache_dtype=kv_format) == run(
        directory, kv_cache_dtype=kv_format
    )


# -- memory ------------------------------------------------------------------------------------------------------


def test_bytes_of_both_tiers_are_counted(directory: Path) -> None:
    options = OPTIONS | {"kv_memory": "200KiB"}
    with LLM(directory, **options, value_tier="host:L=1,N=6") as llm, LLM(directory, **options) as plain:
        ledger, pool = scheduler_of(llm).ledger, llm._engine._executor.cache.pool  # type: ignore[attr-defined]
        layout, size = ledger.layout, ledger.size
        # Keys are half of a block of float32.
        values = layout.kinds[1].tier_bytes
        assert 2 * values == layout.kinds[0].form.nbytes
        assert pool.kinds[1].tier.nbytes == size.by_kind[1] * values
        assert pool.nbytes == layout.device_bytes(size.by_kind)
        assert size.nbytes(layout) <= 200 * 2**10
        plain_ledger = scheduler_of(plain).ledger
        assert ledger.capacity > 1.3 * plain_ledger.capacity
        for each in (llm, plain):
            each.submit(prompts()[0], GREEDY)
            each.step(), each.step(), each.step()
        blocks = ledger.allocator.held
        assert blocks.total == plain_ledger.allocator.held.total and blocks[1] == 2 * blocks[0]
        stats, plain_stats = llm.stats(), plain.stats()
        assert plain_stats.kv_bytes_held - stats.kv_bytes_held == blocks[1] * values
        assert plain_stats.value_tier is None and stats.value_tier is not None
        assert stats.value_tier.bytes_used == blocks[1] * values
        assert stats.value_tier.bytes_budget == pool.kinds[1].tier.nbytes
        total, step = stats.value_tier.total, stats.value_tier.last_step
        rows, queries = 2 * 2, 2 * 4  # in two far layers: KV heads, query heads
        assert (step.head_queries, step.rows_selected) == (queries, 6 * queries)
        assert 6 * rows <= step.rows_read <= 6 * queries and step.rows_prefilled == 0
        assert (step.rows_written, step.bytes_written) == (rows, rows * 8 * 4)
        assert step.bytes_read == step.rows_read * 8 * 4
        assert total.rows_written == rows * scheduler_of(llm).running[0].kv.num_computed
        assert total.rows_prefilled > 0 and total.seconds_waited >= step.seconds_waited


def test_a_size_bounds_what_lies_there(directory: Path) -> None:
    with LLM(directory, **OPTIONS, value_tier="host:N=6,size=100KiB") as llm:
        assert 95_000 < llm.stats().value_tier.bytes_budget <= 100 * 2**10  # type: ignore[union-attr]


def test_blocks_are_split_by_what_sequences_of_any_length_take(tmp_path: Path) -> None:
    """Layers and rows of Gemma-3-270M, whose layer 0 has a window: 8 prompts run at once, as without a tier."""
    kinds = ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(18)]
    shape = {"num_hidden_layers": 18, "layer_types": kinds, "sliding_window": 512, "num_key_value_heads": 1}
    shape |= {"head_dim": 256, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1}
    config = ARCHITECTURES["gemma3"].to_dict() | shape | {"max_position_embeddings": 32768, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Gemma3ForCausalLM"]}))
    options: dict[str, Any] = {"kv_memory": "200MiB", "load_format": "dummy", "skip_tokenizer_init": True}
    options |= {"dtype": "bfloat16", "max_num_seqs": 64}
    with LLM(tmp_path, **options, value_tier="host:L=1,N=64") as llm:
        for first in range(8):
            llm.submit([3 + first] * 1024, SamplingParams(max_tokens=20, ignore_eos=True))
        together = 0
        while llm.has_unfinished:
            llm.step()
            together = max(together, llm.stats().num_running)
        assert together == 8
        ledger = scheduler_of(llm).ledger
        count = BlockCount(ledger.layout.by_kind(ledger.layout.row_blocks_seen(32768)))
        assert count.fits(ledger.size.by_kind), "one of full length has room besides"


# -- pressure ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "swaps"), [("full", True), ("snapkv", False)])
def test_who_gives_way_answers_the_same(directory: Path, policy: str, swaps: bool, tmp_path: Path) -> None:
    """Copied to the host with its values, or computed again: a token of the answer reads as many values then."""
    amount: dict[str, Any] = {"eviction": policy} | ({} if policy == "full" else {"kv_budget": 40})
    tier = {"value_tier": f"disk:{tmp_path}:L=1,N=6", "enable_prefix_caching": False}
    expected = run(directory, **tier, **amount)
    more = {"kv_offloading_size": "4MiB"} if swaps else {}
    with LLM(directory, **OPTIONS | tier | amount | more) as llm:
        assert answers_under_preemption(llm) == expected
        assert (llm.stats().num_swaps > 3) == swaps


def test_prefixes_are_shared_as_they_were_computed(directory: Path) -> None:
    """Of a prompt; what an answer computed with few values is not taken for a prompt's."""
    first = prompts()[0]
    with LLM(directory, **OPTIONS, value_tier="host:L=1,N=2") as llm:
        answer = llm.generate(first, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))[0]
        longer = first + answer.outputs[0].token_ids + [5]
        found = llm.generate(longer, GREEDY)[0]
        assert len(first) - 16 < found.num_cached_tokens <= len(first)
        llm.check_integrity()
    with LLM(directory, **OPTIONS, value_tier="host:L=1,N=2") as llm:
        assert llm.generate(longer, GREEDY)[0].outputs[0].token_ids == found.outputs[0].token_ids


def test_samples_write_into_values_of_their_own(directory: Path) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=20, ignore_eos=True)
    for tier in ("host:L=1,N=1000", "host:L=1,N=6"):
        with LLM(directory, **OPTIONS, value_tier=tier) as llm:
            found = [answer.token_ids for answer in llm.generate(prompts()[0], params)[0].outputs]
            llm.check_integrity()
        assert len({tuple(each) for each in found}) == 3
        options = {} if tier.endswith("1000") else {"value_tier": tier, "attention_backend": "reference"}
        with LLM(directory, **OPTIONS, **options) as llm:
            assert [answer.token_ids for answer in llm.generate(prompts()[0], params)[0].outputs] == found


# -- failures ----------------------------------------------------------------------------------------------------


def test_one_kind_of_blocks_runs_short(directory: Path) -> None:
    """With little memory requests wait for one another, whichever kind lacks; all answer as alone."""
    expected = run(directory, value_tier="host:L=1,N=6")
    with LLM(directory, **OPTIONS | {"kv_memory": 130_000}, value_tier="host:L=1,N=6") as llm:
        assert answers(llm) == expected


def test_a_full_disk_fails_the_request_that_needs_more(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others continue, and when there is room again so does the same request."""
    allocate, room = os.posix_fallocate, [17_000]

    def bounded(file: int, start: int, nbytes: int) -> None:
        if nbytes > room[0]:
            raise OSError(28, "No space left on device")
        room[0] -= nbytes
        allocate(file, start, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", bounded)
    monkeypatch.setattr("winnow.cache.tiers.value_store._EXTENT_BYTES", 8192)
    tier = f"disk:{tmp_path}:L=1,N=6"
    short = prompts()[0][:20]
    expected = (
        LLM(directory, **OPTIONS, value_tier="host:L=1,N=6").generate(short, GREEDY)[0].outputs[0].token_ids
    )
    with LLM(directory, **OPTIONS, value_tier=tier) as llm:
        ids = [llm.submit(tokens, GREEDY) for tokens in (short, [*prompts()[1], *prompts()[2]], short)]
        outputs = {}
        while llm.has_unfinished:
            outputs |= {output.request_id: output for output in llm.step() if output.finished}
            llm.check_integrity()
        first, large, last = (outputs[request_id] for request_id in ids)
        assert first.outputs[0].token_ids == last.outputs[0].token_ids == expected
        assert large.error is not None and "value_tier=disk" in large.error and "No space left" in large.error
        room[0] = 10**9
        assert llm.generate([*prompts()[1], *prompts()[2]], GREEDY)[0].error is None
        llm.check_integrity()


def test_the_host_has_not_the_memory(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from winnow.process.resources import HostMemory

    monkeypatch.setattr("winnow.cache.tiers.value_store.host_memory", lambda: HostMemory(2**20, 1000))
    with pytest.raises(ConfigError, match=r"value_tier: size must be at most .* 1000 B, got .*: give size="):
        LLM(directory, **OPTIONS, value_tier="host:L=1,N=6")
    monkeypatch.setattr("winnow.cache.tiers.value_store._require_host_memory", lambda nbytes: None)
    with LLM(directory, **OPTIONS, value_tier="host:L=1,N=6") as llm:
        [output] = llm.generate(prompts()[0], GREEDY)
        assert output.error is not None and "1000 B free" in output.error
        monkeypatch.undo()
        assert llm.generate(prompts()[0], GREEDY)[0].error is None


def test_an_aborted_request_leaves_the_others_alone(directory: Path) -> None:
    expected = run(directory, value_tier="host:L=1,N=6")
    with LLM(directory, **OPTIONS, value_tier="host:L=1,N=6") as llm:
        ids = [llm.submit(tokens, GREEDY) for tokens in (*prompts(), prompts()[0])]
        found = {}
        for step in range(10**6):
            if not llm.has_unfinished:
                break
            found |= {output.request_id: output for output in llm.step() if output.finished}
            if step == 6:
                llm.abort(ids[3])
            llm.check_integrity()
        assert [found[request_id].outputs[0].token_ids for request_id in ids[:3]] == expected
        assert not scheduler_of(llm).ledger.allocator.held.total
