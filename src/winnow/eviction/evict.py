"""One round of eviction: rank the KVs of sequences, allot the budget, compact each row to the KVs that it keeps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from winnow.attention import AttentionBackend, PagedCache
from winnow.cache.layout import IntArray
from winnow.eviction.policy import EvictionPolicy
from winnow.eviction.positions import Rotation, reassign
from winnow.eviction.ranking import Ranking
from winnow.eviction.rows import RoundInputs, RoundRows
from winnow.eviction.sequence import SequenceEviction
from winnow.eviction.signals import Signals


@dataclass(frozen=True)
class EvictionTarget:
    """A sequence of a round. It must not share blocks."""

    slot: int
    eviction: SequenceEviction
    computed: int
    """Tokens computed, including those whose KVs earlier rounds evicted."""
    position_offset: int = 0
    """Token index minus stored position, of the KVs that re-assigned positions moved; else 0."""


@torch.inference_mode()
def evict(
    cache: PagedCache,
    backend: AttentionBackend,
    policy: EvictionPolicy,
    members: Sequence[EvictionTarget],
    signals: Signals,
    rotation: Rotation | None = None,
) -> IntArray:
    """Evict KVs of `members`, all under `policy`, down to their budgets.

    All members are ranked, planned and compacted together. CPU kernels select and move row by row. On other devices
    tensor operations do, which synchronize twice: for the lengths after the round, and for the moves.

    Returns:
        KVs of each of their rows, int32 [B, layers, heads].
    """
    slots = [member.slot for member in members]
    lengths = cache.tables.host_lengths[slots]
    kinds = signals.kinds(slots) if policy.budget.needs_kinds else None
    rows = RoundRows(cache, _round(cache, policy, members, signals), int(lengths.max()), kinds, signals)
    ranking = _rank(policy, rows)
    targets = policy.budget.allot(policy.budget.costs(ranking))
    kept = torch.minimum(torch.maximum(targets, ranking.protected), ranking.length)
    lengths_after: IntArray = kept.to(torch.int32).cpu().numpy()
    stay = kept.transpose(0, 1)
    backend.keep_best(cache.pool, ranking.ranked, stay, int((lengths - lengths_after).max()))
    if policy.score.resets_accumulators:
        cache.pool.clear_accumulators(rows.slot[rows.valid], policy.score.num_accumulators)
    if policy.reassign_positions:
        assert rotation is not None, "checked when the engine opened"
        reassign(cache.pool, rows.slot.transpose(0, 1), kept, rotation)
    cache.pool.moved(rows.block.flatten())
    cache.tables.set_lengths(np.array(slots, dtype=np.int64), lengths_after)
    return lengths_after


def _round(
    cache: PagedCache, policy: EvictionPolicy, members: Sequence[EvictionTarget], signals: Signals
) -> RoundInputs:
    device = cache.pool.device

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    slots = tuple(member.slot for member in members)
    return RoundInputs(
        slots=slots,
        now=column([member.computed - member.position_offset - 1 for member in members]).int(),
        budget=column([member.eviction.target for member in members]),
        sinks=policy.keep.sinks,
        recent=column([member.eviction.recent_at(member.computed) for member in members]),
        spans=tuple(member.eviction.spans for member in members),
        tokens=column([member.computed for member in members]),
        similarity=signals.similarity(slots)
        if policy.budget.needs_similarity
        else torch.empty(0, device=device),
    )


def _rank(policy: EvictionPolicy, rows: RoundRows) -> Ranking:
    """Score layer by layer, so that temporaries as large as the keys exist for one layer at a time."""
    scores, protected, stats = [], [], []
    for layer in map(rows.layer, range(len(rows.slot))):
        score = policy.score.score(layer).float()
        scores.append(score.mean(dim=1, keepdim=True).expand_as(score) if policy.score.per_layer else score)
        pinned, of_layer = policy.budget.pin(layer), policy.budget.layer_stats(layer)
        protected.append(layer.protected if pinned is None else layer.protected | pinned)
        if of_layer is not None:
            stats.append(of_layer)
    return Ranking(
        rows, torch.stack(scores), torch.stack(protected), torch.stack(stats, dim=1) if stats else None
    )
