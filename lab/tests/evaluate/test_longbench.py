"""LongBench: prompts as the original makes them, cut as it cuts them, and rows that are wrong."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from winnow.errors import DatasetError, EvaluationError
from winnow_lab.evaluate.metrics import score
from winnow_lab.evaluate.sample import Sample
from winnow_lab.evaluate.tasks.files import shipped
from winnow_lab.evaluate.tasks.longbench import (
    LONGBENCH,
    LONGBENCH_KV_COMPRESS,
    LONGBENCH_KV_COMPRESS_70B,
    cut_middle,
)
from winnow_lab.evaluate.tasks.task import TaskSettings

# subset, input, answers, classes, an answer, its score
ROWS: list[tuple[str, str, list[str], list[str] | None, str, float]] = [
    ("narrativeqa", "Who came?", ["The tall man", "a man"], None, "tall man.", 1.0),
    ("qasper", "Is {it} so?", ["yes"], None, "no", 0.0),
    ("multifieldqa_en", "What?", ["a red car"], None, "car", 2 / 3),
    ("hotpotqa", "Where?", ["Paris"], None, "In Paris", 2 / 3),
    ("2wikimqa", "Where?", ["Paris"], None, "Paris", 1.0),
    ("musique", "Where?", ["Paris"], None, "Rome", 0.0),
    ("gov_report", "", ["water was cold"], None, "water was warm", 2 / 3),
    ("qmsum", "What was said?", ["they agreed"], None, "", 0.0),
    ("multi_news", "", ["it rained"], None, "it rained", 1.0),
    ("trec", "Question: How?\nType:", ["Food"], ["Food", "Colour"], " Food\nColour", 1.0),
    ("triviaqa", "Question:\nWho?\nAnswer:", ["Ann", "Anna"], None, "\nAnna\nPassage:", 1.0),
    ("samsum", "Dialogue: Hi\nSummary:", ["Tom left"], None, "Tom left\nDialogue:", 1.0),
    ("passage_count", "", ["7"], None, "7 or 8", 0.5),
    ("passage_retrieval_en", "An abstract.", ["Paragraph 12"], None, "Paragraph 12", 1.0),
    ("lcc", "", ["return x"], None, "# so:\nreturn x", 1.0),
    ("repobench-p", "def f(x):\n", ["    return x"], None, "    return y", 0.92),
]
CONTEXT = "Once {upon} a time.\n\nThere was more.  "


def row(text: str, answers: list[str], classes: list[str] | None, context: str = CONTEXT) -> dict[str, Any]:
    known = {"length": 7, "dataset": "x", "language": "en", "_id": "0f"}
    return {"input": text, "context": context, "answers": answers, "all_classes": classes, **known}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, text, answers, classes, _, _ in ROWS:
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row(text, answers, classes)) + "\n")
    return tmp_path


def tokens_of(text: str) -> list[str]:
    """A stand-in for a tokenizer that loses nothing: words, each with the white space before it."""
    return re.findall(r"\s*\S+|\s+\Z", text)


def truncate(text: str, most: int) -> str:
    tokens = tokens_of(text)
    half = most // 2
    return text if len(tokens) <= most else "".join(tokens[:half] + tokens[len(tokens) - half :])


def settings(data: Path | None, most: int = 10_000) -> TaskSettings:
    return TaskSettings(lambda text: len(tokens_of(text)), truncate, most, data=data)


def by_subset(samples: list[Sample]) -> dict[str, Sample]:
    assert len({sample.name for sample in samples}) == len(samples)
    return {sample.category: sample for sample in samples}


def test_prompts_are_the_originals(data: Path) -> None:
    templates = json.loads((shipped("longbench") / "dataset2prompt.json").read_text())
    lengths = json.loads((shipped("longbench") / "dataset2maxlen.json").read_text())
    samples = by_subset(LONGBENCH.samples(settings(data)))
    assert list(samples) == [name for name, *_ in ROWS] == list(LONGBENCH.categories)
    for name, text, answers, classes, _, _ in ROWS:
        sample, (question,) = samples[name], samples[name].questions
        assert sample.context + question.text == templates[name].format(context=CONTEXT, input=text)
        assert sample.context.endswith(CONTEXT)
        assert question.references == tuple(answers)
        assert question.max_tokens == lengths[name]
        assert question.classes == tuple(classes or ())


def test_chat_templates_and_stops(data: Path) -> None:
    plain = {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}
    samples = LONGBENCH.samples(settings(data))
    assert {sample.category for sample in samples if not sample.chat} == plain
    assert {sample.category: sample.questions[0].stop for sample in samples if sample.questions[0].stop} == {
        "samsum": ("\n",)
    }
    others = LONGBENCH_KV_COMPRESS.samples(settings(data))
    assert {sample.category for sample in others if not sample.chat} == {*plain, "passage_count"}


def test_the_line_that_kv_compress_leaves_out_for_its_70b_model(data: Path) -> None:
    usual, dropped = (
        {
            sample.category: sample.context + sample.questions[0].text
            for sample in task.samples(settings(data))
        }
        for task in (LONGBENCH_KV_COMPRESS, LONGBENCH_KV_COMPRESS_70B)
    )
    # As its file of prompts has them, keys lcc-llama_3_1_70b and repobench-p-llama_3_1_70b.
    assert dropped["lcc"] == f"Please complete the code given below. \n{CONTEXT}\n"
    assert dropped["repobench-p"] == f"Please complete the code given below. \n{CONTEXT}def f(x):\n\n"
    assert {name for name in usual if usual[name] != dropped[name]} == {"lcc", "repobench-p"}


def test_worked_examples_are_other_rows(data: Path) -> None:
    rows = [
        row(f"Who is {name}?", [f"{name}!", "x"], None, f"About {name}.") for name in ("Ann", "Bob", "Cyd")
    ]
    (data / "narrativeqa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = replace(settings(data), categories=("narrativeqa",))
    template = json.loads((shipped("longbench") / "dataset2prompt.json").read_text())["narrativeqa"]
    prompts = {
        name: template.format(context=f"About {name}.", input=f"Who is {name}?")
        for name in ("Ann", "Bob", "Cyd")
    }
    worked = {name: f"{prompt} {name}!\n\n" for name, prompt in prompts.items()}
    for sample, name in zip(LONGBENCH.samples(replace(asked, shots=2)), prompts, strict=True):
        first, second = (worked[other] for other in prompts if other != name)
        shown = sample.context + sample.questions[0].text
        assert shown in (first + second + prompts[name], second + first + prompts[name])
        assert sample.questions[0].references == (f"{name}!", "x")
    with pytest.raises(EvaluationError, match="--shots must be at most 2"):
        LONGBENCH.samples(replace(asked, shots=3))


def test_each_subset_has_its_metric(data: Path) -> None:
    samples = by_subset(LONGBENCH.samples(settings(data)))
    for name, _, _, _, answer, expected in ROWS:
        question = samples[name].questions[0]
        found = score(question.metric, answer, question.references, question.classes)
        assert found == pytest.approx(expected, abs=1e-7), name


def test_long_prompts_lose_their_middle(data: Path) -> None:
    words = " ".join(f"w{number}" for number in range(1000))
    (data / "hotpotqa.jsonl").write_text(json.dumps(row("Where is it?", ["x"], None, words)))
    whole, cut = (
        LONGBENCH.samples(replace(settings(data, most), categories=("hotpotqa",)))[0]
        for most in (10_000, 500)
    )
    most = 500 - 32 - 128
    tokens = tokens_of(whole.context + whole.questions[0].text)
    kept = tokens[: most // 2] + tokens[-(most // 2) :]
    assert cut.context + cut.questions[0].text == "".join(kept)
    assert cut.questions == whole.questions


@given(
    st.text("ab \n", max_size=60),
    st.text("xy \n", min_size=1, max_size=30).filter(str.strip),
    st.integers(min_value=2, max_value=30),
)
def test_cut_middle(context: str, question: str, most: int) -> None:
    whole = truncate(context + question, most)
    cut = cut_middle(context, question, truncate, most)
    assert "".join(cut) == whole
    end = "".join(tokens_of(whole)[-(most // 2) :])
    if end.endswith(question):
        assert cut[1] == question
    else:
        # The question was cut, too. Nothing but it, and no less than what is left of its end, is the question now.
        assert "".join(question.split()).endswith("".join(cut[1].split()))
        assert len("".join(cut[1].split())) >= sum(mark in "xy" for mark in end)


def test_cut_middle_with_a_tokenizer_that_changes_white_space() -> None:
    def truncate_and_clean(text: str, most: int) -> str:
        return truncate(text, most).replace(" ,", ",").replace(" .", ".")

    context, question = cut_middle("a b . " * 50, "\n\nIs it b , or c ?\nAnswer:", truncate_and_clean, 30)
    assert question == "\n\nIs it b, or c ?\nAnswer:"
    assert context.endswith("a b. ")


def test_samples_are_drawn_from_the_rows(data: Path) -> None:
    rows = [json.dumps(row(f"Where {number}?", ["x"], None)) for number in range(20)]
    (data / "musique.jsonl").write_text("\n".join(rows))
    asked = replace(settings(data), categories=("musique",), samples=5)
    some = LONGBENCH.samples(asked)
    assert len(some) == 5
    assert some == LONGBENCH.samples(asked)
    assert some != LONGBENCH.samples(replace(asked, seed=1))
    every = LONGBENCH.samples(replace(asked, samples=None))
    assert len(every) == 20
    assert all(sample in every for sample in some)


def test_it_asks_for_data() -> None:
    with pytest.raises(EvaluationError, match="--data"):
        LONGBENCH.samples(settings(None))


def test_a_missing_subset_names_its_file(data: Path) -> None:
    (data / "musique.jsonl").unlink()
    with pytest.raises(DatasetError, match=r"musique\.jsonl"):
        LONGBENCH.samples(settings(data))


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"context": None}, "'context'"),
        ({"input": 1}, "'input'"),
        ({"answers": []}, "'answers'"),
        ({"answers": ["12"]}, "'answers'.*passage_retrieval_en.*paragraph"),
    ],
)
def test_a_bad_row_names_file_and_line(data: Path, change: dict[str, Any], shown: str) -> None:
    good = row("x", ["Paragraph 1"], None)
    lines = [json.dumps(good), "", json.dumps(good | change)]
    (data / "passage_retrieval_en.jsonl").write_text("\n".join(lines))
    with pytest.raises(DatasetError, match=rf"passage_retrieval_en\.jsonl, line 3: .*{shown}"):
        LONGBENCH.samples(replace(settings(data), categories=("passage_retrieval_en",)))


def test_classes_are_needed_where_they_count(data: Path) -> None:
    (data / "trec.jsonl").write_text(json.dumps(row("x", ["Food"], None)))
    with pytest.raises(DatasetError, match=r"trec\.jsonl, line 1: 'all_classes'"):
        LONGBENCH.samples(replace(settings(data), categories=("trec",)))


def test_a_model_too_short_for_the_answer(data: Path) -> None:
    with pytest.raises(EvaluationError, match=r"gov_report.*512.*600"):
        LONGBENCH.samples(replace(settings(data, 600), categories=("gov_report",)))
