"""Attention with keys on the device and values on a tier (KCache, arXiv 2404.18057): the oracle of every kernel.

The softmax goes over all keys. Tokens of a prompt read all values. A later token reads for each query head the N values
with the largest weights (`ValueTier.top_n`) and no others; those that the heads of a group choose come in one packed
gather. The output is the weighted sum of these. The paper does not say whether weights are scaled so that they add up
as all of them did; `ValueTier.renormalize` asks for it. With N at least the row's length nothing is left out.
"""

import time
from dataclasses import replace

import torch
from torch import Tensor

from winnow.attention.gathered_rows import (
    TEMPORARY,
    BlockOutput,
    GatheredRows,
    SequenceGroup,
    attend_group,
    see,
    sequence_groups,
    softmax_over,
    weighted_sum,
)
from winnow.attention.interface import AttentionSpec
from winnow.attention.observer import Term
from winnow.attention.pages import choose_pages, page_bounds, summary_bounds
from winnow.attention.spans import Spans
from winnow.cache import PagedCache
from winnow.cache.layout import ceil_div
from winnow.cache.tiers.key_summaries import KeySummaries
from winnow.cache.tiers.tier_traffic import TierTraffic
from winnow.cache.tiers.value_store import ValueStore


def attend_split(cache: PagedCache, spans: Spans, layer: int, q: Tensor, spec: AttentionSpec) -> Tensor:
    """Return `BackendStep.attend` of a layer whose values lie on a tier; counts what is read in `KVPool.traffic`.

    Accumulators see all weights, whichever values were read; where keys lie there too, only those of prompts.
    `Term.VALUE_AWARE` reads all values.
    """
    pool = cache.pool.of_layer(layer)
    assert pool.tier is not None, "its values lie on a tier"
    out, keys_apart, most = torch.empty_like(q), pool.summaries is not None, pool.tier.tier.top_n
    for group in sequence_groups(spans, cache.pool.layout.heads[layer] * pool.kind.key_size):
        rows = GatheredRows.gather(cache, spans, group, layer, with_keys=not keys_apart)
        tier = _TierRows(rows, group, pool.tier, spec)
        chosen = len(group.index) * q.shape[1] * min(most, group.longest) * pool.kind.value_size
        attend_group(
            cache,
            spans,
            group,
            rows,
            q,
            tier.attend_pages_apart if keys_apart else tier.attend,
            out,
            breaks=(group.select_from,),
            most_queries=TEMPORARY // chosen,
        )
    return out


class _TierRows:
    """Gathered rows whose values, or KVs, are read as queries ask for them."""

    def __init__(
        self, rows: GatheredRows, group: SequenceGroup, store: ValueStore, spec: AttentionSpec
    ) -> None:
        self._rows, self._group, self._store, self._tier, self._spec = rows, group, store, store.tier, spec
        observe = group.observe
        self._observed = observe is not None and Term.VALUE_AWARE in observe.terms
        self._size = rows.pool.kind.size
        self._pages = ceil_div(store.tier.top_n, self._size)
        self._all: Tensor | None = None

    def attend(self, q: Tensor, position: Tensor, first: int) -> BlockOutput:
        """See `AttendBlock`; keys lie on the device."""
        weights = softmax_over(q, position, self._rows, self._spec)
        if first < self._group.select_from:
            return BlockOutput(weighted_sum(weights.p, self._read_all()), weights, self._all)
        everything = self._read_all() if self._observed else None
        if self._tier.select == "weights":
            return BlockOutput(self._selected(weights.p, self._tier.top_n), weights, everything)
        means = self._tier.select == "means"
        bounds = page_bounds(self._grouped(q), self._rows.k, self._rows.valid, self._size, means=means)
        chosen = choose_pages(bounds, weights.visible, self._size, self._pages)
        p = softmax_over(q, position, self._rows, self._spec, chosen).p
        return BlockOutput(self._selected(p, self._pages * self._size), weights, everything)

    def attend_pages_apart(self, q: Tensor, position: Tensor, first: int) -> BlockOutput:
        """See `AttendBlock`; the device has summaries of keys alone."""
        rows, summaries = self._rows, self._rows.pool.summaries
        if first < self._group.select_from:
            weights = softmax_over(q, position, self._with_keys(), self._spec)
            return BlockOutput(weighted_sum(weights.p, self._read_all()), weights, self._all)
        assert summaries is not None, "keys are on the tier"
        self._refresh(summaries)
        here, count = rows.pool.local(rows.block), rows.valid.unflatten(-1, (-1, self._size)).sum(dim=-1)
        low, high, means = summaries.low[here], summaries.high[here], summaries.means
        bounds = summary_bounds(self._grouped(q), low, high, count, means=means)
        visible, _ = see(position, rows, self._spec)
        chosen = choose_pages(bounds, visible, self._size, self._pages)  # [G, H, g, n, N]
        start = time.perf_counter()
        part, of_part = self._gather_pages(chosen)
        values, read = part.values(), int(part.valid.sum())
        asked, selected = chosen[..., 0].numel(), int(chosen.sum())
        traffic = TierTraffic(head_queries=asked, rows_selected=selected, rows_read=read, keys_read=read)
        self._count(traffic, start)
        weights = softmax_over(q, position, part, self._spec, of_part)
        return BlockOutput(weighted_sum(weights.p, values), None)

    def _with_keys(self) -> GatheredRows:
        if not len(self._rows.k):
            start, rows = time.perf_counter(), self._rows
            self._rows = replace(rows, k=self._rows.pool.keys_of(rows.block))
            self._count(TierTraffic(keys_read=int(rows.valid.sum())), start)
        return self._rows

    def _gather_pages(self, chosen: Tensor) -> tuple[GatheredRows, Tensor]:
        """Return the pages that any query chose of each row, and which of their KVs each query chose."""
        rows, size = self._rows, self._size
        wanted = chosen.unflatten(-1, (-1, size)).any(dim=-1).flatten(2, 3).any(dim=2)  # [G, H, pages]
        most = max(int(wanted.sum(dim=-1).max()), 1)
        there, page = wanted.int().sort(dim=-1, descending=True, stable=True)
        there, page = there[..., :most].bool(), page[..., :most]
        kv = (page[..., None] * size + torch.arange(size, device=page.device)).flatten(
            -2
        )  # [G, H, most * size]
        valid = rows.valid.gather(-1, kv) & there.repeat_interleave(size, dim=-1)
        block = rows.block.gather(-1, page)
        part = replace(
            rows,
            k=self._rows.pool.keys_of(block),
            block=block,
            position=rows.position.gather(-1, kv),
            valid=valid,
            slot=rows.slot.gather(-1, kv),
        )
        index = kv[:, :, None, None].expand(*chosen.shape[:-1], -1)
        return part, chosen.gather(-1, index) & valid[:, :, None, None]

    def _refresh(self, summaries: KeySummaries) -> None:
        """Summarise the keys anew of blocks where KVs were moved."""
        valid = self._rows.valid.unflatten(-1, (-1, self._size))
        here = self._rows.pool.local(self._rows.block)
        stale = summaries.stale[here] & valid.any(dim=-1)
        if bool(stale.any()):
            start = time.perf_counter()
            keys = self._rows.pool.keys_of(self._rows.block[stale][:, None])
            summaries.make(here[stale], keys, valid[stale])
            self._count(TierTraffic(keys_read=int(valid[stale].sum())), start)

    def _grouped(self, q: Tensor) -> Tensor:
        """Return q, [G, n, Hq, d], scaled, as float32 [G, H, g, n, d]."""
        heads = self._rows.block.shape[1]
        return (q.float() * self._spec.scale).unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)

    def _read_all(self) -> Tensor:
        if self._all is None:
            start = time.perf_counter()
            self._all = self._rows.values()
            self._count(TierTraffic(rows_prefilled=int(self._rows.valid.sum())), start)
        return self._all

    def _selected(self, p: Tensor, top_n: int) -> Tensor:
        """Return the sum over the `top_n` largest of p, [G, H, g, n, N], of each query head: [G, H, g, n, d]."""
        weight, kv = p.topk(min(top_n, p.shape[-1]), dim=-1)
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
        traffic.bytes_read += traffic.keys_read * store.key_bytes
        traffic.seconds_waited = time.perf_counter() - start
        store.traffic.add(traffic)
