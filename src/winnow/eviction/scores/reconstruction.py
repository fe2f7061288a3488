"""What the context's own repetition pays attention to."""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from winnow.eviction.replay import Replay
from winnow.eviction.rows import LayerRows
from winnow.eviction.scores.base import Score


@dataclass(frozen=True)
class Reconstruction(Score):
    """The largest attention that a KV gets while the context is repeated behind it (KVzip, eq. 2)."""

    num_scores: ClassVar[int] = 1
    asked: Replay = field(default_factory=Replay)

    @property
    def replay(self) -> Replay:
        return self.asked

    def worth(self, rows: LayerRows) -> Tensor:
        return rows.score[0]
