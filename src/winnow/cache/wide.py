"""Parts of a sequence that are kept in 16 bits beside narrow KVs: first layers, sinks, the most recent KVs.

A block has room for narrow KVs only, and any block may go to any row. So what stays wide lies a second time in rows of
its own, found by sequence and position: a KV keeps its position when it moves, so nothing here follows moves, and
rounds rank by what blocks hold. A place says which position it holds, and one that holds another is not read.
"""

import torch
from torch import Tensor

from winnow.cache.layout import CacheLayout, CacheSize
from winnow.cache.memory import empty_in_large_pages

_EMPTY = -1


class WideWindow:
    """The wide KVs of consecutive layers of all sequences.

    Attributes:
        k, v: [max_num_seqs, layers, H, places, d]; positions below `sinks` have a place each, the others take turns in
            the `recent` places after them.
        position: int32 [max_num_seqs, layers, places], whose KV a place holds; -1: nobody's.
    """

    def __init__(
        self,
        layout: CacheLayout,
        max_num_seqs: int,
        layers: range,
        sinks: int,
        recent: int,
        device: torch.device | str,
    ) -> None:
        self.layers, self.sinks, self.recent = layers, sinks, recent
        places = (max_num_seqs, len(layers), layout.num_kv_heads, sinks + recent, layout.head_dim)
        dtype = getattr(torch, layout.wide.dtype)
        self.k, self.v = (empty_in_large_pages(places, dtype, device) for _ in range(2))
        self.position = torch.full(
            (max_num_seqs, len(layers), sinks + recent), _EMPTY, dtype=torch.int32, device=device
        )

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes + self.position.nbytes

    def write(self, slots: Tensor, layer: int, k: Tensor, v: Tensor, position: Tensor, after: Tensor) -> None:
        """Keep those of new KVs, [T, H, d], that stay wide.

        Args:
            slots: of their sequences, int64 [T]; position: [T].
            after: how many tokens of the same sequence follow in the batch, [T].
        """
        kept = (position < self.sinks) | (after < self.recent)
        place = self._place(position)[kept]
        index = slots[kept], layer - self.layers.start
        self.position[(*index, place)] = position[kept].int()
        for wide, given in ((self.k, k), (self.v, v)):
            stored = given[kept].to(wide.dtype)
            # Infinity could make a logit -inf, which attention takes for a mask; NaN is noticed.
            wide[index[0], index[1], :, place] = stored.masked_fill(stored.isinf(), torch.nan)

    def widen(self, slots: Tensor, layer: int, position: Tensor, k: Tensor, v: Tensor) -> None:
        """Replace what narrow KVs, float32 [G, H, N, d] at positions [G, H, N], lost, where they are kept wide.

        Args:
            slots: int64 [G], of their sequences; KVs past a row's length may be anything.
        """
        index = layer - self.layers.start
        place = self._place(position.long().clamp_min(0))
        found = self.position[slots, index].gather(1, place.flatten(1)).view_as(place) == position
        group, head, n = found.nonzero(as_tuple=True)
        where = slots[group], index, head, place[group, head, n]
        k[group, head, n] = self.k[where].float()
        v[group, head, n] = self.v[where].float()

    def keys(self, slot: int, layer: int, first: int, end: int) -> Tensor:
        """The keys of the positions from `first` to `end`, all of them here: [H, n, d]."""
        position = torch.arange(first, end, device=self.k.device)
        index, place = layer - self.layers.start, self._place(position)
        assert bool((self.position[slot, index, place] == position).all()), "a key that is needed is gone"
        return self.k[slot, index, :, place]

    def clear(self, slot: int) -> None:
        """Forget a sequence."""
        self.position[slot] = _EMPTY

    def fork(self, slot: int, to: int) -> None:
        """Let the sequence in slot `to` have what that in `slot` has."""
        for part in (self.k, self.v, self.position):
            part[to] = part[slot]

    def _place(self, position: Tensor) -> Tensor:
        """The place of each position, which another may hold; the last one for those without."""
        if not self.recent:
            return position.clamp_max(self.sinks - 1)
        return torch.where(position < self.sinks, position, self.sinks + position % self.recent)


def open_windows(layout: CacheLayout, size: CacheSize, device: torch.device | str) -> tuple[WideWindow, ...]:
    """The windows of a cache, by layers; none if nothing stays wide."""
    return tuple(
        WideWindow(layout, size.max_num_seqs, layers, sinks, recent, device)
        for layers, sinks, recent in layout.wide_windows(size.max_positions(layout))
    )
