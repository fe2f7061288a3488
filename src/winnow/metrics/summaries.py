"""ROUGE as the package `rouge` computes it, for numbers that compare with published ones.

Its words are what stands between spaces, cased and with their punctuation; a text is a list of sentences, cut at each
full stop; and words and pairs of words count once, however often they occur. Values fall short of 1.0 by up to 5e-9.
"""

from typing import Any

from winnow.errors import EvaluationError
from winnow.extras import install_hint


def rouge_l_of_sentences(prediction: str, reference: str) -> float:
    """Return F of ROUGE-L over sentences, as LongBench scores summaries: 0.0 where the package fails.

    It fails on a text without sentences, such as an empty one, and on sentences of about a thousand words.

    Raises:
        EvaluationError: the package is not installed.
    """
    return _rouge("rouge-l", prediction, reference)


def rouge_2(prediction: str, reference: str) -> float:
    """Return F of the pairs of neighbouring words that both texts have; 0.0 for a text without sentences.

    Raises:
        EvaluationError: the package is not installed.
    """
    return _rouge("rouge-2", prediction, reference)


def import_rouge() -> Any:
    """Return the package's class `Rouge`; raises EvaluationError where it is not installed."""
    try:
        from rouge import Rouge
    except ImportError:
        raise EvaluationError(f"ROUGE needs the package rouge: {install_hint('eval')}") from None
    return Rouge


def _rouge(kind: str, prediction: str, reference: str) -> float:
    rouge = import_rouge()(metrics=[kind], stats=["f"])
    try:
        return float(rouge.get_scores(prediction, reference)[0][kind]["f"])
    except (ValueError, RecursionError):
        return 0.0
