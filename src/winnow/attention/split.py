"""Attention with keys on the device and values on a tier (KCache, arXiv 2404.18057): the oracle of every kernel.

The softmax goes over all keys. Tokens of a prompt read all values. A later token reads for each query head the N values
with the largest weights (`ValueTier.top_n`) and no others; those that the heads of a group choose come in one packed
gather. The output is the weighted sum of these. The paper does not say whether weights are scaled so that they add up
as all of them did; `ValueTier.renormalize` asks for it. With N at least the row's length nothing is left out.
"""

import time

import torch
from torch import Tensor

from winnow.attention.gathered_rows import (
    TEMPORARY,
    GatheredRows,
    RowGroup,
    Weights,
    attend_group,
    row_groups,
    weighted_sum,
)
from winnow.attention.interface import AttentionSpec
from winnow.attention.observer import Term
from winnow.attention.pages import choose_pages, page_bounds, softmax_within
from winnow.attention.spans import Spans
from winnow.cache import PagedCache
from winnow.cache.layout import ceil_div
from winnow.cache.tier_traffic import TierTraffic
from winnow.value_tier import ValueTier


def attend_split(cache: PagedCache, spans: Spans, layer: int, q: Tensor, spec: AttentionSpec) -> Tensor:
    """`AttentionBackend.attend` of a layer whose values lie on a tier; counts what is read in `KVPool.traffic`.

    Accumulators see all weights, whichever values were read. `Term.VALUE_AWARE` reads all values.
    """
    layout = cache.pool.layout
    assert layout.value_tier is not None and layout.is_far(layer), "its values lie on a tier"
    out = torch.empty_like(q)
    for group in row_groups(spans, layout.num_kv_heads * layout.head_dim):
        rows = GatheredRows.gather(cache, spans, group, layer)
        values = _TierValues(cache, rows, group, layout.value_tier, group.of_queries(q).float() * spec.scale)
        chosen = len(group.index) * q.shape[1] * min(layout.value_tier.top_n, group.longest) * layout.head_dim
        attend_group(
            cache,
            spans,
            group,
            rows,
            q,
            spec,
            values.sums,
            out,
            breaks=(group.select_from,),
            most_queries=TEMPORARY // chosen,
        )
    return out


class _TierValues:
    """The values of gathered rows, read as queries ask for them."""

    def __init__(
        self, cache: PagedCache, rows: GatheredRows, group: RowGroup, tier: ValueTier, q: Tensor
    ) -> None:
        self._cache, self._rows, self._group, self._tier, self._q = cache, rows, group, tier, q
        observe = group.observe
        self._observed = observe is not None and Term.VALUE_AWARE in observe.terms
        self._all: Tensor | None = None

    def sums(self, weights: Weights, first: int) -> tuple[Tensor, Tensor | None]:
        """See `ValueSums`."""
        selects = first >= self._group.select_from
        if not selects:
            return weighted_sum(weights.p, self._read_all()), self._all
        everything = self._read_all() if self._observed else None
        if self._tier.select == "weights":
            return self._selected(weights.p, self._tier.top_n), everything
        size = self._cache.pool.layout.block_size
        pages = ceil_div(self._tier.top_n, size)
        return self._selected(self._of_pages(weights, first, size, pages), pages * size), everything

    def _read_all(self) -> Tensor:
        if self._all is None:
            start = time.perf_counter()
            self._all = self._rows.values(self._cache)
            self._count(TierTraffic(rows_prefilled=int(self._rows.valid.sum())), start)
        return self._all

    def _of_pages(self, weights: Weights, first: int, size: int, pages: int) -> Tensor:
        """As weights.p: the softmax over the pages that each query head chooses by summaries."""
        rows = self._rows
        n, heads = weights.p.shape[3], rows.k.shape[1]
        q = self._q[:, first : first + n].unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)  # [G, H, g, n, d]
        bounds = page_bounds(q, rows.k, rows.valid, size, means=self._tier.select == "means")
        return softmax_within(weights.p, choose_pages(bounds, weights.visible, size, pages))

    def _selected(self, p: Tensor, top_n: int) -> Tensor:
        """The sum over the `top_n` largest of p, [G, H, g, n, N], of each query head: [G, H, g, n, d]."""
        weight, kv = p.topk(min(top_n, p.shape[-1]), dim=-1)
        # Of weight 0 are KVs that the query does not see, and what pads rows: nothing is read for them.
        chosen = weight > 0.0
        row = torch.arange(self._rows.slot[..., 0].numel(), device=p.device).view(*p.shape[:2], 1, 1, 1)
        place = row * p.shape[-1] + kv  # in the flattened rows
        read = torch.zeros(self._rows.slot.numel(), dtype=torch.bool, device=p.device)
        read[place[chosen]] = True
        start = time.perf_counter()
        values = self._cache.pool.values(self._rows.slot.flatten()[read])  # packed: [m, d]
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
        pool = self._cache.pool
        assert pool.values_apart is not None, "values lie on a tier"
        traffic.bytes_read = (traffic.rows_read + traffic.rows_prefilled) * pool.values_apart.slot_bytes
        traffic.seconds_waited = time.perf_counter() - start
        pool.traffic.add(traffic)
