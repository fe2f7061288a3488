"""Needles: where they lie, and how they are asked for."""

import re
from typing import Any

import pytest

from winnow.errors import EvaluationError
from winnow_lab.evaluate.sample import Sample
from winnow_lab.evaluate.tasks import TaskSettings
from winnow_lab.evaluate.tasks.in_prose import DEPTHS, NEEDLE, NEEDLE_CHAT, NeedleTask


def count_words(text: str) -> int:
    return len(text.split())


def made(task: NeedleTask = NEEDLE, **options: Any) -> list[Sample]:
    settings = TaskSettings(count_words, lambda text, most: text, max_model_len=10_000, **options)
    return task.samples(settings)


def test_the_needle_lies_at_its_depth() -> None:
    samples = made(tokens=(1000, 4000), samples=2)
    assert len(samples) == 2 * len(DEPTHS) * 2
    assert len({sample.name for sample in samples}) == len(samples)
    for sample in samples:
        depth = int(sample.category.removeprefix("depth-"))
        [question] = sample.questions
        [key] = question.references
        before, after = re.split(rf"The pass key of \w+ is {key}\. ?", sample.context)
        share = 100 * len(before) / (len(before) + len(after))
        # Needles stand between sentences, the longest of which are some 300 letters.
        assert share == pytest.approx(depth, abs=100 * 300 / len(sample.context))
        assert sample.length is not None
        taken = count_words(sample.context + question.text)
        assert 0.9 * sample.length < taken <= sample.length


def test_the_name_in_the_question_is_the_needle_s() -> None:
    for task in (NEEDLE, NEEDLE_CHAT):
        for sample in made(task, samples=1, questions=3, categories=("depth-30",)):
            assert sample.chat == task.chat
            assert len(sample.questions) == 3
            for question in sample.questions:
                found = re.search(r"What is the pass key of (\w+)\?", question.text)
                assert found is not None
                assert f"The pass key of {found[1]} is {question.references[0]}." in sample.context


def test_settings_that_do_not_suit() -> None:
    with pytest.raises(EvaluationError, match=r"--tokens 20000: the model takes 10000 at most"):
        made(tokens=(20_000,))
    with pytest.raises(EvaluationError, match=r"--tokens 20 leaves no room for prose"):
        made(tokens=(20,))
    with pytest.raises(EvaluationError, match=r"--questions must be at most \d+ for needles, got 5000"):
        made(questions=5000)
