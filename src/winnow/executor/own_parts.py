"""Attention of replays that reads their own part of the context alone, and of pictures that looks both ways."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from winnow.attention import AttentionBackend, BackendStep, PagedCache, Spans
from winnow.attention.reference import BatchPart, PartedStep, TwoWayStep
from winnow.cache.cache_size import CacheSize
from winnow.cache.layout import PAGE_ENTRIES, IntArray, ceil_div
from winnow.cache.paged import BlockTables
from winnow.eviction.replay import ReplayPass, ReplaySpan


def with_own_parts(
    backend: AttentionBackend,
    cache: PagedCache,
    spans: Spans,
    replays: Sequence[ReplaySpan],
    two_way: Mapping[int, NDArray[np.int64]],
    *,
    windowed: bool,
) -> BackendStep:
    """Prepare a batch, divided where replays attend to their own part, and tokens of pictures to later ones.

    Keys and values of all tokens are written before. Where some are kept wide, which slots find, replays read
    all.

    Args:
        two_way: by sequence of the batch with such pictures, positions of the last KVs that its tokens see.
        windowed: only in layers with a window.
    """
    whole = backend.prepare(cache, spans)
    apart = {span.slot: span for span in replays if span.replay.own_part and cache.wide is None}
    if not apart and not two_way:
        return whole
    parts, others = [], []
    for index, slot in enumerate(spans.slots.tolist()):
        part: BackendStep | None = None
        if slot in apart:
            part = backend.prepare(*_own_part(cache, spans, index, apart[slot].replay))
        elif index in two_way:
            last = torch.from_numpy(two_way[index].astype(np.int32)).to(spans.device)
            part = TwoWayStep(cache, spans.only([index]), last, windowed=windowed)
        if part is None:
            others.append(index)
        else:
            parts.append(BatchPart(spans.tokens_of([index]), part))
    if others:
        parts.append(BatchPart(spans.tokens_of(others), backend.prepare(cache, spans.only(others))))
    return PartedStep(whole, parts)


def visible_blocks(replay: ReplayPass, size: int, total: int) -> IntArray:
    """Return the blocks of a row of `total` KVs that a pass reads: those of the row's head, of its chunk and of its own
    tokens.

    Blocks are whole, so a few KVs beside these are read too.
    """
    ends = (0, replay.head), (replay.start, replay.end), (replay.context_len, total)
    found = [np.arange(first // size, ceil_div(end, size)) for first, end in ends if first < end]
    return np.unique(np.concatenate(found))


def _own_part(cache: PagedCache, spans: Spans, index: int, replay: ReplayPass) -> tuple[PagedCache, Spans]:
    """Return tables, of one slot, that name the blocks that the pass sees, and the pass in that slot."""
    layout, device, slot = cache.pool.layout, spans.device, int(spans.slots[index])
    lengths, total = cache.tables.host_lengths[slot], int(spans.lengths[index])
    most = ceil_div(total, layout.block_size)
    entries = cache.tables.lookup_layers(torch.tensor([slot], device=device), most)[:, 0]  # [L, H, blocks]
    seen = visible_blocks(replay, layout.block_size, total)
    # Rows that hold less than all tokens, as those of sliding windows do, are read whole.
    whole = lengths == total
    chosen = entries.clone()
    mask = torch.from_numpy(whole).to(device)
    chosen[..., : len(seen)] = torch.where(
        mask[..., None], entries[..., torch.from_numpy(seen).to(device)], entries[..., : len(seen)]
    )
    pages = ceil_div(most, PAGE_ENTRIES)
    tables = BlockTables(layout, CacheSize(0, pages, 1, pages), device)
    room = torch.nn.functional.pad(chosen, (0, pages * PAGE_ENTRIES - most))
    tables.pages.copy_(room.unflatten(-1, (pages, PAGE_ENTRIES)).permute(2, 0, 1, 3))
    tables.page_table[0] = torch.arange(pages, dtype=torch.int32, device=device)
    shorter = np.where(whole, total - (most - len(seen)) * layout.block_size, lengths).astype(np.int32)
    tables.set_lengths(np.array([0]), shorter[None])
    part = spans.only([index])
    part = replace(part, slots=np.array([0]), lengths=np.array([int(shorter.max())]))
    return replace(cache, tables=tables), part
