"""Bytes of a KV, a block and a sequence, and how many of them fit into a budget. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from winnow.cache.codec import BlockFormat, KVCodec, codec_of, round_up
from winnow.cache.formats import ITEM_BYTES
from winnow.errors import ConfigError
from winnow.kv_dtype import WideParts
from winnow.units import format_bytes
from winnow.value_tier import ValueTier

if TYPE_CHECKING:
    import torch

# Counts and indices on the host, int32 or int64.
IntArray = NDArray[np.integer[Any]]

# Entries in a table page, per row. With blocks of 16 slots a page covers 256 KVs of every row of a sequence.
PAGE_ENTRIES = 16
# Assumed ratio of a sequence's longest row to its average row where heads compete for a budget.
ROW_SKEW = 8
_INT32 = 4
_FLOAT32 = 4


class BlockCount(NamedTuple):
    """Numbers of blocks by where their values lie: near, on the device with the keys; far, on a value tier."""

    near: int = 0
    far: int = 0

    @property
    def total(self) -> int:
        return self.near + self.far


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class CacheLayout:
    """The shape of a cache: what a block holds and how many rows a sequence has.

    Raises:
        ConfigError: no codec has the name that `kv_format` gives.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_format: "KVCodec | str | torch.dtype"
    """How KVs are stored, independent of the activations' dtype: a codec, its name, or the torch dtype of vectors."""
    num_accumulators: int = 0
    """float32 accumulators per slot that eviction policies may use, 0 to 2."""
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer, None where a layer sees everything; empty: all layers do."""
    chunk: int | None = None
    """Most tokens that a step computes of one sequence; None: any number."""
    wide: WideParts = field(default_factory=WideParts)
    """Which KVs are kept in 16 bits beside those in blocks (`winnow.cache.wide`)."""
    value_tier: ValueTier | None = None
    """Where the values of the upper layers lie; None: on the device, beside their keys."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_format", codec_of(self.kv_format))  # so that equal layouts compare equal

    @property
    def codec(self) -> KVCodec:
        """How KVs are stored."""
        return codec_of(self.kv_format)

    @property
    def rows_per_seq(self) -> int:
        """One row per layer and KV head."""
        return self.num_layers * self.num_kv_heads

    @cached_property
    def block_format(self) -> BlockFormat:
        """The layout of the fields of a block's KVs."""
        if self.value_tier is None:
            return BlockFormat.of(self.codec.fields(self.head_dim), self.block_size)
        return BlockFormat.of_sides(self.key_format, self.value_format)

    @cached_property
    def key_format(self) -> BlockFormat:
        """The layout of the fields of a block's keys where values lie apart."""
        return BlockFormat.of(self.codec.key_fields(self.head_dim), self.block_size).padded()

    @cached_property
    def value_format(self) -> BlockFormat:
        """The layout of the fields of a block's values where they lie apart."""
        return BlockFormat.of(self.codec.value_fields(self.head_dim), self.block_size).padded()

    @property
    def block_bytes(self) -> int:
        """Keys, values, positions and accumulators of one block."""
        return self.block_format.nbytes + self.block_size * (_INT32 + self.num_accumulators * _FLOAT32)

    @property
    def tier_bytes(self) -> int:
        """Of a far block, those that lie on the tier: of its values, or of its KVs."""
        if self.value_tier is None:
            return 0
        return self.block_format.nbytes if self.value_tier.keys else self.value_format.nbytes

    @property
    def summary_bytes(self) -> int:
        """Of a far block, those of the summary of keys that lie on the tier (`winnow.cache.key_summaries`)."""
        if self.value_tier is None or not self.value_tier.keys:
            return 0
        return self.head_dim * _FLOAT32 * (1 if self.value_tier.select == "means" else 2) + 1

    def by_kind(self, num_blocks: IntArray) -> BlockCount:
        """Blocks of each kind, of rows that have `num_blocks`, [layers, heads]."""
        return BlockCount(
            int(num_blocks[: self.near_layers].sum()), int(num_blocks[self.near_layers :].sum())
        )

    def device_bytes(self, count: BlockCount) -> int:
        """Bytes of the device that a number of blocks takes."""
        return count.total * self.block_bytes - count.far * (self.tier_bytes - self.summary_bytes)

    @property
    def near_layers(self) -> int:
        """The first layers, whose values lie on the device: all, where there is no tier."""
        return self.num_layers if self.value_tier is None else self.value_tier.layers

    def is_far(self, layer: int) -> bool:
        """Whether the values of a layer's rows lie on a tier."""
        return layer >= self.near_layers

    def far_rows(self, num_blocks: IntArray) -> NDArray[np.bool_] | None:
        """Which of `num_blocks`, [B, layers, heads], blocks, row by row, lie in far rows: bool [n]; None: no row is."""
        if self.value_tier is None:
            return None
        far = np.broadcast_to(np.arange(self.num_layers)[:, None] >= self.near_layers, num_blocks.shape)
        return np.repeat(far.ravel(), num_blocks.ravel())

    def host_bytes(self, num_blocks: int) -> int:
        """Blocks copied to host memory: KVs, positions and accumulators side by side, each aligned to 8 bytes."""
        return sum(round_up(num_blocks * size, 8) for size in self.part_bytes)

    @property
    def part_bytes(self) -> tuple[int, ...]:
        """Of one block: its KVs, its positions, and each of its accumulators."""
        return (
            self.block_format.nbytes,
            self.block_size * _INT32,
            *[self.block_size * _FLOAT32] * self.num_accumulators,
        )

    @property
    def page_bytes(self) -> int:
        """One table page: PAGE_ENTRIES int32 block ids for every row of a sequence."""
        return self.rows_per_seq * PAGE_ENTRIES * _INT32

    def wide_windows(self, max_positions: int) -> "Iterator[tuple[range, int, int]]":
        """Layers, places of first tokens and places of recent ones of each `WideWindow`.

        A layer that is wide as a whole has a place for every position.
        """
        wide, layers = self.wide, range(self.num_layers)
        if wide.layers:
            yield layers[: wide.layers], max_positions, 0
        if (wide.sinks or wide.recent) and layers[wide.layers :]:
            yield layers[wide.layers :], wide.sinks, wide.recent

    def wide_bytes(self, max_positions: int) -> int:
        """Bytes of a sequence's wide KVs and their positions."""
        return sum(
            len(layers) * (sinks + recent) * self._wide_place_bytes
            for layers, sinks, recent in self.wide_windows(max_positions)
        )

    def wide_bytes_of(self, first: int, end: int) -> int:
        """Bytes of what is wide, whatever follows, of the tokens from `first` to `end` of a sequence."""
        sinks = max(min(end, self.wide.sinks) - first, 0)
        layers, others = self.wide.layers, self.num_layers - self.wide.layers
        return (layers * (end - first) + others * sinks) * self._wide_place_bytes

    @property
    def _wide_place_bytes(self) -> int:
        kv_bytes = 2 * self.num_kv_heads * self.head_dim * ITEM_BYTES[self.wide.dtype]
        return kv_bytes + _INT32

    def blocks_for(self, num_kvs: int) -> int:
        """Blocks that a sequence with `num_kvs` KVs in every row needs."""
        return self.rows_per_seq * ceil_div(num_kvs, self.block_size)

    def row_blocks(self, lengths: IntArray) -> IntArray:
        """Blocks of rows of `lengths` KVs, of any shape."""
        return -(-lengths // self.block_size)

    def partly_filled(self, lengths: IntArray) -> IntArray:
        """Which blocks of rows of `lengths` KVs are partly filled: int64 [n], counted row by row."""
        ends = self.row_blocks(lengths).ravel().cumsum() - 1
        tails: IntArray = ends[lengths.ravel() % self.block_size > 0]
        return tails

    @property
    def has_windows(self) -> bool:
        """Whether the rows of some layers need not keep all KVs."""
        return any(window is not None for window in self.windows)

    @cached_property
    def evictable(self) -> tuple[int, ...]:
        """The layers that policies evict from: those without a window, or all, where each has one."""
        full = tuple(layer for layer, window in enumerate(self.windows) if window is None)
        return full or tuple(range(self.num_layers))

    @cached_property
    def evictable_part(self) -> "CacheLayout":
        """The layout of these layers alone."""
        if len(self.evictable) == self.num_layers:
            return self
        return replace(self, num_layers=len(self.evictable), windows=())

    def seen(self, num_tokens: int) -> list[int]:
        """Most KVs that the rows of each layer hold while the first `num_tokens` tokens of a sequence are computed."""
        windows = self.windows or (None,) * self.num_layers
        return [num_tokens if window is None else self._slid(window, num_tokens) for window in windows]

    def _slid(self, window: int, num_tokens: int, replay: int = 0) -> int:
        """The same of a layer with a window.

        Whole blocks that no later token sees are given back before a step: a row holds the window, a chunk, and what
        else its first block has. A replay is computed behind the tokens, and none goes before its end.
        """
        chunk = num_tokens if self.chunk is None else self.chunk
        return min(num_tokens + replay, window - 1 + max(chunk, replay) + self.block_size - 1)

    def windowed_blocks(self, num_tokens: int, replay: int) -> int:
        """Most blocks of the layers that policies do not evict from, while a number of tokens is computed.

        Args:
            replay: most tokens that are computed behind them at a time, and dropped.
        """
        slid = (
            self._slid(window, num_tokens, replay)
            for layer, window in enumerate(self.windows)
            if window is not None and layer not in self.evictable
        )
        return self.num_kv_heads * sum(ceil_div(kvs, self.block_size) for kvs in slid)

    def blocks_seen(self, num_tokens: int) -> int:
        """Most blocks that a sequence under no policy holds while its first `num_tokens` tokens are computed."""
        return self.num_kv_heads * sum(ceil_div(kvs, self.block_size) for kvs in self.seen(num_tokens))

    def pages_for(self, num_kvs: int) -> int:
        """Table pages that a sequence with `num_kvs` KVs in its longest row needs."""
        return ceil_div(num_kvs, self.block_size * PAGE_ENTRIES)


@dataclass(frozen=True)
class CacheSize:
    """The number of blocks, pages and sequences, from which all tensors of the cache follow."""

    num_blocks: int
    num_pages: int
    max_num_seqs: int
    pages_per_seq: int
    num_far_blocks: int = 0
    """The last of the blocks, whose values lie on a tier."""

    @property
    def by_kind(self) -> BlockCount:
        return BlockCount(self.num_blocks - self.num_far_blocks, self.num_far_blocks)

    @classmethod
    def fit(cls, layout: CacheLayout, kv_memory: int, max_num_seqs: int, max_model_len: int) -> "CacheSize":
        """The size of the largest cache within `kv_memory` bytes, tables and counters included.

        Values on a tier take none of these, and at most `ValueTier.size` there.

        Raises:
            ConfigError: not even one sequence of one block per row fits.
        """
        limit = None if layout.value_tier is None else layout.value_tier.size

        def size(num_blocks: int) -> CacheSize:
            return cls.of_blocks(layout, num_blocks, max_num_seqs, max_model_len)

        def fits_tier(found: CacheSize) -> bool:
            return limit is None or found.tier_bytes(layout) <= limit

        # Do not allocate more blocks than all sequences together can fill.
        least_bytes = min(layout.device_bytes(BlockCount(1)), layout.device_bytes(BlockCount(far=1)))
        low, high = 0, min(kv_memory // least_bytes, max_num_seqs * layout.blocks_for(max_model_len))
        while low < high:  # the largest count whose total fits; the total grows with the count
            middle = (low + high + 1) // 2
            found = size(middle)
            if found.nbytes(layout) <= kv_memory and fits_tier(found):
                low = middle
            else:
                high = middle - 1
        if low < layout.rows_per_seq:
            smallest = size(layout.rows_per_seq)
            name, least, got = "kv_memory", smallest.nbytes(layout), kv_memory
            if limit is not None and not fits_tier(smallest):
                name, least, got = "value_tier: size", smallest.tier_bytes(layout), limit
            raise ConfigError(
                f"{name} must be at least {format_bytes(least)} ({least} bytes) for one block in each of the "
                f"{layout.num_layers} layers x {layout.num_kv_heads} KV heads, got {format_bytes(got)}"
            )
        return size(low)

    @classmethod
    def of_blocks(
        cls, layout: CacheLayout, num_blocks: int, max_num_seqs: int, max_model_len: int
    ) -> "CacheSize":
        """The size of a cache of `num_blocks` blocks with the table pages that they need.

        A sequence of b blocks per row takes at most b / PAGE_ENTRIES + 1 pages, so with equal rows blocks run out
        first. Rows that differ in length, or share blocks, may run out of pages earlier; the ledger counts both. Any
        request may bring a policy whose rows differ, so there are pages for rows ROW_SKEW times as long as the average
        (under 2 % of the memory), and always enough for one sequence alone, whose row takes at most all blocks.
        """
        pages_per_seq = layout.pages_for(max_model_len)
        num_pages = ROW_SKEW * ceil_div(num_blocks, layout.rows_per_seq * PAGE_ENTRIES)
        num_pages = max(num_pages, min(pages_per_seq, ceil_div(num_blocks, PAGE_ENTRIES))) + max_num_seqs
        # Blocks of either kind in proportion to what layers hold of a sequence of full length.
        by_layer = [ceil_div(kvs, layout.block_size) for kvs in layout.seen(max_model_len)]
        num_near = ceil_div(num_blocks * sum(by_layer[: layout.near_layers]), sum(by_layer))
        return cls(
            num_blocks,
            min(num_pages, max_num_seqs * pages_per_seq),
            max_num_seqs,
            pages_per_seq,
            num_blocks - num_near,
        )

    def max_positions(self, layout: CacheLayout) -> int:
        """Positions that a sequence may have: its longest row, in whole table pages."""
        return self.pages_per_seq * PAGE_ENTRIES * layout.block_size

    def wide_prefix_bytes(self, layout: CacheLayout) -> int:
        """Bytes that are set apart for what is wide of prefixes: all tokens that the blocks hold, or all sequences."""
        tokens = self.num_blocks // layout.rows_per_seq * layout.block_size
        positions = min(self.max_positions(layout), ceil_div(tokens, self.max_num_seqs))
        return self.max_num_seqs * layout.wide_bytes(positions)

    def nbytes(self, layout: CacheLayout) -> int:
        """All bytes of the cache but those of a value tier: blocks, free stack, counts of holders, table pages, page
        table, lengths, wide KVs."""
        return (
            layout.device_bytes(self.by_kind)
            # free stack, holders, and whether the prefix index is one of them
            + self.num_blocks * (2 * _INT32 + 1)
            # tables and lengths exist twice: the ledger's, and those on the compute device; lengths of these twice
            + 2 * self.num_pages * layout.page_bytes
            # and what each sequence has reserved
            + self.max_num_seqs * (2 * self.pages_per_seq + 3 * layout.rows_per_seq + 1) * _INT32
            + self.max_num_seqs * layout.wide_bytes(self.max_positions(layout))
            + self.wide_prefix_bytes(layout)
        )

    def tier_bytes(self, layout: CacheLayout) -> int:
        """Bytes that blocks take on a tier."""
        return self.num_far_blocks * layout.tier_bytes
