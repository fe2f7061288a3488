"""Compressed answers that are computed from all KVs too: `check`."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from winnow import LLM, SamplingParams
from winnow.engine.answer_check import AnswerCheck
from winnow.engine.requests.new_request import NewRequest
from winnow.outputs import AgreementRecord

PROMPTS = [list(range(10 + i, 310 + i)) for i in range(6)]
# A penalty, so that what is compared is what the parameters ask for.
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, repetition_penalty=1.1)
OPTIONS: dict[str, Any] = {"kv_memory": "64MiB", "kv_floor": 16, "dtype": "float32", "kv_cache_dtype": "auto"}


@pytest.fixture(scope="module")
def whole() -> list[list[int]]:
    """The full cache's answers, one by one."""
    with LLM(**OPTIONS) as llm:
        return [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """An engine that compares all it may, however long that takes."""
    monkeypatch.setattr(AnswerCheck, "due", lambda self, *_: bool(self._waiting))
    with LLM(**OPTIONS, compression=8.0, check=1.0) as llm:
        yield llm


def test_answers_are_compared_and_nothing_else_counts_it(llm: LLM, whole: list[list[int]]) -> None:
    outputs = llm.generate(PROMPTS, [replace(GREEDY, compression=c) for c in (1.02, 8, 1.02, 8, 1.02, 8)])
    same = [output.outputs[0].token_ids == own for output, own in zip(outputs, whole, strict=True)]
    assert 0 < sum(same) < len(PROMPTS), "both kinds"
    stats = llm.stats()
    others = {output.request_id for output, equal in zip(outputs, same, strict=True) if not equal}
    assert (stats.agreement.checked, stats.agreement.equal) == (len(PROMPTS), sum(same))
    assert set(stats.agreement.lines) == others
    # Of answers that differ too each token is compared, behind those before it.
    assert stats.agreement.tokens == 6 * 8 and 8 * sum(same) < stats.agreement.agreed < 6 * 8
    assert (stats.prompt_tokens, stats.generated_tokens) == (6 * 300, 6 * 8)
    assert (stats.num_running, stats.num_draft_tokens) == (0, 0)
    llm.check_integrity()
    # Neither where nothing was evicted, nor after a single prompt.
    llm.generate(PROMPTS[:2], replace(GREEDY, eviction="full"))
    llm.generate(PROMPTS[0], GREEDY)
    found = llm.stats().agreement
    assert (found.checked, found.waiting) == (len(PROMPTS), 1)
    found = llm.check_answers()
    assert (found.checked, found.waiting) == (len(PROMPTS) + 1, 0)


def test_answers_that_are_drawn_are_compared_with_the_same_draws(llm: LLM) -> None:
    """Digits by chance alone, nearly: other numbers behind the first that differs would agree in a tenth."""
    form = {"regex": "[0-9]{30}"}
    params = [
        SamplingParams(temperature=100.0, max_tokens=24, seed=i, structured_outputs=form)
        for i in range(len(PROMPTS))
    ]
    with LLM(**OPTIONS) as full:
        whole = [each.outputs[0].token_ids for each in full.generate(PROMPTS, params)]
    compressions = (1.02, 8, 1.02, 8, 1.02, 8)
    asked = [replace(each, compression=c) for each, c in zip(params, compressions, strict=True)]
    found = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, asked)]
    same = [ours == theirs for ours, theirs in zip(found, whole, strict=True)]
    assert 0 < sum(same) < len(PROMPTS), "both kinds"
    record = llm.stats().agreement
    assert (record.checked, record.equal) == (len(PROMPTS), sum(same))
    assert record.tokens == sum(map(len, found)) and record.agreed > 0.9 * record.tokens


def test_a_check_gives_way_to_a_request(llm: LLM, whole: list[list[int]]) -> None:
    compressed = llm.generate(PROMPTS[1], GREEDY)[0].outputs[0].token_ids
    assert llm.driver.call(llm.driver.engine.check_step) and not llm.has_unfinished
    name = llm.submit(PROMPTS[0], replace(GREEDY, eviction="full"), request_id="request-0")
    outputs = [output for _ in range(8) for output in llm.step()]
    assert {output.request_id for output in outputs} == {name}
    assert outputs[-1].outputs[0].token_ids == whole[0]
    found = llm.check_answers()
    assert (found.checked, found.equal) == (1, compressed == whole[1])


def test_checks_take_their_share_of_answers_and_time() -> None:
    check, busy = (
        AnswerCheck(0.05, seed=0),
        {"prefill": 10.0, "schedule": 1.0, "execute": 38.0, "output": 1.0},
    )
    check._waiting = [NewRequest("a", None, [1] * 150, SamplingParams(), expected=(2,) * 50)]
    of_check = {"schedule": 0.0, "execute": 0.5, "output": 0.0}
    # Two seconds of 40 by 0.05; what is next takes 200 tokens of 10 s / 1000.
    assert not check.due(busy, of_check, 1000) and check.due(busy, of_check, 2000)


def test_what_stands_behind_another_token_is_compared_next() -> None:
    def after(answer: tuple[int, ...], **params: Any) -> tuple[AgreementRecord, list[NewRequest]]:
        check = AnswerCheck(1.0, seed=0)
        new = NewRequest("a", None, [1, 2], SamplingParams(max_tokens=4, **params), expected=(3, 4, 5, 6))
        check.compared(new, answer, shares_prefixes=True)
        return check.record, check._waiting

    record, [rest] = after((3, 9))
    assert (record.checked, record.equal, record.tokens, record.agreed) == (1, 0, 2, 1)
    assert (rest.token_ids, rest.expected, rest.params.max_tokens) == ([1, 2, 3, 4], (5, 6), 2)
    assert rest.answered == 2
    # Nothing was written, or all was.
    assert not after(())[1] and not after((3, 4, 5, 6))[1]


def test_few_equal_answers_end_compression_of_auto() -> None:
    assert not AgreementRecord(checked=7, tokens=70, agreed=0).backs_off
    assert AgreementRecord(checked=8, tokens=80, agreed=63).backs_off
    assert not AgreementRecord(checked=8, equal=0, tokens=80, agreed=64).backs_off
    for checked, rounds in ((0, True), (8, False)):
        with LLM(**OPTIONS | {"kv_memory": "6MiB"}, compression="auto", check=0) as llm:
            record = llm.driver.engine.scheduler.decisions.agreement
            record.checked, record.tokens = checked, 10 * checked
            llm.generate(PROMPTS, GREEDY)
            assert (llm.stats().num_rounds > 0) == rounds and llm.stats().agreement.checked == checked
