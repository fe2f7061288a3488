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

from winnow.cache.cache_size import CacheSize
from winnow.cache.layout import CacheLayout
from winnow.cache.memory import empty_in_large_pages
from winnow.cache.slot_states import SlotState

_EMPTY = -1
_INT64 = 8
_DTYPES = {"place": torch.int64, "k": torch.uint8, "v": torch.uint8, "position": torch.int32}


SavedWindow = dict[str, Tensor]
"""KVs that one sequence has in n places of a window, on the host: place int64 [n], k and v [layers, H, n, d], position
int32 [layers, n]."""


class WideWindow:
    """The wide KVs of consecutive layers of all sequences.

    Attributes:
        k, v: [max_num_seqs, layers, H, places, d]; positions below `sinks` have a place each, the others take turns in
            the `recent` places after them.
        position: int32 [max_num_seqs, layers, places], whose KV a place holds; -1: of none.
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

    def clear(self, slot: int) -> None:
        self.position[slot] = _EMPTY

    def saved_bytes(self, slot: int) -> int:
        return int(self._used(slot).sum()) * (self.nbytes // self.position[:, 0].numel() + _INT64)

    def save(self, slot: int, positions: tuple[int, int] | None = None) -> SavedWindow:
        used = self._used(slot)
        if positions is not None:
            used[max(self.sinks, positions[0]) :] = False
            used[: positions[0]] = used[positions[1] :] = False
        place = used.nonzero()[:, 0]
        parts = {"k": self.k[slot][:, :, place], "v": self.v[slot][:, :, place]}
        parts |= {"place": place, "position": self.position[slot][:, place]}
        return {name: part.cpu() for name, part in parts.items()}

    def load(self, slot: int, saved: SavedWindow) -> None:
        here = {name: part.to(self.k.device) for name, part in saved.items()}
        place = here["place"]
        self.k[slot][:, :, place], self.v[slot][:, :, place] = here["k"], here["v"]
        self.position[slot][:, place] = here["position"]

    def fork(self, slot: int, to: int) -> None:
        for part in (self.k, self.v, self.position):
            part[to] = part[slot]

    def _used(self, slot: int) -> Tensor:
        """Return which places hold anything of a sequence in some layer, bool [places]."""
        return (self.position[slot] != _EMPTY).any(dim=0)

    def _place(self, position: Tensor) -> Tensor:
        """Return the place of each position, which another may hold; the last one for those without."""
        if not self.recent:
            return position.clamp_max(self.sinks - 1)
        return torch.where(position < self.sinks, position, self.sinks + position % self.recent)


class WideWindows(SlotState):
    """All that is wide in a cache."""

    name = "wide"
    of_prefix = True

    def __init__(self, layout: CacheLayout, size: CacheSize, device: torch.device | str) -> None:
        self.windows = tuple(
            WideWindow(layout, size.max_num_seqs, layers, sinks, recent, device)
            for layers, sinks, recent in layout.wide_windows(size.max_positions(layout))
        )

    @property
    def total_bytes(self) -> int:
        return sum(window.nbytes for window in self.windows)

    def of_layer(self, layer: int) -> WideWindow | None:
        return next((window for window in self.windows if layer in window.layers), None)

    def nbytes(self, slot: int) -> int:
        return sum(window.saved_bytes(slot) for window in self.windows)

    def fork(self, slot: int, to: int) -> None:
        for window in self.windows:
            window.fork(slot, to)

    def save(self, slot: int, positions: tuple[int, int] | None = None) -> tuple[SavedWindow, ...]:
        return tuple(window.save(slot, positions) for window in self.windows)

    def load(self, slot: int, saved: tuple[SavedWindow, ...]) -> None:
        for window, part in zip(self.windows, saved, strict=True):
            window.load(slot, part)

    def close(self, slot: int) -> None:
        for window in self.windows:
            window.clear(slot)

    def to_arrays(self, saved: tuple[SavedWindow, ...]) -> dict[str, NDArray[Any]]:
        """Return saved windows as arrays by name: "N.FIELD" of the N-th window, vectors as bytes."""
        return {
            f"{number}.{name}": part[name].contiguous().view(dtype).numpy()
            for number, part in enumerate(saved)
            for name, dtype in _DTYPES.items()
        }

    def from_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> tuple[SavedWindow, ...]:
        def numbers(name: str, dtype: torch.dtype) -> Tensor:
            # An empty array has strides that only a copy of it has not.
            return torch.from_numpy(arrays[name]).clone(memory_format=torch.contiguous_format).view(dtype)

        return tuple(
            {
                name: numbers(f"{number}.{name}", window.k.dtype if name in ("k", "v") else dtype)
                for name, dtype in _DTYPES.items()
            }
            for number, window in enumerate(self.windows)
        )
