"""The metrics of the demo tasks against values worked out by hand."""

import pytest

from winnow.batch.metrics import exact_match, rouge_l


@pytest.mark.parametrize("prediction", ["Tom, Paris", "  tom,  PARIS\n"])
def test_exact_match_ignores_case_and_white_space(prediction: str) -> None:
    assert exact_match(prediction, "Tom, Paris") == 1.0


@pytest.mark.parametrize("prediction", ["", "Tom", "Tom Paris", "Tom, Paris."])
def test_exact_match_wants_the_whole_answer(prediction: str) -> None:
    assert exact_match(prediction, "Tom, Paris") == 0.0


def test_rouge_l_of_a_text_with_itself_is_one() -> None:
    assert rouge_l("The cat sat.", "the cat, sat") == 1.0


def test_rouge_l_by_hand() -> None:
    # Common subsequence "police the gunman" has 3 words of 4 on either side: precision = recall = 3/4.
    assert rouge_l("police ended the gunman", "police killed the gunman") == pytest.approx(0.75)


def test_rouge_l_weighs_precision_and_recall_alike() -> None:
    # 2 common words; precision 2/2, recall 2/6, F1 = 2 * 1 * (1/3) / (4/3) = 0.5.
    assert rouge_l("one two", "one two three four five six") == pytest.approx(0.5)
    assert rouge_l("one two three four five six", "one two") == pytest.approx(0.5)


def test_rouge_l_is_about_order() -> None:
    assert rouge_l("two one", "one two") == pytest.approx(0.5)


@pytest.mark.parametrize(("prediction", "expected"), [("", 0.0), ("nothing shared", 0.0)])
def test_rouge_l_without_common_words(prediction: str, expected: float) -> None:
    assert rouge_l(prediction, "alpha beta") == expected


def test_rouge_l_of_two_empty_texts() -> None:
    assert rouge_l("", " .") == 1.0
