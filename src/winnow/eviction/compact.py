"""The fit of a round: what stays of each row is fitted to the whole before KVs move, and stored where it moved to."""

from collections.abc import Sequence
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

    `ranked` are the rows as they lie now, layers first, of which each keeps `kept` KVs, int64 [layers, B, H].
    """
    fitted = []
    for index, layer in enumerate(ranking.rows.layers):
        rows = ranked[index]
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
                queries = queries_of_head(reference, head, kept.shape[-1])
                fitted.append(_fit(fit, cache, layer, rows[member, head], stays[member, head], queries))
    return fitted


def store_fitted(cache: PagedCache, fitted: Sequence[FittedRow]) -> None:
    """Store fitted KVs, which have moved to the first slots of their rows in any order."""
    numbers = cache.pool.numbers
    for row in fitted:
        count = len(row.bias)
        front = numbers.slots_of(row.block)[:count]
        order = numbers.positions_of(row.block)[:count].argsort()
        cache.pool.of_layer(row.layer).set_fitted(front[order], row.values, row.bias)


def _fit(
    fit: Fit, cache: PagedCache, layer: int, row: RankedRows, stays: Tensor, queries: RowQueries
) -> FittedRow:
    pool, block = cache.pool.of_layer(layer), row.block
    parts = pool.keys_of(block), pool.values_of(block), row.position, pool.biases_of(block)
    length = int(row.length)
    kvs = RowKVs(*(part[:length] for part in parts))
    kept = stays.nonzero()[:, 0]
    kept = kept[kvs.position[kept].argsort()]
    gained, values = fit_row(fit, shares_of(queries, kvs, kept), kvs.v[kept], row.must_stay[kept])
    return FittedRow(layer, block, kvs.bias[kept] + gained, values)


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
