"""How near a line of code is to the right one."""

from difflib import SequenceMatcher

_NO_CODE = ("`", "#", "//")


def edit_similarity(prediction: str, reference: str) -> float:
    """How alike a line of code and the reference are, in hundredths (LongBench's `code_sim_score`).

    The prediction's first line, after newlines in front, that has no backtick, `#` or `//` is taken; an empty text if
    there is none. LongBench measures with `fuzzywuzzy.fuzz.ratio`, which has two definitions. Alone, that package takes
    difflib's ratio `2 M / T` of matching blocks; beside python-Levenshtein it takes the ratio of insertions and
    deletions, which is often higher. This is difflib's: the requirements of KV-Compress's experiments, and of LongBench
    in lm-evaluation-harness, name fuzzywuzzy alone. The prediction goes first, since difflib's ratio is not symmetric.
    """
    lines = prediction.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in _NO_CODE)), "")
    return round(100 * SequenceMatcher(None, code, reference).ratio()) / 100
