"""Scores of one prediction, each between 0.0 and 1.0, by name."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from winnow.metrics.answers import (
    bbh_match,
    exact_match,
    gsm8k_flexible,
    gsm8k_strict,
    match_all,
    match_part,
    trivia_match,
)
from winnow.metrics.choice import classification, count, retrieval
from winnow.metrics.metric import Metric, best_of, first_line
from winnow.metrics.overlap import edit_similarity, rouge_l, token_f1
from winnow.metrics.summaries import import_rouge, rouge_2, rouge_l_of_sentences

__all__ = ["METRICS", "Metric", "require_metric", "score"]

_QA_F1 = best_of(token_f1)
_ROUGE_L = best_of(rouge_l_of_sentences, require=import_rouge)
_ROUGE_2 = best_of(rouge_2, require=import_rouge)
_CLASSIFICATION = Metric(classification)

METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "exact": best_of(exact_match),
        "rouge-l": best_of(rouge_l),
        "qa-f1": _QA_F1,
        "first-line-qa-f1": first_line(_QA_F1),
        "longbench-rouge-l": _ROUGE_L,
        "first-line-longbench-rouge-l": first_line(_ROUGE_L),
        "rouge-2": _ROUGE_2,
        "first-line-rouge-2": first_line(_ROUGE_2),
        "first-line-classification": first_line(_CLASSIFICATION),
        "retrieval": best_of(retrieval),
        "count": best_of(count),
        "edit-sim": best_of(edit_similarity),
        "gsm8k-strict": best_of(gsm8k_strict),
        "gsm8k-flexible": best_of(gsm8k_flexible),
        "bbh": best_of(bbh_match),
        "triviaqa": best_of(trivia_match),
        "match-all": Metric(match_all),
        "match-part": Metric(match_part),
    }
)


def score(metric: str, prediction: str, references: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Return the score of a prediction.

    Args:
        metric: a key of `METRICS`.
        prediction: what the model answered.
        references: accepted answers, at least one. The best counts, except for `match-all`, which asks for all.
        classes: every class name there is, for `first-line-classification`.

    Raises:
        ValueError: there is no such metric.
        EvaluationError: it needs a package that is not installed.
    """
    assert references and not isinstance(references, str), "references are a sequence of at least one text"
    return _metric(metric).score(prediction, references, classes)


def require_metric(name: str) -> None:
    """Raise EvaluationError when a package that the metric needs is missing: before the work, rather than after it."""
    require = _metric(name).require
    if require is not None:
        require()


def _metric(name: str) -> Metric:
    if name not in METRICS:
        raise ValueError(f"unknown metric {name!r}: expected one of {', '.join(METRICS)}")
    return METRICS[name]
