"""Eviction seen from outside: what users ask for, what memory really does, and what never changes."""

import re
from collections.abc import Iterator
from dataclasses import astuple, replace
from itertools import cycle
from pathlib import Path

import pytest
import torch
from tiny_llama import VOCAB, greedy, prompt, save_tiny_llama
from transformers import LlamaConfig

from winnow import LLM, RequestOutput, SamplingParams
from winnow.cache import CacheSize, Ledger
from winnow.errors import CapacityError, InvalidRequestError
from winnow.eviction import PRESETS, AdaptiveRows, EvictionPolicy, Keep, Recency, When

LAYERS, HEADS, BLOCK = 3, 2, 4
ROWS = LAYERS * HEADS
# Those that fit what they keep need KVs with a bias: eviction/test_compact.py.
EVERY_PRESET = sorted(name for name, preset in PRESETS.items() if preset.policy.compact is None)


def of_each_kind(*, scored: bool) -> list[str]:
    """Presets with every budget, every set of moments, and, if `scored`, every kind of score: few, in turn."""
    names: list[str] = []
    seen: set[object] = set()
    for name in EVERY_PRESET:
        policy = PRESETS[name].policy
        observed = (
            "observed",
            policy.score.window is None,
            policy.score.num_accumulators,
            policy.score.replay is None,
        )
        score = type(policy.score) if scored else observed
        kinds = {policy.budget, tuple(map(bool, astuple(policy.when))), score}
        if not kinds <= seen:
            names.append(name)
            seen |= kinds
    return names


TAKES_BUDGET = [name for name in EVERY_PRESET if PRESETS[name].policy.budget.fixed is None]


def budget_for(name: str, kv_budget: int) -> dict[str, int]:
    """The budget, for presets that take one."""
    policy = PRESETS[name].policy
    return {} if policy.when.never or policy.budget.fixed is not None else {"kv_budget": kv_budget}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), seed=5, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(directory, kv_memory="8MiB", block_size=BLOCK, num_accumulators=2, kv_floor=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def crowded(directory: Path) -> Iterator[LLM]:
    """Little room, small steps: prompts wait, are cut into pieces, and are preempted."""
    options = {"block_size": BLOCK, "num_accumulators": 2, "kv_floor": 1}
    with LLM(directory, kv_memory="400KiB", max_num_seqs=3, max_num_batched_tokens=450, **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def narrow(directory: Path) -> Iterator[LLM]:
    with LLM(directory, kv_memory="820KiB", block_size=BLOCK, max_num_seqs=4, kv_floor=1) as llm:
        assert 1300 < ledger_of(llm).capacity < 1900
        yield llm


def own_affair(name: str) -> object:
    """The preset, or its policy without rounds that depend on memory and on what else runs."""
    policy = PRESETS[name].policy
    return name if policy.when == policy.when.alone else replace(policy, when=policy.when.alone)


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


def ledger_of(llm: LLM) -> Ledger:
    return llm._engine.scheduler.ledger


class TestWhatNeverChanges:
    @pytest.mark.parametrize("name", TAKES_BUDGET)
    def test_a_budget_above_the_length_gives_the_full_answer(self, llm: LLM, name: str) -> None:
        prompts = [prompt(150), prompt(40), prompt(90, 1)]
        full = llm.generate(prompts, greedy())
        kept = llm.generate(prompts, greedy(eviction=name, **budget_for(name, 300)))
        assert ids(kept) == ids(full)
        for output in kept:
            report = output.outputs[0].eviction
            assert (report is None) == (name == "full")
            if report is not None:
                assert (report.rounds, report.bytes_freed, report.compression) == (0, 0, 1.0)
                assert report.kv_budget is None

    def test_full_is_bit_equal_whatever_else_runs(self, directory: Path) -> None:
        prompts = [prompt(200), prompt(70)]
        wanted = greedy(logprobs=5)
        with LLM(directory, block_size=BLOCK, num_accumulators=0) as plain:
            alone = [plain.generate(p, wanted)[0] for p in prompts]
        with LLM(directory, block_size=BLOCK, num_accumulators=2) as llm:
            for expected, tokens in zip(alone, prompts, strict=True):
                [found] = llm.generate(tokens, wanted)
                assert found.outputs[0].logprobs == expected.outputs[0].logprobs
            beside = [prompt(150, 3), prompt(90, 4)]
            requests = [greedy(eviction="h2o", kv_budget=40), greedy(eviction="kv-compress", kv_budget=40)]
            mixed = llm.generate([*prompts, *beside], [wanted, wanted, *requests])
            assert ids(mixed[:2]) == ids(alone)

    @pytest.mark.parametrize("name", of_each_kind(scored=True))
    def test_an_answer_does_not_depend_on_what_else_runs(self, llm: LLM, crowded: LLM, name: str) -> None:
        prompts = [prompt(230, 1), prompt(60, 2), prompt(301, 3)]
        amount = budget_for(name, 80)
        wanted = greedy(eviction=own_affair(name), **amount)
        alone = [llm.generate(p, wanted)[0].outputs[0] for p in prompts]
        crowded.reset_prefix_cache()
        together = [output.outputs[0] for output in crowded.generate(prompts * 2, wanted)]
        crowded.check_integrity()
        for found, expected in zip(together, alone * 2, strict=True):
            assert found.token_ids == expected.token_ids
            if expected.eviction is not None and found.eviction is not None:
                assert found.eviction.kept == expected.eviction.kept


class TestMemory:
    @pytest.mark.parametrize("name", of_each_kind(scored=False))
    def test_blocks_in_use_are_those_of_what_is_kept(self, llm: LLM, name: str) -> None:
        cache = ledger_of(llm)
        amount = budget_for(name, 80)
        for length in (333, 150):
            llm.submit(prompt(length), greedy(eviction=name, max_tokens=18, **amount))
        while llm.has_unfinished:
            outputs = llm.step()
            llm.check_integrity()
            held = -(-cache.lengths // BLOCK)
            assert cache.allocator.num_used == held.sum()
            for output in outputs:
                report = output.outputs[0].eviction
                if report is not None:
                    blocks = sum(-(-kvs // BLOCK) for layer in report.kept for kvs in layer)
                    assert report.bytes_held == blocks * cache.layout.block_bytes
        assert cache.allocator.num_used == 0

    def test_at_8x_bytes_fall_at_least_6x_on_4k_prompts(self, directory: Path) -> None:
        with LLM(directory, kv_memory="16MiB") as llm:  # blocks of 16, the default
            for name in ("kv-compress", "snapkv", "ada-snapkv", "pyramidkv"):
                outputs = llm.generate([prompt(4000)], greedy(eviction=name, compression=8, max_tokens=2))
                for output in outputs:
                    report = output.outputs[0].eviction
                    assert report is not None
                    whole = ledger_of(llm).layout.blocks_for(4001) * ledger_of(llm).layout.block_bytes
                    assert whole / report.bytes_held > 6, name
                    assert report.compression == pytest.approx(8, rel=0.03)
                    assert report.bytes_freed > 0.8 * whole

    @pytest.mark.parametrize(
        ("name", "tokens", "peak"),
        [
            ("kv-compress-pd", 12_000, 1024 + 512),
            ("batch-max", 12_000, 1024),
            ("streaming", 12_000, 1024 + 256),
            ("winnow-seen-pd", 6_000, 6_000 // 4 + 256),
        ],
    )
    def test_prompts_longer_than_the_pool_run(
        self, tmp_path: Path, name: str, tokens: int, peak: int
    ) -> None:
        """The budget is 1,024 KVs per row; no step holds more than budget, or a quarter, + chunk."""
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32768,
        ).save_pretrained(tmp_path)
        options = {"kv_memory": "295KiB", "max_num_seqs": 2, "load_format": "dummy"}
        with LLM(tmp_path, eviction=name, kv_budget=1024, **options) as llm:
            cache = ledger_of(llm)
            assert 1024 + 512 < cache.capacity < 2100
            llm.submit(prompt(tokens), greedy(max_tokens=20))
            most = 0
            while llm.has_unfinished:
                outputs = llm.step()
                blocks = -(-cache.lengths[0] // 16)
                most = max(most, int(blocks.sum()) * 16 / 2)
            assert outputs[0].outputs[0].finish_reason == "length"
            assert most <= peak + 16
            assert llm.stats().num_preemptions == 0
        with (
            LLM(tmp_path, **options) as llm,
            pytest.raises(
                CapacityError,
                match=f"needs room for {tokens + 19} KVs a row.*such as winnow-seen-pd, needs less",
            ),
        ):
            llm.submit(prompt(tokens), greedy(max_tokens=20))

    def test_compression_lets_more_requests_run_at_once(self, directory: Path) -> None:
        def most_running(**options: object) -> int:
            with LLM(directory, kv_memory="600KiB", prefill_chunk=64, **options) as llm:
                for i in range(12):
                    llm.submit(prompt(300, i), greedy(max_tokens=60))
                most = 0
                while llm.has_unfinished:
                    llm.step()
                    most = max(most, llm.stats().num_running)
                return most

        assert most_running() <= 6
        assert most_running(eviction="kv-compress-pd", compression=8, kv_floor=1) == 12


def on_one_line(name: str, n: int) -> SamplingParams:
    return greedy(eviction=name, n=n, max_tokens=20, **budget_for(name, 600))


class TestPoliciesOfRequests:
    """Single requests bring policies to an engine that was opened with none, and with little memory."""

    @pytest.mark.parametrize(
        ("name", "n"), list(zip(of_each_kind(scored=False), cycle((1, 3, 1)), strict=False))
    )
    def test_are_answered_or_refused_and_others_go_on(self, llm: LLM, narrow: LLM, name: str, n: int) -> None:
        admitted = {narrow.submit(prompt(300), greedy()): 300}
        for length in (1300, 2600):
            try:
                admitted[narrow.submit(prompt(length), on_one_line(name, n))] = length
            except CapacityError as error:
                assert not PRESETS[name].policy.when.in_prefill
                assert re.search(r"needs room for \d+ KVs a row, kv_memory .* holds \d+", str(error))
        outputs = {}
        while narrow.has_unfinished:
            outputs |= {output.request_id: output for output in narrow.step() if output.finished}
            if narrow.stats().num_steps % 4 == 0:
                narrow._engine.check_integrity()
        assert ledger_of(narrow).allocator.num_used == 0
        for request_id, length in admitted.items():
            params = greedy() if length == 300 else on_one_line(name, n)
            answers = ids([outputs[request_id]])
            assert [len(answer) for answer in answers] == [params.max_tokens] * params.n
            report = outputs[request_id].outputs[0].eviction
            is_replaced = report is not None and report.policy not in (name, "own")
            if own_affair(name) == name and not is_replaced:
                assert answers == ids(llm.generate([prompt(length)], params))

    @pytest.mark.parametrize("name", of_each_kind(scored=False))
    def test_what_admission_counts_is_enough(self, directory: Path, llm: LLM, name: str) -> None:
        """A request alone in as many blocks as it is said to hold at most is never preempted."""
        layout, amount = ledger_of(llm).layout, budget_for(name, 130)
        for length in (386, 900):
            params = greedy(eviction=name, max_tokens=30, **amount)
            eviction = llm._engine._admission.admit(prompt(length), params).evictions[0]
            peak = (
                layout.blocks_for(length + 29)
                if eviction is None
                else eviction.peak_blocks(layout, length + 29)
            )
            room = CacheSize.of_blocks(layout, peak, 1, 4096).nbytes(layout)
            tight = {
                "kv_memory": room,
                "block_size": BLOCK,
                "max_num_seqs": 1,
                "num_accumulators": 2,
                "kv_floor": 1,
            }
            with LLM(directory, **tight) as alone:
                assert ledger_of(alone).size.num_blocks == peak
                [output] = alone.generate(prompt(length), params)
                assert alone.stats().num_preemptions == 0
                assert len(output.outputs[0].token_ids) == 30

    def test_a_window_wider_than_a_step_is_refused(self, directory: Path) -> None:
        """It would wait for ever: all of it is observed in one step."""
        with LLM(directory, kv_memory="1MiB", max_num_seqs=8, max_num_batched_tokens=16, kv_floor=1) as llm:
            with pytest.raises(
                InvalidRequestError, match="max_num_batched_tokens must be at least 32, got 16"
            ):
                llm.generate(prompt(200), greedy(eviction="snapkv", kv_budget=64))
            assert ids(llm.generate([prompt(200)], greedy(eviction="kv-compress", kv_budget=64)))


class TestSamples:
    @pytest.mark.parametrize("name", ["snapkv", "kv-compress", "h2o", "batch-max", "kvzip"])
    def test_each_sample_is_what_it_would_be_alone(self, llm: LLM, name: str) -> None:
        wanted = SamplingParams(
            n=3, temperature=1.0, seed=7, max_tokens=20, ignore_eos=True, eviction=name, kv_budget=80
        )
        [together] = llm.generate(prompt(200), wanted)
        assert ids([together]) == ids(llm.generate(prompt(200), wanted))
        # greedy samples of one prompt are all the answer that one request gets
        [one] = llm.generate(prompt(200), greedy(eviction=name, kv_budget=80))
        [three] = llm.generate(prompt(200), greedy(eviction=name, kv_budget=80, n=3))
        assert ids([three]) == ids([one]) * 3
        kept = {completion.eviction.kept for completion in three.outputs if completion.eviction}
        assert kept == {one.outputs[0].eviction.kept}  # type: ignore[union-attr]
        llm.check_integrity()

    @pytest.mark.parametrize("context", [None, 150])
    @pytest.mark.parametrize("name", ["snapkv", "kv-compress-full", "tova", "pyramidkv", "kvzip"])
    def test_samples_may_keep_different_amounts(self, llm: LLM, name: str, context: int | None) -> None:
        budgets = (200, 100, 60, 45)
        [together] = llm.generate(
            prompt(190), greedy(n=4, eviction=name, kv_budget=budgets, context_tokens=context)
        )
        for completion, budget in zip(together.outputs, budgets, strict=True):
            [alone] = llm.generate(
                prompt(190), greedy(eviction=name, kv_budget=budget, context_tokens=context)
            )
            assert completion.token_ids == alone.outputs[0].token_ids
            if alone.outputs[0].eviction.rounds:  # type: ignore[union-attr]
                assert completion.eviction.kept == alone.outputs[0].eviction.kept  # type: ignore[union-attr]
        llm.check_integrity()


class TestContext:
    def test_what_stays_does_not_depend_on_the_question(self, llm: LLM) -> None:
        document = prompt(150)

        def first_kept(question: list[int], context: int | None) -> list[list[list[int]]]:
            """Positions of the document that are left when the answer begins."""
            rid = llm.submit(
                document + question, greedy(eviction="snapkv", kv_budget=60, context_tokens=context)
            )
            while True:
                llm.step()
                [sequence] = llm._engine.scheduler.running
                if sequence.num_output_tokens == 2:
                    break
            pool, tables = llm._engine._executor.cache.pool, llm._engine._executor.cache.tables
            rows = []
            for layer in range(LAYERS):
                length = tables.host_lengths[sequence.kv.slot, layer]
                blocks = tables.lookup(
                    torch.tensor([sequence.kv.slot]), layer, -(-int(length.max()) // BLOCK)
                )[0]
                positions = pool.position[blocks.long()].flatten(1)
                rows.append(
                    [sorted(p for p in positions[h, : length[h]].tolist() if p < 150) for h in range(HEADS)]
                )
            llm.abort(rid)
            return rows

        questions = [prompt(10, 1), prompt(10, 2)]
        assert first_kept(questions[0], 150) == first_kept(questions[1], 150)
        assert first_kept(questions[0], None) != first_kept(questions[1], None), "query-aware, it does"

    def test_the_question_is_kept_whole(self, llm: LLM) -> None:
        [output] = llm.generate(
            prompt(200), greedy(eviction="recent", kv_budget=40, context_tokens=150, max_tokens=2)
        )
        report = output.outputs[0].eviction
        assert report is not None
        assert report.rounds == 1
        assert report.kept == ((91, 91),) * LAYERS, (
            "40 of the context, 50 of the question, a token of the answer"
        )

    def test_marked_spans_survive(self, llm: LLM) -> None:
        policy = EvictionPolicy(
            Recency(), AdaptiveRows(), Keep(recent=2), When(after_prefill=True, decode_every=1)
        )
        rid = llm.submit(
            prompt(100), greedy(eviction=policy, kv_budget=30, protect=[(3, 9), (50, 52)], max_tokens=40)
        )
        pool, cache = llm._engine._executor.cache.pool, ledger_of(llm)
        seen = 0
        while llm.has_unfinished:
            llm.step()
            for sequence in llm._engine.scheduler.running:
                if sequence.rounds.rounds:
                    seen += 1
                    blocks = cache.blocks_of(sequence.kv.slot)
                    left = pool.position[blocks].flatten().tolist()
                    for position in (3, 4, 5, 6, 7, 8, 50, 51):
                        assert left.count(position) >= ROWS
        assert seen > 30, rid
