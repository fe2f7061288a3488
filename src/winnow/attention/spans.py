"""The layout of a packed batch: which tokens belong to which sequence, and how a layer attends over it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from winnow.attention.observer import AttentionObserver

NEVER = 2**62
"""`Spans.select_from` of a sequence whose queries read all values."""


@dataclass(frozen=True)
class AttentionSpec:
    """Attention of a layer: causal softmax(scale q k^T) v, modified as the fields say."""

    scale: float
    """Factor of the logits."""
    window: int | None = None
    """A query sees only KVs fewer than `window` positions back."""
    softcap: float | None = None
    """Bends scaled logits x to softcap * tanh(x / softcap) (Gemma 2)."""
    sinks: Tensor | None = None
    """[Hq]: one more logit per query head, which takes probability and gives no value (gpt-oss)."""
    slopes: Tensor | None = None
    """[Hq]: logits of a query head fall by its slope for each position between query and key (ALiBi)."""
    chunked: bool = False
    """The window begins anew at every multiple of `window`: a query sees the KVs of its own chunk alone (Llama 4)."""

    def reach(self, position: Any) -> Any:
        """Return how many positions queries at `position`, int or Tensor, see in a window, their own included."""
        assert self.window is not None, "there is a window"
        return position % self.window + 1 if self.chunked else self.window


@dataclass(frozen=True)
class Spans:
    """Packed batch of B sequences in T tokens, without padding. Sequences with one token come first.

    Attributes:
        slots: the cache slot of each sequence, int64 [B].
        counts: tokens of each sequence in this batch, int64 [B]; T is their sum.
        lengths: KVs in the longest row of each sequence, this batch's included, int64 [B].
        position: of every token in its sequence, int64 [T], on the compute device.
        first_position: of each sequence's first token in this batch, int64 [B].
        observe: the accumulator updates of each sequence's queries, [B]; None: none.
        observe_from: the first position of each sequence whose query updates accumulators, int64 [B].
        select_from: first position of each sequence whose query reads only the values of largest weight, where values
            lie on a tier, int64 [B]; earlier queries read all.
        temporary: sequences whose KVs are dropped after the step, and enter no wide window, bool [B].
    """

    slots: NDArray[np.int64]
    counts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    position: Tensor
    first_position: NDArray[np.int64]
    observe: tuple[AttentionObserver | None, ...]
    observe_from: NDArray[np.int64]
    select_from: NDArray[np.int64]
    temporary: NDArray[np.bool_]

    @classmethod
    def build(
        cls,
        slots: list[int],
        starts: list[int],
        counts: list[int],
        lengths: NDArray[np.int64],
        device: torch.device | str = "cpu",
        observe: Sequence[AttentionObserver | None] | None = None,
        observe_from: list[int] | None = None,
        select_from: list[int] | None = None,
        temporary: list[bool] | None = None,
    ) -> Self:
        """Pack sequences whose tokens in this batch start at the positions `starts`."""
        count_array = np.asarray(counts, dtype=np.int64)
        first_position = np.asarray(starts, dtype=np.int64)
        position = first_position
        if (count_array != 1).any():
            first = first_position - (np.cumsum(count_array) - count_array)
            position = np.arange(count_array.sum()) + np.repeat(first, count_array)
        return cls(
            np.asarray(slots, dtype=np.int64),
            count_array,
            lengths,
            torch.from_numpy(position).to(device),
            first_position,
            (None,) * len(slots) if observe is None else tuple(observe),
            np.array(observe_from or [0] * len(slots), dtype=np.int64),
            np.array(select_from or [NEVER] * len(slots), dtype=np.int64),
            np.array(temporary or [False] * len(slots), dtype=np.bool_),
        )

    def tokens_of(self, index: Sequence[int]) -> Tensor:
        """Return the batch indices of the tokens of some of the sequences, in their order: int64 [n]."""
        found = [np.arange(self.starts[i], self.starts[i] + self.counts[i]) for i in index]
        return torch.from_numpy(np.concatenate(found)).to(self.device)

    def only(self, index: Sequence[int]) -> Self:
        some = np.array(index)
        return type(self)(
            self.slots[some],
            self.counts[some],
            self.lengths[some],
            self.position[self.tokens_of(index)],
            self.first_position[some],
            tuple(self.observe[i] for i in index),
            self.observe_from[some],
            self.select_from[some],
            self.temporary[some],
        )

    @cached_property
    def active_observers(self) -> Sequence[AttentionObserver | None]:
        """Observer of each sequence; None if none of its queries in this batch updates accumulators."""
        if not any(self.observe):
            return self.observe
        active = (self.first_position + self.counts > self.observe_from).tolist()
        return [each if counts else None for each, counts in zip(self.observe, active, strict=True)]

    def chunk_layout(self, index: Sequence[int], tile_queries: int) -> tuple[Tensor, Tensor]:
        """Split the tokens of some sequences into tiles, and locate those of all sequences.

        Returns:
            tiles: int32 [tiles, 2]: index of the sequence, and the tile's first token, counted within the sequence.
            extents: int32 [B, 3]: the sequence's first token in the batch, its number of tokens, and the first of them
                that updates accumulators (negative: all).
        """
        tiles = -(-self.counts[index] // tile_queries)
        within = np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)
        first_active = self.observe_from - self.first_position
        return (
            self.upload(np.stack([np.repeat(index, tiles), within * tile_queries], axis=1)),
            self.upload(np.stack([self.starts, self.counts, first_active], axis=1)),
        )

    def upload(self, values: NDArray[np.int64] | Sequence[int]) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int32)).to(self.device)

    @property
    def num_decodes(self) -> int:
        many = np.flatnonzero(self.counts > 1)
        return int(many[0]) if len(many) else len(self.counts)

    @property
    def device(self) -> torch.device:
        return self.position.device

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        return np.cumsum(self.counts) - self.counts

    @cached_property
    def device_slots(self) -> Tensor:
        return torch.from_numpy(self.slots).to(self.device)

    @cached_property
    def token_sequence(self) -> Tensor:
        return torch.from_numpy(np.repeat(np.arange(len(self.counts)), self.counts)).to(self.device)

    @cached_property
    def token_slots(self) -> Tensor:
        return self.device_slots[self.token_sequence]

    @cached_property
    def tokens_after(self) -> Tensor:
        """Number of tokens of the same sequence that follow each token in this batch, int64 [T]."""
        ends = np.repeat(self.starts + self.counts, self.counts)
        return torch.from_numpy(ends - 1 - np.arange(len(ends))).to(self.device)
