"""What attention tells the scores about the KVs it read."""

from dataclasses import dataclass
from enum import Enum


class Term(Enum):
    """What one query adds to the score of a KV j. p is the softmax over the row, h a query head of the KV's group."""

    ATTENTION = "attention"
    """p_h, aggregated over the group (H2O, SnapKV, Batch-Max)."""
    SQUARED = "squared"
    """p_h ** 2, then aggregated (KV-Compress eq. 19)."""
    GROUP_SQUARED = "group squared"
    """p_h aggregated, then squared (RoCo's second moment)."""
    BELOW_AVERAGE = "below average"
    """1 where p_h < 1 / (KVs the query sees), aggregated (Scissorhands)."""
    VALUE_AWARE = "value aware"
    """(p_h / (1 - p_h)) ** 2 * |v_j - o_h|^2, aggregated: the change of the output o_h if j were gone (DropKV)."""


class Group(Enum):
    """How the query heads of a group become one number per KV."""

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"


@dataclass(frozen=True)
class Pool:
    """Smoothing of a row's scores over neighbours in position, so that what surrounds a wanted KV stays too.

    Neighbours are the KVs that the row still holds, in the order of their positions. Max pooling takes the largest of
    `size`; average pooling divides by `size` also at the ends (SnapKV's counts its padding).
    """

    size: int
    kind: str = "max"
    per_query_head: bool = False
    """Pool the query heads apart, before they are aggregated (SnapKV); False: after (KV-Compress eq. 8-11)."""
    skip_window: bool = False
    """Leave the keys of the observing queries themselves out, as if the row ended before them (SnapKV)."""

    def __post_init__(self) -> None:
        if self.size < 1 or self.size % 2 == 0:
            raise ValueError(f"pool size must be odd and at least 1, got {self.size}")
        if self.kind not in ("max", "average"):
            raise ValueError(f"pool kind must be max or average, got {self.kind!r}")


@dataclass(frozen=True)
class AttentionObserver:
    """What attention does to the scores of a sequence, in the same pass.

    Over the queries i that count, score[n, j] receives the sum of what `terms[n]` says. A query counts from the
    position that its span says (`Spans.observe_from`), and for key j only if i - j >= exclude_first.
    """

    terms: tuple[Term, ...] = (Term.ATTENTION,)
    """One per score of the KV that is used."""
    group: Group = Group.SUM
    """Maximum: per query where scores are added up, and of the sums over queries where they are replaced."""
    exclude_first: int = 0
    """Queries right after a key that do not count for it (v in KV-Compress eq. 19)."""
    replace: bool = False
    """Overwrite the scores of all the row's KVs instead of adding to them. All queries that count are in this pass."""
    pool: Pool | None = None
    """Only with `replace`, since pooled sums cannot be added to."""

    def __post_init__(self) -> None:
        if self.pool is not None and not self.replace:
            raise ValueError("pooling needs all queries in one pass: replace must be True")
