"""Attention with keys on the device and values on a tier (KCache, arXiv 2404.18057): the oracle of every kernel.

The softmax goes over all keys. Tokens of a prompt read all values. A later token reads for each query head the N values
with the largest weights (`ValueTier.top_n`) and no others; those that the heads of a group choose come in one packed
gather. The output is the weighted sum of these. The paper does not say whether weights are scaled so that they add up
as all of them did; `ValueTier.renormalize` asks for it. With N at least the row's length nothing is left out.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from winnow.attention.gathered_rows import (
    TEMPORARY,
    BlockOutput,
    GatheredRows,
    SequenceGroup,
    attend_group,
    sequence_groups,
    softmax_over,
    weighted_sum,
)
from winnow.attention.interface import AttentionSpec
from winnow.attention.spans import Spans
from winnow.cache import PagedCache
from winnow.cache.tiers.tier_traffic import TierTraffic
from winnow.cache.tiers.value_store import ValueStore


def attend_split(
    cache: PagedCache,
    spans: Spans,
    layer: int,
    q: Tensor,
    spec: AttentionSpec,
    last: Callable[[int, int], Tensor | None] = lambda first, count: None,
) -> Tensor:
    """Return `BackendStep.attend` of a layer whose values lie on a tier; counts what is read in `KVPool.traffic`.

    Accumulators see all weights, whichever values were read.

    Args:
        last: as `ReferenceStep.last_visible`, of this layer.
    """
    pool = cache.pool.of_layer(layer)
    assert pool.tier is not None, "its values lie on a tier"
    out, most = torch.empty_like(q), pool.tier.tier.top_n
    for group in sequence_groups(spans, cache.pool.layout.heads[layer] * pool.kind.key_size):
        rows = GatheredRows.gather(cache, spans, group, layer)
        tier = _TierRows(rows, group, pool.tier, spec, last)
        chosen = len(group.index) * q.shape[1] * min(most, group.longest) * pool.kind.value_size
        attend_group(
            cache,
            spans,
            group,
            rows,
            q,
            tier.attend,
            out,
            breaks=(group.select_from,),
            most_queries=TEMPORARY // chosen,
        )
    return out


class _TierRows:
    """Gathered rows whose values are read as queries ask for them."""

    def __init__(
        self,
        rows: GatheredRows,
        group: SequenceGroup,
        store: ValueStore,
        spec: AttentionSpec,
        last: Callable[[int, int], Tensor | None],
    ) -> None:
        self._rows, self._group, self._store, self._tier, self._spec = rows, group, store, store.tier, spec
        self._last = last
        self._all: Tensor | None = None

    def attend(self, q: Tensor, position: Tensor, first: int) -> BlockOutput:
        """See `AttendBlock`."""
        weights = softmax_over(q, position, self._rows, self._spec, self._last(first, position.shape[1]))
        if first < self._group.select_from:
            return BlockOutput(weighted_sum(weights.p, self._read_all()), weights)
        return BlockOutput(self._selected(weights.p), weights)

    def _read_all(self) -> Tensor:
        if self._all is None:
            start = time.perf_counter()
            self._all = self._rows.values()
            self._count(TierTraffic(rows_prefilled=int(self._rows.valid.sum())), start)
        return self._all

    def _selected(self, p: Tensor) -> Tensor:
        """Return the sum over the N largest of p, [G, H, g, n, N], of each query head: [G, H, g, n, d]."""
        weight, kv = p.topk(min(self._tier.top_n, p.shape[-1]), dim=-1)
        # Of weight 0 are KVs that the query does not see, and what pads rows: nothing is read for them.
        chosen = weight > 0.0
        row = torch.arange(self._rows.slot[..., 0].numel(), device=p.device).view(*p.shape[:2], 1, 1, 1)
        place = row * p.shape[-1] + kv  # in the flattened rows
        read = torch.zeros(self._rows.slot.numel(), dtype=torch.bool, device=p.device)
        read[place[chosen]] = True
        start = time.perf_counter()
        values = self._rows.pool.values(self._rows.slot.flatten()[read])  # packed: [m, d]
        self._count(
            TierTraffic(
                head_queries=p[..., 0].numel(), rows_selected=int(chosen.sum()), rows_read=len(values)
            ),
            start,
        )
        packed = (read.cumsum(0) - 1)[place].clamp_min(0)
        if not len(values):
            return p.new_zeros(*p.shape[:-1], values.shape[-1])
        out = (weight[..., None, :] @ values[packed].masked_fill_(~chosen[..., None], 0.0))[..., 0, :]
        if self._tier.renormalize:
            out *= (p.sum(dim=-1) / weight.sum(dim=-1).clamp_min(torch.finfo().tiny))[..., None]
        return out

    def _count(self, traffic: TierTraffic, start: float) -> None:
        """Add what was read since `start`, of `time.perf_counter`."""
        store = self._store
        traffic.bytes_read = (traffic.rows_read + traffic.rows_prefilled) * store.slot_bytes
        traffic.seconds_waited = time.perf_counter() - start
        store.traffic.add(traffic)
