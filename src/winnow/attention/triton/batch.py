"""The launches of a step: planned once, used by all of its layers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from winnow.attention.observer import AttentionObserver
from winnow.attention.spans import Spans

# Bytes of the largest scratch for logits of decoding sequences; larger batches take several launches.
_RAW_BYTES = 2**26


@dataclass(frozen=True)
class Decodes:
    """Sequences with one query each, computed by one launch."""

    index: Tensor | None
    """int32 [R], their indices in the batch; None: the first R."""
    count: int
    longest: int
    """KVs in the longest row."""
    observe: AttentionObserver | None


@dataclass(frozen=True)
class Watched:
    """Chunks with the same observer."""

    index: Tensor
    """int32 [R], indices of the sequences in the batch."""
    longest: int
    observe: AttentionObserver


@dataclass(frozen=True)
class Chunks:
    """Sequences computed in tiles of queries."""

    tiles: Tensor
    extents: Tensor
    """See `Spans.chunk_layout`."""
    watched: tuple[Watched, ...]


@dataclass(frozen=True)
class Batch:
    """The launches of one step."""

    decodes: tuple[Decodes, ...]
    chunks: Chunks | None

    @property
    def uploads_nothing(self) -> bool:
        """Return whether all inputs of the launches are on the device already, in the spans."""
        watched = self.chunks is not None and bool(self.chunks.watched)
        return not watched and all(part.index is None for part in self.decodes)

    @classmethod
    def plan(cls, spans: Spans, query_heads: int, tile_queries: int) -> "Batch":
        """Split the batch into launches. Sequences without an observer take no Python loop.

        Args:
            query_heads: Hq, which determines the size of scratch.
            tile_queries: tokens in one tile of a chunk.
        """
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
                decodes += [
                    _decodes(spans, part, observe) for part in _parts(spans.lengths, index, query_heads)
                ]
            else:  # neighbours are pooled: treat it as a chunk of one query
                chunked += index
        for observe, index in _by_observer(observers, chunked).items():
            if observe is not None:
                watched[observe] = index
        return cls(tuple(decodes), _chunks(spans, chunked, tile_queries, watched))


def _by_observer(
    observers: Sequence[AttentionObserver | None], among: Sequence[int] | None = None
) -> dict[AttentionObserver | None, list[int]]:
    """Group sequences by observer: their indices in the batch."""
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
    return Chunks(
        *spans.chunk_layout(index, tile_queries),
        tuple(
            Watched(spans.upload(members), int(spans.lengths[members].max()), observe)
            for observe, members in watched.items()
        ),
    )
