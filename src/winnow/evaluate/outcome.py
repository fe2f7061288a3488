"""How one question of one sample was answered in one cell."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self


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
        reached: tokens of what the policy judged per KV kept of them; None if the answer ended before they were cut.
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
    reached: float | None
    kv_bytes: int

    @property
    def key(self) -> tuple[str, str, int]:
        """Which question of which sample in which cell."""
        return self.cell, self.sample, self.question

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        return cls(**values)
