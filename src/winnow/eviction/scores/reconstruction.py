"""What the context's own repetition pays attention to."""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from winnow.eviction.replay import Replay
from winnow.eviction.rows import LayerRows
from winnow.eviction.scores.base import Score
from winnow.eviction.signals import Needs


@dataclass(frozen=True)
class Reconstruction(Score):
    """The largest attention that a KV gets while the context is repeated behind it (KVzip, eq. 2)."""

    num_accumulators: ClassVar[int] = 1
    asked: Replay = field(default_factory=Replay)
    """How the context is repeated."""
    normalized: bool = False
    """Before the largest is taken, multiply attention by |W v| / |h|, Euclidean norms: W are the query head's output
    weights, v is the KV's value, and h the normalised hidden state that attention is computed from at the query's token
    (KVzip+, in KVzap)."""

    @property
    def needs(self) -> Needs:
        return Needs(output=self.normalized, inputs=self.normalized)

    @property
    def replay(self) -> Replay:
        return self.asked

    def worth(self, rows: LayerRows) -> Tensor:
        return rows.accumulators[0]
