"""Scores of one prediction, each between 0.0 and 1.0, by name: those of `winnow run`, and of published benchmarks."""

import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from types import MappingProxyType
from typing import Any

from winnow.batch import metrics
from winnow.batch.metrics import PairScore, Score, best_of, plain_text, token_f1
from winnow.errors import EvaluationError
from winnow.process.extras import install_hint

_GSM8K_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_GSM8K_FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_GSM8K_REASONING = re.compile(r"(?s).*#### ")
# The lookahead gives up the line's last character, whatever it is.
_BBH_ANSWER = re.compile(r"(?<=the answer is )(.*)(?=.)")
_DIGITS = re.compile(r"\d+")
_PARAGRAPH = re.compile(r"Paragraph (\d+)")
_NO_CODE = ("`", "#", "//")


def trivia_match(prediction: str, reference: str) -> float:
    """Return 1.0 when both texts are the same but for case and ASCII punctuation (lm-evaluation-harness, triviaqa).

    White space is trimmed from the prediction alone.
    """
    return float(plain_text(prediction.strip()) == plain_text(reference))


def gsm8k_strict(prediction: str, reference: str) -> float:
    """Return 1.0 when the first "#### number" of the prediction is the reference's (lm-evaluation-harness,
    strict-match).

    The reference is a worked answer that ends so, or the number alone. Commas, dollar signs and a final full stop are
    deleted from both before they are compared as text.
    """
    found = _GSM8K_STRICT.search(prediction)
    return float(found is not None and _number(found[1]) == _number(reference))


def gsm8k_flexible(prediction: str, reference: str) -> float:
    """Return 1.0 when the last number of the prediction is the reference's (lm-evaluation-harness, flexible-extract).

    A run of at least two digits, dots, commas and dollar signs counts as a number, even without a digit.
    """
    found = _GSM8K_FLEXIBLE.findall(prediction)
    return float(bool(found) and _number(found[-1]) == _number(reference))


def bbh_match(prediction: str, reference: str) -> float:
    """Return 1.0 when what the prediction says after "the answer is " is the reference, case and all, else 0.0.

    The answer runs to the end of the line without its last character, the full stop (lm-evaluation-harness,
    bbh_cot_fewshot, get-answer): a line that ends without one loses a character of its answer.
    """
    found = _BBH_ANSWER.search(prediction)
    return float(found is not None and found[1].strip() == reference)


def match_part(prediction: str, references: Sequence[str], _classes: Sequence[str]) -> float:
    """Return 1.0 when the prediction contains any reference, in either case (RULER's `string_match_part`)."""
    said = prediction.lower()
    return float(any(reference.lower() in said for reference in references))


def _number(text: str) -> str:
    return _GSM8K_REASONING.sub("", text.replace(",", "").replace("$", "")).removesuffix(".").lower()


def classification(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """Return 1 / the number of classes that the prediction names, where the right one is among them, else 0.0.

    A class is named when it occurs in the prediction. Those that are a part of the right one's name do not count,
    except one directly behind another such class: the original removes while it iterates, and published numbers contain
    that.
    """

    def named_among(reference: str) -> float:
        kept: list[str] = []
        passed_over = False
        for name in (each for each in classes if each in prediction):
            removed = name in reference and name != reference and not passed_over
            if not removed:
                kept.append(name)
            passed_over = removed
        return 1 / len(kept) if reference in kept else 0.0

    return max(map(named_among, references))


def retrieval(prediction: str, reference: str) -> float:
    """Return the share of the prediction's numbers that are the number of the reference; 0.0 without numbers.

    Raises ValueError for a reference that is no "Paragraph N".
    """
    paragraph = _PARAGRAPH.search(reference)
    if paragraph is None:
        raise ValueError(
            f"a reference of this metric names a paragraph, such as 'Paragraph 7', not {reference!r}"
        )
    return count(prediction, paragraph[1])


def count(prediction: str, reference: str) -> float:
    """Return the share of the prediction's numbers that are the reference; 0.0 without numbers."""
    numbers = _DIGITS.findall(prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def edit_similarity(prediction: str, reference: str) -> float:
    """Return how alike a line of code and the reference are, in hundredths (LongBench's `code_sim_score`).

    The prediction's first line, after newlines in front, that has no backtick, `#` or `//` is taken; else an empty
    text. LongBench's `fuzzywuzzy.fuzz.ratio` is difflib's ratio `2 M / T` of matching blocks, or, beside
    python-Levenshtein, one that is often higher. This is difflib's: KV-Compress's experiments and lm-evaluation-harness
    require fuzzywuzzy alone. The prediction goes first, since the ratio is not symmetric.
    """
    lines = prediction.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in _NO_CODE)), "")
    return round(100 * SequenceMatcher(None, code, reference).ratio()) / 100


def rouge(kind: str) -> PairScore:
    """Return F of ROUGE as the package `rouge` computes it, for numbers that compare with published ones.

    Its words are what stands between spaces, cased and with their punctuation; a text is a list of sentences, cut at
    each full stop; and words and pairs of words count once, however often they occur. Values fall short of 1.0 by up to
    5e-9. They are 0.0 where the package fails: on a text without sentences, and on sentences of about a thousand words.
    """

    def score(prediction: str, reference: str) -> float:
        package = import_rouge()(metrics=[kind], stats=["f"])
        try:
            return float(package.get_scores(prediction, reference)[0][kind]["f"])
        except (ValueError, RecursionError):
            return 0.0

    return score


def import_rouge() -> Any:
    try:
        from rouge import Rouge
    except ImportError:
        raise EvaluationError(f"ROUGE needs the package rouge: {install_hint('rouge', './lab')}") from None
    return Rouge


def first_line(score: Score) -> Score:
    """Return the metric of the prediction's first line, after newlines in front of it (LongBench's few shots)."""
    return lambda prediction, *rest: score(prediction.lstrip("\n").split("\n")[0], *rest)


_OF_PACKAGE = {"longbench-rouge-l": best_of(rouge("rouge-l")), "rouge-2": best_of(rouge("rouge-2"))}

METRICS: Mapping[str, Score] = MappingProxyType(
    {
        **metrics.METRICS,
        "first-line-qa-f1": first_line(best_of(token_f1)),
        **_OF_PACKAGE,
        **{f"first-line-{name}": first_line(score) for name, score in _OF_PACKAGE.items()},
        "first-line-classification": first_line(classification),
        "retrieval": best_of(retrieval),
        "count": best_of(count),
        "edit-sim": best_of(edit_similarity),
        "gsm8k-strict": best_of(gsm8k_strict),
        "gsm8k-flexible": best_of(gsm8k_flexible),
        "bbh": best_of(bbh_match),
        "triviaqa": best_of(trivia_match),
        "match-part": match_part,
    }
)


def score(metric: str, prediction: str, references: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Return the score of a prediction against accepted answers, at least one; the best counts, but for `match-all`.

    `classes` are those of `first-line-classification`.

    Raises:
        ValueError: there is no such metric.
        EvaluationError: it needs a package that is not installed.
    """
    assert references and not isinstance(references, str), "references are a sequence of at least one text"
    return _metric(metric)(prediction, references, classes)


def require_metric(name: str) -> None:
    """Raise EvaluationError when a package that the metric needs is missing: before the work, not after it."""
    _metric(name)
    if name.removeprefix("first-line-") in _OF_PACKAGE:
        import_rouge()


def _metric(name: str) -> Score:
    if name not in METRICS:
        raise ValueError(f"unknown metric {name!r}: expected one of {', '.join(METRICS)}")
    return METRICS[name]
