"""Outcome of one question of one sample in one cell."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

# Names in journals, where they differ from the fields: an evaluation of days continues under a newer version.
_JSON_NAMES = {"achieved_compression": "reached"}


JOURNAL = "outcomes.jsonl"
"""File of finished answers."""


@dataclass(frozen=True)
class Outcome:
    """One answer and its score.

    Attributes:
        cell: `Cell.name`.
        sample: `Sample.name`.
        question: its place among the sample's questions.
        category: the sample's.
        length: tokens asked for; None where the task's length is not free.
        score: 0..1.
        answer: the text that was scored.
        prompt_tokens: of context and question.
        answer_tokens: of the answer.
        achieved_compression: tokens of what the policy judged per KV kept of them; None if the answer ended before
            they were cut.
        kv_bytes: of the blocks that the sequence held when its answer ended.
    """

    cell: str
    sample: str
    question: int
    category: str
    length: int | None
    score: float
    answer: str
    prompt_tokens: int
    answer_tokens: int
    achieved_compression: float | None
    kv_bytes: int

    @property
    def key(self) -> tuple[str, str, int]:
        """Question, sample and cell."""
        return self.cell, self.sample, self.question

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name, as `from_json` reads them; journals call the achieved compression `reached`."""
        values = asdict(self)
        return {_JSON_NAMES.get(name, name): value for name, value in values.items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the reverse of `to_json`."""
        fields = {name: field for field, name in _JSON_NAMES.items()}
        return cls(**{fields.get(name, name): value for name, value in values.items()})
