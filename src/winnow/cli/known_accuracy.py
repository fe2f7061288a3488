"""Measured accuracy by model, policy, compression and task: known_accuracy.json, which names the pages."""

import json
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("known_accuracy.json")
PAGE = "docs/results/known.md"
DEMO = "winnow-demo"
MIN_SHARE = 0.8
"""Share of the full cache's answers below which a task counts as lost."""
_SAME = 0.05
"""Compressions count as the same within this part."""
# What follows a model's name where its weights are in another format.
_FORMAT = r"([.-](I?Q\d\w*|B?F16|F32|GGUF))*"


@dataclass(frozen=True)
class KnownAccuracy:
    """Accuracy of one policy at one compression on one task.

    Attributes:
        question: seen (the policy judges the whole prompt) or later (it judges the context before the question).
        share: mean score of the full cache's, over `categories` that the model can answer; `error` its standard error.
        task: with the prompts' length in tokens.
        source: the report in the repository.
    """

    policy: str
    compression: float
    question: str
    share: float
    error: float
    model: str
    task: str
    categories: int
    source: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def is_of(self, model: str | Path | None) -> bool:
        """Return whether it was measured on the model at a path or of a name; None: the demo model."""
        name = DEMO if model is None else Path(model).name
        return re.fullmatch(re.escape(self.model) + _FORMAT, name, re.IGNORECASE) is not None


def known_accuracy(policy: str, compression: float, model: str | None = None) -> list[KnownAccuracy]:
    """Return what was measured at that compression; where nothing was, at the nearest ones below and above it. A model
    of which nothing was measured, or None: of every model."""
    rows = [each for each in record() if each.policy == policy]
    if model is not None:
        rows = [each for each in rows if each.is_of(model)] or rows
    series: dict[tuple[str, ...], list[KnownAccuracy]] = {}
    for each in rows:
        series.setdefault((each.model, each.task, each.question), []).append(each)
    found = []
    for known in series.values():
        known.sort(key=lambda each: each.compression)
        same = [each for each in known if abs(each.compression / compression - 1) <= _SAME]
        below = [each for each in known if each.compression < compression][-1:]
        above = [each for each in known if each.compression > compression][:1]
        found += same or below + above
    return found


def lost_tasks(model: str | Path | None, policy: str, compression: float) -> list[KnownAccuracy]:
    """Return what a policy was measured to lose on a model, at that compression or at the nearest below it."""
    nearest = {
        (each.task, each.question): each
        for each in sorted(record(), key=lambda each: each.compression)
        if each.policy == policy and each.is_of(model) and each.compression <= compression * (1 + _SAME)
    }
    return sorted((e for e in nearest.values() if e.share < MIN_SHARE), key=lambda each: each.share)


def share_range(rows: Collection[KnownAccuracy]) -> str:
    """Return shares as text, least to most where they differ: "0.17 to 0.93"."""
    least, most = (f"{pick(each.share for each in rows):.2f}" for pick in (min, max))
    return least if least == most else f"{least} to {most}"


@cache
def record() -> tuple[KnownAccuracy, ...]:
    return tuple(KnownAccuracy(**row) for row in json.loads(FILE.read_text(encoding="utf-8"))["rows"])
