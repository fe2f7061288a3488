"""Placement of KVs that were computed elsewhere, and repair of those that their new neighbours change most."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from winnow.attention import AttentionBackend, PagedCache, Spans
from winnow.cache.cache_size import CacheSize
from winnow.cache.layout import CacheLayout, ceil_div
from winnow.cache.paged import BlockTables
from winnow.engine.memory.spans import FIRST_LAYERS
from winnow.engine.plan import PlannedSequence, StepPlan
from winnow.executor.attention_step import PagedAttentionStep
from winnow.models import LoadedModel
from winnow.models.bind.rotation import ModelRotation

_LEAST_NORM = 1e-6
_COMPARED_EVERY = 4  # keys of one layer in each four are compared with the mean of their row


def reuse_refusal(model: LoadedModel, layout: CacheLayout, *, hidden: bool) -> str | None:
    """Return why KVs of this model cannot stand elsewhere than they were computed; None: they can."""
    if (
        not getattr(model.forward_model, "narrows", False)
        or model.geometry.num_layers <= FIRST_LAYERS
        or hidden
    ):
        return "its layers cannot be computed for some of a step's tokens"
    if len(layout.kinds) > 1 or layout.has_windows or layout.state_bytes or layout.wide.any:
        return "its layers do not all keep every token in one format"
    if model.geometry.latent or not isinstance(model.processor, str):
        return "its keys follow from more than tokens and positions"
    return "how it rotates keys is not known" if model.rotation is None else None


@dataclass(frozen=True)
class PlacedTokens:
    """Tokens of an entry that were placed.

    Attributes:
        entry: index in the plan.
        position: int64 [n]; tokens: their places in the packed batch, int64 [n].
        slot: of the layer that is compared, int64 [H, n].
        k, v: that were placed there, float32 [H, n, d]; deviation: of their keys in all layers, [n].
    """

    entry: int
    position: Tensor
    tokens: Tensor
    slot: Tensor
    k: Tensor
    v: Tensor
    deviation: Tensor


def place_spans(cache: PagedCache, rotation: ModelRotation, plan: StepPlan) -> list[PlacedTokens]:
    """Copy the KVs of a plan's spans to where its sequences have them, in all layers but the first, which compute them
    anew; keys are turned by the difference of positions."""
    placed, first = [], 0
    for index, entry in enumerate(plan.entries):
        if entry.placed:
            placed.append(_place(cache, rotation, index, entry, first))
        first += entry.count
    return placed


def _place(
    cache: PagedCache, rotation: ModelRotation, index: int, entry: PlannedSequence, first: int
) -> PlacedTokens:
    pool, size = cache.pool, cache.pool.layout.block_size
    shape, device = (pool.layout.num_layers, pool.layout.num_kv_heads), pool.device
    slots = torch.tensor([entry.slot], device=device)
    rows = cache.tables.lookup_layers(slots, ceil_div(entry.end, size))[:, 0].long()  # [L, H, blocks]
    spans = [torch.arange(span.start, span.start + span.count, device=device) for span in entry.placed]
    sources = []
    for span in entry.placed:
        blocks = torch.from_numpy(span.blocks.T.astype(np.int64)).to(device).view(*shape, -1)
        at = torch.arange(span.offset, span.offset + span.count, device=device)
        sources.append(blocks[..., at // size] * size + at % size)
    position, source = torch.cat(spans), torch.cat(sources, dim=-1)
    target = rows[..., position // size] * size + position % size  # [L, H, n]
    was = pool.position.view(-1)[source[0, 0]].long()
    deviation, k, v = torch.zeros(len(position), device=device), position, position
    compared = FIRST_LAYERS - 1
    for layer in range(compared, shape[0]):
        of_layer = pool.of_layer(layer)
        stored = of_layer.keys(source[layer])
        turned = rotation.turn(layer, stored, position - was)
        if layer == compared:
            k, v = turned, of_layer.values(source[layer])
        else:
            of_layer.copy_turned(source[layer], target[layer], turned, position)
        if layer % _COMPARED_EVERY == compared:
            unit = torch.nn.functional.normalize(rotation.turn(layer, stored, -was), dim=-1)
            mean = torch.nn.functional.normalize(unit.mean(dim=-2, keepdim=True), dim=-1)
            deviation += 1.0 - (unit * mean).sum(-1).mean(0)
    tokens = first + position - entry.start
    return PlacedTokens(index, position, tokens, target[compared], k, v, deviation)


class Repair:
    """Narrowing of a packed batch, once its first layers are computed, to the tokens that the others compute.

    Of placed spans these are the ones whose keys and values have changed most in the last of the first layers and
    whose keys are unlike the others', by the sum of both ranks. Each run of them is a sequence of its own in tables
    that end with it, so that it sees what stands before it, and its KVs are written where they belong.
    """

    first_layer = FIRST_LAYERS

    def __init__(
        self,
        backend: AttentionBackend,
        cache: PagedCache,
        plan: StepPlan,
        spans: Spans,
        placed: Sequence[PlacedTokens],
        step: PagedAttentionStep,
    ) -> None:
        self._backend, self._cache, self._plan = backend, cache, plan
        self._spans, self._placed, self._step = spans, placed, step

    def narrow(self) -> tuple[Tensor, PagedAttentionStep]:
        """See `Narrowing`; called once, when the first layers are computed."""
        spans, device = self._spans, self._spans.device
        goes_on = torch.ones(len(spans.position), dtype=torch.bool, device=device)
        for each in self._placed:
            goes_on[each.tokens] = False
            goes_on[each.tokens[self._most_changed(each)]] = True
        split = {each.entry for each in self._placed}
        runs: list[tuple[int, int, int]] = []  # entry, first token in the batch, count
        host = goes_on.cpu().numpy()
        for index, (start, count) in enumerate(
            zip(spans.starts.tolist(), spans.counts.tolist(), strict=True)
        ):
            if index not in split:
                runs.append((index, start, count))
                continue
            edges = np.diff(np.concatenate([[False], host[start : start + count], [False]]).astype(np.int8))
            ends = zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True)
            runs += ((index, start + int(a), int(b - a)) for a, b in ends)
        runs.sort(key=lambda run: run[2] > 1)  # those of one token first
        order = torch.cat([torch.arange(start, start + count, device=device) for _, start, count in runs])
        return order, self._step_of(runs, split, order)

    def _most_changed(self, placed: PlacedTokens) -> Tensor:
        pool = self._cache.pool.of_layer(FIRST_LAYERS - 1)
        k, v = pool.keys(placed.slot), pool.values(placed.slot)
        change = torch.zeros_like(placed.deviation)
        for new, old in ((k, placed.k), (v, placed.v)):
            change += ((new - old) ** 2).sum(-1).mean(0) / (new**2).sum(-1).mean().clamp_min(_LEAST_NORM)
        ranks = change.argsort(stable=True).argsort() + placed.deviation.argsort(stable=True).argsort()
        return ranks.argsort(descending=True, stable=True)[: self._plan.entries[placed.entry].repaired]

    def _step_of(
        self, runs: Sequence[tuple[int, int, int]], split: set[int], order: Tensor
    ) -> PagedAttentionStep:
        spans, step = self._spans, self._step
        index = np.array([run[0] for run in runs])
        offset = np.array([run[1] for run in runs]) - spans.starts[index]
        counts, slots = np.array([run[2] for run in runs]), spans.slots[index]
        starts, own = spans.first_position[index] + offset, np.isin(index, list(split))
        tables, numbers = self._cache.tables, np.arange(len(runs))
        view = BlockTables(
            self._cache.pool.layout, CacheSize(0, 0, len(runs), tables.pages_per_seq), spans.device
        )
        view.pages = tables.pages
        view.page_table.copy_(tables.page_table[torch.from_numpy(slots).to(spans.device)])
        lengths = tables.host_lengths[slots]
        lengths[own] = np.minimum(lengths[own], (starts + counts)[own, None, None])
        view.set_lengths(numbers, lengths)
        narrow = Spans.build(
            numbers.tolist(),
            starts.tolist(),
            counts.tolist(),
            view.longest(numbers.tolist()),
            spans.device,
            [spans.observe[i] for i in index],
            spans.observe_from[index].tolist(),
            spans.select_from[index].tolist(),
        )
        place = torch.empty(len(spans.position), dtype=torch.int64, device=spans.device).fill_(-1)
        place[order] = torch.arange(len(order), device=spans.device)
        wanted = (
            torch.arange(len(place), device=spans.device)
            if step.logits_indices is None
            else step.logits_indices
        )
        new_start = {run[1]: int(at) for run, at in zip(runs, np.cumsum(counts) - counts, strict=True)}

        def moved(tokens: slice) -> slice:
            first = new_start[tokens.start] if tokens.start in new_start else int(place[tokens.start])
            return slice(first, first + tokens.stop - tokens.start, tokens.step)

        return PagedAttentionStep(
            self._backend.prepare(replace(self._cache, tables=view), narrow),
            place[wanted],
            tuple((probe, replace(seen, tokens=moved(seen.tokens))) for probe, seen in step.probes),
            tuple(replace(each, tokens=moved(each.tokens)) for each in step.replays),
        )
