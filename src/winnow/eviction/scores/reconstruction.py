"""Attention from a replay of the context (KVzip)."""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from winnow.eviction.replay import Replay
from winnow.eviction.round_rows import LayerRows
from winnow.eviction.scores.base import Scorer


@dataclass(frozen=True)
class Reconstruction(Scorer):
    """The largest attention that a KV receives from a replay of the context (KVzip, eq. 2)."""

    num_accumulators: ClassVar[int] = 1
    asked: Replay = field(default_factory=Replay)
    """Settings of the replay."""

    @property
    def replay(self) -> Replay:
        return self.asked

    def score(self, rows: LayerRows) -> Tensor:
        return rows.accumulators[0]
