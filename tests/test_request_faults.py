"""What goes wrong inside the engine over one request, such as in a tokenizer's code, is that request's alone."""

from typing import Any

import pytest

from winnow import LLM, SamplingParams
from winnow.cache import Ledger
from winnow.engine.admission import Admission, Admitted
from winnow.engine.requests.request_table import OutputState
from winnow.errors import InvalidRequestError
from winnow.outputs import RequestOutput
from winnow.sampling import TextStream, logprobs as sampling_logprobs

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
HEALTHY = ["The boat left", "Twelve men", "Rain fell on"]
FAULTY = "Nobody knew"


def open_llm(**options: Any) -> LLM:
    return LLM(**{"kv_memory": "8MiB", "max_num_seqs": 4, "max_model_len": 256} | options)


def parts(outputs: list[RequestOutput]) -> list[tuple[str, list[int], str | None]]:
    return [(a.text, a.token_ids, a.finish_reason) for output in outputs for a in output.outputs]


@pytest.mark.parametrize("method", ["push", "finish"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_detokenizer_that_raises(
    engine_name: str, method: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(n=n, temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    with open_llm(engine=engine_name) as llm:
        expected = llm.generate([*HEALTHY, FAULTY], params)
        faulty = llm.tokenizer(FAULTY)["input_ids"]
        create, sound = TextStream.__init__, getattr(TextStream, method)
        pushed: dict[TextStream, int] = {}

        def watch(self: TextStream, tokenizer: Any, params: Any, prompt: Any = ()) -> None:
            create(self, tokenizer, params, prompt)
            if list(prompt) == faulty:
                pushed[self] = 0

        def raises(self: TextStream, *args: Any, **named: Any) -> None:
            if self in pushed:
                pushed[self] += 1
                if method == "finish" or pushed[self] == 3:
                    raise UnicodeError("no such\ncharacter")
            sound(self, *args, **named)

        monkeypatch.setattr(TextStream, "__init__", watch)
        monkeypatch.setattr(TextStream, method, raises)
        outputs = llm.generate([HEALTHY[0], FAULTY, *HEALTHY[1:]], params)
        assert parts([outputs[0], *outputs[2:]]) == parts(expected[:3])
        failed = outputs[1]
        assert failed.finished and failed.error == "UnicodeError: no such character"
        kept = 2 if method == "push" else 6
        for answer, whole in zip(failed.outputs, expected[3].outputs, strict=True):
            assert answer.finish_reason == "error"
            assert answer.token_ids == whole.token_ids[:kept]
            assert answer.logprobs is not None and len(answer.logprobs) == kept
            assert whole.text.startswith(answer.text)
        assert not llm.has_unfinished
        llm.check_integrity()
        monkeypatch.undo()
        assert parts(llm.generate([FAULTY], params)) == parts(expected[3:])


def test_prompt_logprobs_whose_texts_raise(engine_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=0)
    with open_llm(engine=engine_name) as llm:
        expected = llm.generate(HEALTHY, GREEDY)
        decode = sampling_logprobs.decode_logprobs

        def raises(*args: Any, **named: Any) -> Any:
            if "first" not in named:  # of answers it says whether a token is their first
                raise KeyError(17)
            return decode(*args, **named)

        monkeypatch.setattr("winnow.engine.requests.request_table.decode_logprobs", raises)
        names = [llm.submit(prompt, GREEDY, final_only=True) for prompt in HEALTHY]
        names.append(llm.submit(FAULTY, params, final_only=True))
        finished: dict[str, RequestOutput] = {}
        while llm.has_unfinished:
            finished |= {output.request_id: output for output in llm.step()}
        assert parts([finished[name] for name in names[:3]]) == parts(expected)
        failed = finished[names[3]]
        assert failed.error == "KeyError: 17"
        assert failed.outputs[0].token_ids == []
        llm.check_integrity()


def test_an_answer_that_cannot_begin_leaves_nothing_behind(
    engine_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*args: Any) -> None:
        raise KeyError(17)

    with open_llm(engine=engine_name) as llm:
        running = llm.submit(HEALTHY[0], GREEDY)
        with monkeypatch.context() as patched:
            patched.setattr(OutputState, "__init__", raises)
            with pytest.raises(KeyError):
                llm.submit(FAULTY, GREEDY, request_id="a")
        assert llm.abort("a") is None
        assert llm.submit(HEALTHY[1], GREEDY, request_id="a") == "a"
        finished = set()
        while llm.has_unfinished:
            finished |= {output.request_id for output in llm.step() if output.finished}
        assert finished == {running, "a"}


def test_what_was_admitted_and_fits_nowhere_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admission refuses it; here that is switched off."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with open_llm(kv_memory="2MiB", max_model_len=2048) as llm:
        room = llm._engine.scheduler.ledger
        assert isinstance(room, Ledger) and room.capacity < 1000
        expected = llm.generate(HEALTHY, params)
        monkeypatch.setattr(
            Admission, "admit", lambda self, tokens, params, tenant, **_: Admitted(4, (None,), None)
        )
        outputs = llm.generate([HEALTHY[0], [5] * 1500, *HEALTHY[1:]], params)
        assert parts([outputs[0], *outputs[2:]]) == parts(expected)
        [error] = [output.error for output in outputs if output.error is not None]
        assert error.startswith("kv_memory is too small for this request alone: with 1500 tokens it needs ")
        assert parts([outputs[1]]) == [("", [], "error")]
        llm.check_integrity()


def test_half_a_surrogate_pair(engine_name: str) -> None:
    half, named = "a\ud800", "whole characters, got half a surrogate pair"
    with open_llm(engine=engine_name) as llm:
        expected = llm.generate(HEALTHY, GREEDY)
        chat = [{"role": "user", "content": half}]
        for call in (
            lambda: llm.generate([*HEALTHY, half], GREEDY),
            lambda: llm.chat(chat, GREEDY),
            lambda: llm.submit({"prompt": half}, GREEDY),
            lambda: llm.submit_chat(chat, GREEDY),
            lambda: next(iter(llm.stream(half, GREEDY))),
        ):
            with pytest.raises(InvalidRequestError, match=named):
                call()
        if engine_name == "paged":  # a name is any text, and its tenant's prefixes are found by it
            llm.submit("The", GREEDY, tenant=half)
            while llm.has_unfinished:
                assert all(each.error is None for each in llm.step())
        assert parts(llm.generate(HEALTHY, GREEDY)) == parts(expected)
