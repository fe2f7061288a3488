"""Memory of the cache: the KVs of all rows, in blocks."""

from collections.abc import Iterator

import torch
from torch import Tensor

from winnow.cache.kind_pool import KindPool
from winnow.cache.layout import CacheLayout
from winnow.cache.row_groups import BlockCount
from winnow.cache.slot_numbers import SlotNumbers


class KVPool:
    """Blocks of all layers, heads and sequences.

    Outside `winnow.cache` and the attention backends vectors are read and written through `of_layer`, whose methods
    work for any codec and tier, and KVs are moved by the methods here.

    Memory is uninitialised: a slot is written before the length of its row covers it.

    Attributes:
        kinds: the blocks of each kind, in the order of `CacheLayout.kinds`.
        numbers: positions and accumulators of all blocks.
    """

    def __init__(
        self, layout: CacheLayout, count: BlockCount | int, device: torch.device | str = "cpu"
    ) -> None:
        """Take the memory of `count` blocks: of each kind, or of the only one."""
        count = BlockCount((count,)) if isinstance(count, int) else count
        self.layout, self.num_blocks = layout, count.total
        self.numbers = SlotNumbers(count.total, layout.block_size, layout.num_accumulators, device)
        kinds, first = [], 0
        for kind, number in zip(layout.kinds, count, strict=True):
            kinds.append(KindPool(kind, first, number, self.numbers, alone=len(layout.kinds) == 1))
            first += number
        self.kinds = tuple(kinds)
        self._by_layer = tuple(self.kinds[kind] for kind in layout.kind_of[:, 0].tolist())

    def of_layer(self, layer: int) -> KindPool:
        """Return the blocks that the rows of a layer hold."""
        return self._by_layer[layer]

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    @property
    def position(self) -> Tensor:
        """See `SlotNumbers`."""
        return self.numbers.position

    @property
    def accumulators(self) -> Tensor:
        """See `SlotNumbers`."""
        return self.numbers.accumulators

    @property
    def nbytes(self) -> int:
        """Bytes of the device."""
        return sum(kind.nbytes for kind in self.kinds) + self.numbers.nbytes

    def copy_blocks(self, source: Tensor, target: Tensor) -> None:
        """Copy whole blocks, int32 [n] each, to others of their kind. No target may also be a source."""
        for kind, mask in self.split(source):
            kind.copy_blocks(source[mask], target[mask])
        self.numbers.copy_blocks(source, target)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy KVs from slots to slots with positions and accumulators, int64 [n] each; no slot is in both.

        Fields are copied byte by byte, so a KV is the same afterwards whatever the codec. A KV stays in its row.
        """
        source_place, target_place = self.numbers.place(source), self.numbers.place(target)
        for kind, mask in self.split(source_place[0]):
            kind.move(
                (source_place[0][mask], source_place[1][mask]), (target_place[0][mask], target_place[1][mask])
            )
        self.numbers.move(source_place, target_place)

    def split(self, block: Tensor) -> Iterator[tuple[KindPool, Tensor | slice]]:
        """Return the kinds that hold some of `block`, int64 [n], and which."""
        if len(self.kinds) == 1:
            yield self.kinds[0], slice(None)
            return
        for kind in self.kinds:
            mask = kind.covers(block)
            if bool(mask.any()):
                yield kind, mask
