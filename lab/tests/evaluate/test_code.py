"""Functions to repeat: they stand in the context, and are asked for by a line that is there once."""

from typing import Any

import pytest

from winnow.errors import EvaluationError
from winnow_lab.evaluate.metrics import METRICS
from winnow_lab.evaluate.sample import Sample
from winnow_lab.evaluate.tasks import TaskSettings, load_task


def made(**options: Any) -> list[Sample]:
    settings = TaskSettings(lambda text: len(text.split()), lambda text, most: text, 10_000, **options)
    return load_task("code").samples(settings)


def test_what_is_asked_for_follows_its_line() -> None:
    samples = made(tokens=(300, 600), samples=2, questions=2)
    assert [sample.category for sample in samples] == ["line", "line", "body", "body"] * 2
    for sample in samples:
        for question in sample.questions:
            first = question.text.splitlines()[-1]
            assert sample.context.splitlines().count(first) == 1
            after = sample.context.partition(f"{first}\n")[2]
            [answer] = question.references
            assert after.lstrip().startswith(answer.lstrip())
            assert ("\n" in answer) == (sample.category == "body")
            assert METRICS[question.metric](after, (answer,), ()) == 1.0
        assert sample.length is not None
        assert 0.7 * sample.length < len((sample.context + sample.questions[0].text).split()) <= sample.length


def test_settings_that_do_not_suit() -> None:
    with pytest.raises(EvaluationError, match=r"--tokens 20: 0 of \d+ functions fit"):
        made(tokens=(20,))
    with pytest.raises(EvaluationError, match=r"--tokens 9000: (\d+) of \1 functions fit"):
        made(tokens=(9_000,))
