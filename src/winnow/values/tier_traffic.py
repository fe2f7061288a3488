"""Traffic to and from the tiers of values."""

from dataclasses import dataclass, fields


@dataclass
class TierTraffic:
    """Traffic to and from a value tier.

    Attributes:
        head_queries: pairs of a decoded token and a query head that chose which values to read; rows_selected: values
            that these chose, at most N each.
        rows_read: values read for them; those that several query heads of a group chose count once.
        rows_prefilled: values read by tokens of prompts, which read all; rows_scored: by policies that score values.
        rows_written: values stored.
        bytes_read, bytes_written: of all these.
        seconds_waited: for values to arrive or to be stored; on a CPU, whose kernels use them where they lie, none.
    """

    head_queries: int = 0
    rows_selected: int = 0
    rows_read: int = 0
    rows_prefilled: int = 0
    rows_scored: int = 0
    rows_written: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    seconds_waited: float = 0.0

    def add(self, other: "TierTraffic") -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
