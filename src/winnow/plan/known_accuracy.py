"""Measured accuracy of a policy at a compression: known_accuracy.json, which names its sources."""

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("known_accuracy.json")
_SAME = 0.05
"""Compressions count as the same within this part."""


@dataclass(frozen=True)
class KnownAccuracy:
    """Accuracy of one policy at one compression.

    Attributes:
        question: seen (the policy judges the whole prompt) or later (it judges the context before the question).
        share: mean score of the full cache's, over `categories` that the model can answer; `error` its standard error.
        tasks: with the prompts' length in tokens.
        source: the report in the repository.
    """

    policy: str
    compression: float
    question: str
    share: float
    error: float
    model: str
    tasks: str
    categories: int
    source: str

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def known_accuracy(policy: str, compression: float) -> list[KnownAccuracy]:
    """Return what was measured at that compression; where nothing was, at the nearest ones below and above it."""
    series: dict[tuple[str, ...], list[KnownAccuracy]] = {}
    for each in _rows():
        if each.policy == policy:
            series.setdefault((each.model, each.tasks.split()[0], each.source, each.question), []).append(
                each
            )
    found = []
    for rows in series.values():
        rows.sort(key=lambda each: each.compression)
        same = [each for each in rows if abs(each.compression / compression - 1) <= _SAME]
        below = [each for each in rows if each.compression < compression][-1:]
        above = [each for each in rows if each.compression > compression][:1]
        found += same or below + above
    return found


@cache
def _rows() -> tuple[KnownAccuracy, ...]:
    return tuple(KnownAccuracy(**row) for row in json.loads(FILE.read_text(encoding="utf-8"))["rows"])
