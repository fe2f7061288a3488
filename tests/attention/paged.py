"""Caches as eviction leaves them: rows of one sequence differ in length, blocks lie scattered, positions have gaps."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from winnow.attention import AttentionObserver, PagedCache, Spans
from winnow.cache import BlockCount, CacheLayout, CacheSize, KVPool, LocalCache, PairCodec
from winnow.values.kv_dtype import WideParts
from winnow.values.value_tier import ValueTier


@dataclass(frozen=True)
class PagedBatch:
    """A cache whose rows are filled but for the batch's own KVs, and the batch."""

    cache: PagedCache
    spans: Spans
    layer: int
    q: Tensor  # [T, Hq, d]
    k: Tensor  # [T, H, d]
    v: Tensor

    def with_own_pool(self) -> PagedCache:
        """The same cache over a copy of the memory, for another backend to change."""
        mine = self.cache.pool
        pool = KVPool(mine.layout, BlockCount(kind.num_blocks for kind in mine.kinds), mine.device)
        for kind, source in zip(pool.kinds, mine.kinds, strict=True):
            for storage, other in zip(kind.storages, source.storages, strict=True):
                storage.data.copy_(other.data)
        pool.position.copy_(mine.position)
        pool.accumulators.copy_(mine.accumulators)
        return PagedCache(pool, self.cache.tables, windows=deepcopy(self.cache.windows))


def with_codec(layout: CacheLayout, codec: PairCodec) -> CacheLayout:
    """The same rows, stored otherwise."""
    return replace(layout, groups=tuple(replace(group, codec=codec) for group in layout.groups))


def contents_of(pool: KVPool) -> list[Tensor]:
    """Fields of all kinds, positions and accumulators."""
    fields = [field for kind in pool.kinds for field in kind.fields.values()]
    return [*fields, pool.position, pool.accumulators]


def paged_batch(
    seed: int,
    counts: Sequence[int],
    *,
    longest: int = 200,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    kv_dtype: PairCodec | str | torch.dtype | None = None,
    num_accumulators: int = 1,
    observe: Sequence[AttentionObserver | None] | None = None,
    wide: WideParts = WideParts(),  # noqa: B008  # frozen
    device: torch.device | str = "cpu",
    value_tier: str | None = None,
    answers: bool = True,
) -> PagedBatch:
    """Sequences that bring `counts` tokens, after up to `longest` older ones of which each row keeps some.

    Args:
        value_tier: as the option; the batch's layer is 1 of 2.
        answers: with a tier the second half of a chunk, and a single token, choose the values that they read; or none.
        dtype: of the batch's queries, keys and values.
        kv_dtype: how the cache stores KVs; None: the same.
        observe: for each sequence, decoding ones first; the second half of a sequence's queries counts.
        wide: no layers, since sequences may have very many positions.
    """
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    layers, layer = 2, 1
    counts = sorted(counts, key=lambda count: count > 1)
    tier = ValueTier.parse(value_tier)
    layout = CacheLayout.even(
        layers, kv_heads, head_dim, block_size, kv_dtype or dtype, num_accumulators, value_tier=tier
    )
    layout = replace(layout, wide=wide)
    blocks = layout.rows_per_seq * sum(-(-(longest + count) // block_size) for count in counts)
    num_far = 0 if tier is None else blocks * (layers - tier.layers) // layers
    num_pages = len(counts) * layout.pages_for(longest + max(counts))
    size = CacheSize(blocks, num_pages, len(counts), 10_000, (num_far,) if num_far else ())
    local = LocalCache(layout, size, device)
    ledger, pool, tables = local.ledger, local.paged.pool, local.paged.tables
    everything = ledger.allocator.allocate(
        blocks, (np.arange(blocks) >= blocks - num_far).astype(int) if num_far else None
    )
    # Blocks of a row lie anywhere.
    ledger.allocator.release(everything[torch.randperm(blocks, generator=generator).numpy()])
    # What a row never wrote may be anything, also not a number.
    for kind in pool.kinds:
        for storage in kind.storages:
            storage.data.fill_(255)
    pool.accumulators.fill_(0.25)
    slots, starts = [ledger.open() for _ in counts][::-1], []  # a slot is not the sequence's number
    for slot in slots:
        start = int(rng.integers(0, longest + 1))
        if start:
            ledger.append([slot], [start])
            kept = rng.integers(0, start + 1, size=(layers, kv_heads), dtype=np.int32)
            ledger.shrink([slot], kept[None])
            local.sync()
            for head in range(kv_heads):
                n = int(kept[layer, head])
                if not n:
                    continue
                blocks_of_row = -(-n // block_size)
                table = tables.lookup(torch.tensor([slot], device=device), layer, blocks_of_row)
                offset = torch.arange(block_size, device=device)
                where = (table[0, head].long()[:, None] * block_size + offset).flatten()[:n]
                positions = torch.from_numpy(rng.choice(start, n, replace=False)).to(device)
                pool.of_layer(layer).write(where, randn(n, head_dim), randn(n, head_dim), positions)
                if pool.of_layer(layer).has_bias:
                    pool.of_layer(layer).set_fitted(where, randn(n, head_dim), randn(n))
                pool.accumulators.flatten(1)[:, where] = 0.25
            window = local.paged.window(layer)
            if window is not None:
                position = torch.arange(start, device=device)
                k, v = (randn(start, kv_heads, head_dim) for _ in range(2))
                window.write(layer, torch.full_like(position, slot), k, v, position, start - 1 - position)
        starts.append(start)
    local.append(slots, counts)
    spans = Spans.build(
        slots,
        starts,
        counts,
        tables.longest(slots),
        device,
        observe=observe,
        observe_from=[start + count // 2 for start, count in zip(starts, counts, strict=True)],
        select_from=[start + count // 2 for start, count in zip(starts, counts, strict=True)]
        if answers
        else None,
    )
    total = sum(counts)
    return PagedBatch(
        local.paged,
        spans,
        layer,
        randn(total, kv_heads * group, head_dim),
        randn(total, kv_heads, head_dim),
        randn(total, kv_heads, head_dim),
    )
