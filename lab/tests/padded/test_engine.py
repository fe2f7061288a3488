"""What the padded engine promises besides its tokens: memory, priorities, idle computation, columns held."""

import random
from collections.abc import Callable
from functools import cache

import pytest
import torch
from padded_models import PROMPTS, Case, case, prompt

from winnow.engine.requests.new_request import NewRequest
from winnow.errors import CapacityError
from winnow.sampling import SamplingParams
from winnow_lab.padded.build import PaddedEngine
from winnow_lab.padded.cache import PaddedCache, QueryKVs
from winnow_lab.padded.options import BENCH_PADDED_MODES, PADDED_MODES
from winnow_lab.padded.stats import PaddedStats


@cache
def llama() -> Case:
    return case("llama-gqa")


@cache
def failing_llama() -> Case:
    """A model of its own for tests that break it."""
    return case("llama-gqa")


GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


def greedy(max_tokens: int, **options: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)  # type: ignore[arg-type]


def column_bytes() -> int:
    return llama().open("static")._executor._budget.column_bytes


def finish(engine: PaddedEngine) -> dict[str, list[int]]:
    answers = {}
    while engine.has_unfinished:
        for output in engine.step():
            if output.finished:
                answers[output.request_id] = output.outputs[0].token_ids
        engine.check_integrity()
    return answers


def mixed_queries(count: int) -> list[tuple[list[int], int]]:
    """The paper's first data set (5.1), a hundredth as long: prompts and answer lengths, long-short, short-long, and
    twice short-short."""
    rng = random.Random(0)
    kinds = [("long", "short"), ("short", "long"), ("short", "short"), ("short", "short")] * (count // 4)
    rng.shuffle(kinds)
    lengths = {"long": (36, 44), "short": (1, 5)}
    return [
        (prompt(rng.randint(*lengths[asked]), seed), rng.randint(*lengths[answer]))
        for seed, (asked, answer) in enumerate(kinds)
    ]


@cache
def mixed_stats(mode: str, count: int = 24) -> PaddedStats:
    engine = llama().open(mode, max_num_seqs=8)
    for index, (tokens, max_tokens) in enumerate(mixed_queries(count)):
        engine.add(NewRequest(str(index), None, tokens, greedy(max_tokens)))
    assert len(finish(engine)) == count
    return engine.stats()


def test_steps_tell_once_of_those_that_ask_for_no_more() -> None:
    engine = llama().open("embedding", max_num_seqs=2)
    engine.add(NewRequest("quiet", None, PROMPTS[2], greedy(5), final_only=True))
    engine.add(NewRequest("all_steps", None, PROMPTS[3], greedy(5)))
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    names = [output.request_id for output in outputs]
    assert (names.count("quiet"), names.count("all_steps")) == (1, 5)
    assert all(len(output.outputs[0].token_ids) == 5 for output in outputs if output.finished)


class TestIdleComputation:
    def test_embedding_wastes_next_to_nothing(self) -> None:
        assert mixed_stats("embedding", 100).idle_share < 0.02

    def test_as_the_paper_orders_the_modes(self) -> None:
        idle = {mode: mixed_stats(mode).counters.idle for mode in PADDED_MODES}
        assert idle["embedding"] < idle["pd"] < idle["static"]
        assert idle["embedding"] < idle["shaping"]

    @pytest.mark.parametrize("mode", [*PADDED_MODES, *BENCH_PADDED_MODES])
    def test_positions_add_up(self, mode: str) -> None:
        """All tokens but each answer's last are computed once; whatever is more is counted as idle."""
        counters = mixed_stats(mode).counters
        assert counters.positions - counters.idle == sum(len(t) + n - 1 for t, n in mixed_queries(24))

    def test_fewer_passes_where_queries_join(self) -> None:
        passes = {mode: mixed_stats(mode).counters.passes for mode in PADDED_MODES}
        assert passes["embedding"] < 0.8 * passes["static"]


class TestColumns:
    @pytest.mark.parametrize("mode", ["shaping", "embedding"])
    def test_no_more_than_the_longest_needs(self, mode: str) -> None:
        stats = mixed_stats(mode)
        assert stats.column_share == 1.0
        assert stats.counters.released > 0

    def test_gaps_are_kept_as_in_the_paper(self) -> None:
        """4.1: each running query gets as many columns as the one that joins, and keeps them until its row ends."""
        engine = llama().open("shaping-gaps", max_num_seqs=2)
        engine.add(NewRequest("runs", None, prompt(4), greedy(12)))
        engine.step()
        engine.step()
        before = engine.stats().columns_held
        engine.add(NewRequest("joins", None, prompt(30), greedy(3)))
        engine.step()
        assert engine.stats().columns_held == before + 30
        engine.step()
        assert engine.stats().columns_held == before + 31
        while "joins" not in (done := {o.request_id for o in engine.step() if o.finished}):
            pass
        engine.check_integrity()
        assert engine.stats().columns_held >= before + 31, "the gap is the row's that continues"
        assert not done & {"runs"}
        mixed = mixed_stats("shaping-gaps")
        assert mixed.column_share > 1.2
        assert mixed.counters.passes == mixed_stats("shaping").counters.passes

    def test_gaps_change_no_token(self) -> None:
        found = []
        for mode in ("shaping-gaps", "embedding"):
            engine = llama().open(mode, max_num_seqs=4)
            for index, (tokens, max_tokens) in enumerate(mixed_queries(16)):
                engine.add(NewRequest(str(index), None, tokens, greedy(max_tokens)))
            found.append(finish(engine))
        assert found[0] == found[1]

    def test_run_to_completion_holds_what_is_not_needed(self) -> None:
        assert mixed_stats("static").column_share > 1.2


class TestMemory:
    # Host memory is used where one gives way to another, which those that run to completion never do.
    @pytest.mark.parametrize(
        ("mode", "park_columns"),
        [(mode, 70) for mode in (*PADDED_MODES, *BENCH_PADDED_MODES)]
        + [("embedding", None), ("embedding", 0), ("shaping", 0)],
    )
    def test_adversarial_lengths_stay_within_the_memory(self, mode: str, park_columns: int | None) -> None:
        """Short queries that grow long all at once, then one that needs nearly all of the memory; host memory for as
        much again, for a part of the parked, or for none."""
        queries = [(prompt(3, seed), 50) for seed in range(5)] + [(prompt(120), 20), (prompt(1), 1)]
        park_memory = None if park_columns is None else park_columns * column_bytes() or 1
        engine = llama().open(mode, max_num_seqs=8, kv_memory=150 * column_bytes(), park_memory=park_memory)
        roomy = llama().open(mode, max_num_seqs=8)
        for each in (engine, roomy):
            for index, (tokens, max_tokens) in enumerate(queries):
                each.add(NewRequest(str(index), None, tokens, greedy(max_tokens)))
        assert finish(engine) == finish(roomy)
        stats = engine.stats()
        assert 0 < stats.kv_bytes_peak <= 150 * column_bytes()
        assert stats.num_preemptions == stats.counters.parks
        assert roomy.stats().counters.parks == 0
        if mode == "embedding":
            assert stats.counters.parks > 0, "the memory was meant to be too small"
            assert (stats.counters.drops > 0) == (park_columns == 0), "as was that of the host"

    @pytest.mark.parametrize(("columns", "fetches"), [(10_000, 4), (40, 0)])
    def test_the_next_parked_is_copied_while_the_last_pass_of_another_runs(
        self, columns: int, fetches: int
    ) -> None:
        """As where the device has memory of its own, one query after the other having given way to a more urgent one;
        not where the device has no memory for two."""
        found = []
        for fetching in (False, True):
            engine = llama().open("embedding", max_num_seqs=1, kv_memory=columns * column_bytes())
            started: list[QueryKVs] = []

            def fetch(
                kvs: QueryKVs, started: list[QueryKVs] = started, engine: PaddedEngine = engine
            ) -> Callable[[], QueryKVs]:
                started.append(copy := kvs.map(torch.clone))
                assert engine.stats().counters.joins == 4 + len(started), "there is a row only after a pass"
                return lambda: copy

            engine._executor._queue._fetch = fetch if fetching else None
            for priority in range(5):
                engine.add(
                    NewRequest(str(priority), None, prompt(20, priority), greedy(12), priority=priority)
                )
                for _ in range(4):
                    engine.step()
            found.append(finish(engine))
            stats = engine.stats()
            assert stats.kv_bytes_peak <= columns * column_bytes() and stats.kv_bytes_used == 0
            assert stats.counters.fetches == len(started) == fetches * fetching
        assert found[0] == found[1] and len(found[0]) == 5

    def test_the_parked_find_room_in_host_memory_or_are_computed_again(self) -> None:
        """One query after the other gives way to a more urgent one; there is room for the KVs of some of them."""
        dropped = []
        for park_columns in (200, 60, 1):
            limit = park_columns * llama().open("static").kv_bytes(1)
            engine = llama().open("embedding", max_num_seqs=1, park_memory=limit)
            held = []
            for priority in range(5):
                engine.add(NewRequest(str(priority), None, PROMPTS[4], greedy(12), priority=priority))
                for _ in range(4):
                    engine.step()
                    held.append(engine.stats().parked_bytes)
                engine.check_integrity()
            answers = finish(engine)
            assert list(answers) == ["4", "3", "2", "1", "0"]
            assert all(answer == llama().answers[4][:12] for answer in answers.values())
            counters = engine.stats().counters
            assert counters.parks == 4
            assert counters.prefills == 5 + counters.drops, "the dropped one is computed again, and no other"
            assert max(held) <= limit
            dropped.append(counters.drops)
        assert dropped == [0, 2, 4]

    @pytest.mark.parametrize("mode", ["pd", "embedding"])
    def test_nothing_is_prefilled_that_cannot_be_kept(self, mode: str) -> None:
        engine = llama().open(mode, max_num_seqs=3, park_memory=1)
        for index in range(9):
            engine.add(NewRequest(str(index), None, prompt(6, index), greedy(4 + index)))
        assert len(finish(engine)) == 9
        assert engine.stats().counters.drops == 0

    def test_the_threshold_is_what_parks(self) -> None:
        """The same queries and memory; only `park_above` differs."""
        parks = []
        for park_above in (1.0, 0.4):
            engine = llama().open(
                "embedding", kv_memory=500 * column_bytes(), park_above=park_above, admit_below=0.4
            )
            for index in range(5):
                engine.add(NewRequest(str(index), None, prompt(4, index), greedy(60)))
            finish(engine)
            assert engine.stats().kv_bytes_peak <= park_above * 500 * column_bytes()
            parks.append(engine.stats().counters.parks)
        assert parks[0] == 0 < parks[1]

    def test_under_the_threshold_more_are_admitted(self) -> None:
        most = []
        for admit_below in (0.3, 0.9):
            engine = llama().open("embedding", kv_memory=600 * column_bytes(), admit_below=admit_below)
            for index in range(12):
                engine.add(NewRequest(str(index), None, prompt(5, index), greedy(10)))
            running = 0
            while engine.has_unfinished:
                engine.step()
                running = max(running, engine.stats().num_running)
            most.append(running)
        assert most[0] < most[1]

    def test_what_can_never_fit_is_refused_at_the_door(self) -> None:
        engine = llama().open("embedding", kv_memory=50 * column_bytes())
        engine.add(NewRequest("fits", None, prompt(31), greedy(20)))
        with pytest.raises(CapacityError, match=r"needs room for 51 KVs, kv_memory .* holds 50"):
            engine.add(NewRequest("no", None, prompt(31), greedy(21)))
        engine.add(NewRequest("cut", None, prompt(49), SamplingParams(max_tokens=None, temperature=0.0)))
        assert {name: len(tokens) for name, tokens in finish(engine).items()} == {"fits": 20, "cut": 2}


class TestPriorities:
    def test_the_urgent_goes_first_and_the_parked_is_embedded_again_bit_by_bit(self) -> None:
        engine = llama().open("embedding", max_num_seqs=2)
        for name in ("slow", "slower"):
            engine.add(NewRequest(name, None, PROMPTS[6], greedy(16)))
        for _ in range(5):
            engine.step()
        batch, queue = engine._executor._batch, engine._executor._queue
        victim = next(s for s in batch.running if s.request.request_id == "slower")
        before = batch.view(victim).map(torch.clone)
        engine.add(NewRequest("urgent", None, PROMPTS[3], greedy(3), priority=1))
        order = []
        while engine.has_unfinished:
            parked = victim.kv.slot is None and not victim.finished
            order += [output.request_id for output in engine.step() if output.finished]
            engine.check_integrity()
            if victim in queue:
                assert engine.stats().parked_bytes == engine.kv_bytes(before.length)
                for kept, held in zip(queue._kvs[victim].layers, before.layers, strict=True):
                    assert all(torch.equal(k, h) for k, h in zip(kept, held, strict=True))
            elif parked and victim.kv.slot is not None:
                for now, held in zip(batch.view(victim).layers, before.layers, strict=True):
                    assert all(torch.equal(n[:, : h.shape[1]], h) for n, h in zip(now, held, strict=True))
        assert order == ["urgent", "slow", "slower"]
        assert engine.stats().counters.parks == 1

    def test_equals_do_not_displace_each_other(self) -> None:
        engine = llama().open("embedding", max_num_seqs=1)
        for name in ("first", "second"):
            engine.add(NewRequest(name, None, PROMPTS[2], greedy(5), priority=3))
        assert list(finish(engine)) == ["first", "second"]
        assert engine.stats().counters.parks == 0

    def test_samples_keep_the_place_of_their_request(self) -> None:
        """Beside "runs" two rows are free, and the three sequences are prefilled before any of them has one."""
        engine = llama().open("embedding", max_num_seqs=3)
        engine.add(NewRequest("runs", None, PROMPTS[2], greedy(40)))
        engine.step()
        engine.step()
        engine.add(NewRequest("samples", None, PROMPTS[2], SamplingParams(n=2, **GREEDY)))
        engine.add(NewRequest("later", None, prompt(5, 1), greedy(2)))
        assert list(finish(engine)) == ["samples", "later", "runs"]

    @pytest.mark.parametrize("mode", ["static", "pd"])
    def test_a_batch_that_runs_to_completion_is_not_interrupted(self, mode: str) -> None:
        engine = llama().open(mode, max_num_seqs=1)
        engine.add(NewRequest("first", None, PROMPTS[2], greedy(5)))
        engine.step()
        engine.step()
        engine.add(NewRequest("urgent", None, PROMPTS[2], greedy(5), priority=1))
        assert list(finish(engine)) == ["first", "urgent"]


class TestFailures:
    @pytest.mark.parametrize(
        ("part", "mode"),
        [("second layer", mode) for mode in PADDED_MODES]
        + [(part, mode) for part in ("sampling", "exchanging tensors") for mode in ("static", "embedding")],
    )
    def test_a_step_that_fails_half_way_costs_time_and_nothing_else(
        self, mode: str, part: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In the second layer the first one's KVs are written; when tokens are sampled, all of them are."""
        model = failing_llama()
        engine = model.open(mode, max_num_seqs=3)
        for index, tokens in enumerate(PROMPTS):
            engine.add(NewRequest(str(index), None, tokens, SamplingParams(n=2, **GREEDY)))
        owner, name, failing = {
            "second layer": (model.model.model.layers[1], "forward", (1, 4, 9)),
            "sampling": (engine._executor._sampler_slots, "sample", (1, 4, 9)),
            "exchanging tensors": (PaddedCache, "resize", (1, 2, 4)),
        }[part]
        works, calls = getattr(owner, name), 0

        def fails_now_and_then(*args: object, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            if calls in failing:
                raise RuntimeError("out of memory")
            return works(*args, **kwargs)

        monkeypatch.setattr(owner, name, fails_now_and_then)
        answers: dict[str, list[list[int]]] = {}
        failures = 0
        while engine.has_unfinished:
            try:
                answers |= {
                    o.request_id: [c.token_ids for c in o.outputs] for o in engine.step() if o.finished
                }
            except RuntimeError:
                failures += 1
            engine.check_integrity()
        assert failures == 3
        assert [answers[str(index)] for index in range(len(PROMPTS))] == [[a[:8]] * 2 for a in model.answers]
