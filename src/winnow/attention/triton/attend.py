"""One call of `attend`: its launches and their scratch, whose size is bounded by the batch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import e, log2
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from winnow.attention.interface import AttentionSpec
from winnow.attention.observer import AttentionObserver, Group, Term, aggregate_sums
from winnow.attention.spans import Spans
from winnow.attention.triton.kernels.chunk import attend_chunk
from winnow.attention.triton.kernels.decode import attend_split, merge_splits
from winnow.attention.triton.kernels.observer import observe_chunk, observe_decode, replace_accumulators
from winnow.attention.triton.launch import (
    CacheShape,
    Tuning,
    dot_format,
    multiprocessors_of,
    padded,
    product_dtype,
)
from winnow.attention.triton.side_format import Window, readable, side_formats
from winnow.cache import PagedCache
from winnow.cache.layout import ceil_div

# Bytes of the largest scratch for logits of decoding sequences; larger batches take several launches.
_RAW_BYTES = 2**26


@dataclass(frozen=True)
class Decodes:
    """Sequences with one query each, computed by one launch."""

    index: Tensor | None  # int32 [R], their indices in the batch; None: the first R
    count: int
    longest: int  # KVs in the longest row
    observe: AttentionObserver | None


@dataclass(frozen=True)
class Watched:
    """Chunks with the same observer."""

    index: Tensor  # int32 [R], of the sequences in the batch
    longest: int
    observe: AttentionObserver


@dataclass(frozen=True)
class Chunks:
    """Sequences computed in tiles of queries."""

    tiles: Tensor  # see `Spans.chunk_layout`
    extents: Tensor
    watched: tuple[Watched, ...]


@dataclass(frozen=True)
class Batch:
    """The launches of one step."""

    decodes: tuple[Decodes, ...]
    chunks: Chunks | None

    @property
    def uploads_nothing(self) -> bool:
        watched = self.chunks is not None and bool(self.chunks.watched)
        return not watched and all(part.index is None for part in self.decodes)

    @classmethod
    def plan(cls, spans: Spans, query_heads: int, tile_queries: int) -> "Batch":
        """Split the batch into launches. Sequences without an observer take no Python loop."""
        chunked = list(range(spans.num_decodes, len(spans.counts)))
        observers = spans.active_observers
        if not any(observers):
            decodes = [_decodes(spans, None, None)] if spans.num_decodes else []
            return cls(tuple(decodes), _chunks(spans, chunked, tile_queries, {}))
        decodes, watched = [], {}
        for observe, index in _by_observer(observers[: spans.num_decodes]).items():
            if observe is None:
                decodes.append(_decodes(spans, index, None))
            elif observe.smoothing is None:
                parts = _parts(spans.lengths, index, query_heads)
                decodes += [_decodes(spans, part, observe) for part in parts]
            else:  # neighbours are pooled: treat it as a chunk of one query
                chunked += index
        for observe, index in _by_observer(observers, chunked).items():
            if observe is not None:
                watched[observe] = index
        return cls(tuple(decodes), _chunks(spans, chunked, tile_queries, watched))


def _by_observer(
    observers: Sequence[AttentionObserver | None], among: Sequence[int] | None = None
) -> dict[AttentionObserver | None, list[int]]:
    groups: dict[AttentionObserver | None, list[int]] = {}
    for i in range(len(observers)) if among is None else among:
        groups.setdefault(observers[i], []).append(i)
    return groups


def _decodes(spans: Spans, index: list[int] | None, observe: AttentionObserver | None) -> Decodes:
    if index is None or len(index) == spans.num_decodes:  # all, in order
        count = spans.num_decodes
        return Decodes(None, count, int(spans.lengths[:count].max()), observe)
    return Decodes(spans.upload(index), len(index), int(spans.lengths[index].max()), observe)


def _parts(lengths: NDArray[np.int64], index: list[int], query_heads: int) -> Iterator[list[int]]:
    """Split decoding sequences whose logits exceed the scratch, keeping similar lengths together."""
    most = _RAW_BYTES // (4 * query_heads)
    if int(lengths[index].max()) * len(index) <= most:
        yield index
        return
    index = sorted(index, key=lambda i: -int(lengths[i]))
    while index:
        size = max(1, most // int(lengths[index[0]]))
        yield index[:size]
        index = index[size:]


def _chunks(
    spans: Spans, index: list[int], tile_queries: int, watched: dict[AttentionObserver, list[int]]
) -> Chunks | None:
    if not index:
        return None
    observed = (
        Watched(spans.upload(members), int(spans.lengths[members].max()), observe)
        for observe, members in watched.items()
    )
    return Chunks(*spans.chunk_layout(index, tile_queries), tuple(observed))


# KVs of one program of the kernels that only touch accumulators.
_KVS_PER_PROGRAM = 128


class Attend:
    """One layer of a batch: queries, the rows they read, and the output.

    Where keys or values are stored rotated, so are the queries that come and the output, `out`, [T, Hq, d], contiguous.
    """

    def __init__(
        self, cache: PagedCache, spans: Spans, layer: int, q: Tensor, out: Tensor, spec: AttentionSpec,
        tuning: Tuning,
    ) -> None:  # fmt: skip
        assert spec.scale > 0, "the largest product is the largest logit"
        pool, tables = cache.pool.of_layer(layer), cache.tables
        self._pool, self._cache, self._spans, self._layer = pool, cache, spans, layer
        self._q, self._spec, self._tuning = q, spec, tuning
        self._group = q.shape[1] // cache.pool.layout.heads[layer]
        self._tile = max(tuning.chunk.queries, padded(self._group))
        self.tile_queries = self._tile // self._group
        self.out = out
        # Arguments that kernels share, in order.
        self._kvs = (pool.storage, pool.numbers.position)
        self._rows = (tables.pages, tables.page_table, tables.lengths, spans.device_slots)
        self._shape = CacheShape.of(cache)

    @cached_property
    def _formula(self) -> dict[str, Any]:
        return {
            **side_formats(self._pool.kind),
            "HEAD_DIM": self._q.shape[2],
            "BLOCK_D": padded(self._q.shape[2]),
            "GROUP": self._group,
            "WINDOW": None if self._spec.window is None else Window(self._spec.window, self._spec.chunked),
            "SOFTCAP": self._spec.softcap,
            "DOT": dot_format(product_dtype(self._q, readable(self._pool.kind.codec))),
        }

    @property
    def _scale(self) -> float:
        """Return the factor of products: logits are to base 2, which a soft-cap brings about by itself."""
        return self._spec.scale * (log2(e) if self._spec.softcap is None else 1.0)

    @cached_property
    def _slopes(self) -> Tensor | None:
        return None if self._spec.slopes is None else self._spec.slopes.float().contiguous()

    # -- one query each ------------------------------------------------------------------------------------------

    def decode(self, part: Decodes) -> None:
        """Compute sequences with one query; update accumulators from the logits that attention kept."""
        tuning, q = self._tuning, self._q
        kv_heads, query_heads, head_dim = self._shape.kv_heads, q.shape[1], q.shape[2]
        split = tuning.split_of(part.count * kv_heads, part.longest, multiprocessors_of(q.device))
        splits = max(1, min(tuning.max_splits, ceil_div(part.longest, split)))
        partial = q.new_empty((part.count, query_heads, splits, head_dim), dtype=torch.float32)
        statistics = q.new_empty((3, part.count, query_heads, splits), dtype=torch.float32)
        raw = merged = None
        if part.observe is not None:
            raw = q.new_empty((part.count, query_heads, part.longest), dtype=torch.float32)
            merged = q.new_empty((3, part.count, query_heads), dtype=torch.float32)
        cut = {"MIN_SPLIT": split, "MAX_SPLITS": tuning.max_splits}
        attend_split[(part.count, kv_heads, splits)](
            q, *self._kvs, *self._rows, part.index, self._spans.position, self._slopes, partial, statistics,
            raw, self._layer, q.stride(0), q.stride(1), part.longest, self._scale, CACHE=self._shape,
            **self._formula, **cut, BLOCK_G=max(tuning.decode.queries, padded(self._group)),
            BLOCK_N=tuning.decode.keys, num_warps=tuning.decode.num_warps,
            num_stages=tuning.decode.num_stages,
        )  # fmt: skip
        merge_splits[(part.count, query_heads)](
            partial, statistics, self._spec.sinks, *self._rows[2:], part.index, self.out, merged,
            self._layer, splits, CACHE=self._shape, HEAD_DIM=head_dim, GROUP=self._group, **cut,
            BLOCK_S=triton.next_power_of_2(splits), BLOCK_D=self._formula["BLOCK_D"], num_warps=4,
        )  # fmt: skip
        if part.observe is not None:
            self._observe_decodes(part, part.observe, raw, merged)

    def _observe_decodes(
        self, part: Decodes, observe: AttentionObserver, raw: Tensor | None, merged: Tensor | None
    ) -> None:
        for term, accumulator in zip(observe.terms, self._accumulators, strict=False):
            grid = part.count, self._shape.kv_heads, ceil_div(part.longest, _KVS_PER_PROGRAM)
            observe_decode[grid](
                raw, merged, self._cache.pool.position, accumulator, *self._rows, part.index, self._spans.position,
                self._layer, part.longest, CACHE=self._shape, GROUP=self._group,
                TERM=term.value, AGGREGATE=observe.group.value, EXCLUDE_FIRST=observe.exclude_first,
                REPLACE=observe.replace, BLOCK_G=triton.next_power_of_2(self._group), BLOCK_N=_KVS_PER_PROGRAM,
                num_warps=4,
            )  # fmt: skip

    # -- many queries each ---------------------------------------------------------------------------------------

    def prefill(self, chunks: Chunks) -> None:
        """Compute chunks; update the accumulators of those with an observer in a second pass over their keys."""
        tuning, q = self._tuning, self._q
        statistics = None
        if chunks.watched:
            statistics = q.new_empty((3, *q.shape[:2]), dtype=torch.float32)
        attend_chunk[(len(chunks.tiles), self._shape.kv_heads)](
            q, *self._kvs, *self._rows, chunks.extents, chunks.tiles, self._spans.position, self._slopes,
            self._spec.sinks, self.out, statistics, self._layer, q.stride(0), q.stride(1), len(q),
            self._scale, CACHE=self._shape, **self._formula, BLOCK_M=self._tile, BLOCK_N=tuning.chunk.keys,
            num_warps=tuning.chunk.num_warps, num_stages=tuning.chunk.num_stages,
        )  # fmt: skip
        for watched in chunks.watched:
            for term, accumulator in zip(watched.observe.terms, self._accumulators, strict=False):
                self._observe_chunks(chunks, watched, term, accumulator, statistics)

    def _observe_chunks(
        self, chunks: Chunks, watched: Watched, term: Term, accumulator: Tensor, statistics: Tensor | None
    ) -> None:
        """Update `accumulator`, float32 [slots of the pool], by one term of chunks with the same observer."""
        tuning, q, observe = self._tuning.observe, self._q, watched.observe
        kv_heads, block_size = self._shape.kv_heads, self._shape.block_size
        # Pooling per query head, and a maximum of sums, need the sums of single heads.
        apart = observe.smoothing is not None and observe.smoothing.per_query_head
        apart |= observe.replace and observe.group is Group.MAX
        heads = 1 if apart else self._group
        parts = q.shape[1] // heads
        longest = ceil_div(watched.longest, block_size) * block_size
        sums = None
        if heads < self._group or observe.smoothing is not None:
            sums = q.new_empty((len(watched.index), parts, longest), dtype=torch.float32)
        observe_chunk[(ceil_div(watched.longest, tuning.keys), parts, len(watched.index))](
            q, *self._kvs, *self._rows, chunks.extents, watched.index, self._spans.position, self._slopes,
            statistics, accumulator if sums is None else sums, self._layer, q.stride(0), q.stride(1),
            len(q), longest, self._scale, CACHE=self._shape, **self._formula, TERM=term.value,
            AGGREGATE=observe.group.value, EXCLUDE_FIRST=observe.exclude_first, REPLACE=observe.replace,
            SUMS=sums is not None, HEADS=heads, BLOCK_Q=tuning.queries, BLOCK_N=tuning.keys,
            num_warps=tuning.num_warps, num_stages=tuning.num_stages,
        )  # fmt: skip
        if sums is not None:
            replace_accumulators[(len(watched.index), kv_heads, ceil_div(longest, _KVS_PER_PROGRAM))](
                self._aggregate(chunks, watched, sums.unflatten(1, (kv_heads, -1))), accumulator,
                *self._rows, watched.index, self._layer, longest, CACHE=self._shape, BLOCK_N=_KVS_PER_PROGRAM,
                num_warps=4,
            )  # fmt: skip

    def _aggregate(self, chunks: Chunks, watched: Watched, sums: Tensor) -> Tensor:
        """Pool and aggregate sums over queries, [R, H, query heads or 1, N]: contiguous [R, H, N]."""
        pool, tables = self._cache.pool, self._cache.tables
        index = watched.index.long()
        slots = self._spans.device_slots[index]
        block_size = pool.layout.block_size
        blocks = tables.lookup(slots, self._layer, ceil_div(watched.longest, block_size)).long()
        lengths = tables.lengths[slots, self._layer][..., None]
        valid = torch.arange(sums.shape[3], device=sums.device) < lengths
        first = self._spans.position[(chunks.extents[index, 0] + chunks.extents[index, 2]).long()]
        position = pool.position[blocks].flatten(2)
        return aggregate_sums(sums, watched.observe, position, valid, first).contiguous()

    @property
    def _accumulators(self) -> Tensor:
        return self._cache.pool.accumulators.flatten(1)
