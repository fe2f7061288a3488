"""BIG-Bench Hard: prompts as lm-evaluation-harness makes them, and data that is wrong."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from winnow.errors import DatasetError, EvaluationError
from winnow_lab.evaluate.metrics import score
from winnow_lab.evaluate.tasks.task import TaskSettings
from winnow_lab.tasks import DATA
from winnow_lab.tasks.bbh import BBH

SETTINGS = TaskSettings(lambda text: len(text) // 4, lambda text, most: text, 8192)
PROMPT = """A canary.
-----
Tell whether it is so.

Q: one
A: Let's think step by step.
It is. So the answer is yes.

Q: two
A: Let's think step by step.
It is not. So the answer is no."""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "bbh").mkdir()
    (tmp_path / "cot-prompts").mkdir()
    examples = [{"input": f"case {number}", "target": f"t{number}"} for number in range(5)]
    (tmp_path / "bbh/snarks.json").write_text(json.dumps({"canary": "", "examples": examples}))
    (tmp_path / "cot-prompts/snarks.txt").write_text(PROMPT)
    return tmp_path


def snarks(data: Path) -> TaskSettings:
    return replace(SETTINGS, data=data, categories=("snarks",), shots=2)


def test_the_prompt(data: Path) -> None:
    samples = BBH.samples(snarks(data))
    assert [sample.name for sample in samples] == [f"snarks/{number}" for number in range(1, 6)]
    for number, sample in enumerate(samples):
        (question,) = sample.questions
        assert sample.context == PROMPT.removeprefix("A canary.\n-----\n")
        assert question.text == f"\n\nQ: case {number}\nA: Let's think step by step.\n"
        assert question.references == (f"t{number}",)
        assert (question.metric, question.max_tokens) == ("bbh", 1024)
        assert question.stop == ("</s>", "Q", "\n\n")


def test_fewer_examples(data: Path) -> None:
    (one, *_), (none, *_) = (BBH.samples(replace(snarks(data), shots=shots)) for shots in (1, 0))
    assert one.context == PROMPT.split("-----\n")[1].split("\n\nQ: two")[0]
    assert none.context == "Tell whether it is so."


def test_the_sample_that_ships() -> None:
    samples = BBH.samples(SETTINGS)
    assert len(samples) == 27 * 8
    assert tuple(dict.fromkeys(sample.category for sample in samples)) == BBH.categories
    for sample in samples:
        (question,) = sample.questions
        assert sample.context.count("\n\nQ: ") == 3
        assert "canary" not in sample.context
        # The examples answer as the metric reads, so a model that follows them can be right.
        for shot in sample.context.split("\n\nQ: ")[1:]:
            said = shot.rsplit("the answer is ", 1)[1].removesuffix(".")
            assert score("bbh", shot.split("\nA: ", 1)[1], [said]) == 1.0
        right = f"Hence. So the answer is {question.references[0]}."
        assert score(question.metric, right, question.references) == 1.0


def test_questions_may_share_examples(data: Path) -> None:
    samples = BBH.samples(replace(snarks(data), questions=2))
    assert [len(sample.questions) for sample in samples] == [2, 2, 1]
    assert len(BBH.samples(replace(snarks(data), questions=2, samples=1))) == 1


def test_more_examples_than_there_are(data: Path) -> None:
    with pytest.raises(EvaluationError, match=r"--shots must lie between 0 and 2.*got 3"):
        BBH.samples(replace(snarks(data), shots=None))


def test_a_prompt_too_long_for_the_model() -> None:
    with pytest.raises(EvaluationError, match=r"has \d+ tokens.*1024.*1500.*fewer --shots"):
        BBH.samples(replace(SETTINGS, max_model_len=1500))


@pytest.mark.parametrize("name", ["bbh/snarks.json", "cot-prompts/snarks.txt"])
def test_a_missing_file_is_named(data: Path, name: str) -> None:
    (data / name).unlink()
    with pytest.raises(DatasetError, match=name):
        BBH.samples(snarks(data))


def test_a_bad_row_names_file_and_entry(data: Path) -> None:
    rows = [{"input": "a", "target": "b"}, {"input": "a", "target": 1}]
    (data / "bbh/snarks.json").write_text(json.dumps({"examples": rows}))
    with pytest.raises(DatasetError, match=r"snarks\.json, 'examples', entry 2: 'target'"):
        BBH.samples(snarks(data))


@pytest.mark.parametrize("prompt", ["", "no rule\n\nQ: one\nA: two", "canary\n-----\nno examples"])
def test_a_bad_prompt_is_named(data: Path, prompt: str) -> None:
    (data / "cot-prompts/snarks.txt").write_text(prompt)
    with pytest.raises(DatasetError, match=r"snarks\.txt"):
        BBH.samples(snarks(data))


def test_the_files_that_ship_keep_their_canaries() -> None:
    files = [path for folder in ("bbh", "cot-prompts") for path in (DATA / "bbh" / folder).iterdir()]
    assert len(files) == 54
    assert all("canary GUID" in path.read_text() for path in files)
