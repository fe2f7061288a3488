"""GSM8K: prompts as lm-evaluation-harness makes them, and data that is wrong."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from winnow.errors import DatasetError, EvaluationError
from winnow_lab.evaluate.metrics import score
from winnow_lab.evaluate.tasks.task import TaskSettings
from winnow_lab.tasks.shots import GSM8K, GSM8K_FLEXIBLE

SETTINGS = TaskSettings(lambda text: len(text) // 4, lambda text, most: text, 8192)


def write(directory: Path, name: str, rows: list[dict[str, str]]) -> None:
    (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, count in (("train", 2), ("test", 5)):
        rows = [
            {"question": f"{name} {number}?", "answer": f"So {number}.\n#### {number}"}
            for number in range(count)
        ]
        write(tmp_path, f"{name}.jsonl", rows)
    return tmp_path


def test_the_prompt(data: Path) -> None:
    samples = GSM8K.samples(replace(SETTINGS, data=data, shots=2))
    assert [sample.name for sample in samples] == [f"gsm8k/{number}" for number in range(1, 6)]
    shots = [f"Question: train {number}?\nAnswer: So {number}.\n#### {number}\n\n" for number in (0, 1)]
    for number, sample in enumerate(samples):
        (question,) = sample.questions
        assert sample.context in (shots[0] + shots[1], shots[1] + shots[0])
        assert question.text == f"Question: test {number}?\nAnswer:"
        assert question.references == (f"So {number}.\n#### {number}",)
        assert (question.metric, question.max_tokens) == ("gsm8k-strict", 256)
        assert question.stop == ("Question:", "</s>", "<|im_end|>")
    assert {sample.context for sample in samples} == {shots[0] + shots[1], shots[1] + shots[0]}


def test_the_sample_that_ships() -> None:
    samples = GSM8K.samples(SETTINGS)
    assert len(samples) == 64
    for sample, other in zip(samples, GSM8K_FLEXIBLE.samples(SETTINGS), strict=True):
        (strict,), (flexible,) = sample.questions, other.questions
        assert sample.context.count("Question: ") == sample.context.count("\nAnswer: ") == 5
        assert sample.context == other.context
        number = strict.references[0].split("#### ")[1]
        assert score(strict.metric, f"It is\n#### {number}.", strict.references) == 1.0
        assert score(flexible.metric, f"It is ${number}.", flexible.references) == 1.0
        assert score(flexible.metric, f"It is ${number} and 1 more.", flexible.references) in (
            0.0,
            number == "1",
        )


def test_few_samples_are_some_of_all() -> None:
    every = GSM8K.samples(SETTINGS)
    some = GSM8K.samples(replace(SETTINGS, samples=4))
    assert len(some) == 4
    assert all(sample in every for sample in some)
    assert some != GSM8K.samples(replace(SETTINGS, samples=4, seed=1))


def test_questions_may_share_examples(data: Path) -> None:
    samples = GSM8K.samples(replace(SETTINGS, data=data, shots=1, questions=2))
    assert [len(sample.questions) for sample in samples] == [2, 2, 1]
    asked = [question.text for sample in samples for question in sample.questions]
    assert asked == [f"Question: test {number}?\nAnswer:" for number in range(5)]
    assert len(GSM8K.samples(replace(SETTINGS, data=data, shots=1, questions=2, samples=2))) == 2


def test_no_examples(data: Path) -> None:
    assert all(sample.context == "" for sample in GSM8K.samples(replace(SETTINGS, data=data, shots=0)))


@pytest.mark.parametrize("shots", [-1, 3])
def test_more_examples_than_there_are(data: Path, shots: int) -> None:
    with pytest.raises(EvaluationError, match=f"--shots must lie between 0 and 2.*got {shots}"):
        GSM8K.samples(replace(SETTINGS, data=data, shots=shots))


def test_a_prompt_too_long_for_the_model() -> None:
    with pytest.raises(EvaluationError, match=r"gsm8k/\d+ has \d+ tokens.*256.*600.*fewer --shots"):
        GSM8K.samples(replace(SETTINGS, max_model_len=600))


@pytest.mark.parametrize("name", ["test.jsonl", "train.jsonl"])
def test_a_missing_file_is_named(data: Path, name: str) -> None:
    (data / name).unlink()
    with pytest.raises(DatasetError, match=name):
        GSM8K.samples(replace(SETTINGS, data=data, shots=0))


@pytest.mark.parametrize("name", ["test.jsonl", "train.jsonl"])
def test_a_bad_row_names_file_and_line(data: Path, name: str) -> None:
    write(data, name, [{"question": "a", "answer": "#### 1"}, {"question": "a"}])
    with pytest.raises(DatasetError, match=rf"{name}, line 2: .*'answer'"):
        GSM8K.samples(
            replace(SETTINGS, data=data, shots=len((data / "train.jsonl").read_text().splitlines()))
        )
