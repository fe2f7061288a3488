"""Statistics of the padded engine, and the counters of its forward passes."""

from dataclasses import dataclass, field, fields

from winnow.outputs import EngineStats


@dataclass
class Counters:
    passes: int = 0
    """Forward passes of the running batch."""
    prefills: int = 0
    """Groups of queries prefilled apart from the running batch."""
    positions: int = 0
    """Positions computed in all forward passes, rows times columns."""
    idle: int = 0
    """Padding and rows of these without an unfinished query."""
    columns_held: int = 0
    """Columns of the batch, summed over its forward passes."""
    columns_needed: int = 0
    """Length of the longest unfinished query, summed likewise: the minimum that could be held."""
    joins: int = 0
    """Queries that entered the batch, including those that came back."""
    parks: int = 0
    """Queries taken out of the batch before they were finished."""
    drops: int = 0
    """Queries whose KVs did not fit into host memory and are computed again."""
    fetches: int = 0
    """Parked queries whose KVs were on their way to the device before there was a row for them."""
    released: int = 0
    """Leading columns cut because they were padding in every row."""
    prefill_seconds: float = 0.0
    """Seconds of prefills, and of waiting for them, while the batch did not run."""
    decode_seconds: float = 0.0
    """Seconds of passes of the batch."""
    overlapped_seconds: float = 0.0
    """Seconds of prefills in the background while the batch ran."""

    def count(self, rows: int, width: int, tokens: int) -> None:
        """Count a forward pass in which `tokens` positions were those of unfinished queries."""
        self.positions += rows * width
        self.idle += rows * width - tokens

    def add(self, other: "Counters") -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


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
    def idle_share(self) -> float:
        """Fraction of all computed positions that were padding or in idle rows."""
        return self.counters.idle / self.counters.positions if self.counters.positions else 0.0

    @property
    def column_share(self) -> float:
        """Columns held over columns needed, summed over all passes of the batch; 1 is the minimum."""
        held, needed = self.counters.columns_held, self.counters.columns_needed
        return held / needed if needed else 1.0
