"""State that the attention layers of one forward pass share, and parts of it that attend in another way."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from winnow.attention import AttentionBackend, AttentionSpec, BackendStep, HeadRotation, PagedCache, Spans
from winnow.attention.interface import NativeStep
from winnow.attention.reference import PartedStep, TwoWayStep
from winnow.cache.cache_size import CacheSize
from winnow.cache.layout import PAGE_ENTRIES, IntArray, ceil_div
from winnow.cache.paged import BlockTables
from winnow.engine.plan import PlannedSequence, StepPlan
from winnow.eviction.probes import Probe, Watched
from winnow.eviction.replay import ReplayPass, ReplaySpan, observe_replay
from winnow.executor.occupants import Occupants


class Narrowing(Protocol):
    """Choice of the tokens that layers from `first_layer` on compute."""

    first_layer: int

    def narrow(self) -> "tuple[Tensor, PagedAttentionStep]":
        """Return the tokens that later layers compute, int64 [n], places in the batch, and the step of these."""


@dataclass(frozen=True)
class PagedAttentionStep:
    """A packed batch over the paged cache; see `winnow.models.bind.binding.AttentionStep`."""

    batch: BackendStep
    logits_indices: Tensor | None  # tokens whose logits are wanted, int64 [n]; None: all of the batch
    probes: tuple[tuple[Probe, Watched], ...] = ()
    replays: tuple[ReplaySpan, ...] = ()
    repair: "Narrowing | None" = None
    """Selects the tokens that layers after the first ones compute; None: all."""

    @property
    def native(self) -> NativeStep | None:
        """Return the batch for layers that are one native call; None: something between is looked at."""
        return None if self.probes or self.replays else self.batch.whole_layers

    def rotate_and_write(self, layer: int, heads: Tensor, query_heads: int, rotation: HeadRotation) -> bool:
        return self.batch.rotate_and_write(layer, heads, query_heads, rotation)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        self.batch.write(layer, k, v)
        return self.attend_written(layer, q, k, v, spec)

    def attend_written(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        for probe, seen in self.probes:
            if not probe.evictable_only or layer in self.batch.cache.pool.layout.evictable:
                probe.at(layer, seen, q[seen.tokens], k[seen.tokens], v[seen.tokens], spec)
        # Layers with a window take no part in rounds, and hold no more of the context than it sees.
        for span in self.replays if layer in self.batch.cache.pool.layout.evictable else ():
            observe_replay(self.batch, span, layer, q[span.tokens], spec)
        if self.replays and layer == self.batch.cache.pool.layout.num_layers - 1:
            replayed = sum(span.tokens.stop - span.tokens.start for span in self.replays)
            if replayed == len(self.batch.spans.position):
                return q.new_zeros(q.shape)  # unread: only scores are wanted
        return self.batch.attend(layer, q, spec)


def replay_spans(plan: StepPlan, occupants: Occupants) -> tuple[ReplaySpan, ...]:
    spans: list[ReplaySpan] = []
    first = 0
    for entry in plan.entries:
        if entry.replay is not None:
            eviction = occupants[entry.slot].eviction
            assert eviction is not None, "only policies replay"
            replay = eviction.passes[entry.replay]
            tokens, done = slice(first, first + entry.count), entry.start - replay.context_len
            spans.append(ReplaySpan(entry.slot, replay, tokens, done))
        first += entry.count
    return tuple(spans)


@dataclass(frozen=True)
class LogitsRows:
    """Tokens of the packed batch that need logits, and what for."""

    tokens: list[int]  # indices into the packed batch; the others index the logits of these
    samples: list[int]  # the row of each of `StepPlan.samplers`, and behind it those of its drafts
    prompts: dict[int, slice]  # by entry: the rows that predict prompt tokens whose logprobs are asked for

    @classmethod
    def of(cls, entries: Sequence[PlannedSequence]) -> "LogitsRows":
        rows, first = cls([], [], {}), 0
        tokens, samples = rows.tokens, rows.samples
        for index, entry in enumerate(entries):
            if entry.logprobs is not None:
                known, last = entry.logprobs
                rows.prompts[index] = slice(len(tokens), len(tokens) + last - known)
                tokens += range(first + known - entry.start, first + last - entry.start)
            first += len(entry.token_ids)
            if entry.num_drafts:
                samples += range(len(tokens), len(tokens) + 1 + entry.num_drafts)
                tokens += range(first - 1 - entry.num_drafts, first)
            elif entry.samplers:
                samples += [len(tokens)] * len(entry.samplers)
                tokens.append(first - 1)
        return rows


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

    Keys and values of all tokens are written before. Where some are kept wide, which slots find, replays read all.

    Args:
        two_way: by sequence of the batch with such pictures, positions of the last KVs that its tokens see.
        windowed: only in layers with a window.
    """
    whole = backend.prepare(cache, spans)
    apart = {span.slot: span for span in replays if span.replay.own_part and not cache.windows}
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
            parts.append((spans.tokens_of([index]), part))
    if others:
        parts.append((spans.tokens_of(others), backend.prepare(cache, spans.only(others))))
    return PartedStep(whole, parts)


def visible_blocks(replay: ReplayPass, size: int, total: int) -> IntArray:
    """Return the blocks, of `size` KVs, of a row of `total` that a pass reads: those of the row's head, of its chunk
    and of its own tokens. Blocks are whole, so a few KVs beside these are read too."""
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
    chosen, count = entries.clone(), len(seen)
    mask, read = (torch.from_numpy(each).to(device) for each in (whole, seen))
    chosen[..., :count] = torch.where(mask[..., None], entries[..., read], entries[..., :count])
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
