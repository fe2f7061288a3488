"""What the forward passes of a padded batch come to."""

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
    """Of these, padding and rows without an unfinished query."""
    columns_held: int = 0
    """Columns of the batch, summed over its forward passes."""
    columns_needed: int = 0
    """The longest unfinished query, summed likewise: the least that could be held."""
    joins: int = 0
    """Queries that entered the batch, those that came back too."""
    parks: int = 0
    """Queries taken out of the batch before they were finished."""
    drops: int = 0
    """Queries that lost KVs because host memory had no room for them, to compute them again."""
    released: int = 0
    """Leading columns cut because they were padding for everyone."""
    prefill_seconds: float = 0.0
    """In which a prefill was computed, or waited for, while the batch stood still."""
    decode_seconds: float = 0.0
    """Of passes of the batch."""
    overlapped_seconds: float = 0.0
    """Of these, those in which a prefill was computed at the same time."""

    def count(self, rows: int, width: int, tokens: int) -> None:
        """Count a forward pass in which `tokens` positions were those of unfinished queries."""
        self.positions += rows * width
        self.idle += rows * width - tokens

    def add(self, other: "Counters") -> None:
        """Add another's counters."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
