"""Metrics of published benchmarks against values worked out by hand from their definitions."""

import string

import pytest
from hypothesis import given, strategies as st
from rapidfuzz import fuzz

from winnow_lab.evaluate.metrics import classification, score

# metric, prediction, references, expected, why
BY_HAND = [
    ("qa-f1", "The cat, a dog.", ["cat dog"], 1.0, "articles and punctuation do not count"),
    ("qa-f1", "CAT", ["cat"], 1.0, "nor does case"),
    ("qa-f1", "cat dog", ["dog bird"], 0.5, "1 shared: P = R = 1/2"),
    ("qa-f1", "dog dog dog", ["dog dog bird bird"], 4 / 7, "multisets share 2: 2 * 2 / (3 + 4)"),
    ("qa-f1", "Anne ate", ["anne atethe"], 0.5, "articles go only as whole words"),
    ("qa-f1", "mother-in-law", ["motherinlaw"], 1.0, "punctuation leaves no gap behind"),
    ("qa-f1", "it's", ["it\u2019s"], 0.0, "a typographic apostrophe is not ASCII and stays"),
    ("qa-f1", "the", ["a"], 0.0, "nothing left on either side is nothing shared"),
    ("qa-f1", "", ["x"], 0.0, "an empty prediction"),
    ("qa-f1", "red", ["blue", "red car"], 2 / 3, "the best of two references"),
    ("longbench-rouge-l", "", ["a b"], 0.0, "the package fails on an empty prediction"),
    ("longbench-rouge-l", "...", ["a b"], 0.0, "and on one without sentences"),
    ("longbench-rouge-l", "a b", ["a b"], 1.0, "P = R = 1"),
    ("longbench-rouge-l", "A b", ["a b"], 0.5, "words keep their case: 1 shared of 2"),
    ("longbench-rouge-l", "b a", ["a b"], 0.5, "a subsequence keeps the order"),
    ("longbench-rouge-l", "a a a b", ["a b"], 1.0, "repeated words count once"),
    (
        "longbench-rouge-l",
        "c d. a b",
        ["a b. c d"],
        1.0,
        "each sentence is sought in all of the prediction's",
    ),
    ("longbench-rouge-l", "a b c", ["a, b c"], 2 / 3, "punctuation is part of its word"),
    ("first-line-longbench-rouge-l", "\na b\nc d e f", ["a b"], 1.0, "later lines do not count"),
    (
        "rouge-2",
        "a b c d",
        ["a b x c d"],
        4 / 7,
        "pairs ab, cd of ab, bc, cd and ab, bx, xc, cd: P = 2/3, R = 2/4",
    ),
    ("rouge-2", "a b a b", ["a b a"], 1.0, "pairs count once: ab, ba on either side"),
    ("first-line-rouge-2", "\na b c\na d", ["a b c"], 1.0, "later lines do not count"),
    ("rouge-2", "a", ["a"], 0.0, "one word makes no pair"),
    ("retrieval", "Paragraph 7", ["Paragraph 7"], 1.0, "the only number is right"),
    ("retrieval", "7, 17 or 7", ["Paragraph 7"], 2 / 3, "2 of 3 numbers are; 17 is not 7"),
    ("retrieval", "07", ["Paragraph 7"], 0.0, "numbers compare as text"),
    ("retrieval", "the seventh", ["Paragraph 7"], 0.0, "no number"),
    ("count", "3", ["3"], 1.0, "the only number is right"),
    ("count", "3 of 13, not 3.5", ["3"], 0.5, "numbers are 3, 13, 3 and 5"),
    ("count", "three", ["3"], 0.0, "no number"),
    ("edit-sim", "return x\nelse", ["return x"], 1.0, "only the first line counts"),
    ("edit-sim", "\n\nreturn x", ["return x"], 1.0, "newlines in front are skipped"),
    (
        "edit-sim",
        "```python\n# a comment\n// another\nreturn x",
        ["return x"],
        1.0,
        "lines of no code are skipped",
    ),
    ("edit-sim", "x = 1  # one\ny", ["x = 1"], 0.0, "also one that ends in a comment; y is left"),
    ("edit-sim", "# only\n# comments", ["return x"], 0.0, "no line is left"),
    ("edit-sim", "abcd", ["bcde"], 0.75, "block bcd: 2 * 3 / 8"),
    ("edit-sim", "ab", ["abc"], 0.8, "block ab: 2 * 2 / 5"),
    ("edit-sim", "abc", ["abcdef"], 0.67, "6/9 is rounded to hundredths"),
    ("edit-sim", "xaybz", ["aXb"], 0.5, "blocks a and b: 2 * 2 / 8"),
    (
        "edit-sim",
        "tide",
        ["diet"],
        0.25,
        "difflib's blocks: t alone; insertions and deletions would give 0.5",
    ),
    ("gsm8k-strict", "So 3+4=7.\n#### 7", ["3 + 4 = <<3+4=7>>7\n#### 7"], 1.0, "the reference's last number"),
    ("gsm8k-strict", "#### 1,234.", ["x\n#### 1234"], 1.0, "commas and a final full stop are deleted"),
    ("gsm8k-strict", "#### -5 apples", ["#### -5"], 1.0, "the sign belongs to the number"),
    ("gsm8k-strict", "#### 7\n#### 8", ["#### 8"], 0.0, "the first counts"),
    ("gsm8k-strict", "#### $7", ["#### 7"], 0.0, "a dollar sign is no part of the pattern"),
    ("gsm8k-strict", "The answer is 7", ["#### 7"], 0.0, "no #### in it"),
    ("gsm8k-strict", "#### 7.0", ["#### 7"], 0.0, "numbers compare as text"),
    ("gsm8k-flexible", "It costs $1,200.", ["#### 1200"], 1.0, "dollar, comma and full stop are deleted"),
    ("gsm8k-flexible", "first 5, then 6 apples", ["#### 6"], 1.0, "the last counts"),
    ("gsm8k-flexible", "The answer is 6. Well...", ["#### 6"], 0.0, "three dots match and come last"),
    ("gsm8k-flexible", "none", ["#### 6"], 0.0, "no number"),
    ("bbh", "x. So the answer is (A).", ["(A)"], 1.0, "up to the full stop"),
    ("bbh", "So the answer is (A)", ["(A)"], 0.0, "without one the bracket is lost"),
    ("bbh", "So the answer is True.\nthe answer is False.", ["True"], 1.0, "the first counts"),
    ("bbh", "the answer is true.", ["True"], 0.0, "case counts"),
    ("bbh", "The answer is True.", ["True"], 0.0, "so does the phrase's"),
    ("bbh", "the answer is a b.c.", ["a b.c"], 1.0, "the last full stop of the line ends it"),
    ("triviaqa", " St. Louis", ["Paris", "st louis"], 1.0, "any alias, without case and punctuation"),
    ("triviaqa", "the cat", ["cat"], 0.0, "articles count"),
    (
        "match-all",
        "uses Foo and 42",
        ["foo", "42", "bar", "7"],
        0.5,
        "2 of 4 are contained, whatever their case",
    ),
    ("match-all", "1742", ["42"], 1.0, "within a word too"),
    ("match-part", "uses Foo", ["bar", "foo"], 1.0, "one is enough"),
    ("match-part", "uses Foo", ["bar"], 0.0, "none is not"),
]


@pytest.mark.parametrize(("metric", "prediction", "references", "expected", "why"), BY_HAND)
def test_by_hand(metric: str, prediction: str, references: list[str], expected: float, why: str) -> None:
    # The package rouge adds 1e-8 to a denominator.
    assert score(metric, prediction, references) == pytest.approx(expected, abs=2e-8), why


# classes, prediction, reference, expected, why
CLASSES_BY_HAND = [
    (["Food", "Animal"], "Food", "Food", 1.0, "the right one alone"),
    (["Food", "Animal"], "Food or Animal", "Food", 0.5, "the right one of two named"),
    (["Food", "Animal"], "Animal", "Food", 0.0, "a wrong one"),
    (["Food", "Animal"], "food", "Food", 0.0, "case counts"),
    (["group", "Human group"], "Human group", "Human group", 1.0, "a part of the right name is removed"),
    (["group", "Human group"], "Human group", "group", 0.5, "but a longer name than the right one is not"),
    (["a", "b", "ab"], "ab", "ab", 0.5, "b stands behind a, which is removed, and is passed over"),
    (["a", "b", "c", "abc"], "abc", "abc", 0.5, "a and c are removed, b is passed over"),
    (["a", "x", "b", "ab"], "ab x", "ab", 0.5, "x is passed over, b is removed: x and ab are left"),
    (["ab", "a", "b"], "ab", "ab", 0.5, "a is removed and b passed over behind the right one, too"),
]


@pytest.mark.parametrize(("classes", "prediction", "reference", "expected", "why"), CLASSES_BY_HAND)
def test_classification(
    classes: list[str], prediction: str, reference: str, expected: float, why: str
) -> None:
    assert classification(prediction, [reference], classes) == expected, why


@given(
    st.lists(st.text("ab", min_size=1, max_size=3), unique=True, max_size=6),
    st.text("ab", max_size=6),
    st.text("ab", max_size=3),
)
def test_classification_removes_while_it_iterates(
    classes: list[str], prediction: str, reference: str
) -> None:
    """Python's own iteration over a list that shrinks is what the published numbers contain."""
    left = [name for name in classes if name in prediction]
    for name in left:
        if name in reference and name != reference:
            left.remove(name)
    assert classification(prediction, [reference], classes) == (1 / len(left) if reference in left else 0.0)


def test_retrieval_wants_a_paragraph() -> None:
    with pytest.raises(ValueError, match="names a paragraph"):
        score("retrieval", "7", ["7"])


@given(st.permutations(string.ascii_letters), st.integers(0, 52), st.integers(0, 52), st.booleans())
def test_edit_similarity_is_rapidfuzz_where_both_definitions_agree(
    letters: list[str], first: int, last: int, longer: bool
) -> None:
    """fuzzywuzzy has two ratios, difflib's and that of edits: a line that lacks a piece has the same in both."""
    whole = "".join(letters)
    part = whole[: min(first, last)] + whole[max(first, last) :]
    prediction, reference = (whole, part) if longer else (part, whole)
    assert score("edit-sim", prediction, [reference]) == round(fuzz.ratio(prediction, reference)) / 100
