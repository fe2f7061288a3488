"""Statistics of the padded engine."""

from dataclasses import dataclass, field

from winnow.outputs import EngineStats
from winnow.padded.counters import Counters


@dataclass(frozen=True)
class PaddedStats(EngineStats):
    """`EngineStats` plus figures of the padded batch.

    `kv_bytes_used` and `kv_bytes_peak` are bytes of the batch's tensors, free columns included, and of a group that is
    being prefilled. `num_preemptions` counts queries that were parked.
    """

    num_parked: int = 0
    """Queries outside the batch whose KVs are in host memory."""
    parked_bytes: int = 0
    """Bytes of those KVs."""
    columns_held: int = 0
    """Columns of the batch."""
    columns_needed: int = 0
    """Length of the longest unfinished query in it: the minimum that could be held."""
    counters: Counters = field(default_factory=Counters)
    """Counters of forward passes, joins and parks since the engine was built."""

    @property
    def tally(self) -> Counters:
        """Former name of `counters`."""
        return self.counters

    @property
    def idle_share(self) -> float:
        """Fraction of all computed positions that were padding or in idle rows."""
        return self.counters.idle / self.counters.positions if self.counters.positions else 0.0

    @property
    def column_share(self) -> float:
        """Columns held over columns needed, summed over all passes of the batch; 1 is the minimum."""
        return (
            self.counters.columns_held / self.counters.columns_needed if self.counters.columns_needed else 1.0
        )
