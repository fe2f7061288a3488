"""Counters of a padded batch's forward passes."""

from dataclasses import dataclass, fields


@dataclass
class Counters:
    """Counters that only grow."""

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
        """Add the values of `other`."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
