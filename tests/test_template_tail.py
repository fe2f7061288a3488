"""The engine learns from a conversation which tokens a chat template wrote behind the question."""

from typing import Any

import pytest

from winnow import LLM, SamplingParams
from winnow.errors import InvalidRequestError
from winnow.eviction import EqualHeads, EvictionPolicy, Keep, When, Window
from winnow.prompt.chat import apply_template


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM(kv_memory="8MiB", kv_floor=1, num_accumulators=1) as llm:
        yield llm


def test_the_tail_is_what_the_template_writes_behind_the_question(llm: LLM) -> None:
    for question in ("Who came?", "a", "assistant"):
        found = apply_template(llm.tokenizer, [{"role": "user", "content": question}])
        tail = llm.tokenizer.decode(found.token_ids[len(found.token_ids) - found.template_tail :])
        assert found.text is not None and found.template_tail > 0
        assert found.text.rpartition(question)[0] or found.text.startswith(question)
        assert found.text.endswith(tail)


def test_an_answer_that_is_continued_has_no_tail(llm: LLM) -> None:
    talk = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "It was"}]
    assert apply_template(llm.tokenizer, talk).template_tail == 0


def test_kept_positions_are_those_of_a_window_placed_by_hand(llm: LLM) -> None:
    prompt, tail = list(range(10, 90)), 6
    policy = EvictionPolicy(
        Window(8, skip_template=True), EqualHeads(), Keep(recent=8), When(after_prefill=True)
    )
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True, "eviction": policy}

    def kept(ids: list[int], **more: Any) -> Any:
        return llm.inspect(ids, SamplingParams(**options, **more)).after_prompt.rows

    ours = kept(prompt, kv_budget=30 + tail, template_tail=tail)
    by_hand = kept(prompt[:-tail], kv_budget=30)
    without = kept(prompt, kv_budget=30 + tail)
    behind = list(range(len(prompt) - tail, len(prompt)))
    flat = [row for layer in ours for row in layer]
    assert [sorted(row) for row in flat] == [sorted([*row, *behind]) for layer in by_hand for row in layer]
    assert flat != [row for layer in without for row in layer], (
        "a window that ends with the template keeps others"
    )


def test_a_tail_longer_than_the_prompt_is_refused(llm: LLM) -> None:
    with pytest.raises(
        InvalidRequestError, match="template_tail must be at most the prompt's 3 tokens, got 4"
    ):
        llm.submit([5, 6, 7], SamplingParams(template_tail=4))
