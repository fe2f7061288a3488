"""A moment of the padded engine."""

from dataclasses import dataclass, field

from winnow.outputs import EngineStats
from winnow.padded.counters import Counters


@dataclass(frozen=True)
class PaddedStats(EngineStats):
    """`EngineStats` with what only a padded batch has.

    `kv_bytes_used` and `kv_bytes_peak` are those of the batch's tensors, free columns included, and of a group that is
    being prefilled. `num_preemptions` counts queries that were parked.
    """

    num_parked: int = 0
    """Queries that are out of the batch with their KVs."""
    parked_bytes: int = 0
    """Of those KVs, in host memory."""
    columns_held: int = 0
    """Columns of the batch now."""
    columns_needed: int = 0
    """The longest unfinished query in it: the least that could be held."""
    counters: Counters = field(default_factory=Counters)
    """Counters of forward passes, joins and parks."""

    @property
    def tally(self) -> Counters:
        """Former name of `counters`."""
        return self.counters

    @property
    def idle_share(self) -> float:
        """Part of all computed positions that were padding or belonged to nobody."""
        return self.counters.idle / self.counters.positions if self.counters.positions else 0.0

    @property
    def column_share(self) -> float:
        """Columns held over columns needed, over all passes of the batch; 1 is the bound."""
        return (
            self.counters.columns_held / self.counters.columns_needed if self.counters.columns_needed else 1.0
        )
