"""One round of eviction: rank the KVs of sequences, allot the budget, compact each row to the KVs that it keeps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from winnow.attention import AttentionBackend, PagedCache
from winnow.cache.layout import IntArray
from winnow.eviction.compact import FittedRow, fit_round, store_fitted
from winnow.eviction.costs import Ranking
from winnow.eviction.kernels import RowKernels
from winnow.eviction.policy import EvictionPolicy
from winnow.eviction.round_rows import RoundInputs, RoundRows
from winnow.eviction.sequence import SequenceEviction
from winnow.eviction.signals import Signals
from winnow.process.ranks import Ranks
from winnow.sampling.rows import HostCopy


@dataclass(frozen=True)
class EvictionTarget:
    """A sequence of a round."""

    slot: int
    eviction: SequenceEviction
    computed: int
    """Tokens computed, including those whose KVs earlier rounds evicted."""


@dataclass(frozen=True)
class PlannedRound:
    """A round that is ranked; no KV has moved yet."""

    policy: EvictionPolicy
    slots: tuple[int, ...]
    ranking: Ranking
    kept: Tensor  # KVs that each ranked row of the members will keep, int64 [B, layers, heads], on the device
    held: IntArray  # KVs of all rows before the round, int32 [B, layers, heads], on the host
    coming: HostCopy  # KVs that the ranked rows of all ranks will keep, int32, on their way to the host
    ranks: Ranks

    @cached_property
    def lengths(self) -> IntArray:
        """KVs that each row of any rank will keep, int32 [B, layers, heads], on the host; waits for the device."""
        # Rows that are not ranked hold what a window sees: as much in each head.
        lengths = np.tile(self.held, (1, 1, self.ranks.size))
        lengths[:, self.ranking.rows.layers] = self.coming.read().numpy()
        return lengths

    @property
    def own_lengths(self) -> IntArray:
        return self.lengths[:, :, self.ranks.part(self.lengths.shape[2])]


@torch.inference_mode()
def plan_round(
    cache: PagedCache, policy: EvictionPolicy, members: Sequence[EvictionTarget], signals: Signals
) -> PlannedRound:
    """Rank the KVs of `members`, all under `policy`, and allot their budgets.

    On devices other than CPUs the first look at the lengths waits.
    """
    ranking = rank_round(cache, policy, members, signals)
    costs = policy.budget.costs(ranking).over(signals.ranks)
    targets = policy.budget.allot(costs)
    kept = torch.minimum(torch.maximum(targets, costs.protected), costs.length)
    slots = [member.slot for member in members]
    held: IntArray = cache.tables.host_lengths[slots]
    coming = HostCopy(kept.to(torch.int32))
    own = signals.ranks.own(kept, 2)
    return PlannedRound(policy, tuple(slots), ranking, own, held, coming, signals.ranks)


@torch.inference_mode()
def compact_round(
    cache: PagedCache, backend: AttentionBackend, planned: PlannedRound, signals: Signals
) -> None:
    """Move the KVs that stay to the front of their rows: only the first blocks, which the kept ones fill, are written.

    Sequences may have got copies of these blocks since the round was planned. CPU kernels select and move row by row;
    on other devices tensor operations do, which synchronize for the moves.
    """
    policy, ranked = planned.policy, planned.ranking.ranked
    slots, layers = np.array(planned.slots, dtype=np.int64), list(planned.ranking.rows.layers)
    num_blocks = ranked.block.shape[-1]
    found = cache.tables.lookup_layers(torch.from_numpy(slots).to(cache.pool.device), num_blocks)
    block = (found if len(layers) == len(found) else found[layers]).long()
    most = int((cache.tables.host_lengths[slots] - planned.own_lengths).max())
    stay = planned.kept.transpose(0, 1)
    rows = replace(ranked, block=block)
    fitted: list[FittedRow] = []
    if policy.compact is not None:
        fitted = fit_round(policy.compact, cache, planned.ranking, rows, stay, planned.slots, signals)
    backend.keep_best(cache.pool, rows, stay, most)
    store_fitted(cache, fitted)
    if policy.score.resets_accumulators:
        slot = cache.pool.numbers.slots_of(block)
        front = torch.arange(slot.shape[-1], device=slot.device) < stay[..., None]
        cache.pool.numbers.clear_accumulators(slot[front], policy.score.num_accumulators)
    cache.tables.set_lengths(slots, planned.own_lengths)


def rank_round(
    cache: PagedCache, policy: EvictionPolicy, members: Sequence[EvictionTarget], signals: Signals
) -> Ranking:
    """Return the KVs of `members`, scored; nothing changes."""
    slots = [member.slot for member in members]
    layers = cache.pool.layout.evictable
    [longest] = signals.ranks.largest([int(cache.tables.host_lengths[slots][:, layers].max())])
    return _rank(policy, RoundRows(cache, _round(cache, policy, members), layers, longest, signals))


def _round(cache: PagedCache, policy: EvictionPolicy, members: Sequence[EvictionTarget]) -> RoundInputs:
    device = cache.pool.device

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    slots = tuple(member.slot for member in members)
    return RoundInputs(
        slots=slots,
        now=column([member.computed - 1 for member in members]).int(),
        budget=column([member.eviction.target_at(member.computed) for member in members]),
        sinks=policy.keep.sinks,
        recent=column([member.eviction.recent_at(member.computed) for member in members]),
        spans=tuple(member.eviction.spans for member in members),
        tokens=column([member.computed for member in members]),
        within=tuple(member.computed < member.eviction.context_len for member in members),
    )


def _rank(policy: EvictionPolicy, rows: RoundRows) -> Ranking:
    """Score layer by layer, so that temporaries as large as the keys exist for one layer at a time."""
    scores = []
    whole: Tensor | None = None
    # Without a kernel all keys would be copied at once.
    by_row = policy.score.by_row and RowKernels.of(rows.layer(0)) is not None
    if by_row and (together := rows.together(rotated=policy.score.needs.rotation)) is not None:
        whole = policy.score.score(together).unflatten(0, rows.length.shape[:2])
    for index, layer in enumerate(map(rows.layer, range(len(rows.slot)))):
        score = policy.score.score(layer).float() if whole is None else whole[index]
        if policy.score.per_layer:
            score = layer.over_ranks(score).mean(dim=1, keepdim=True).expand_as(score)
        scores.append(score)
    return Ranking(rows, torch.stack(scores) if whole is None else whole, rows.protected)
