"""NQ-open: closed-book questions behind worked examples."""

from pathlib import Path
from typing import Any

import pytest
from plain_settings import plain_settings

from winnow.errors import DatasetError, EvaluationError
from winnow_lab.evaluate.metrics import score
from winnow_lab.evaluate.sample import Sample
from winnow_lab.tasks.nq_open import NQ_OPEN

QUESTIONS, EXAMPLES = "NQ-open.dev.jsonl", "NQ-open.efficientqa.dev.1.1.jsonl"


def made(**options: Any) -> list[Sample]:
    return NQ_OPEN.samples(plain_settings(**options))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    lines = [f'{{"question": "who is {n}", "answer": ["N. {n}", "the {n}"]}}' for n in range(20)]
    (tmp_path / QUESTIONS).write_text("\n".join(lines))
    (tmp_path / EXAMPLES).write_text('{"question": "who was", "answer": ["A", "B"]}\n')
    return tmp_path


def test_the_prompt(directory: Path) -> None:
    sample = made(data=directory, shots=1)[3]
    (question,) = sample.questions
    assert sample.context + question.text == "Question: who was?\nAnswer: A\n\nQuestion: who is 3?\nAnswer:"
    assert question.stop == ("\n", ".", ",")
    assert question.references == ("N. 3", "the 3")
    assert score(question.metric, " n 3", question.references) == 1.0
    assert score(question.metric, " n 4", question.references) == 0.0


def test_five_examples_ship_and_none_is_asked() -> None:
    samples = made()
    assert len(samples) == len({sample.name for sample in samples}) == 500
    asked = {sample.questions[0].text for sample in samples}
    for sample in samples:
        assert sample.context.count("Question: ") == 5
        assert not any(f"{part}\nAnswer:" in asked for part in sample.context.split("\nAnswer:")[:-1])
    assert len({sample.context for sample in samples}) > 490


def test_without_examples_there_is_no_context(directory: Path) -> None:
    (directory / EXAMPLES).unlink()
    assert {sample.context for sample in made(data=directory, shots=0)} == {""}
    with pytest.raises(DatasetError, match=f"no file {EXAMPLES} .* by the project Natural Questions"):
        made(data=directory, shots=1)


def test_more_examples_than_there_are_is_refused(directory: Path) -> None:
    with pytest.raises(
        EvaluationError, match="--shots must be at most 1, the examples that there are, got 2"
    ):
        made(data=directory, shots=2)


def test_samples_are_drawn_by_the_seed() -> None:
    assert made(samples=7) == made(samples=7)
    assert len(made(samples=7)) == 7
    assert made(samples=7) != made(samples=7, seed=1)


def test_a_malformed_line_is_named(directory: Path) -> None:
    with (directory / QUESTIONS).open("a") as file:
        file.write('\n{"question": "who", "answer": []}')
    with pytest.raises(
        DatasetError, match=r"NQ-open.dev.jsonl, line 21: 'answer' must be a list of at least one"
    ):
        made(data=directory)
