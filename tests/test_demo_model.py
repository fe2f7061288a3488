"""The model that ships: it loads, it chats, and it really looks things up."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from winnow import LLM, SamplingParams
from winnow.batch.metrics import score

PROMPTS = Path(__file__).parent.parent / "examples" / "demo" / "prompts.jsonl"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
STORY = (
    "The road to the harbour was empty all morning. The instrument of Philip is piano. Nobody opened the shop before "
    "noon, and the lamps were lit early. The birth month of Eva is March. A dog slept under the bridge."
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(kv_memory="64MiB") as llm:
        yield llm


def test_it_looks_up_what_the_prompt_says(llm: LLM) -> None:
    prompts = [
        f"{STORY}\nQuestion: What is the {what}?\nAnswer:"
        for what in ("instrument of Philip", "birth month of Eva")
    ]
    texts = [output.outputs[0].text.strip() for output in llm.generate(prompts, GREEDY)]
    assert texts == ["piano", "March"]


def test_an_answer_ends_by_itself(llm: LLM) -> None:
    [output] = llm.generate(f"{STORY}\nQuestion: What is the instrument of Philip?\nAnswer:", GREEDY)
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason is None


def test_chat_asks_twice_about_one_story(llm: LLM) -> None:
    messages = [
        {"role": "system", "content": STORY},
        {"role": "user", "content": "What is the instrument of Philip?"},
        {"role": "assistant", "content": "piano"},
        {"role": "user", "content": "What is the birth month of Eva?"},
    ]
    [output] = llm.chat(messages, GREEDY)
    assert output.outputs[0].text.strip() == "March"


def test_text_streams_piece_by_piece_and_stops_at_a_string_across_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    [whole] = llm.generate("It was a dark night and", params)
    text = whole.outputs[0].text
    stop = text[10:15]  # cut anywhere, most likely inside tokens
    end = text.index(stop)
    seen = [
        o.outputs[0].text
        for o in llm.stream(
            "It was a dark night and",
            SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=stop),
        )
    ]
    assert seen[-1] == text[:end]
    assert all(later.startswith(earlier) for earlier, later in pairwise(seen))
    assert len(seen) < 40


@pytest.mark.slow
def test_it_retrieves_over_long_prompts(llm: LLM) -> None:
    """The two shortest of each category of the demo's prompts, about 1,000 tokens each."""
    lines = sorted(
        (json.loads(line) for line in PROMPTS.read_text().splitlines()), key=lambda line: len(line["prompt"])
    )
    chosen = [
        line
        for category in sorted({x["category"] for x in lines})
        for line in [x for x in lines if x["category"] == category][:2]
    ]
    params = [SamplingParams(temperature=0.0, max_tokens=line["max_tokens"]) for line in chosen]
    outputs = llm.generate([line["prompt"] for line in chosen], params)
    scores = [
        score(x["metric"], o.outputs[0].text, [x["reference"]]) for x, o in zip(chosen, outputs, strict=True)
    ]
    assert len(chosen) >= 14
    assert sum(scores) / len(scores) >= 0.7
