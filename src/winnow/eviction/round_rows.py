"""The rows of a round as scorers and budgets read them."""

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from winnow.attention import PagedCache
from winnow.cache.layout import ceil_div
from winnow.eviction.signals import KeyDirections, RotationTable, Signals
from winnow.eviction.text_units import Unit
from winnow.process.ranks import ALONE, Ranks


@dataclass(frozen=True)
class RoundInputs:
    """The B sequences that one policy evicts from together."""

    slots: tuple[int, ...]
    now: Tensor  # position of the last token computed, int32 [B]
    budget: Tensor  # KVs per row on average after the round, int64 [B]
    sinks: int  # number of first positions that are protected
    recent: Tensor  # number of last positions that are protected, int64 [B]
    spans: tuple[tuple[tuple[int, int], ...], ...]  # further protected positions, as half-open intervals
    tokens: Tensor  # tokens computed so far, int64 [B]
    within: tuple[bool, ...] = ()  # which of them still compute their context; empty: none

    @cached_property
    def num_positions(self) -> int:
        """All positions are below it. Waits for the device, once a round."""
        return int(self.now.max()) + 1


class RoundRows:
    """The rows of L of the layers: blocks, lengths, positions and protection of their KVs.

    Rows are padded to N slots each, the blocks of the longest row. Layers come first, so that those of one layer are
    contiguous.

    Attributes:
        block: int64 [L, B, H, N / block size], the blocks of each row.
        length: int32 [L, B, H].
        position: int32 [L, B, H, N], arbitrary past the length.
        protected: bool [L, B, H, N], KVs that must stay.
    """

    def __init__(
        self,
        cache: PagedCache,
        round_: RoundInputs,
        layers: tuple[int, ...],
        longest: int,
        signals: Signals | None = None,
    ) -> None:
        self.cache, self.signals, self.round = cache, signals, round_
        tables = cache.tables
        slots = torch.tensor(round_.slots, device=cache.pool.device)
        num_blocks = ceil_div(longest, cache.pool.layout.block_size)
        self.layers = layers
        self.block = tables.lookup_layers(slots, num_blocks)
        length = tables.lengths[slots].transpose(0, 1)
        if len(layers) < len(length):
            some = torch.tensor(layers, device=slots.device)
            self.block, length = self.block[some], length[some]
        self.block, self.length = self.block.long(), length.contiguous()
        self.position = cache.pool.numbers.positions_of(self.block)
        self.protected = self._kept_positions().logical_and_(self.valid)
        self._found: dict[Unit, Tensor] = {}

    @property
    def missing(self) -> int:
        """Number of rows of a sequence that do not exist, since their layers have fewer heads than others."""
        has_row = self.cache.pool.layout.has_row[list(self.layers)]
        return int(has_row.size - has_row.sum())

    @cached_property
    def slot(self) -> Tensor:
        """The pool's slot of each KV, int64 [L, B, H, N]."""
        return self.cache.pool.numbers.slots_of(self.block)

    @cached_property
    def valid(self) -> Tensor:
        """Return whether a slot is below its row's length, bool [L, B, H, N]."""
        return torch.arange(self.position.shape[-1], device=self.block.device) < self.length[..., None]

    def layer(self, index: int) -> "LayerRows":
        return LayerRows(self, index)

    def text_units(self, unit: Unit) -> Tensor:
        """Return the number of the sentence or word of each position, int64 [B, positions]; found once a round."""
        assert self.signals is not None, "rows of an engine have them"
        if unit not in self._found:
            self._found[unit] = self.signals.text_units(self.round.slots, unit, self.round.num_positions)
        return self._found[unit]

    def together(self, *, rotated: bool) -> "LayerRows | None":
        """Return the rows of all layers as if they were one layer's, [L * B, H, N], for kernels that score single rows.

        None: layers store keys differently, or rotate them differently and that matters (`rotated`).
        """
        if len({id(self.cache.pool.of_layer(layer)) for layer in self.layers}) > 1:
            return None
        if rotated:
            assert self.signals is not None, "rows of an engine have them"
            if len({id(self.signals.rotation_table(layer, 1)) for layer in self.layers}) > 1:
                return None
        return _AllRows(self)

    def _kept_positions(self) -> Tensor:
        position, round_ = self.position, self.round
        # Less than `recent` positions before the last one. Comparing with wider integers would widen all positions.
        kept = position > (round_.now - round_.recent).int()[:, None, None]
        if round_.sinks:
            kept |= position < round_.sinks
        for index, spans in enumerate(round_.spans):
            for start, end in spans:
                kept[:, index] |= (position[:, index] >= start) & (position[:, index] < end)
        return kept


P = TypeVar("P")


class LayerRows:
    """The KVs of one layer, padded to N slots a row.

    Attributes:
        layer: the layer's number.
        length: int32 [B, H].
        position: int32 [B, H, N], arbitrary past the length.
        protected: bool [B, H, N], KVs that must stay.
    """

    def __init__(self, rows: RoundRows, index: int) -> None:
        self.round = rows.round
        self.layer = rows.layers[index]
        self.layers: tuple[int, ...] = (self.layer,)
        self.length = rows.length[index]
        self.position = rows.position[index]
        self.protected = rows.protected[index]
        self.pool = rows.cache.pool.of_layer(self.layer)
        self._rows, self._index = rows, index

    @cached_property
    def slot(self) -> Tensor:
        """The pool's slot of each KV, int64 [B, H, N]."""
        return self._rows.slot[self._index]

    @cached_property
    def valid(self) -> Tensor:
        """Return whether a slot is below its row's length, bool [B, H, N]."""
        return self._rows.valid[self._index]

    @cached_property
    def accumulators(self) -> Tensor:
        """Numbers that attention accumulated (`AttentionObserver`), float32 [num_accumulators, B, H, N]."""
        return self.pool.numbers.accumulated(self._block)

    def keys(self) -> Tensor:
        """Return the keys, rotated at their positions, float32 [B, H, N, d]; zeros where not valid."""
        return self._where_valid(self.pool.keys_of(self._block))

    def values(self) -> Tensor:
        """Return the values, float32 [B, H, N, d]; zeros where not valid."""
        self.pool.count_scored(int(self.length.sum()))
        return self._where_valid(self.pool.values_of(self._block))

    @property
    def _ranks(self) -> Ranks:
        return ALONE if self._rows.signals is None else self._rows.signals.ranks

    @property
    def first_head(self) -> int:
        """Number of its first head among those of all ranks."""
        return self._ranks.rank * self.position.shape[1]

    def over_ranks(self, x: Tensor) -> Tensor:
        """Return numbers of the KVs of the layer's heads on all ranks, of `x`, [B, H, N], on this one."""
        return self._ranks.join(x, 1)

    @property
    def _signals(self) -> Signals:
        assert self._rows.signals is not None, "rows of an engine have them"
        return self._rows.signals

    def unrotated_keys(self) -> Tensor:
        """Return the keys before their rotation, float32 [B, H, N, d]; zeros where not valid.

        Requires `Needs(rotation=True)`.
        """
        return self._where_valid(self._signals.turn(self.layer, self.keys(), -self.position))

    def key_directions(self) -> KeyDirections:
        """Return sums of the directions of the keys, before rotation, that earlier rounds saw."""
        vectors = self.position.shape[1], self.pool.kind.key_size  # heads of a layer, and numbers in a key
        sums, counted = self._signals.key_directions(self.layers, self.round.slots, vectors)
        return KeyDirections(sums.flatten(0, 1), counted.repeat(len(self.layers)))

    def keep_key_directions(self, sums: Tensor) -> None:
        """Keep sums, float32 [B, H, d], to which the keys of all tokens computed so far are added."""
        directions = KeyDirections(sums.unflatten(0, (len(self.layers), -1)), self.round.tokens.int())
        self._signals.keep_key_directions(self.layers, self.round.slots, directions)

    def rotation_table(self) -> RotationTable:
        """Return the rotation of keys at the positions of all KVs. Requires `Needs(rotation=True)`."""
        return self._signals.rotation_table(self.layer, self.round.num_positions)

    @property
    def sentence(self) -> Tensor:
        """The number of each KV's sentence, int64 [B, H, N], arbitrary where not valid (`Needs(sentences=True)`)."""
        return self.text_unit("sentence")

    @property
    def word(self) -> Tensor:
        """The number of each KV's word, as `sentence`."""
        return self.text_unit("word")

    def text_unit(self, unit: Unit) -> Tensor:
        of_position = self._rows.text_units(unit)[:, None].expand(-1, self.position.shape[1], -1)
        return of_position.gather(2, self.position.masked_fill(~self.valid, 0).long())

    def probe(self, kind: type[P]) -> P:
        """Return a probe. Requires `Needs(probes=...)` with it."""
        found: P = self._signals.probe(kind)
        return found

    def age(self) -> Tensor:
        """Return positions from each KV to the last token computed, int32 [B, H, N]; 0 for that token's own KV."""
        return self.round.now[:, None, None] - self.position

    @property
    def _block(self) -> Tensor:
        """int64 [B, H, N / block size]."""
        return self._rows.block[self._index]

    def _where_valid(self, vectors: Tensor) -> Tensor:
        return vectors.masked_fill_(~self.valid[..., None], 0.0)


class _AllRows(LayerRows):
    """The KVs of all layers."""

    def __init__(self, rows: RoundRows) -> None:
        super().__init__(rows, 0)
        self.layers = rows.layers
        self.length, self.position = rows.length.flatten(0, 1), rows.position.flatten(0, 1)
        self.protected, self.slot = rows.protected.flatten(0, 1), rows.slot.flatten(0, 1)
        self.valid = rows.valid.flatten(0, 1)
