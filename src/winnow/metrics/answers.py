"""Answers that are right or wrong, and where in a longer text the answer stands."""

import re
import string
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_GSM8K_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_GSM8K_FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_GSM8K_REASONING = re.compile(r"(?s).*#### ")
# The lookahead gives up the line's last character, whatever it is.
_BBH_ANSWER = re.compile(r"(?<=the answer is )(.*)(?=.)")


def fold(text: str) -> str:
    """Return the text in lower case, without white space at its ends, and runs of it joined."""
    return " ".join(text.lower().split())


def without_punctuation(text: str) -> str:
    """Return the text without ASCII punctuation; what it separated grows together."""
    return text.translate(_PUNCTUATION)


def words_of_answer(text: str) -> list[str]:
    """Return an answer's words in lower case, without ASCII punctuation and articles, as SQuAD compares them."""
    return _ARTICLES.sub(" ", without_punctuation(text.lower())).split()


def exact_match(prediction: str, reference: str) -> float:
    """Return 1.0 when the texts are equal after trimming, joining runs of white space and lowering case, else 0.0."""
    return float(fold(prediction) == fold(reference))


def trivia_match(prediction: str, reference: str) -> float:
    """Return 1.0 when both texts are the same but for case and ASCII punctuation, else 0.0 (lm-evaluation-harness,
    triviaqa).

    White space is trimmed from the prediction alone.
    """
    return float(_plain(prediction.strip()) == _plain(reference))


def gsm8k_strict(prediction: str, reference: str) -> float:
    """Return 1.0 when the first "#### number" of the prediction is the reference's (lm-evaluation-harness,
    strict-match).

    The reference is a worked answer that ends so, or the number alone. Commas, dollar signs and a final full stop are
    deleted from both before they are compared as text.
    """
    found = _GSM8K_STRICT.search(prediction)
    return _same_number(found[1], reference) if found else 0.0


def gsm8k_flexible(prediction: str, reference: str) -> float:
    """Return 1.0 when the last number of the prediction is the reference's (lm-evaluation-harness, flexible-extract).

    A run of at least two digits, dots, commas and dollar signs counts as a number, even without a digit.
    """
    found = _GSM8K_FLEXIBLE.findall(prediction)
    return _same_number(found[-1], reference) if found else 0.0


def bbh_match(prediction: str, reference: str) -> float:
    """Return 1.0 when what the prediction says after "the answer is " is the reference, case and all, else 0.0.

    The answer runs to the end of the line without its last character, the full stop (lm-evaluation-harness,
    bbh_cot_fewshot, get-answer): a line that ends without one loses a character of its answer.
    """
    found = _BBH_ANSWER.search(prediction)
    return float(found is not None and found[1].strip() == reference)


def match_all(prediction: str, references: Sequence[str], _classes: Sequence[str]) -> float:
    """Return the share of the references that the prediction contains, in either case (RULER's `string_match_all`)."""
    said = prediction.lower()
    return sum(reference.lower() in said for reference in references) / len(references)


def match_part(prediction: str, references: Sequence[str], _classes: Sequence[str]) -> float:
    """Return 1.0 when the prediction contains any reference, in either case (RULER's `string_match_part`)."""
    said = prediction.lower()
    return float(any(reference.lower() in said for reference in references))


def _plain(text: str) -> str:
    return without_punctuation(text.lower())


def _same_number(found: str, reference: str) -> float:
    return float(_bare(found) == _bare(reference))


def _bare(text: str) -> str:
    number = _GSM8K_REASONING.sub("", text.replace(",", "").replace("$", ""))
    return number.removesuffix(".").lower()
