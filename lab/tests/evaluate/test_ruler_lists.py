"""The recipes that track variables and count words."""

import re
from collections import Counter
from itertools import pairwise

import pytest
from plain_settings import count_tokens, plain_settings

from winnow_lab.evaluate.sample import Sample
from winnow_lab.evaluate.tasks.ruler import RULER
from winnow_lab.evaluate.tasks.ruler.lists import count_of_rank
from winnow_lab.evaluate.tasks.ruler.needles import NOISE


def made(category: str, tokens: int = 4096) -> list[Sample]:
    return RULER.samples(plain_settings(categories=(category,), samples=4, tokens=(tokens,)))


def values_of(text: str) -> dict[str, str]:
    """Runs the assignments of a text, in order."""
    values: dict[str, str] = {}
    for name, source, number in re.findall(r"VAR (\w+) = (?:VAR (\w+)|(\d+))", text):
        values[name] = values[source] if source else number
    return values


def test_chains_lead_to_the_value() -> None:
    for sample in made("vt"):
        example, _, text = sample.context.rpartition("Memorize and track")
        (question,) = sample.questions
        asked = re.search(r"assigned the value (\d{5}) in the text above", question.text)
        assert asked
        values = values_of(text)
        assert len(values) == 5 and set(values.values()) == {asked[1]}
        assert tuple(values) == question.references
        assert all(re.fullmatch(r"[A-Z]{5}", name) for name in values)
        lines = text.split("\n")
        assert sum(line == NOISE for line in lines) == len(lines) - 5 - 2
        assert not values.keys() & values_of(example).keys()


def test_noise_stands_between_the_lines_of_a_chain() -> None:
    for sample in made("vt", 1200):
        for text in sample.context.split("Memorize and track")[1:]:
            lines = text.split("\nQuestion:")[0].split("\n")[2:]
            of_chain = [place for place, line in enumerate(lines) if line.startswith("VAR ")]
            assert len(of_chain) == 5 and lines[-1] in (NOISE, "")
            assert all(next_one - place > 1 for place, next_one in pairwise(of_chain))


def test_the_worked_example_of_tracking() -> None:
    """RULER's own: names of three letters, two spaces before the answer, as much noise as 500 tokens hold."""
    for tokens in (1200, 4096):
        for sample in made("vt", tokens):
            example = sample.context.rpartition("Memorize and track")[0]
            value, answer = re.findall(
                r"5 variables are assigned the value (\d+), they are:  ([A-Z ]+)\n\n$", example
            )[0]
            assert values_of(example) == dict.fromkeys(answer.split(), value)
            assert all(re.fullmatch(r"[A-Z]{3}", name) for name in answer.split())
            taken = count_tokens(example.removesuffix("\n\n"))
            assert taken <= 500 < taken + count_tokens(NOISE + "\n")


def test_the_template_of_tracking() -> None:
    (question,) = made("vt")[0].questions
    value = re.findall(r"\d{5}", question.text)[0]
    assert question.plain == (
        f"\nQuestion: Find all variables that are assigned the value {value} in the text above."
        " Answer: According to the chain(s) of variable assignment in the text above,"
        f" 5 variables are assigned the value {value}, they are: "
    )


@pytest.mark.parametrize(
    ("tokens", "common", "rare", "example_common", "example_rare", "example_others"),
    [(2048, 6, 1, 3, 1, 10), (4096, 30, 3, 10, 3, 30), (8192, 30, 3, 10, 3, 30)],
)
def test_counts_of_common_words(
    tokens: int, common: int, rare: int, example_common: int, example_rare: int, example_others: int
) -> None:
    for sample in made("cwe", tokens):
        shown, asked = sample.context.split("Below is a numbered list of words.")[1:]
        items = re.findall(r"(\d+)\. ([a-z]+)", asked)
        assert [int(number) for number, _ in items] == list(range(1, len(items) + 1))
        counts = Counter(word for _, word in items)
        references = sample.questions[0].references
        assert [counts[word] for word in references] == [common] * 10
        assert set(counts[word] for word in counts.keys() - set(references)) == {rare}

        listed, answer = shown.split("\nQuestion:")
        shown_counts = Counter(word for _, word in re.findall(r"(\d+)\. ([a-z]+)", listed))
        answered = re.findall(r"\d+\. ([a-z]+)", answer.split("Answer:")[1])
        assert [shown_counts[word] for word in answered] == [example_common] * 10
        assert sorted(shown_counts.values())[:example_others] == [example_rare] * example_others
        assert len(shown_counts) == 10 + example_others
        assert not shown_counts.keys() & counts.keys()


def test_counts_of_frequent_words() -> None:
    for tokens in (512, 1024, 4096):
        for sample in made("fwe", tokens):
            text = sample.context.split("coded words. ")[1]
            counts = Counter(text.split())
            ranked = counts.most_common()
            assert ranked[0][0] == "..."
            assert tuple(word for word, _ in ranked[1:4]) == sample.questions[0].references
            amounts = [amount for _, amount in ranked]
            assert amounts[1] > amounts[2] > amounts[3] > amounts[4]
            assert all(re.fullmatch(r"[a-z]{6}", word) for word, _ in ranked[1:])
            assert len(counts) <= tokens // 50
            # Zipf's law with exponent 2: n from the largest count, then every other within the rounding.
            for rank, amount in enumerate(amounts, start=1):
                assert abs(amount - amounts[0] / rank**2) < 1


def test_ranks_asked_for_never_tie() -> None:
    for n in range(53, 20_000):
        counts = [count_of_rank(rank, n) for rank in (2, 3, 4, 5)]
        assert counts == sorted(set(counts), reverse=True)
