"""What all metrics share: names, the best reference, the first line, missing packages."""

import sys

import pytest
from hypothesis import given, strategies as st

from winnow.batch.lines import METRICS as LINE_METRICS
from winnow.errors import EvaluationError
from winnow_lab.evaluate.metrics import METRICS, require_metric, score

TEXTS = st.text(alphabet="ab .,\n#`A1", max_size=20) | st.sampled_from(
    ["the answer is a.", "#### 12", "$1,000"]
)


def test_score_picks_the_metric() -> None:
    assert score("exact", "a b", ["a c"]) == 0.0
    assert score("rouge-l", "a b", ["a c"]) == pytest.approx(0.5)


def test_score_names_an_unknown_metric() -> None:
    with pytest.raises(ValueError, match=r"'bleu'.*exact, rouge-l"):
        score("bleu", "a", ["a"])


@pytest.mark.parametrize("metric", METRICS)
@given(prediction=TEXTS, references=st.lists(TEXTS, min_size=1, max_size=3))
def test_scores_lie_between_zero_and_one(metric: str, prediction: str, references: list[str]) -> None:
    if metric == "retrieval":
        references = [f"Paragraph {number}" for number, _ in enumerate(references)]
    assert 0.0 <= score(metric, prediction, references, classes=["a", "ab", "b A"]) <= 1.0


@pytest.mark.parametrize("metric", [name for name in METRICS if name not in ("match-all", "retrieval")])
@given(prediction=TEXTS, references=st.lists(TEXTS, min_size=1, max_size=3))
def test_the_best_reference_counts(metric: str, prediction: str, references: list[str]) -> None:
    classes = ["a", "ab", "b A"]
    alone = [score(metric, prediction, [reference], classes) for reference in references]
    assert score(metric, prediction, references, classes) == max(alone)


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ("alpha\nbeta", 1.0),
        ("\n\nalpha\nbeta", 1.0),  # newlines in front are no first line
        (" \nalpha", 0.0),  # a blank is: only newlines are skipped
        ("beta\nalpha", 0.0),
    ],
)
def test_first_line_only(prediction: str, expected: float) -> None:
    assert score("first-line-qa-f1", prediction, ["alpha"]) == expected


def test_metrics_of_lines_need_nothing_but_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge", None)
    for name in LINE_METRICS:
        require_metric(name)
        assert score(name, "x", ["x"]) == 1.0


def test_a_missing_package_is_named_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    require_metric("rouge-2")
    require_metric("exact")
    monkeypatch.setitem(sys.modules, "rouge", None)
    require_metric("exact")
    with pytest.raises(EvaluationError, match=r"rouge.*\./lab\[rouge\]"):
        require_metric("first-line-longbench-rouge-l")
