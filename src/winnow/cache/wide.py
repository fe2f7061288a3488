"""Parts of a sequence that are kept in 16 bits beside narrow KVs: first layers, sinks, the most recent KVs.

A block has room for narrow KVs only, and any block may go to any row. So what stays wide lies a second time in rows of
its own, found by sequence and position: a KV keeps its position when it moves, so nothing here follows moves, and
rounds rank by what blocks hold. A place says which position it holds, and one that holds another is not read.
"""

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from winnow.cache.layout import CacheLayout, Window
from winnow.cache.memory import empty_in_large_pages
from winnow.cache.slot_states import SlotState

_EMPTY = -1
_INT64 = 8

SavedWindow = dict[str, Tensor]
"""KVs that one sequence has in n places of a window, on the host: place int64 [n], k and v as bytes, uint8
[layers, H, n, bytes], position int32 [layers, n]."""


class WideWindow(SlotState):
    """The wide KVs of consecutive layers of all sequences.

    Attributes:
        k, v: [max_num_seqs, layers, H, places, d]; positions below `sinks` have a place each, the others take turns in
            the `recent` places after them.
        position: int32 [max_num_seqs, layers, places], whose KV a place holds; -1: of none.
    """

    of_prefix = True

    def __init__(
        self, layout: CacheLayout, seqs: int, number: int, window: Window, device: torch.device | str
    ) -> None:
        self.name, (self.layers, self.sinks, self.recent) = f"wide{number}", window
        rows, places = (seqs, len(self.layers)), self.sinks + self.recent
        shape = (*rows, layout.num_kv_heads, places, layout.head_dim)
        dtype = getattr(torch, layout.wide.dtype)
        self.k, self.v = (empty_in_large_pages(shape, dtype, device) for _ in range(2))
        self.position = torch.full((*rows, places), _EMPTY, dtype=torch.int32, device=device)

    @property
    def total_bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes + self.position.nbytes

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor, position: Tensor, after: Tensor) -> None:
        """Store new KVs, [T, H, d], that belong to the window; others are ignored.

        `after` says how many tokens of the same sequence follow in the batch, [T] as `slots` and `position`.
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
        """Replace what narrow KVs, float32 [G, H, N, d] at positions [G, H, N], lost, where they are kept wide."""
        index = layer - self.layers.start
        place = self._place(position.long().clamp_min(0))
        found = self.position[slots, index].gather(1, place.flatten(1)).view_as(place) == position
        group, head, n = found.nonzero(as_tuple=True)
        where = slots[group], index, head, place[group, head, n]
        k[group, head, n] = self.k[where].float()
        v[group, head, n] = self.v[where].float()

    def nbytes(self, slot: int) -> int:
        return int(self._used(slot).sum()) * (self.total_bytes // self.position[:, 0].numel() + _INT64)

    def save(self, slot: int, positions: tuple[int, int] | None = None) -> SavedWindow:
        used = self._used(slot)
        if positions is not None:
            used[max(self.sinks, positions[0]) :] = False
            used[: positions[0]] = used[positions[1] :] = False
        place = used.nonzero()[:, 0]
        k, v = (part[slot].index_select(2, place).view(torch.uint8).cpu() for part in (self.k, self.v))
        return {"place": place.cpu(), "k": k, "v": v, "position": self.position[slot][:, place].cpu()}

    def load(self, slot: int, saved: SavedWindow) -> None:
        place, k, v, position = (saved[name].to(self.k.device) for name in ("place", "k", "v", "position"))
        self.k[slot][:, :, place], self.v[slot][:, :, place] = k.view(self.k.dtype), v.view(self.v.dtype)
        self.position[slot][:, place] = position

    def fork(self, slot: int, to: int) -> None:
        for part in (self.k, self.v, self.position):
            part[to] = part[slot]

    def close(self, slot: int) -> None:
        self.position[slot] = _EMPTY

    def to_arrays(self, saved: SavedWindow) -> dict[str, NDArray[Any]]:
        return {name: part.numpy() for name, part in saved.items()}

    def from_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> SavedWindow:
        # An empty array has strides that only a copy of it has not.
        form = torch.contiguous_format
        return {name: torch.from_numpy(array).clone(memory_format=form) for name, array in arrays.items()}

    def _used(self, slot: int) -> Tensor:
        """Return which places hold anything of a sequence in some layer, bool [places]."""
        return (self.position[slot] != _EMPTY).any(dim=0)

    def _place(self, position: Tensor) -> Tensor:
        """Return the place of each position, which another may hold; the last one for those without."""
        if not self.recent:
            return position.clamp_max(self.sinks - 1)
        return torch.where(position < self.sinks, position, self.sinks + position % self.recent)
