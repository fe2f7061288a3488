"""Terms that attention adds to accumulators of KVs, for policies that score KVs by attention."""

from dataclasses import dataclass
from enum import Enum


class Term(Enum):
    """Term of one query in an accumulator of KV j. p is the softmax over the row, h a query head of the group."""

    ATTENTION = "attention"
    """p_h, aggregated over the group (H2O, SnapKV, Batch-Max)."""
    SQUARED = "squared"
    """p_h ** 2, then aggregated (KV-Compress eq. 19)."""
    BELOW_AVERAGE = "below average"
    """1 where p_h < 1 / (KVs the query sees), aggregated (Scissorhands)."""


class Group(Enum):
    """Aggregation of the query heads of a group to one number per KV."""

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"


@dataclass(frozen=True)
class Smoothing:
    """Pooling of a row's accumulators over neighbours in position, so that the context of an important KV stays.

    Neighbours are the KVs that the row still holds, in the order of their positions. Max pooling takes the largest of
    `size`; average pooling divides by `size` also at the ends (SnapKV's counts its padding).
    """

    size: int
    kind: str = "max"
    per_query_head: bool = False
    """Pool the query heads apart, before they are aggregated (SnapKV); False: after (KV-Compress eq. 8-11)."""
    skip_window: bool = False
    """Exclude the keys of the observing queries themselves, as if the row ended before them (SnapKV)."""
    by_text: bool = False
    """`size` counts tokens of the papers' tokenizers: `EvictionPolicy.with_pool` replaces it by the number of the
    model's tokens that cover as much text."""

    def __post_init__(self) -> None:
        if self.size < 1 or self.size % 2 == 0:
            raise ValueError(f"smoothing size must be odd and at least 1, got {self.size}")
        if self.kind not in ("max", "average"):
            raise ValueError(f"smoothing kind must be max or average, got {self.kind!r}")


@dataclass(frozen=True)
class AttentionObserver:
    """Rule by which attention updates the accumulators of a sequence, in the pass that computes the output.

    Accumulator n of KV j receives `terms[n]`, summed over the queries i that count: those at positions from
    `Spans.observe_from` on, and for key j only if i - j >= exclude_first.
    """

    terms: tuple[Term, ...] = (Term.ATTENTION,)
    """One per accumulator that is used."""
    group: Group = Group.SUM
    """MAX is taken per query where accumulators are added to, and of the sums over queries where they are replaced."""
    exclude_first: int = 0
    """Number of queries right after a key that do not count for it (v in KV-Compress eq. 19)."""
    replace: bool = False
    """Overwrite the accumulators of the row instead of adding to them; all queries that count are in this pass."""
    smoothing: Smoothing | None = None
    """Requires `replace`, since pooled sums cannot be added to."""

    def __post_init__(self) -> None:
        if self.smoothing is not None and not self.replace:
            raise ValueError("pooling needs all queries in one pass: replace must be True")
