"""Summaries behind worked examples: fields of two data sets, where examples come from, and the sample that ships."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from winnow.errors import DatasetError, EvaluationError
from winnow_lab.evaluate.metrics import score
from winnow_lab.evaluate.tasks.task import TaskSettings
from winnow_lab.papers.judged import chat_mode
from winnow_lab.tasks.shots import SUMMARIES, SUMMARIES_ROUGE_2

SETTINGS = TaskSettings(lambda text: len(text) // 4, lambda text, most: text, 8192)


def write(directory: Path, name: str, rows: list[dict[str, Any]]) -> None:
    (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_fields_of_both_data_sets(tmp_path: Path) -> None:
    write(tmp_path, "test.jsonl", [{"source": ["It rains.", "It pours."], "target": ["Rain.", "Much rain."]}])
    write(
        tmp_path, "train.jsonl", [{"article": "A cat sat.\n\nIt slept.", "highlights": "A cat .\nAsleep ."}]
    )
    [sample] = SUMMARIES.samples(replace(SETTINGS, data=tmp_path, shots=1))
    [question] = sample.questions
    assert sample.context == "Text: A cat sat. It slept.\nSummary: A cat . Asleep .\n\n"
    assert question.text == "Text: It rains. It pours.\nSummary:"
    assert question.references == ("Rain.", "Much rain.")
    assert score(question.metric, "\n Much rain.\n\nSo.", question.references) == pytest.approx(1.0)


def test_without_a_training_file_other_rows_are_the_examples(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(4)]
    write(tmp_path, "test.jsonl", [{"article": text, "highlights": f"of {text}"} for text in texts])
    samples = SUMMARIES.samples(replace(SETTINGS, data=tmp_path, shots=3))
    for sample, text in zip(samples, texts, strict=True):
        assert sample.questions[0].text == f"Text: {text}\nSummary:"
        shown = {
            line.removeprefix("Summary: of ") for line in sample.context.split("\n") if "Summary" in line
        }
        assert shown == {*texts} - {text}
    with pytest.raises(EvaluationError, match=r"--shots must lie between 0 and 3, .*got 4"):
        SUMMARIES.samples(replace(SETTINGS, data=tmp_path, shots=4))


def test_the_sample_that_ships_is_mostly_worked_examples() -> None:
    samples = SUMMARIES.samples(SETTINGS)
    assert len(samples) == 192
    for sample, other in zip(samples, SUMMARIES_ROUGE_2.samples(SETTINGS), strict=True):
        assert sample.context == other.context
        assert sample.context.count("\nSummary: ") == 4
        assert other.questions[0].metric == "first-line-rouge-2"
    shares = [len(each.context) / len(each.context + each.questions[0].text) for each in samples]
    assert sum(shares) / len(shares) > 0.75


def test_benches_ask_chat_models_in_plain_text() -> None:
    """Behind a chat template the small models continue with an example, or begin with a new line."""
    tokenizer = SimpleNamespace(chat_template="{{ messages }}")
    assert [chat_mode(task, tokenizer) for task in ("summaries", "summaries-rouge-2", "ruler")] == [
        "auto",
        "auto",
        "on",
    ]


def test_a_row_without_its_text_is_named(tmp_path: Path) -> None:
    write(tmp_path, "test.jsonl", [{"article": "a", "highlights": "b"}, {"highlights": "b"}])
    with pytest.raises(DatasetError, match=r"test\.jsonl, line 2: field 'article' is missing"):
        SUMMARIES.samples(replace(SETTINGS, data=tmp_path, shots=1))
