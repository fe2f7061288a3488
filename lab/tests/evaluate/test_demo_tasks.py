"""Task generators: right answers that stand in the context, lengths that hold, nothing left to chance but the seed."""

import random
import re

import pytest

from winnow_lab.evaluate.demo_tasks import CATEGORIES, Haystack, make_document, make_sample, question_suffix
from winnow_lab.evaluate.demo_tasks.haystack import scatter
from winnow_lab.evaluate.demo_tasks.words import ATTRIBUTES, NAMES, WORD_GROUPS
from winnow_lab.evaluate.metrics import METRICS, score


def count_tokens(text: str) -> int:
    """A stand-in for a tokenizer: words and signs."""
    return len(re.findall(r"\w+|[^\w\s]|\n", text))


SENTENCES = [
    f"{subject} {verb} the {adjective} {thing} number {number} before noon."
    for number, (subject, verb, adjective, thing) in enumerate(
        (subject, verb, adjective, thing)
        for subject in ("A clerk", "The crowd", "One bird", "Every pupil", "Nobody")
        for verb in ("saw", "praised", "painted", "forgot")
        for adjective in ("old", "grey", "tall")
        for thing in ("bridge", "letter", "garden")
    )
]
HAYSTACK = Haystack.build(SENTENCES, count_tokens)
PLANTED_IN_TEXT = [name for name in CATEGORIES if name != "few-shot"]


def rng(seed: int = 7) -> random.Random:
    return random.Random(seed)


@pytest.mark.parametrize("category", CATEGORIES)
def test_same_seed_same_sample(category: str) -> None:
    first = make_sample(category, rng(), HAYSTACK, count_tokens, 700)
    assert first == make_sample(category, rng(), HAYSTACK, count_tokens, 700)
    assert first != make_sample(category, rng(8), HAYSTACK, count_tokens, 700)


@pytest.mark.parametrize("category", CATEGORIES)
@pytest.mark.parametrize("tokens", [500, 1500])
def test_prompt_and_answer_fill_the_length(category: str, tokens: int) -> None:
    for seed in range(10):
        sample = make_sample(category, rng(seed), HAYSTACK, count_tokens, tokens)
        length = count_tokens(sample.prompt) + count_tokens(" " + sample.answer)
        assert 0.9 * tokens < length <= tokens


@pytest.mark.parametrize("category", CATEGORIES)
def test_prompt_ends_with_the_question(category: str) -> None:
    sample = make_sample(category, rng(), HAYSTACK, count_tokens, 700)
    assert sample.prompt == sample.context + question_suffix(sample.question)
    assert sample.prompt.endswith(f"\nQuestion: {sample.question}\nAnswer:")
    assert sample.metric in METRICS
    assert score(sample.metric, sample.answer, [sample.answer]) == 1.0


@pytest.mark.parametrize("category", CATEGORIES)
def test_answer_stands_in_the_context(category: str) -> None:
    for seed in range(10):
        sample = make_sample(category, rng(seed), HAYSTACK, count_tokens, 700)
        for part in re.split(r" ; |, ", sample.answer):
            assert part in sample.context


def test_single_asks_for_the_only_value_of_that_fact() -> None:
    for seed in range(20):
        sample = make_sample("single", rng(seed), HAYSTACK, count_tokens, 700)
        fact = sample.question.replace("What is the", "The").rstrip("?")
        assert sample.context.count(f"{fact} is ") == 1
        assert f"{fact} is {sample.answer}." in sample.context


def test_two_hop_leads_over_the_bridge_and_not_to_the_decoy() -> None:
    pattern = re.compile(r"What is the (.+) of the (.+) of (\w+)\?")
    for seed in range(20):
        sample = make_sample("two-hop", rng(seed), HAYSTACK, count_tokens, 700)
        found = pattern.fullmatch(sample.question)
        assert found is not None
        attribute, relation, head = found.groups()
        bridge, value = sample.answer.split(", ")
        assert f"The {relation} of {head} is {bridge}." in sample.context
        assert f"The {attribute} of {bridge} is {value}." in sample.context
        assert f"The {attribute} of {head} is {value}." not in sample.context


def test_few_shot_asks_for_a_word_that_was_not_shown() -> None:
    for seed in range(20):
        sample = make_sample("few-shot", rng(seed), HAYSTACK, count_tokens, 700)
        shown = dict(re.findall(r'The word "(\w+)" belongs to the group (\w+)\.', sample.context))
        asked = sample.question.split('"')[1]
        group = next(
            set(group) for group in WORD_GROUPS.values() if asked in group and set(group) & set(shown)
        )
        assert asked not in shown
        assert {shown[word] for word in group & set(shown)} == {sample.answer}


def test_passage_is_the_one_that_ends_with_the_quote() -> None:
    for seed in range(20):
        sample = make_sample("passage", rng(seed), HAYSTACK, count_tokens, 700)
        quoted = sample.question.split('"')[1]
        holders = [line for line in sample.context.split("\n") if quoted in line]
        assert len(holders) == 1
        assert holders[0].endswith(f"{quoted}. [{sample.answer}]")


def test_key_points_come_in_order_and_complete() -> None:
    sample = make_sample("key-points", rng(), HAYSTACK, count_tokens, 700, planted=5)
    assert sample.answer == " ; ".join(re.findall(r"^Key point (\d: .*)$", sample.context, re.MULTILINE))
    assert sample.answer.count(" ; ") == 4


def test_code_returns_the_body_of_the_function_asked_for() -> None:
    sample = make_sample("code", rng(), HAYSTACK, count_tokens, 700)
    name = sample.question.removeprefix("What does the function ").removesuffix(" return?")
    assert re.search(
        rf"def {name}\(\w+\):\n    return {re.escape(sample.answer)}$", sample.context, re.MULTILINE
    )


@pytest.mark.parametrize("category", PLANTED_IN_TEXT)
def test_another_seed_s_answer_scores_nothing(category: str) -> None:
    """Negative control: an answer not read from this context is wrong."""
    mine = make_sample(category, rng(1), HAYSTACK, count_tokens, 700)
    other = make_sample(category, rng(2), HAYSTACK, count_tokens, 700)
    assert score(mine.metric, other.answer, [mine.answer]) < 1.0


def test_several_questions_about_one_context() -> None:
    document = make_document("passkey", rng(), HAYSTACK, count_tokens, 900, planted=6, questions=4)
    assert len({question.text for question in document.questions}) == 4
    assert document.sample(2).question == document.questions[2].text
    assert document.sample(2).context == document.context


def test_fewer_lines_where_the_length_is_short() -> None:
    sample = make_sample("passkey", rng(), HAYSTACK, count_tokens, 90, planted=50)
    assert count_tokens(sample.prompt) <= 90


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="unknown category 'poem'"):
        make_sample("poem", rng(), HAYSTACK, count_tokens, 700)
    with pytest.raises(ValueError, match="12 tokens are too few"):
        make_sample("key-points", rng(), HAYSTACK, count_tokens, 12)
    with pytest.raises(ValueError, match="at least one sentence"):
        Haystack.build([], count_tokens)


def test_scatter_keeps_both_orders() -> None:
    merged = scatter(rng(), ["a", "b", "c"], ["1", "2", "3", "4"])
    assert [item for item in merged if item.isalpha()] == ["a", "b", "c"]
    assert [item for item in merged if item.isdigit()] == ["1", "2", "3", "4"]


def test_haystack_passage_keeps_order_and_length() -> None:
    taken = HAYSTACK.passage(rng(), 200)
    assert sum(count_tokens(" " + sentence) for sentence in taken) <= 200
    start = SENTENCES.index(taken[0])
    assert taken == [SENTENCES[(start + offset) % len(SENTENCES)] for offset in range(len(taken))]


def test_word_lists_have_no_doubles() -> None:
    grouped = [word for group in WORD_GROUPS.values() for word in group]
    assert len(set(grouped)) == len(grouped)
    assert len(set(NAMES)) == len(NAMES)
    assert all(len(set(values)) == len(values) for values in ATTRIBUTES.values())
