"""The recipes that ask about documents: files of SQuAD and HotpotQA, and passages that stand in."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from plain_settings import plain_settings

from winnow.errors import DatasetError, EvaluationError
from winnow_lab.evaluate.sample import Sample
from winnow_lab.evaluate.tasks.ruler import RULER
from winnow_lab.evaluate.tasks.ruler.documents import read_hotpot, read_squad

SQUAD, HOTPOT = "dev-v2.0.json", "hotpot_dev_distractor_v1.json"


def squad() -> dict[str, Any]:
    """Three articles of four paragraphs, each with a question, and one that nothing answers."""
    return {
        "data": [
            {
                "title": f"a{article}",
                "paragraphs": [
                    {
                        "context": f"Article {article}, paragraph {number}, holds word{article}x{number}. "
                        * 6,
                        "qas": [
                            {
                                "question": f"Which word does paragraph {number} of {article} hold?",
                                "answers": [{"text": f"word{article}x{number}"}] * 2,
                            },
                            {"question": "Which other?", "answers": [], "is_impossible": True},
                        ],
                    }
                    for number in range(4)
                ],
            }
            for article in range(3)
        ]
    }


def hotpot() -> list[dict[str, Any]]:
    """Questions with two paragraphs that support the answer, and three that do not."""
    return [
        {
            "question": f"Question {number}?",
            "answer": f"answer{number}",
            "context": [
                [f"T{number}-{place}", [f"Text of {place}. ", f"It says answer{number}." * (place < 2)]]
                for place in range(5)
            ],
        }
        for number in range(30)
    ]


def write(directory: Path, name: str, content: Any) -> Path:
    path = directory / name
    path.write_text(json.dumps(content))
    return path


def made(category: str, data: Path | None, **options: object) -> list[Sample]:
    return RULER.samples(plain_settings(categories=(category,), data=data, **{"samples": 6, **options}))


def documents(sample: Sample) -> list[str]:
    parts = re.split(r"\n\nDocument (\d+):\n", sample.context)
    assert parts[1::2] == [str(number) for number in range(1, len(parts) // 2 + 1)]
    return parts[2::2]


def test_paragraphs_of_the_article_come_before_others(tmp_path: Path) -> None:
    write(tmp_path, SQUAD, squad())
    for tokens, most in ((400, 4), (1024, 12)):
        for sample in made("qa_1", tmp_path, tokens=(tokens,)):
            assert sample.category == "qa_1"
            (question,) = sample.questions
            (answer,) = question.references
            article = answer[4]
            held = documents(sample)
            assert sum(answer in text for text in held) == 1
            others = [text for text in held if not text.startswith(f"Article {article}")]
            own = len(held) - len(others)
            assert own == min(len(held), 4) and len(held) <= most
            assert len(set(held)) == len(held)


def test_questions_differ_between_samples_until_all_were_asked(tmp_path: Path) -> None:
    write(tmp_path, SQUAD, squad())
    samples = made("qa_1", tmp_path, tokens=(600,), samples=24)
    asked = [sample.questions[0].text for sample in samples]
    assert len(set(asked[:12])) == 12
    assert asked[12:] == asked[:12]


def test_documents_come_again_when_there_are_no_more(tmp_path: Path) -> None:
    write(tmp_path, SQUAD, squad())
    for sample in made("qa_1", tmp_path, tokens=(4096,)):
        held = documents(sample)
        assert len(held) > 24
        times = Counter(held)
        assert len(times) == 12 and max(times.values()) - min(times.values()) <= 1
        (answer,) = sample.questions[0].references
        assert sum(answer in text for text in held) > 1  # the one that is needed comes again like the others


@pytest.mark.parametrize(("tokens", "questions"), [(300, 1), (700, 2)])
def test_all_paragraphs_of_a_question_of_hotpotqa_are_there(
    tmp_path: Path, tokens: int, questions: int
) -> None:
    write(tmp_path, HOTPOT, hotpot())
    for sample in made("qa_2", tmp_path, tokens=(tokens,), questions=questions):
        assert len(sample.questions) == questions
        titles = {text.split("\n")[0] for text in documents(sample)}
        for question in sample.questions:
            (answer,) = question.references
            number = answer.removeprefix("answer")
            assert {f"T{number}-{place}" for place in range(5)} <= titles
            assert question.metric == "match-part"


def test_a_question_of_hotpotqa_whose_paragraphs_do_not_fit_is_refused(tmp_path: Path) -> None:
    write(tmp_path, HOTPOT, hotpot())
    with pytest.raises(EvaluationError, match=r"too few for the smallest sample of qa_2"):
        made("qa_2", tmp_path, tokens=(120,))


def test_the_template() -> None:
    (sample,) = made("qa_1", None, samples=1)
    instruction = (
        "Answer the question based on the given documents. "
        "Only give me the answer and do not output any other words."
    )
    assert sample.context.startswith(f"{instruction}\n\nThe following are given documents.\n\nDocument 1:\n")
    assert re.fullmatch(
        re.escape(f"\n\n{instruction}\n\nQuestion: ") + ".+ Answer:", sample.questions[0].plain
    )


def test_the_rows_are_those_whose_files_are_there(tmp_path: Path) -> None:
    def rows() -> set[str]:
        samples = RULER.samples(plain_settings(samples=1, tokens=(2048,), data=tmp_path))
        return {sample.category for sample in samples if sample.category.startswith("qa")}

    with pytest.raises(DatasetError, match=f"neither {SQUAD} nor dev-v1.1.json .* nor {HOTPOT}"):
        rows()
    write(tmp_path, HOTPOT, hotpot())
    assert rows() == {"qa_2"}
    write(tmp_path, "dev-v1.1.json", squad())
    assert rows() == {"qa_1", "qa_2"}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=rf"no file {SQUAD} .* published by the project SQuAD"):
        made("qa_1", tmp_path)
    with pytest.raises(DatasetError, match=rf"no file {HOTPOT} .* published by the project HotpotQA"):
        made("qa_2", tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("question", None, "'question' must be a string"),
        ("context", [["T0-0", "no list"]], "the sentences of 'T0-0' must be a list of strings"),
        ("context", [["T0-0"]], "'context' must be a list of pairs"),
        ("context", {}, "'context' must be a list"),
    ],
)
def test_malformed_hotpotqa_is_named(tmp_path: Path, field: str, value: Any, reason: str) -> None:
    rows = hotpot()
    rows[2][field] = value
    with pytest.raises(DatasetError) as error:
        read_hotpot(write(tmp_path, HOTPOT, rows))
    assert str(error.value).startswith(f"{tmp_path / HOTPOT}, entry 3: ")
    assert reason in str(error.value)


def test_malformed_squad_is_named(tmp_path: Path) -> None:
    content = squad()
    del content["data"][1]["paragraphs"][2]["qas"][0]["question"]
    with pytest.raises(DatasetError) as error:
        read_squad(write(tmp_path, SQUAD, content))
    place = f"{tmp_path / SQUAD}, 'data', entry 2, 'paragraphs', entry 3, 'qas', entry 1"
    assert str(error.value) == f"{place}: field 'question' is missing"


@pytest.mark.parametrize(
    ("name", "content", "read"), [(SQUAD, {"data": []}, read_squad), (HOTPOT, [], read_hotpot)]
)
def test_a_file_without_questions_is_refused(tmp_path: Path, name: str, content: Any, read: Any) -> None:
    with pytest.raises(DatasetError, match=r"no question"):
        read(write(tmp_path, name, content))
