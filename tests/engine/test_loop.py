"""What every engine does with a request, and what an observer of one is shown."""

from collections.abc import Iterator
from typing import Any

import pytest

from winnow import LLM, RequestOutput, SamplingParams
from winnow.engine.engine import Engine
from winnow.engine.requests.new_request import KeptKVs, NewRequest
from winnow.engine.requests.request_table import FinishReason, RequestTable
from winnow.errors import InvalidRequestError

PROMPT = [5, 6, 7, 8, 9]


def greedy(max_tokens: int = 4, n: int = 1) -> SamplingParams:
    return SamplingParams(n=n, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def open_llm(**options: Any) -> LLM:
    return LLM(**{"kv_memory": "8MiB", "max_num_seqs": 4, "max_model_len": 64} | options)


@pytest.fixture(scope="module")
def paged() -> Iterator[LLM]:
    with open_llm() as llm:
        yield llm


@pytest.fixture(scope="module")
def engine(engine_name: str) -> Iterator[Engine]:
    with open_llm(engine=engine_name) as llm:
        yield llm._engine


def finish(engine: Engine) -> list[RequestOutput]:
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
        engine.check_integrity()
    return outputs


class TestRequests:
    def test_a_step_of_an_idle_engine_does_nothing(self, engine: Engine) -> None:
        before = engine.stats()
        assert engine.step() == []
        assert engine.stats() == before

    def test_ids_are_free_again_after_the_last_output(self, engine: Engine) -> None:
        new = NewRequest("a", None, PROMPT, greedy())
        for _ in range(2):
            engine.add(new)
            with pytest.raises(InvalidRequestError, match="request_id 'a' is in use"):
                engine.add(new)
            assert finish(engine)[-1].finished
        engine.add(new)
        output = engine.abort("a")
        assert output is not None and output.finished and output.outputs[0].finish_reason == "abort"
        assert engine.abort("a") is None

    def test_all_of_it_reaches_the_request(self, engine: Engine) -> None:
        engine.add(NewRequest("a", "text", PROMPT, greedy(), 3, "somebody", final_only=True))
        request = engine.requests["a"]
        assert (request.prompt, request.priority, request.tenant) == ("text", 3, "somebody")
        assert len(finish(engine)) == 1

    def test_samples_that_wait_keep_their_place_before_later_requests(self, engine: Engine) -> None:
        engine.add(NewRequest("many", None, PROMPT, greedy(n=9)))
        engine.step()
        engine.add(NewRequest("late", None, PROMPT, greedy()))
        engine.add(NewRequest("urgent", None, PROMPT, greedy(), priority=1))
        done = [output.request_id for output in finish(engine) if output.finished]
        assert done == ["urgent", "many", "late"]

    def test_counts(self, engine: Engine) -> None:
        before = engine.stats()
        engine.add(NewRequest("a", None, PROMPT[::-1], greedy(4, n=2)))
        finish(engine)
        after = engine.stats()
        assert after.prompt_tokens - before.prompt_tokens == len(PROMPT)
        assert after.generated_tokens - before.generated_tokens == 8
        assert after.num_steps > before.num_steps


class TestInterruptions:
    @pytest.mark.parametrize("call", [0, 1, 2, 7, 11])
    def test_of_handing_out_tokens_lose_nothing(
        self, engine: Engine, call: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Requests that ended before are returned by the next step, and the others go on, with the same tokens."""
        requests = [NewRequest(str(n), None, PROMPT, greedy(n, n=2)) for n in (1, 2, 5)]

        def answers() -> dict[str, list[list[int]]]:
            for request in requests:
                engine.add(request)
            found = {}
            while engine.has_unfinished:
                try:
                    outputs = engine.step()
                except KeyboardInterrupt:
                    engine.check_integrity()
                    continue
                for output in outputs:
                    found[output.request_id] = [answer.token_ids for answer in output.outputs]
            return found

        expected = answers()
        append, calls = RequestTable.append_token, 0

        def interrupted(*args: Any) -> FinishReason | None:
            nonlocal calls
            calls += 1
            if calls == call + 1:
                raise KeyboardInterrupt
            return append(*args)

        monkeypatch.setattr(RequestTable, "append_token", interrupted)
        assert answers() == expected
        assert calls > call


class Observer:
    """Notes what it is shown; fails where it is asked to."""

    def __init__(self, fails: str | None = None) -> None:
        self.shown: list[tuple[str, KeptKVs]] = []
        self._fails = fails

    def first_token(self, kept: KeptKVs) -> None:
        self._show("first_token", kept)

    def finished(self, kept: KeptKVs) -> None:
        self._show("finished", kept)

    def _show(self, hook: str, kept: KeptKVs) -> None:
        self.shown.append((hook, kept))
        if hook == self._fails:
            raise ValueError("no such\nplot")


class TestObservers:
    def test_hooks_are_called_once_for_the_first_sample(self, paged: LLM) -> None:
        observer = Observer()
        paged._engine.add(NewRequest("a", None, PROMPT, greedy(4, n=3), observer=observer))
        finish(paged._engine)
        (first, after_prompt), (last, at_end) = observer.shown
        assert (first, last) == ("first_token", "finished")
        for kept, length in ((after_prompt, 6), (at_end, 8)):
            assert all(list(row) == list(range(length)) for layer in kept.positions for row in layer)
            assert kept.weights == [[length] * 2] * len(kept.weights)

    def test_an_answer_of_one_token_has_no_first_token_computed(self, paged: LLM) -> None:
        observer = Observer()
        paged._engine.add(NewRequest("a", None, PROMPT, greedy(1), observer=observer))
        finish(paged._engine)
        assert [hook for hook, _ in observer.shown] == ["finished"]

    @pytest.mark.parametrize("hook", ["first_token", "finished"])
    def test_one_that_raises_fails_its_request_alone(self, paged: LLM, hook: str) -> None:
        engine = paged._engine
        before = engine.stats().kv_bytes_used
        engine.add(NewRequest("sound", None, PROMPT, greedy()))
        engine.add(NewRequest("observed", None, PROMPT, greedy(), observer=Observer(hook)))
        sound, observed = sorted(
            (output for output in finish(engine) if output.finished), key=lambda o: o.request_id, reverse=True
        )
        assert sound.error is None and len(sound.outputs[0].token_ids) == 4
        assert observed.error == "ValueError: no such plot"
        assert observed.outputs[0].finish_reason == "error"
        assert engine.stats().kv_bytes_used == before
