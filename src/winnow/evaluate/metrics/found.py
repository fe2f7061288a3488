"""References that occur in the prediction, whatever else it says (RULER, arXiv:2404.06654)."""

from collections.abc import Sequence


def match_all(prediction: str, references: Sequence[str], _classes: Sequence[str]) -> float:
    """The share of the references that the prediction contains, upper or lower case (RULER's `string_match_all`)."""
    said = prediction.lower()
    return sum(reference.lower() in said for reference in references) / len(references)


def match_part(prediction: str, references: Sequence[str], _classes: Sequence[str]) -> float:
    """1.0 when the prediction contains any of the references, upper or lower case (RULER's `string_match_part`)."""
    said = prediction.lower()
    return float(any(reference.lower() in said for reference in references))
