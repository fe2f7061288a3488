"""Categories that tell nothing about a policy.

A question at the end of a prompt that the policy judges as a whole has looked its answer up before anything is evicted,
and what it found lies in the most recent KVs: a plain window then answers it as well as the full cache. And where the
full cache itself does not answer, no policy can lose anything. Such categories are uninformative.
"""

from collections.abc import Callable, Mapping, Sequence

NEAR = 0.05
"""A control within this share of the full cache's score answers as well."""
MIN_FULL_SCORE = 0.1
"""Below this score the full cache does not answer."""

ScoreOf = Callable[[str], float | None]


def uninformative_categories(
    categories: Sequence[str], full: ScoreOf, controls: Mapping[str, ScoreOf]
) -> dict[str, str]:
    """Return uninformative categories, each with the reason.

    Args:
        full: the full cache's score of a category.
        controls: by preset, its scores in the query mode and at the compression in question.
    """
    marks = {}
    for category in categories:
        reference = full(category)
        if reference is None:
            continue
        if reference < MIN_FULL_SCORE:
            marks[category] = f"the full cache itself scores {reference:.2f}"
            continue
        for name, score in controls.items():
            control = score(category)
            if control is not None and control >= (1 - NEAR) * reference:
                marks[category] = f"{name} scores {control:.2f}, the full cache {reference:.2f}"
                break
    return marks
