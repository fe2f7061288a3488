"""Attention over a paged cache in plain torch: the oracle of the other backends.

Rows are decoded into padded float32 tensors, computed by the textbook formula, and masked. Decoding sequences of
similar length are computed together; prefill chunks one by one, in blocks of queries.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from winnow.attention.interface import AttentionSpec
from winnow.attention.observer import AttentionObserver
from winnow.attention.observer_reference import Observation
from winnow.attention.spans import Spans
from winnow.attention.torch_backend import TorchBackend
from winnow.cache import KVPool, PagedCache
from winnow.cache.layout import ceil_div

# Elements of the largest temporary: 64 MiB of float32.
_TEMPORARY = 2**24


@dataclass(frozen=True)
class _Group:
    """G sequences computed together, n queries each, rows padded to `longest` KVs."""

    index: list[int]
    """Indices of the sequences in the spans."""
    tokens: slice | Tensor
    """Their queries in the packed batch, G * n of them."""
    longest: int
    observe: AttentionObserver | None


class ReferenceBackend(TorchBackend):
    """See `AttentionBackend` for shapes and meaning."""

    def write(self, cache: PagedCache, spans: Spans, layer: int, k: Tensor, v: Tensor) -> None:
        pool, tables = cache.pool, cache.tables
        block_size = pool.layout.block_size
        # Count a token's slot from the end of its row: rows may differ in length, but all end with this batch.
        index = tables.lengths[spans.token_slots, layer].long() - 1 - spans.tokens_after[:, None]  # [T, H]
        blocks = tables.lookup(
            spans.device_slots, layer, ceil_div(int(spans.lengths.max()), block_size)
        )  # [B, H, blocks]
        head = torch.arange(index.shape[1], device=spans.device)
        block = blocks[spans.token_sequence[:, None], head, index // block_size]  # [T, H]
        slot = block.long() * block_size + index % block_size
        pool.write(slot, k, v, spans.position[:, None].expand_as(index))
        window = cache.window(layer)
        if window is not None:
            if not pool.layout.codec.movable:
                _encode_full_blocks(cache, spans, layer, blocks.long(), k)
            wide = ~spans.token_temporary
            parts = (spans.token_slots, k, v, spans.position, spans.tokens_after)
            slots, k, v, position, after = (part[wide] for part in parts)
            window.write(slots, layer, k, v, position, after)

    def attend(self, cache: PagedCache, spans: Spans, layer: int, q: Tensor, spec: AttentionSpec) -> Tensor:
        out = torch.empty_like(q)
        kv_heads, head_dim = cache.pool.layout.num_kv_heads, cache.pool.layout.head_dim
        for group in _groups(spans, kv_heads * head_dim):
            rows = _Rows.gather(cache, spans, group, layer)
            q_group = q[group.tokens].unflatten(0, (len(group.index), -1))  # [G, n, Hq, d]
            position = spans.position[group.tokens].int().unflatten(0, (len(group.index), -1))  # [G, n]
            queries = max(1, _TEMPORARY // (len(group.index) * q.shape[1] * group.longest))
            observation = None if group.observe is None else Observation(group.observe)
            pieces = [
                _attend_rows(q_part, position_part, rows, spec, observation)
                for q_part, position_part in zip(
                    q_group.split(queries, dim=1), position.split(queries, dim=1), strict=True
                )
            ]
            out[group.tokens] = torch.cat(pieces, dim=1).flatten(0, 1).to(q.dtype)
            if observation is not None:
                observation.store(
                    cache.pool.accumulators.flatten(1),
                    rows.slot,
                    rows.position,
                    rows.valid,
                    rows.observe_from,
                )
        return out

    def compact(self, pool: KVPool, source: Tensor, target: Tensor) -> None:
        pool.move(source, target)


def _encode_full_blocks(cache: PagedCache, spans: Spans, layer: int, blocks: Tensor, k: Tensor) -> None:
    """Encode the keys of blocks that the batch's tokens fill, where that needs all of a block's keys.

    Such KVs never move, so a KV's place in its row is its position. Earlier keys come from the window, and those of
    the batch are rounded as it does.
    """
    window, size = cache.window(layer), cache.pool.layout.block_size
    assert window is not None, "keys wait there for their block to be full"
    for i, (slot, count) in enumerate(zip(spans.slots.tolist(), spans.counts.tolist(), strict=True)):
        end = int(spans.lengths[i])
        start, tokens = end - count, slice(int(spans.starts[i]), int(spans.starts[i]) + count)
        first, last = start // size, end // size
        if first < last:
            earlier = window.keys(slot, layer, first * size, start)
            keys = torch.cat([earlier, k[tokens].transpose(0, 1).to(earlier.dtype)], dim=1)
            whole = keys[:, : (last - first) * size].unflatten(1, (-1, size))
            cache.pool.set_block_keys(blocks[i, :, first:last], whole)


@dataclass(frozen=True)
class _Rows:
    """The rows of one layer for G sequences, padded to N slots."""

    k: Tensor  # float32 [G, H, N, d]
    v: Tensor  # float32 [G, H, N, d]
    position: Tensor  # int32 [G, H, N]
    valid: Tensor  # bool [G, H, N]: below the row's length
    slot: Tensor  # int64 [G, H, N]: flat slot number in the pool
    observe_from: Tensor  # int64 [G]

    @classmethod
    def gather(cls, cache: PagedCache, spans: Spans, group: _Group, layer: int) -> "_Rows":
        pool, tables = cache.pool, cache.tables
        block_size = pool.layout.block_size
        slots = torch.from_numpy(spans.slots[group.index]).to(spans.device)
        blocks = tables.lookup(slots, layer, ceil_div(group.longest, block_size)).long()
        slot = pool.slots_of(blocks)
        length = tables.lengths[slots, layer]  # [G, H]
        valid = torch.arange(slot.shape[2], device=spans.device) < length[..., None]
        k, v, position = pool.keys_of(blocks), pool.values_of(blocks), pool.positions_of(blocks)
        window = cache.window(layer)
        if window is not None:
            window.widen(slots, layer, position, k, v)
        return cls(
            k=k,
            # Padding is uninitialised memory, and 0 x NaN is NaN: clear values past the length.
            v=v.masked_fill_(~valid[..., None], 0.0),
            position=position,
            valid=valid,
            slot=slot,
            observe_from=torch.from_numpy(spans.observe_from[group.index]).to(spans.device),
        )


def _groups(spans: Spans, row_elements: int) -> Iterator[_Group]:
    """Split the batch into padded groups.

    Decoding sequences are sorted by length, so that padding stays below half of a group, and split where the gathered
    KVs would exceed `_TEMPORARY`.
    """
    decodes = spans.num_decodes
    by_length = np.argsort(-spans.lengths[:decodes], kind="stable")
    for observe in dict.fromkeys(spans.observe[:decodes]):
        alike = by_length[[spans.observe[i] == observe for i in by_length]]
        start = 0
        while start < len(alike):
            longest = int(spans.lengths[alike[start]])
            most = max(1, _TEMPORARY // (longest * row_elements))
            short = np.flatnonzero(spans.lengths[alike[start:]] * 2 < longest)
            end = min(len(alike), start + most, start + int(short[0]) if len(short) else len(alike))
            index = alike[start:end].tolist()
            # Decoding sequences lead the batch, so the index of the only token is that of its sequence.
            yield _Group(index, torch.tensor(index, device=spans.device), longest, observe)
            start = end
    for i in range(decodes, len(spans.counts)):
        first, count = int(spans.starts[i]), int(spans.counts[i])
        yield _Group([i], slice(first, first + count), int(spans.lengths[i]), spans.observe[i])


def _attend_rows(
    q: Tensor, position: Tensor, rows: _Rows, spec: AttentionSpec, observation: Observation | None
) -> Tensor:
    """Attention of q, [G, n, Hq, d], at `position`, [G, n], over gathered rows. Returns float32 [G, n, Hq, d]."""
    heads = rows.k.shape[1]
    # q becomes [G, H, g, n, d]: g query heads share a KV head
    q = (q.float() * spec.scale).unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)
    group, n = q.shape[2:4]
    logits = (q.flatten(2, 3) @ rows.k.transpose(2, 3)).unflatten(2, (group, n))  # [G, H, g, n, N]
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    age = position[:, None, :, None] - rows.position[:, :, None, :]  # [G, H, n, N]
    visible = rows.valid[:, :, None, :] & (age >= 0)
    if spec.window is not None:
        visible &= age < spec.window
    logits.masked_fill_(~visible[:, :, None], -torch.inf)
    if spec.sinks is not None:
        column = spec.sinks.float().view(1, heads, group, 1, 1).expand(len(q), -1, -1, n, 1)
        logits = torch.cat([logits, column], dim=-1)
    p = logits.softmax(dim=-1)[..., : rows.k.shape[2]]
    out = (p.flatten(2, 3) @ rows.v).unflatten(2, (group, n))  # [G, H, g, n, d]
    if observation is not None:
        counts = position >= rows.observe_from[:, None]
        first = n - int(counts.sum(dim=1).max())  # no earlier query counts in any sequence
        if first < n:
            observation.accumulate(
                p[:, :, :, first:],
                visible[:, :, first:],
                age[:, :, first:],
                counts[:, first:],
                rows.v,
                out[:, :, :, first:],
            )
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)
