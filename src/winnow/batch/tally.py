"""Sums over the finished records of a run, read from the records themselves.

So a resumed run counts the lines that an earlier one answered, their scores included.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tally:
    """Sums over output records of either form. `scores` lists the scores of each category's lines."""

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cut_off: int = 0
    """Answers that ended at their `max_tokens`, or at the end of the context."""
    first_error: str | None = None
    scores: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, record: dict[str, Any]) -> None:
        self.requests += 1
        if record.get("error") is not None:
            self.failed += 1
            self.first_error = (
                self.first_error or f"line {record['error']['line']}: {record['error']['message']}"
            )
            if isinstance(record.get("reference"), str):
                self._score(record, 0.0)  # no answer is a wrong one
            return
        answer = record["response"]["body"] if "response" in record else record
        self.prompt_tokens += answer["usage"]["prompt_tokens"]
        self.generated_tokens += answer["usage"]["completion_tokens"]
        answers = answer.get("choices") or answer.get("outputs") or [answer]
        self.cut_off += sum(each["finish_reason"] == "length" for each in answers)
        if "score" in record:
            self._score(record, record["score"])

    def _score(self, record: dict[str, Any], score: float) -> None:
        category = record.get("category")  # anything at all, where the line was refused
        self.scores[category if isinstance(category, str) else "all"].append(score)
