"""bAbI: stories cut where their questions stand, worked examples, malformed files."""

from pathlib import Path
from typing import Any

import pytest
from plain_settings import plain_settings

from winnow.errors import DatasetError
from winnow_lab.evaluate.sample import Sample
from winnow_lab.tasks.babi import BABI
from winnow_lab.tasks.stories import Story, StoryQuestion, read_stories

TEST, TRAIN = "qa1_single-supporting-fact_test.txt", "qa1_single-supporting-fact_train.txt"
STORIES = """1 Mary moved to the hall.
2 Where is Mary? \thall\t1
3 John went home.
4 Where is John? \thome\t3
5 Where is Mary?\thall\t1
6 Is John home?\tyes\t3
1 Ann sleeps.
2 What does Ann do?\tsleep\t1
"""


def made(directory: Path | None = None, **options: Any) -> list[Sample]:
    return BABI.samples(plain_settings(data=directory, **{"categories": ("qa1",), "shots": 0, **options}))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / TEST).write_text(STORIES)
    (tmp_path / TRAIN).write_text("1 Bob ran.\n2 Who ran?\tBob\t1\n3 Bob sat.\n4 Who sat?\tBob\t3\n")
    return tmp_path


def test_stories_know_what_was_told_before_each_question(directory: Path) -> None:
    first, second = read_stories(directory / TEST)
    assert first.facts == ("Mary moved to the hall.", "John went home.")
    assert [(q.text, q.answer, q.known) for q in first.questions] == [
        ("Where is Mary?", "hall", 1),
        ("Where is John?", "home", 2),
        ("Where is Mary?", "hall", 2),
        ("Is John home?", "yes", 2),
    ]
    assert second == Story(("Ann sleeps.",), (StoryQuestion("What does Ann do?", "sleep", 1),))


def test_a_question_sees_the_story_up_to_itself(directory: Path) -> None:
    samples = made(directory)
    assert [sample.name for sample in samples] == ["qa1/1/1", "qa1/1/2", "qa1/1/3", "qa1/1/4", "qa1/2/1"]
    assert samples[0].context + samples[0].questions[0].text == (
        "Mary moved to the hall.\nQuestion: Where is Mary?\nAnswer:"
    )
    assert samples[2].context == samples[1].context == "Mary moved to the hall.\nJohn went home."
    assert all(sample.questions[0].stop == ("\n",) for sample in samples)


def test_questions_of_the_same_facts_share_a_context(directory: Path) -> None:
    samples = made(directory, questions=2)
    assert [len(sample.questions) for sample in samples] == [1, 2, 1, 1]
    assert [q.references for q in samples[1].questions] == [("home",), ("hall",)]


def test_worked_examples_come_from_the_train_split(directory: Path) -> None:
    for sample in made(directory, shots=1):
        assert sample.context.startswith("Bob ran.\nQuestion: Who ran?\nAnswer: Bob\n\n")
    (directory / TRAIN).unlink()
    assert len(made(directory)) == 5
    with pytest.raises(DatasetError, match=f"no file {TRAIN} .* published by the project bAbI"):
        made(directory, shots=1)


def test_samples_are_drawn_by_the_seed(directory: Path) -> None:
    assert len(made(directory, samples=2)) == 2
    assert made(directory, samples=2) == made(directory, samples=2)
    assert len({tuple(s.name for s in made(directory, samples=2, seed=seed)) for seed in range(9)}) > 1


def test_every_kind_of_question_ships() -> None:
    samples = BABI.samples(plain_settings())
    assert len({sample.name for sample in samples}) == len(samples)
    for category in BABI.categories:
        own = [sample for sample in samples if sample.category == category]
        assert 50 <= len(own) < 60
        for sample in own:
            assert sample.context.count("Answer: ") == 2
            assert "\t" not in sample.context + sample.questions[0].text


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("1 Mary moved.\n3 Mary slept.\n", 2, "expected fact or question 2"),
        ("1 Mary moved.\n\n2 Where?\tx\t1\n", 2, "expected fact or question 2"),
        ("2 Mary moved.\n", 1, "expected fact or question 1"),
        ("1 Mary moved.\n2 Where is Mary?\t\t1\n", 2, "its answer behind a tab"),
        ("1 Where is Mary?\thall\t1\n", 1, "expected facts before the question"),
        ("Mary moved.\n", 1, "expected fact or question 1"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, text: str, line: int, reason: str) -> None:
    (tmp_path / TEST).write_text(text)
    with pytest.raises(DatasetError) as error:
        read_stories(tmp_path / TEST)
    assert str(error.value).startswith(f"{tmp_path / TEST}, line {line}: ")
    assert reason in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=f"no file {TEST} .* published by the project bAbI"):
        made(tmp_path)
