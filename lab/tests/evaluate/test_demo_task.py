"""The demo model's categories as an evaluation task, in the prose that ships."""

import json
from typing import Any

import pytest

from winnow.errors import EvaluationError
from winnow_lab.checkout import ROOT
from winnow_lab.evaluate.sample import Sample
from winnow_lab.evaluate.tasks import TaskSettings
from winnow_lab.evaluate.tasks.files import shipped_sentences
from winnow_lab.evaluate.tasks.in_prose import DEMO

PROMPTS = ROOT / "examples" / "demo" / "prompts.jsonl"


def made(**options: Any) -> list[Sample]:
    def count_words(text: str) -> int:
        return len(text.split())

    return DEMO.samples(TaskSettings(count_words, lambda text, most: text, 10_000, **options))


def test_every_category_at_every_length() -> None:
    samples = made(tokens=(300, 600), samples=2)
    assert [sample.category for sample in samples[::2]] == [*DEMO.categories] * 2
    assert len({sample.name for sample in samples}) == len(samples) == 2 * 2 * len(DEMO.categories)
    for sample in samples:
        [question] = sample.questions
        words = len((sample.context + question.text).split())
        assert sample.length is not None
        assert 0.5 * sample.length < words <= sample.length
        assert question.text.startswith("\nQuestion: ")
        assert question.text.endswith("\nAnswer:")


def test_the_seed_decides_and_the_number_of_samples_does_not() -> None:
    few, many = made(samples=1), made(samples=3)
    assert few == many[::3]
    assert not {sample.context for sample in few} & {sample.context for sample in made(samples=1, seed=1)}


def test_several_questions_on_one_context() -> None:
    for sample in made(samples=1, questions=3, categories=("passkey", "code")):
        assert len({question.text for question in sample.questions}) == 3
        assert all(question.references[0] in sample.context for question in sample.questions)


def test_too_short_and_too_long() -> None:
    with pytest.raises(EvaluationError, match="--tokens 20: 12 tokens are too few for a 'single' sample"):
        made(tokens=(20,))
    with pytest.raises(EvaluationError, match="--tokens 10001: the model takes 10000 at most"):
        made(tokens=(10_001,))


def test_the_prose_is_that_of_the_sample_prompts() -> None:
    prompts = " ".join(json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines())
    sentences = shipped_sentences()
    assert len(sentences) == len(set(sentences)) > 1000
    assert all(sentence in prompts for sentence in sentences)
