"""RULER's samples: lengths that hold, answers in the context, nothing left to chance but the seed."""

from dataclasses import replace

import pytest
from plain_settings import count_tokens, plain_settings

from winnow.errors import DatasetError, EvaluationError
from winnow.models.load.loader import DEMO_MODEL
from winnow_lab.evaluate.metrics import score
from winnow_lab.evaluate.sample import Question, Sample
from winnow_lab.evaluate.tasks.ruler import RULER
from winnow_lab.evaluate.tasks.ruler.needles import NOISE

# qa_2 has no documents without a file.
SHIPPED = [name for name in RULER.categories if name != "qa_2"]
# Most tokens of a unit of each haystack, by the stand-in for a tokenizer: what may be left over.
NEEDLE = count_tokens("One of the special magic uuids for long-mountain is: .\n") + 2 * 17
UNIT = {
    "niah_single_1": count_tokens(NOISE) + 1,
    "niah_multikey_2": NEEDLE,
    "niah_multikey_3": NEEDLE,
    "vt": count_tokens(NOISE) + 1,
    "cwe": 3 * count_tokens("12345. abcdefghijkl"),
    "fwe": 12,
    "qa_1": 450,
}


def made(category: str, **options: object) -> list[Sample]:
    return RULER.samples(plain_settings(categories=(category,), **{"samples": 3, **options}))


def whole(sample: Sample, question: Question) -> int:
    return count_tokens(sample.context + question.plain) + question.max_tokens


@pytest.mark.parametrize("category", SHIPPED)
@pytest.mark.parametrize("tokens", [1024, 3000, 8192])
def test_prompt_and_answer_fill_the_length(category: str, tokens: int) -> None:
    for sample in made(category, tokens=(tokens,)):
        (question,) = sample.questions
        assert sample.length == tokens
        assert tokens - max(UNIT.get(category, 8), tokens // 50) <= whole(sample, question) <= tokens


@pytest.mark.parametrize("category", SHIPPED)
def test_lengths_hold_by_a_real_tokenizer(category: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    settings = plain_settings(categories=(category,), samples=1, tokens=(2048,))
    settings = replace(
        settings, count_tokens=lambda text: len(tokenizer.encode(text, add_special_tokens=False))
    )
    (sample,) = RULER.samples(settings)
    (question,) = sample.questions
    taken = settings.count_tokens(sample.context + question.plain) + question.max_tokens
    assert 2048 - max(UNIT.get(category, 8), 41) <= taken <= 2048


@pytest.mark.parametrize("category", SHIPPED)
def test_answers_stand_in_the_context(category: str) -> None:
    for sample in made(category, tokens=(2048,), questions=3):
        assert len({question.text for question in sample.questions}) == len(sample.questions)
        for question in sample.questions:
            assert score(question.metric, sample.context, question.references) == 1.0
            assert score(question.metric, "", question.references) == 0.0
            # Nothing that a policy could need of the question stands before it.
            if category not in ("cwe", "fwe"):
                assert question.text.strip() not in sample.context


@pytest.mark.parametrize("category", SHIPPED)
def test_the_seed_decides_everything(category: str) -> None:
    assert made(category) == made(category)
    first, second = made(category), made(category, seed=1)
    assert [sample.name for sample in first] == [sample.name for sample in second]
    assert len({sample.context for sample in (*first, *second)}) == 6


@pytest.mark.parametrize(
    ("category", "most"),
    [
        ("niah_single_1", 1),
        ("niah_multikey_1", 4),
        ("niah_multikey_2", 5),
        ("niah_multikey_3", 5),
        ("niah_multivalue", 1),
        ("niah_multiquery", 1),
        ("vt", 1),
        ("cwe", 1),
        ("fwe", 1),
        ("qa_1", 5),
    ],
)
def test_as_many_questions_as_the_recipe_allows(category: str, most: int) -> None:
    for sample in made(category, tokens=(4096,), questions=5):
        assert len(sample.questions) == most
        assert all(whole(sample, question) <= 4096 for question in sample.questions)


def test_fewer_questions_where_their_documents_do_not_fit() -> None:
    (sample,) = made("qa_1", samples=1, tokens=(1024,), questions=40)
    assert 1 <= len(sample.questions) < 40


def test_several_lengths_and_rows() -> None:
    samples = RULER.samples(plain_settings(tokens=(1024, 2048), samples=2, categories=("vt", "qa_1")))
    rows = [(sample.category, sample.length) for sample in samples]
    assert rows == [
        (row, tokens) for tokens in (1024, 2048) for row in ("vt", "qa_1 (NQ stand-in)") for _ in range(2)
    ]
    assert len({sample.name for sample in samples}) == 8


def test_a_length_that_holds_nothing_is_refused() -> None:
    with pytest.raises(
        EvaluationError, match="--tokens 100: too few for the smallest sample of niah_single_2"
    ):
        made("niah_single_2", tokens=(100,))
    with pytest.raises(EvaluationError, match="--tokens 8192: the model takes 4096 at most"):
        made("vt", tokens=(8192,), max_model_len=4096)


def test_lists_of_words_come_to_an_end() -> None:
    with pytest.raises(EvaluationError, match="cwe needs more than its 19,765 words"):
        made("cwe", samples=1, tokens=(10**6,))


def test_without_a_file_qa_2_is_left_out_unless_it_is_named() -> None:
    rows = {sample.category for sample in RULER.samples(plain_settings(samples=1, tokens=(2048,)))}
    assert rows == {*RULER.categories, "qa_1 (NQ stand-in)"} - {"qa_1", "qa_2"}
    with pytest.raises(DatasetError, match=r"qa_2 needs --data .* hotpot_dev_distractor_v1.json"):
        made("qa_2")


def test_published_numbers() -> None:
    tokens = {name: made(name, samples=1, tokens=(4096,))[0].questions[0].max_tokens for name in SHIPPED}
    niah = dict.fromkeys((name for name in SHIPPED if name.startswith("niah")), 128)
    assert tokens == {**niah, "vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32}
    assert len(niah) == 8
