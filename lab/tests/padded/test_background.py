"""Prefill in the background: the batch continues, and no query's tokens, memory or errors become another's."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, build
from hypothesis import given, settings, strategies as st
from padded_models import PROMPTS, Case, case, prompt

from winnow.engine.requests.new_request import NewRequest
from winnow.errors import ConfigError, UnsupportedModelError
from winnow.sampling import SamplingParams
from winnow_lab.padded import background, executor
from winnow_lab.padded.build import PaddedEngine
from winnow_lab.padded.prefill import Prefilled, prefill


@cache
def llama() -> Case:
    return case("llama-gqa")


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


class Turnstile:
    """Holds each prefill in the background back until it is waited for, or so many steps have been taken."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.holds: Iterator[int] = iter([])
        """Steps, for one prefill after the other; then for ever."""
        self.failures: Iterator[Exception] = iter([])
        """What the next prefills in the background fail with, once they are let through."""
        self._steps = 0
        self._opened = self._waited_for = False
        self._changed = threading.Condition()
        waits = background.Underway.wait

        def wait(underway: background.Underway) -> None:
            self._wait_for(True)
            waits(underway)
            self._wait_for(False)

        patch.setattr(background.Underway, "wait", wait)
        patch.setattr(executor, "prefill", self._prefill)

    def step(self) -> None:
        with self._changed:
            self._steps += 1
            self._changed.notify_all()

    def open(self) -> None:
        with self._changed:
            self._opened = True
            self._changed.notify_all()

    def _wait_for(self, waited_for: bool) -> None:
        with self._changed:
            self._waited_for = waited_for
            self._changed.notify_all()

    def _prefill(self, *args: Any) -> Prefilled:
        if threading.current_thread() is threading.main_thread():
            return prefill(*args)
        stopped: Callable[[], bool] = args[-1]
        with self._changed:
            until = self._steps + next(self.holds, 10**5)
            while not (self._steps >= until or self._opened or self._waited_for or stopped()):
                self._changed.wait(0.01)
        for failure in self.failures:
            raise failure
        return prefill(*args)


@pytest.fixture
def turnstile(monkeypatch: pytest.MonkeyPatch) -> Turnstile:
    return Turnstile(monkeypatch)


def underway(max_num_seqs: int = 3, later: tuple[int, ...] = (4,), **options: Any) -> PaddedEngine:
    """An engine in which "first" runs, and queries "0", "1", ... of these lengths are under way."""
    engine = llama().open("embedding", overlap_prefill=True, max_num_seqs=max_num_seqs, **options)
    engine.add(NewRequest("first", None, PROMPTS[3], greedy(16)))
    engine.step()
    for index, length in enumerate(later):
        engine.add(NewRequest(str(index), None, prompt(length, index), greedy(8)))
    engine.step()
    engine.check_integrity()
    assert [s.request.request_id for s in engine._executor._computing] == [str(i) for i in range(len(later))]
    return engine


def finish(engine: PaddedEngine) -> dict[str, list[int]]:
    answers = {}
    while engine.has_unfinished:
        outputs = engine.step()
        assert outputs, "a step that brings nothing is a step in vain"
        answers |= {o.request_id: o.outputs[0].token_ids for o in outputs if o.finished}
        engine.check_integrity()
    assert engine.stats().kv_bytes_used == 0
    return answers


def alone(tokens: list[int], max_tokens: int) -> list[int]:
    engine = llama().open("static")
    engine.add(NewRequest("", None, tokens, greedy(max_tokens)))
    return finish(engine)[""]


def test_the_batch_goes_on_meanwhile(turnstile: Turnstile) -> None:
    engine = underway()
    passes = engine.stats().counters.passes
    for _ in range(5):
        assert [output.request_id for output in engine.step()] == ["first"]
        engine.check_integrity()
    stats = engine.stats()
    assert stats.counters.passes == passes + 5
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert stats.kv_bytes_used == engine._executor._batch.cache.nbytes + engine.kv_bytes(4), (
        "it counts already"
    )
    turnstile.open()
    assert finish(engine) == {"first": llama().answers[3], "0": alone(prompt(4), 8)}
    counters = engine.stats().counters
    assert counters.prefills == 2
    assert counters.overlapped_seconds > 0


def test_an_empty_batch_waits_instead_of_turning(turnstile: Turnstile) -> None:
    engine = underway()
    engine.abort("first")
    steps, before = engine.stats().num_steps, engine.stats().counters
    [output] = engine.step()
    assert output.request_id == "0"
    after = engine.stats().counters
    assert engine.stats().num_steps == steps + 1
    assert after.prefill_seconds > before.prefill_seconds
    assert after.decode_seconds == before.decode_seconds
    assert finish(engine) == {"0": alone(prompt(4), 8)}


def test_who_needs_memory_waits_and_none_is_parked_for_it(turnstile: Turnstile) -> None:
    """Three queries would outgrow the memory beside the group that is under way."""
    column_bytes = llama().open("static")._executor._budget.column_bytes
    engine = llama().open(
        "embedding", overlap_prefill=True, max_num_seqs=4, kv_memory=300 * column_bytes, admit_below=1.0
    )
    for name in ("a", "b", "c"):
        engine.add(NewRequest(name, None, prompt(5), greedy(100)))
    while engine.stats().num_running < 3:
        engine.step()
    engine.add(NewRequest("late", None, prompt(20), greedy(3)))
    waited_at = None
    while waited_at is None:
        assert engine.step()
        engine.check_integrity()
        if not engine._executor._computing:
            waited_at = engine.stats()
    # Another column for three rows beside the group's 20 would not have fit, and nothing else ends the hold.
    assert 3 * (waited_at.columns_needed + 1) + 20 * 0.5 > 300 - 20
    assert waited_at.counters.parks == 0
    answers = finish(engine)
    assert answers["late"] == alone(prompt(20), 3)
    assert answers["a"] == answers["b"] == answers["c"] == alone(prompt(5), 100)


class TestAborts:
    def test_of_all_that_is_under_way_ends_it(self, turnstile: Turnstile) -> None:
        engine = underway(later=(4, 4))
        engine.abort("0")
        assert len(engine._executor._computing) == 1
        output = engine.abort("1")
        assert output is not None and output.outputs[0].token_ids == []
        engine.check_integrity()
        assert engine.stats().kv_bytes_used == engine._executor._batch.cache.nbytes
        assert finish(engine) == {"first": llama().answers[3]}
        assert engine.stats().counters.prefills == 1

    def test_of_one_leaves_the_others(self, turnstile: Turnstile) -> None:
        engine = underway(later=(4, 4))
        engine.abort("0")
        turnstile.open()
        assert finish(engine) == {"first": llama().answers[3], "1": alone(prompt(4, 1), 8)}

    def test_of_everything(self, turnstile: Turnstile) -> None:
        engine = underway()
        for name in ("first", "0"):
            engine.abort(name)
        assert not engine.has_unfinished
        assert engine.stats().kv_bytes_used == 0


class TestFailures:
    def test_are_those_of_the_group_alone(self, turnstile: Turnstile) -> None:
        turnstile.holds = iter([2])
        turnstile.failures = iter([RuntimeError("out of memory")])
        engine = underway(later=(4, 4))
        held = engine._executor._batch.cache
        turnstile.open()
        with pytest.raises(RuntimeError, match="out of memory"):
            for _ in range(100):
                engine.step()
        engine.check_integrity()
        assert engine._executor._batch.cache is held, "the batch was left alone"
        assert len(engine._executor._queue.waiting) == 2
        assert finish(engine) == {
            "first": llama().answers[3],
            "0": alone(prompt(4, 0), 8),
            "1": alone(prompt(4, 1), 8),
        }

    def test_of_a_pass_leave_the_group_alone(
        self, turnstile: Turnstile, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = underway()
        with monkeypatch.context() as patch:
            patch.setattr(engine._executor._batch, "decode", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.step()
        engine.check_integrity()
        assert len(engine._executor._computing) == 1
        assert finish(engine) == {"first": llama().answers[3], "0": alone(prompt(4), 8)}
        assert engine.stats().counters.prefills == 3, (
            "the first one's, again the first one's, and the group's"
        )


def test_the_more_urgent_that_arrives_meanwhile_is_next(turnstile: Turnstile) -> None:
    engine = underway(max_num_seqs=2)
    engine.add(NewRequest("urgent", None, PROMPTS[2], greedy(3), priority=1))
    assert engine._executor._underway is not None
    engine._executor._underway.wait()
    turnstile.open()
    answers = finish(engine)
    assert list(answers).index("urgent") < list(answers).index("0"), "which gave way"
    assert engine.stats().counters.prefills == 3, "what was computed meanwhile is kept"
    assert answers == {
        "urgent": llama().answers[2][:3],
        "first": llama().answers[3],
        "0": alone(prompt(4), 8),
    }


def test_an_engine_let_go_stops_its_thread(turnstile: Turnstile) -> None:
    before = set(threading.enumerate())
    engine = underway()
    [thread] = set(threading.enumerate()) - before
    del engine
    thread.join(30)
    assert not thread.is_alive()


@settings(max_examples=6)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(0, 12), st.integers(0, 1)),
        min_size=4,
        max_size=8,
    ),
    holds=st.lists(st.integers(0, 9), min_size=12, max_size=12),
    columns=st.sampled_from([150, 400, 10_000]),
    samples=st.integers(1, 2),
)
def test_outputs_do_not_depend_on_who_is_faster(
    arrivals: list[tuple[int, int, int]], holds: list[int], columns: int, samples: int
) -> None:
    """All of an answer, by prefills held back for random times and by none in the background."""
    params = SamplingParams(
        n=samples, temperature=0.7, seed=1, max_tokens=7, ignore_eos=True, prompt_logprobs=0, logprobs=0
    )
    found = []
    with pytest.MonkeyPatch.context() as patch:
        turnstile = Turnstile(patch)
        turnstile.holds = iter(holds)
        for overlap in (True, False):
            memory = columns * llama().open("static")._executor._budget.column_bytes
            engine = llama().open("embedding", overlap_prefill=overlap, max_num_seqs=3, kv_memory=memory)
            pending = sorted(enumerate(arrivals), key=lambda item: item[1][1])
            answers, steps = {}, Counter[str]()
            while pending or engine.has_unfinished:
                while pending and pending[0][1][1] <= steps["all"]:
                    index, (which, _, priority) = pending.pop(0)
                    engine.add(NewRequest(str(index), None, PROMPTS[which], params, priority=priority))
                for output in engine.step():
                    answers[output.request_id] = [
                        [c.token_ids for c in output.outputs],
                        len(output.prompt_logprobs or ()),
                    ]
                steps["all"] += 1
                turnstile.step()
                engine.check_integrity()
            found.append(answers)
    assert found[0] == found[1]


class TestConfiguration:
    def test_only_where_groups_are_embedded(self) -> None:
        with pytest.raises(ConfigError, match="overlap_prefill needs mode=embedding, got on and mode=static"):
            llama().open("static", overlap_prefill=True)

    def test_left_out_it_is_off_on_cpu(self) -> None:
        assert llama().open("embedding")._executor._background is None

    def test_a_model_that_passes_change_is_refused(self) -> None:
        config = type(ARCHITECTURES["llama-gqa"]).from_dict(ARCHITECTURES["llama-gqa"].to_dict())
        config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
        model = build(config)
        with pytest.raises(UnsupportedModelError, match="overlap_prefill cannot be on for LlamaForCausalLM"):
            Case(model).open("embedding", overlap_prefill=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-gpu")
def test_streams_side_by_side_give_the_same_tokens() -> None:
    """Prompts long enough for passes of the batch to run while they are computed; parked and joined many times."""
    model = build(ARCHITECTURES["llama-gqa"]).to("cuda")
    assert Case(model).open("embedding")._executor._background is not None, "left out it is on"
    found = []
    for overlap in (True, False):
        engine = Case(model).open(
            "embedding",
            overlap_prefill=overlap,
            max_num_seqs=4,
            prefill_chunk=16,
            kv_memory=400 * llama().open("static")._executor._budget.column_bytes,
        )
        for index in range(60):
            engine.add(
                NewRequest(
                    str(index), None, prompt(1 + 37 * index % 110, index), greedy(30), priority=index % 3
                )
            )
        found.append(finish(engine))
    assert found[0] == found[1]
