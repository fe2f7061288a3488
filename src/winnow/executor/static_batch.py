"""Batches whose layout lies at fixed places on the device, so that a step that was captured once can run again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from winnow.attention import AttentionObserver, Spans
from winnow.attention.spans import NEVER

# Batches are filled up to a power of two, large ones to a multiple of this.
_BATCH_STEP = 64
# Chunks are filled up to this number of tokens times a power of _GROWTH, their sequences to such a power.
_LEAST_TOKENS = 32
# Grids cover rows of this many KVs, times powers of _GROWTH. Programs beyond a row's end leave at once.
_LEAST_LENGTH = 1024
_GROWTH = 4
# A sequence that only fills the batch: its rows are empty.
_NOBODY = -1


@dataclass(frozen=True)
class BatchShape:
    """Shape of a batch: all that the host decides of a step's launches."""

    decodes: int
    """Sequences that bring a token each."""
    chunks: int
    """Sequences that bring more."""
    chunk_tokens: int
    logits: int
    """Tokens whose logits are wanted."""
    longest: int
    """KVs in the longest row of those that bring a token each."""
    observe: AttentionObserver | None
    """Observer of all sequences."""

    @classmethod
    def around(cls, spans: Spans, wanted: int, max_num_seqs: int) -> "BatchShape | None":
        """Return the least shape, out of short lists, that a batch fits in; None: there is none."""
        decodes, batch = spans.num_decodes, len(spans.counts)
        observers = spans.active_observers
        if wanted > max_num_seqs or any(each != observers[0] for each in observers):
            return None
        return cls(
            min(_round_batch(decodes), max_num_seqs) if decodes else 0,
            _round_up(batch - decodes, 1) if batch > decodes else 0,
            _round_up(int(spans.counts[decodes:].sum()), _LEAST_TOKENS) if batch > decodes else 0,
            min(_round_batch(max(wanted, batch)), max_num_seqs),
            _round_up(int(spans.lengths[:decodes].max(initial=0)), _LEAST_LENGTH),
            observers[0],
        )

    @property
    def tokens(self) -> int:
        return self.decodes + self.chunk_tokens

    @property
    def sequences(self) -> int:
        """Number of sequences, with the one to which the tokens belong that only fill the chunks."""
        return self.decodes + self.chunks + (self.chunk_tokens > 0)


class _Places(NamedTuple):
    """Places of a batch's parts, in tensors or arrays of int64."""

    token_slots: Any
    """[T]: -1: a token only fills the batch."""
    position: Any
    tokens_after: Any
    slots: Any
    """[B]"""
    starts: Any
    counts: Any
    wanted: Any
    """[n]"""


class StaticBatch:
    """Batch of fixed shape in fixed memory, filled anew for each step: the input of a CUDA graph.

    Attributes:
        tokens: int64 [T].
        wanted: tokens whose logits are wanted, int64 [n].
        spans: layout; slots are -1 where sequences only fill it.
    """

    def __init__(self, shape: BatchShape, device: torch.device | str) -> None:
        self._shape = shape
        self._layout = torch.from_numpy(_layout(shape, None, [])).to(device)
        self.tokens = torch.zeros(shape.tokens, dtype=torch.int64, device=device)
        places = _Places(*self._layout.split(_sizes(shape)))
        self.wanted = places.wanted
        ones = np.ones(shape.sequences, dtype=np.int64)
        host_counts = ones.copy()
        host_counts[shape.decodes :] = 0
        host_counts[-1] += shape.chunk_tokens
        self.spans: Spans = _StaticSpans(
            slots=ones * _NOBODY,
            counts=host_counts,
            lengths=ones * shape.longest,
            position=places.position,
            first_position=ones * 0,
            observe=(shape.observe,) * shape.sequences,
            observe_from=ones * 0,
            select_from=ones * NEVER,
            temporary=ones > 1,
            shape=shape,
            places=places,
        )

    def fill(self, tokens: Tensor, spans: Spans, wanted: Sequence[int]) -> None:
        """Put a batch that fits into place.

        Args:
            tokens: of the batch, int64 [T] on the device.
            wanted: those whose logits are wanted.
        """
        self._layout.copy_(torch.from_numpy(_layout(self._shape, spans, wanted)))
        decodes, first = spans.num_decodes, self._shape.decodes
        self.tokens[:decodes] = tokens[:decodes]
        if len(tokens) > decodes:
            self.tokens[first : first + len(tokens) - decodes] = tokens[decodes:]


@dataclass(frozen=True)
class _StaticSpans(Spans):
    """Layout whose host side says how much room there is, and the device what is in it."""

    shape: BatchShape
    places: _Places

    @property
    def num_decodes(self) -> int:
        return self.shape.decodes

    @property
    def device_slots(self) -> Tensor:
        return self.places.slots

    @property
    def token_slots(self) -> Tensor:
        return self.places.token_slots

    @property
    def tokens_after(self) -> Tensor:
        return self.places.tokens_after

    def chunk_layout(self, index: Sequence[int], tile_queries: int) -> tuple[Tensor, Tensor]:
        """See `Spans.chunk_layout`; tiles beyond those of the chunks are of no token."""
        starts, counts, decodes = self.places.starts, self.places.counts, self.shape.decodes
        number = self.shape.chunk_tokens // tile_queries + self.shape.sequences - decodes
        tiles = (counts[decodes:] + tile_queries - 1) // tile_queries
        ends = tiles.cumsum(0)
        tile = torch.arange(number, device=self.device)
        sequence = torch.searchsorted(ends, tile, right=True).clamp_(max=len(tiles) - 1)
        within = tile - (ends - tiles)[sequence]
        return (
            torch.stack([sequence + decodes, within * tile_queries], dim=1).int(),
            torch.stack([starts, counts, torch.zeros_like(starts)], dim=1).int(),
        )


def _sizes(shape: BatchShape) -> list[int]:
    return [shape.tokens] * 3 + [shape.sequences] * 3 + [shape.logits]


def _layout(shape: BatchShape, spans: Spans | None, wanted: Sequence[int]) -> NDArray[np.int64]:
    """Return what a static batch holds of a batch, or of none, one behind the other."""
    flat = np.zeros(sum(_sizes(shape)), dtype=np.int64)
    places = _Places(*np.split(flat, np.cumsum(_sizes(shape))[:-1]))
    places.token_slots[:] = places.slots[:] = _NOBODY
    used = 0
    if spans is not None:
        decodes, batch, total = spans.num_decodes, len(spans.counts), int(spans.counts.sum())
        sequence, token = np.arange(batch), np.arange(total)
        for each in (sequence, token):  # all that follows the sequences with one token
            each[decodes:] += shape.decodes - decodes
        used = total - decodes
        places.slots[sequence], places.starts[sequence] = spans.slots, token[spans.starts]
        places.counts[sequence] = spans.counts
        within = np.arange(total) - np.repeat(spans.starts, spans.counts)
        places.token_slots[token] = np.repeat(spans.slots, spans.counts)
        places.position[token] = np.repeat(spans.first_position, spans.counts) + within
        places.tokens_after[token] = np.repeat(spans.counts, spans.counts) - 1 - within
        places.wanted[: len(wanted)] = token[np.asarray(wanted, dtype=np.int64)]
    if shape.chunk_tokens:
        places.starts[-1], places.counts[-1] = shape.decodes + used, shape.chunk_tokens - used
    return flat


def _round_batch(batch: int) -> int:
    if batch > _BATCH_STEP:
        return -(-batch // _BATCH_STEP) * _BATCH_STEP
    return 1 << (batch - 1).bit_length()


def _round_up(number: int, least: int) -> int:
    """Return the least of `least`, `least` * _GROWTH and so on that is no less than a number."""
    bound = least
    while bound < number:
        bound *= _GROWTH
    return bound
