"""The shape of a cache: which rows a sequence has, and what their blocks take. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from winnow.cache.codec import PairCodec, codec_of, round_up
from winnow.cache.formats import ITEM_BYTES
from winnow.cache.row_groups import BlockCount, BlockKind, RowGroup
from winnow.errors import ConfigError
from winnow.values.kv_dtype import WideParts
from winnow.values.value_tier import ValueTier

if TYPE_CHECKING:
    import torch

# Counts and indices on the host, int32 or int64.
IntArray = NDArray[np.integer[Any]]

# Entries in a table page, per row. With blocks of 16 slots a page covers 256 KVs of every row of a sequence.
PAGE_ENTRIES = 16
_INT32 = 4

Window = tuple[range, int, int]
"""Layers, places of first tokens (of all, in layers that are wide as a whole) and of recent ones; see `wide`."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class CacheLayout:
    """Shape of the cache: groups of rows that are alike, and the settings that all share.

    Arrays of rows are [layers, heads], with the most heads of any layer. Where a layer has fewer, the rows behind its
    own do not exist: their length is always 0, and they hold no block.
    """

    groups: tuple[RowGroup, ...]
    block_size: int
    num_accumulators: int = 0
    """float32 accumulators per slot that eviction policies may use, 0 to 2."""
    chunk: int | None = None
    """Most tokens that a step computes of one sequence; None: any number."""
    wide: WideParts = field(default_factory=WideParts)
    """KVs that are kept in 16 bits beside those in blocks (`winnow.cache.wide`)."""
    state_bytes: int = 0
    """Bytes of each sequence, and of each snapshot of a prefix, that further states take (`SlotState`)."""
    ranks: int = 1
    """Processes that hold an equal part of the heads each, in blocks of kinds of their own."""

    def __post_init__(self) -> None:
        layers = sorted(layer for group in self.groups for layer in group.layers)
        assert layers == list(range(len(layers))), "every layer is of one group"
        assert self.ranks == 1 or {group.num_kv_heads % self.ranks for group in self.groups} == {0}, (
            "every rank has as many heads"
        )

    @classmethod
    def even(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        kv_format: "PairCodec | str | torch.dtype",
        num_accumulators: int = 0,
        windows: Sequence[int | None] = (),
        chunk: int | None = None,
        value_tier: ValueTier | None = None,
        shapes: Sequence[tuple[int, int]] = (),
        values_in_keys: bool = False,
    ) -> "CacheLayout":
        """Return the layout of layers that are alike, but for the arguments that are sequences.

        Args:
            kv_format: how KVs are stored, as `codec_of` takes it.
            windows: sliding window of each layer, None where a layer sees everything; empty: all layers do.
            value_tier: where the values of the upper layers lie; None: on the device.
            shapes: KV heads and head_dim of each layer, where they differ.
        """
        codec, near = codec_of(kv_format), num_layers if value_tier is None else value_tier.layers
        seen = list(windows) or [None] * num_layers
        every = list(shapes) or [(num_kv_heads, head_dim)] * num_layers

        def alike(layer: int) -> tuple[bool, int, tuple[int, int]]:
            return layer >= near, seen[layer] or 0, every[layer]

        groups = []
        for (far, window, (heads, size)), layers in groupby(sorted(range(num_layers), key=alike), key=alike):
            tier = value_tier if far else None
            groups.append(
                RowGroup(tuple(layers), heads, size, size, codec, window or None, tier, values_in_keys)
            )
        return cls(tuple(groups), block_size, num_accumulators, chunk)

    # -- rows ----------------------------------------------------------------------------------------------------

    @cached_property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    @cached_property
    def num_kv_heads(self) -> int:
        return max(group.num_kv_heads for group in self.groups)

    @cached_property
    def by_layer(self) -> tuple[RowGroup, ...]:
        found = {layer: group for group in self.groups for layer in group.layers}
        return tuple(found[layer] for layer in range(self.num_layers))

    @cached_property
    def heads(self) -> tuple[int, ...]:
        return tuple(group.num_kv_heads for group in self.by_layer)

    @cached_property
    def has_row(self) -> NDArray[np.bool_]:
        """Rows that exist, bool [layers, heads]."""
        return np.arange(self.num_kv_heads) < np.array(self.heads)[:, None]

    @cached_property
    def rows_per_seq(self) -> int:
        return sum(self.heads)

    def even_rows(self, num_kvs: int) -> IntArray:
        """Return lengths of rows that hold `num_kvs` KVs each, int32 [layers, heads]."""
        return self.has_row.astype(np.int32) * np.int32(num_kvs)

    @property
    def head_dim(self) -> int:
        """Numbers in any key and in any value. Raises ConfigError: they differ."""
        sizes = {size for group in self.groups for size in (group.key_size, group.value_size)}
        if len(sizes) > 1:
            raise ConfigError(f"keys and values must be of one size here, the model's are of {sorted(sizes)}")
        return sizes.pop()

    @cached_property
    def codecs(self) -> tuple[PairCodec, ...]:
        return tuple(dict.fromkeys(group.codec for group in self.groups))

    @property
    def codec_names(self) -> str:
        return ", ".join(codec.name for codec in self.codecs)

    @property
    def has_bias(self) -> bool:
        return all(codec.further_fields for codec in self.codecs)

    @cached_property
    def value_tier(self) -> ValueTier | None:
        """Tier on which the values of some layers lie; None: all lie on the device."""
        return next((group.tier for group in self.groups if group.tier is not None), None)

    # -- blocks --------------------------------------------------------------------------------------------------

    @cached_property
    def of_rank(self) -> "CacheLayout":
        groups = (replace(group, num_kv_heads=group.num_kv_heads // self.ranks) for group in self.groups)
        return replace(self, groups=tuple(groups), ranks=1)

    @cached_property
    def kinds(self) -> tuple[BlockKind, ...]:
        """Kinds of blocks, each once, rank by rank. Groups whose blocks are alike share one."""
        alike = dict.fromkeys(group.kind(self.block_size) for group in self.groups)
        return tuple(replace(kind, rank=rank) for rank in range(self.ranks) for kind in alike)

    @cached_property
    def kind_of(self) -> IntArray:
        """The number of the kind of each row's blocks, int64 [layers, heads]."""
        kinds = np.array([self.kinds.index(group.kind(self.block_size)) for group in self.by_layer])
        rank = np.arange(self.num_kv_heads) * self.ranks // self.num_kv_heads
        return kinds[:, None] + rank * (len(self.kinds) // self.ranks)

    def by_kind(self, num_blocks: IntArray) -> BlockCount:
        """Return blocks of each kind, of rows that have `num_blocks`, [..., layers, heads]."""
        if len(self.kinds) == 1:
            return BlockCount((int(num_blocks.sum()),))
        each = num_blocks.reshape(-1, self.num_layers, self.num_kv_heads).sum(axis=0)
        return BlockCount(int(each[self.kind_of == kind].sum()) for kind in range(len(self.kinds)))

    def kinds_of(self, num_blocks: IntArray) -> IntArray | None:
        """Return the kind of each block of rows of `num_blocks`, [B, layers, heads], row by row, int64 [n]; None: 0."""
        if len(self.kinds) == 1:
            return None
        kinds = np.broadcast_to(self.kind_of, num_blocks.shape)
        return np.repeat(kinds.ravel(), num_blocks.ravel())

    def device_bytes(self, count: Sequence[int]) -> int:
        """Return bytes of the device that numbers of blocks of each kind take, positions and accumulators included."""
        each = (kind.device_bytes(self.num_accumulators) for kind in self.kinds)
        return sum(n * size for n, size in zip(count, each, strict=False))

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of the device that a block takes, the mean over the rows."""
        return self.device_bytes(self.by_kind(self.even_rows(1))) // self.rows_per_seq

    def tier_bytes(self, count: Sequence[int]) -> int:
        return sum(n * kind.tier_bytes for n, kind in zip(count, self.kinds, strict=False))

    def host_bytes(self, count: Sequence[int]) -> int:
        """Return bytes of blocks copied to host memory: kind by kind, each part of them aligned to 8 bytes."""
        return sum(
            round_up(n * size, 8)
            for n, kind in zip(count, self.kinds, strict=False)
            for size in kind.part_bytes(self.num_accumulators)
        )

    @property
    def page_bytes(self) -> int:
        return self.num_layers * self.num_kv_heads * PAGE_ENTRIES * _INT32

    def blocks_for(self, num_kvs: int) -> int:
        return self.rows_per_seq * ceil_div(num_kvs, self.block_size)

    def row_blocks(self, lengths: IntArray) -> IntArray:
        return -(-lengths // self.block_size)

    def partly_filled(self, lengths: IntArray) -> IntArray:
        """Return which blocks of rows of `lengths` KVs are partly filled: int64 [n], counted row by row."""
        ends = self.row_blocks(lengths).ravel().cumsum() - 1
        tails: IntArray = ends[lengths.ravel() % self.block_size > 0]
        return tails

    def pages_for(self, num_kvs: int) -> int:
        """Return table pages that a sequence with `num_kvs` KVs in its longest row needs."""
        return ceil_div(num_kvs, self.block_size * PAGE_ENTRIES)

    # -- sliding windows -----------------------------------------------------------------------------------------

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(group.window for group in self.by_layer)

    @cached_property
    def has_windows(self) -> bool:
        return any(window is not None for window in self.windows)

    @cached_property
    def _window_sizes(self) -> IntArray:
        return np.array([2**62 if window is None else window for window in self.windows], dtype=np.int64)

    def blocks_passed(self, lengths: IntArray) -> IntArray:
        """Return blocks at the front of rows that no later token sees, int64 [B, layers].

        Lengths, [B, layers], are those of the last KVs of a sequence in order; heads of a layer are alike.
        """
        # The next token sees itself, and window - 1 KVs before it.
        passed: IntArray = np.maximum(lengths - (self._window_sizes - 1), 0) // self.block_size
        return passed

    @cached_property
    def evictable(self) -> tuple[int, ...]:
        """The layers that policies evict from: those without a window, or all, where each has one."""
        full = tuple(layer for layer, window in enumerate(self.windows) if window is None)
        return full or tuple(range(self.num_layers))

    @cached_property
    def evictable_part(self) -> "CacheLayout":
        if len(self.evictable) == self.num_layers:
            return self
        groups, first = [], 0
        for group in self.groups:
            if group.window is None:
                end = first + len(group.layers)
                groups.append(replace(group, layers=tuple(range(first, end))))
                first = end
        return replace(self, groups=tuple(groups))

    def seen(self, num_tokens: int) -> list[int]:
        """Return the most KVs that rows of each layer hold while `num_tokens` tokens of a sequence are computed."""
        return [num_tokens if window is None else self._slid(window, num_tokens) for window in self.windows]

    def _slid(self, window: int, num_tokens: int, replay: int = 0) -> int:
        """Return the same of a layer with a window.

        Whole blocks that no later token sees are given back before a step: a row holds the window, a chunk, and what
        else its first block has. A replay is computed behind the tokens, and none goes before its end.
        """
        chunk = num_tokens if self.chunk is None else self.chunk
        return min(num_tokens + replay, window - 1 + max(chunk, replay) + self.block_size - 1)

    def windowed_blocks(self, num_tokens: int, replay: int) -> int:
        """Return most blocks of the layers that policies do not evict from, while tokens are computed.

        `replay` is most tokens that are computed behind them at a time, and dropped.
        """
        return sum(
            self.heads[layer] * ceil_div(self._slid(window, num_tokens, replay), self.block_size)
            for layer, window in enumerate(self.windows)
            if window is not None and layer not in self.evictable
        )

    def blocks_seen(self, num_tokens: int) -> int:
        """Return most blocks that a sequence under no policy holds while its first `num_tokens` tokens are computed."""
        if not self.has_windows:
            return self.blocks_for(num_tokens)
        return int(self.row_blocks_seen(num_tokens).sum())

    def row_blocks_seen(self, num_tokens: int) -> IntArray:
        """Return the blocks of each row of these, int64 [layers, heads]."""
        each = np.array([ceil_div(kvs, self.block_size) for kvs in self.seen(num_tokens)])
        return self.has_row * each[:, None]

    # -- states --------------------------------------------------------------------------------------------------

    def prefix_state_bytes(self, num_tokens: int) -> int:
        """Return bytes of the states of a prefix, or a sequence, of `num_tokens` tokens, its blocks not counted."""
        return self.wide_bytes(num_tokens) + self.state_bytes

    def wide_bytes(self, max_positions: int) -> int:
        windows = self.wide_windows(max_positions)
        return self._bytes_of_places(sum(len(layers) * (sinks + recent) for layers, sinks, recent in windows))

    def link_state_bytes(self, first: int, end: int, *, resumable: bool) -> int:
        """Return bytes of the states kept with tokens `first` to `end` of a prefix: wide KVs that later tokens do not
        displace and, if `resumable`, the state after them."""
        sinks, layers = max(min(end, self.wide.sinks) - first, 0), self.wide.layers
        places = layers * (end - first) + (self.num_layers - layers) * sinks
        return self._bytes_of_places(places) + (self.state_bytes if resumable else 0)

    def wide_windows(self, max_positions: int) -> list[Window]:
        wide, layers = self.wide, range(self.num_layers)
        whole = [(layers[: wide.layers], max_positions, 0)] if wide.layers else []
        rest = [(layers[wide.layers :], wide.sinks, wide.recent)] if wide.sinks or wide.recent else []
        return whole + rest

    def _bytes_of_places(self, places: int) -> int:
        vectors = 2 * self.num_kv_heads * ITEM_BYTES[self.wide.dtype]
        return places and places * (vectors * self.head_dim + _INT32)
