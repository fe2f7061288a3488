"""Rows as padded float32 tensors, and the softmax of queries over them, in plain torch.

Decoding sequences of similar length are gathered together; prefill chunks one by one.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from winnow.attention.interface import AttentionSpec
from winnow.attention.observer import AttentionObserver, Observation
from winnow.attention.spans import Spans
from winnow.cache import PagedCache
from winnow.cache.layout import ceil_div
from winnow.cache.pool import KindPool
from winnow.cache.tiers.value_store import ValueStore
from winnow.values.tier_traffic import TierTraffic

TEMPORARY = 2**24
"""Elements of the largest temporary: 64 MiB of float32."""


@dataclass(frozen=True)
class SequenceGroup:
    """G sequences computed together, n queries each, rows padded to `longest` KVs."""

    index: list[int]  # of the sequences in the spans
    tokens: slice | Tensor  # queries of them in the packed batch, G * n of them
    longest: int
    observe: AttentionObserver | None
    select_from: int  # first of the n queries of each that selects values (`Spans.select_from`)

    def of_queries(self, x: Tensor) -> Tensor:
        return x[self.tokens].unflatten(0, (len(self.index), -1))


def sequence_groups(spans: Spans, row_elements: int) -> Iterator[SequenceGroup]:
    """Split the batch into padded groups.

    Decoding sequences are sorted by length, so that padding stays below half of a group, and split where the gathered
    KVs would exceed `TEMPORARY`.
    """
    decodes = spans.num_decodes
    first_selecting = np.clip(spans.select_from - spans.first_position, 0, spans.counts)
    by_length = np.argsort(-spans.lengths[:decodes], kind="stable")
    kinds = list(zip(spans.observe[:decodes], first_selecting[:decodes].tolist(), strict=True))
    for kind in dict.fromkeys(kinds):
        alike = by_length[[kinds[i] == kind for i in by_length]]
        start = 0
        while start < len(alike):
            longest = int(spans.lengths[alike[start]])
            most = max(1, TEMPORARY // (longest * row_elements))
            short = np.flatnonzero(spans.lengths[alike[start:]] * 2 < longest)
            end = min(len(alike), start + most, start + int(short[0]) if len(short) else len(alike))
            index = alike[start:end].tolist()
            # Decoding sequences lead the batch, so the index of the only token is that of its sequence.
            yield SequenceGroup(index, torch.tensor(index, device=spans.device), longest, *kind)
            start = end
    for i in range(decodes, len(spans.counts)):
        first, count = int(spans.starts[i]), int(spans.counts[i])
        tokens = slice(first, first + count)
        yield SequenceGroup([i], tokens, int(spans.lengths[i]), spans.observe[i], int(first_selecting[i]))


@dataclass(frozen=True)
class GatheredRows:
    """The rows of one layer for G sequences, padded to N slots, without their values."""

    pool: KindPool
    k: Tensor  # float32 [G, H, N, d]
    block: Tensor  # int64 [G, H, N / block size]
    position: Tensor  # int32 [G, H, N]
    valid: Tensor  # bool [G, H, N]: below the row's length
    slot: Tensor  # int64 [G, H, N]: flat slot number in the pool
    device_slots: Tensor  # int64 [G]: of the cache
    observe_from: Tensor  # int64 [G]
    bias: Tensor | None = None  # float32 [G, H, N]; None: KVs have none

    @classmethod
    def gather(cls, cache: PagedCache, spans: Spans, group: SequenceGroup, layer: int) -> "GatheredRows":
        pool, tables = cache.pool.of_layer(layer), cache.tables
        numbers, heads = pool.numbers, cache.pool.layout.heads[layer]
        slots = torch.from_numpy(spans.slots[group.index]).to(spans.device)
        blocks = tables.lookup(slots, layer, ceil_div(group.longest, pool.kind.size))[:, :heads].long()
        slot = numbers.slots_of(blocks)
        length = tables.lengths[slots, layer, :heads]  # [G, H]
        return cls(
            pool=pool,
            k=pool.keys_of(blocks),
            block=blocks,
            position=numbers.positions_of(blocks),
            valid=torch.arange(slot.shape[2], device=spans.device) < length[..., None],
            slot=slot,
            device_slots=slots,
            observe_from=torch.from_numpy(spans.observe_from[group.index]).to(spans.device),
            bias=pool.biases_of(blocks) if pool.has_bias else None,
        )

    def values(self) -> Tensor:
        # Padding is uninitialised memory, and 0 x NaN is NaN: clear values past the length.
        return self.pool.values_of(self.block).masked_fill_(~self.valid[..., None], 0.0)


class Weights(NamedTuple):
    """The softmax of n queries of each of G sequences over their rows."""

    p: Tensor  # float32 [G, H, g, n, N]
    visible: Tensor  # bool [G, H, n, N]
    age: Tensor  # [G, H, n, N], positions from key to query


def softmax_over(
    q: Tensor, position: Tensor, rows: GatheredRows, spec: AttentionSpec, last: Tensor | None = None
) -> Weights:
    """Return the weights that q, [G, n, Hq, d], at `position`, int32 [G, n], gives the KVs of gathered rows.

    Args:
        last: positions of the last KVs that queries see, int32 [G, n]; None: their own.
    """
    heads = rows.k.shape[1]
    # q becomes [G, H, g, n, d]: g query heads share a KV head
    q = (q.float() * spec.scale).unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)
    group, n = q.shape[2:4]
    logits = (q.flatten(2, 3) @ rows.k.transpose(2, 3)).unflatten(2, (group, n))  # [G, H, g, n, N]
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    if rows.bias is not None:
        logits += rows.bias[:, :, None, None, :]
    age = position[:, None, :, None] - rows.position[:, :, None, :]  # [G, H, n, N]
    seen = age >= 0 if last is None else rows.position[:, :, None, :] <= last[:, None, :, None]
    visible = rows.valid[:, :, None, :] & seen
    if spec.window is not None:
        reach = spec.reach(position)
        visible &= age < (reach if isinstance(reach, int) else reach[:, None, :, None])
    if spec.slopes is not None:
        logits -= spec.slopes.float().view(heads, group, 1, 1) * age[:, :, None]
    logits.masked_fill_(~visible[:, :, None], -torch.inf)
    if spec.sinks is not None:
        column = spec.sinks.float().view(1, heads, group, 1, 1).expand(len(q), -1, -1, n, 1)
        logits = torch.cat([logits, column], dim=-1)
    return Weights(logits.softmax(dim=-1)[..., : rows.k.shape[2]], visible, age)


def weighted_sum(p: Tensor, v: Tensor) -> Tensor:
    return (p.flatten(2, 3) @ v).unflatten(2, p.shape[2:4])


AttendBlock = Callable[[Tensor, Tensor, int], tuple[Tensor, Weights]]
"""Attends from q, [G, n, Hq, d], at positions int32 [G, n], the first of which is that query of each sequence. Returns
sums, float32 [G, H, g, n, d], and the weights of all KVs."""


def attend_group(
    spans: Spans,
    group: SequenceGroup,
    rows: GatheredRows,
    q: Tensor,
    attend: AttendBlock,
    out: Tensor,
    most_queries: int = TEMPORARY,
) -> None:
    """Compute a group's attention in blocks of queries, into its part of `out`, [T, Hq, d], and update accumulators.

    A block starts at `SequenceGroup.select_from`, and has at most `most_queries`, beside what the weights allow.
    """
    q_group, position = group.of_queries(q), group.of_queries(spans.position).int()
    queries = TEMPORARY // (len(group.index) * q.shape[1] * group.longest)
    step, count = max(1, min(queries, most_queries)), q_group.shape[1]
    observation = None if group.observe is None else Observation(group.observe)
    pieces, start = [], 0
    while start < count:
        end = min(start + step, count)
        if start < group.select_from < end:
            end = group.select_from
        sums, weights = attend(q_group[:, start:end], position[:, start:end], start)
        if observation is not None:
            _observe(observation, weights, position[:, start:end], rows)
        pieces.append(sums.permute(0, 3, 1, 2, 4).flatten(2, 3))
        start = end
    out[group.tokens] = torch.cat(pieces, dim=1).flatten(0, 1).to(q.dtype)
    if observation is not None:
        accumulators = rows.pool.numbers.accumulators.flatten(1)
        observation.store(accumulators, rows.slot, rows.position, rows.valid, rows.observe_from)


def _observe(observation: Observation, weights: Weights, position: Tensor, rows: GatheredRows) -> None:
    n = position.shape[1]
    counts = position >= rows.observe_from[:, None]
    first = n - int(counts.sum(dim=1).max())  # no earlier query counts in any sequence
    if first < n:
        visible, age = weights.visible[:, :, first:], weights.age[:, :, first:]
        observation.accumulate(weights.p[:, :, :, first:], visible, age, counts[:, first:])


def attend_split(
    cache: PagedCache,
    spans: Spans,
    layer: int,
    q: Tensor,
    spec: AttentionSpec,
    last: Callable[[int, int], Tensor | None] = lambda first, count: None,
) -> Tensor:
    """Return `BackendStep.attend` of a layer whose values lie on a tier (KCache, arXiv 2404.18057); counts reads.

    The oracle of every kernel. The softmax goes over all keys, and accumulators see all weights. Tokens of a prompt
    read all values; a later token reads for each query head the N with the largest weights (`ValueTier.top_n`), and
    those that the heads of a group choose come in one packed gather. The paper does not say whether weights are scaled
    so that they add up as all of them did; `ValueTier.renormalize` asks for it.

    Args:
        last: as `ReferenceStep.last_visible`, of this layer.
    """
    pool = cache.pool.of_layer(layer)
    assert pool.tier is not None, "its values lie on a tier"
    out, most = torch.empty_like(q), pool.tier.tier.top_n
    for group in sequence_groups(spans, cache.pool.layout.heads[layer] * pool.kind.key_size):
        rows = GatheredRows.gather(cache, spans, group, layer)
        tier = _TierRows(rows, group.select_from, pool.tier, spec, last)
        chosen = len(group.index) * q.shape[1] * min(most, group.longest) * pool.kind.value_size
        attend_group(spans, group, rows, q, tier.attend, out, TEMPORARY // chosen)
    return out


@dataclass
class _TierRows:
    """Gathered rows whose values are read as queries ask for them."""

    rows: GatheredRows
    select_from: int
    store: ValueStore
    spec: AttentionSpec
    last: Callable[[int, int], Tensor | None]

    def attend(self, q: Tensor, position: Tensor, first: int) -> tuple[Tensor, Weights]:
        weights = softmax_over(q, position, self.rows, self.spec, self.last(first, position.shape[1]))
        if first < self.select_from:
            return weighted_sum(weights.p, self._all_values), weights
        return self._selected(weights.p), weights

    @cached_property
    def _all_values(self) -> Tensor:
        start = time.perf_counter()
        values = self.rows.values()
        self._count(TierTraffic(rows_prefilled=int(self.rows.valid.sum())), start)
        return values

    def _selected(self, p: Tensor) -> Tensor:
        """Return the sum over the N largest of p, [G, H, g, n, N], of each query head: [G, H, g, n, d]."""
        rows, tier = self.rows, self.store.tier
        weight, kv = p.topk(min(tier.top_n, p.shape[-1]), dim=-1)
        # Of weight 0 are KVs that the query does not see, and what pads rows: nothing is read for them.
        chosen = weight > 0.0
        row = torch.arange(rows.slot[..., 0].numel(), device=p.device).view(*p.shape[:2], 1, 1, 1)
        place = row * p.shape[-1] + kv  # in the flattened rows
        read = torch.zeros(rows.slot.numel(), dtype=torch.bool, device=p.device)
        read[place[chosen]] = True
        start = time.perf_counter()
        values = rows.pool.values(rows.slot.flatten()[read])  # packed: [m, d]
        self._count(TierTraffic(p[..., 0].numel(), int(chosen.sum()), len(values)), start)
        packed = (read.cumsum(0) - 1)[place].clamp_min(0)
        if not len(values):
            return p.new_zeros(*p.shape[:-1], values.shape[-1])
        out = (weight[..., None, :] @ values[packed].masked_fill_(~chosen[..., None], 0.0))[..., 0, :]
        if tier.renormalize:
            out *= (p.sum(dim=-1) / weight.sum(dim=-1).clamp_min(torch.finfo().tiny))[..., None]
        return out

    def _count(self, traffic: TierTraffic, start: float) -> None:
        traffic.bytes_read = (traffic.rows_read + traffic.rows_prefilled) * self.store.slot_bytes
        traffic.seconds_waited = time.perf_counter() - start
        self.store.traffic.add(traffic)
