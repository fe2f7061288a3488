"""Terms that attention adds to accumulators of KVs, for policies that score KVs by attention."""

from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor


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


class Observation:
    """Accumulation of attention probabilities of the same rows over blocks of queries.

    Shapes: G sequences, H KV heads, g query heads each, n queries, N slots of a row, d = head_dim.
    """

    def __init__(self, observe: AttentionObserver) -> None:
        self._observe = observe
        self._sums: list[Tensor] = []  # per term [G, H, g, N], or [G, H, 1, N] where aggregated per query

    def accumulate(self, p: Tensor, visible: Tensor, age: Tensor, counts: Tensor) -> None:
        """Add a block of queries. `p` may be overwritten.

        Args:
            p: float32 [G, H, g, n, N], zero where a query does not see a KV.
            visible: bool [G, H, n, N].
            age: [G, H, n, N], positions from key to query.
            counts: bool [G, n], which queries count.
        """
        _exclude_near(p, age, self._observe.exclude_first)
        sums = [self._sum(term, p, visible, age, counts) for term in self._observe.terms]
        self._sums = [a + b for a, b in zip(self._sums, sums, strict=True)] if self._sums else sums

    def _sum(self, term: Term, p: Tensor, visible: Tensor, age: Tensor, counts: Tensor) -> Tensor:
        if term is Term.ATTENTION:
            added = p
        elif term is Term.SQUARED:
            # In place where it is the only term: fresh memory of this size costs more than the arithmetic.
            added = p.square_() if len(self._observe.terms) == 1 else p.square()
        else:
            average = 1.0 / visible.sum(dim=-1, keepdim=True)
            added = p < average[:, :, None]
            added = (added & (visible & (age >= self._observe.exclude_first))[:, :, None]).float()
        if self._observe.group is Group.MAX and not self._observe.replace:
            added = _aggregate(added, self._observe.group)
        # [1, n] @ [n, N]: the sum over the queries that count
        return (counts[:, None, None, None, :].float() @ added)[..., 0, :]

    def store(
        self, accumulators: Tensor, slot: Tensor, position: Tensor, valid: Tensor, first: Tensor
    ) -> None:
        """Add the sums to the accumulators, or replace them.

        Args:
            accumulators: float32 [num_accumulators, slots of the pool].
            slot: int64 [G, H, N], the pool slot of each KV.
            position: int32 [G, H, N]; valid: bool [G, H, N], below the row's length.
            first: int64 [G], the first position whose query counts.
        """
        for target, sums in zip(accumulators, self._sums, strict=False):
            added = aggregate_sums(sums, self._observe, position, valid, first)
            if self._observe.replace:
                target[slot[valid]] = added[valid]
            else:
                # Padding adds zeros to whatever slot it names.
                target.index_add_(0, slot.flatten(), added.masked_fill(~valid, 0.0).flatten())


def aggregate_sums(
    sums: Tensor, observe: AttentionObserver, position: Tensor, valid: Tensor, first: Tensor
) -> Tensor:
    """Aggregate query heads and pool neighbours as `observe` says: float32 [G, H, N], arbitrary where not valid.

    Sums are float32 [G, H, g, N], or [G, H, 1, N] where heads are aggregated already; the others as in
    `Observation.store`.
    """
    smoothing = observe.smoothing
    if smoothing is None:
        return _aggregate(sums, observe.group)[:, :, 0]
    pooled = valid & (position < first[:, None, None]) if smoothing.skip_window else valid
    if smoothing.per_query_head:
        return _aggregate(smooth(sums, position, pooled, smoothing), observe.group)[:, :, 0]
    return smooth(_aggregate(sums, observe.group), position, pooled, smoothing)[:, :, 0]


def _exclude_near(p: Tensor, age: Tensor, exclude_first: int) -> None:
    """Set p, [G, H, g, n, N], to zero where a query is fewer than `exclude_first` positions after the key.

    Those keys are nearly always the last ones of their rows, so the columns before the first of them are skipped.
    """
    if not exclude_first:
        return
    # Queries come in the order of their positions: no other is nearer to a key before it than the first.
    touched = (age[:, :, 0] < exclude_first).flatten(0, 1).any(dim=0)  # [N]
    start = int(touched.int().argmax()) if bool(touched.any()) else p.shape[-1]
    p[..., start:].masked_fill_((age[..., start:] < exclude_first)[:, :, None], 0.0)


def _aggregate(x: Tensor, group: Group) -> Tensor:
    if group is Group.SUM:
        return x.sum(dim=2, keepdim=True)
    return x.mean(dim=2, keepdim=True) if group is Group.MEAN else x.amax(dim=2, keepdim=True)


def smooth(x: Tensor, position: Tensor, pooled: Tensor, smoothing: Smoothing) -> Tensor:
    """Pool x, [G, H, g, N], over KVs in the order of `position`, [G, H, N]; those not `pooled` are skipped.

    x must not be negative. The result is arbitrary where not `pooled`.
    """
    last = torch.iinfo(position.dtype).max
    order = position.masked_fill(~pooled, last).argsort(dim=-1, stable=True)[:, :, None].expand_as(x)
    sorted_x = x.masked_fill(~pooled[:, :, None], 0.0).gather(-1, order).flatten(0, 2)[:, None]
    # Scores are not negative, so a zero beyond the end never wins.
    pool = F.max_pool1d if smoothing.kind == "max" else F.avg_pool1d
    smoothed = pool(sorted_x, smoothing.size, stride=1, padding=smoothing.size // 2)
    return torch.empty_like(x).scatter_(-1, order, smoothed[:, 0].view_as(x))
