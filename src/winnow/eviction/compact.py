"""The fit of a round: what stays of each row is fitted to the whole before KVs move, and stored where it moved to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from winnow.attention import PagedCache
from winnow.attention.ranked_rows import RankedRows
from winnow.eviction.costs import Ranking
from winnow.eviction.fit import Fit, RowKVs, RowQueries, fit_row, shares_of
from winnow.eviction.probes import ReferenceProbe
from winnow.eviction.signals import ReferenceQueries, Signals


class FittedRow(NamedTuple):
    """The KVs that a row keeps, by ascending position: their biases, float32 [K], and values, [K, d]."""

    layer: int
    block: Tensor
    bias: Tensor
    values: Tensor


@dataclass(frozen=True)
class _RowRound:
    """One row of a round: blocks int64 [n], KVs, and which of its slots stay and may not change, bool [N]."""

    block: Tensor
    length: int
    position: Tensor
    stays: Tensor
    fixed: Tensor


def fit_round(
    fit: Fit,
    cache: PagedCache,
    ranking: Ranking,
    ranked: RankedRows,
    kept: Tensor,
    slots: Sequence[int],
    signals: Signals,
) -> list[FittedRow]:
    """Return what the rows that lose KVs hold afterwards, one layer after the other.

    Args:
        ranked: the rows as they lie now, layers first.
        kept: KVs that each row keeps, int64 [layers, B, H].
    """
    fitted = []
    for index, layer in enumerate(ranking.rows.layers):
        rows = _layer(ranked, index)
        lost = rows.length - kept[index]
        most = int(lost.max())
        if most == 0:
            continue
        stays = rows.valid & ~rows.lowest(lost, most)
        for member, slot in enumerate(slots):
            reference = signals.probe(ReferenceProbe).of(layer, slot)
            if reference is None:
                continue
            for head in torch.nonzero(lost[member]).flatten().tolist():
                at = member, head
                row = _RowRound(
                    rows.block[at], int(rows.length[at]), rows.position[at], stays[at], rows.must_stay[at]
                )
                fitted.append(_fit(fit, cache, layer, row, queries_of_head(reference, head, kept.shape[-1])))
    return fitted


def store_fitted(cache: PagedCache, fitted: Sequence[FittedRow]) -> None:
    """Store fitted KVs, which have moved to the first slots of their rows in any order."""
    numbers = cache.pool.numbers
    for row in fitted:
        count = len(row.bias)
        front = numbers.slots_of(row.block)[:count]
        order = numbers.positions_of(row.block)[:count].argsort()
        cache.pool.of_layer(row.layer).set_fitted(front[order], row.values, row.bias)


def _fit(fit: Fit, cache: PagedCache, layer: int, row: _RowRound, queries: RowQueries) -> FittedRow:
    pool, length = cache.pool.of_layer(layer), row.length
    kvs = RowKVs(
        pool.keys_of(row.block)[:length],
        pool.values_of(row.block)[:length],
        row.position[:length],
        pool.biases_of(row.block)[:length],
    )
    stays = row.stays[:length].nonzero()[:, 0]
    stays = stays[kvs.position[stays].argsort()]
    shares = shares_of(queries, kvs, stays)
    gained, values = fit_row(fit, shares, kvs.v[stays], row.fixed[stays])
    return FittedRow(layer, row.block, kvs.bias[stays] + gained, values)


def _layer(ranked: RankedRows, index: int) -> RankedRows:
    return replace(
        ranked,
        block=ranked.block[index],
        length=ranked.length[index],
        position=ranked.position[index],
        score=ranked.score[index],
        must_stay=ranked.must_stay[index],
    )


def queries_of_head(reference: ReferenceQueries, head: int, heads: int) -> RowQueries:
    """Return the queries of the group of a KV head out of `heads`."""
    q, spec = reference.q, reference.spec  # [n, Hq, d]
    group = q.shape[1] // heads
    part = q[:, head * group : (head + 1) * group].float() * spec.scale
    position = reference.position[:, None].expand(-1, group)
    slopes = None
    if spec.slopes is not None:
        of_group = spec.slopes[head * group : (head + 1) * group].float()
        slopes = of_group.expand(len(q), -1).reshape(-1, 1)
    return RowQueries(part.flatten(0, 1), position.flatten(), spec, slopes)
