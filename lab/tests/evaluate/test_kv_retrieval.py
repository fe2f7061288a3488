"""Key-value retrieval: the published objects, and grown ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from plain_settings import count_tokens, plain_settings

from winnow.errors import DatasetError, EvaluationError
from winnow_lab.evaluate.sample import Sample
from winnow_lab.evaluate.tasks.kv_retrieval import KV_RETRIEVAL

NAME = "kv-retrieval-140_keys.jsonl"


def made(**options: Any) -> list[Sample]:
    return KV_RETRIEVAL.samples(plain_settings(**{"samples": 5, **options}))


def json_data(sample: Sample) -> dict[str, str]:
    return json.loads(sample.context.split("JSON data:\n")[1])


def row(key: str = "k1", value: str = "v1") -> dict[str, Any]:
    return {"ordered_kv_records": [["k0", "v0"], ["k1", "v1"], ["k2", "v2"]], "key": key, "value": value}


def write(directory: Path, *rows: Any) -> None:
    (directory / NAME).write_text("".join(json.dumps(each) + "\n" for each in rows))


@pytest.mark.parametrize(("category", "keys"), [("75-keys", 75), ("grown", None)])
def test_the_object_holds_what_is_asked(category: str, keys: int | None) -> None:
    for sample in made(categories=(category,), questions=4):
        values = json_data(sample)
        assert keys in (None, len(values))
        asked = [question.text.split('Key: "')[1].split('"')[0] for question in sample.questions]
        assert len(set(asked)) == 4
        assert [(values[key],) for key in asked] == [question.references for question in sample.questions]
        assert {question.metric for question in sample.questions} == {"match-part"}


def test_the_published_prompt(tmp_path: Path) -> None:
    write(tmp_path, row())
    (sample,) = made(data=tmp_path, categories=("140-keys",))
    (question,) = sample.questions
    assert sample.context + question.plain == (
        "Extract the value corresponding to the specified key in the JSON object below.\n\n"
        'JSON data:\n{"k0": "v0",\n "k1": "v1",\n "k2": "v2"}\n\n'
        'Key: "k1"\nCorresponding value:'
    )
    assert question.references == ("v1",)


def test_the_whole_sample_ships() -> None:
    samples = made(categories=("75-keys",), samples=None)
    assert len(samples) == len({sample.context for sample in samples}) == 40


@pytest.mark.parametrize("questions", [1, 3])
def test_grown_objects_fill_the_length(questions: int) -> None:
    pair = count_tokens('"": "",\n ') + 2 * 17
    for tokens in (512, 2000):
        for sample in made(categories=("grown",), tokens=(tokens,), questions=questions):
            taken = [count_tokens(sample.context + q.text) + q.max_tokens for q in sample.questions]
            assert tokens - pair <= max(taken) <= tokens
            assert sample.length == tokens


def test_keys_stand_anywhere_in_grown_objects() -> None:
    places = []
    for sample in made(categories=("grown",), samples=60):
        keys = list(json_data(sample))
        places.append(keys.index(sample.questions[0].text.split('"')[1]) / (len(keys) - 1))
    assert min(places) < 0.1 and max(places) > 0.9


def test_the_seed_decides_everything() -> None:
    assert made() == made()
    assert made() != made(seed=1)


def test_sizes_without_file_or_room_are_left_out_unless_they_are_named(tmp_path: Path) -> None:
    def categories(**options: Any) -> set[str]:
        return {sample.category for sample in made(**options)}

    assert categories() == {"75-keys", "grown"}
    assert categories(max_model_len=2000) == {"grown"}
    write(tmp_path, row())
    assert categories(data=tmp_path) == {"140-keys", "grown"}
    with pytest.raises(
        EvaluationError, match=r"75-keys: prompt and answer take \d+ tokens, the model 2000; .* grown"
    ):
        made(categories=("75-keys",), max_model_len=2000)
    with pytest.raises(
        DatasetError, match=r"300_keys.jsonl does not ship with Winnow: --data names .* by the project"
    ):
        made(categories=("300-keys",))
    with pytest.raises(
        DatasetError, match=r"no file kv-retrieval-75_keys.jsonl .* by the project Lost in the Middle"
    ):
        made(categories=("75-keys",), data=tmp_path)
    (tmp_path / NAME).unlink()
    with pytest.raises(DatasetError, match=r"no file kv-retrieval-75_keys.jsonl"):
        made(data=tmp_path)


def test_too_short_a_length_is_refused() -> None:
    with pytest.raises(EvaluationError, match="--tokens 150: too few"):
        made(categories=("grown",), tokens=(150,))


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({**row(), "ordered_kv_records": [["k1", "v1"], ["k2"]]}, "must be a list of pairs of strings"),
        ({**row(), "ordered_kv_records": [["k1", 1]]}, "must be a list of pairs of strings"),
        (row(value="v2"), "'key' and 'value' are no pair of 'ordered_kv_records'"),
        ({"key": "k1", "value": "v1"}, "field 'ordered_kv_records' is missing"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, wrong: dict[str, Any], reason: str) -> None:
    write(tmp_path, row(), wrong)
    with pytest.raises(DatasetError, match=r"140_keys.jsonl, line 2: ") as error:
        made(data=tmp_path, categories=("140-keys",))
    assert reason in str(error.value)
