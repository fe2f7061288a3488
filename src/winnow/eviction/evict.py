"""One round: rank the KVs of some sequences, decide, move what stays to the front of its row, free the rest."""

from collections.abc import Sequence
from dataclasses import dataclass

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
    """A sequence that takes part in a round; it shares no blocks."""

    slot: int
    eviction: SequenceEviction
    computed: int
    """Tokens in the cache, less what rounds took."""
    shift: int = 0
    """What re-assigned positions lie below token indices."""


@torch.inference_mode()
def evict(
    cache: PagedCache,
    backend: AttentionBackend,
    policy: EvictionPolicy,
    members: Sequence[EvictionTarget],
    signals: Signals,
    rotation: Rotation | None = None,
) -> IntArray:
    """Cut `members`, all under `policy`, to their budgets.

    One pass over all of them: one look at their rows, one choice of who goes, one move. CPU kernels choose and move row
    by row; elsewhere it takes tensor operations, and the device is waited for twice: for how many each row keeps, and
    for who moves.

    Returns:
        KVs of each of their rows, int32 [B, layers, heads].
    """
    slots = [member.slot for member in members]
    lengths = cache.tables.host_lengths[slots]
    kinds = signals.kinds(slots) if policy.budget.needs_kinds else None
    rows = RoundRows(cache, _round(cache, policy, members, signals), int(lengths.max()), kinds, signals)
    ranking = _rank(policy, rows)
    kept = torch.minimum(torch.maximum(policy.budget.targets(ranking), ranking.protected), ranking.length)
    lengths_after: IntArray = kept.to(torch.int32).cpu().numpy()
    stay = kept.transpose(0, 1)
    backend.keep_best(cache.pool, ranking.ranked, stay, int((lengths - lengths_after).max()))
    if policy.score.forgets:
        cache.pool.clear_accumulators(rows.slot[rows.valid], policy.score.num_accumulators)
    if policy.reassign_positions:
        assert rotation is not None, "checked when the engine opened"
        reassign(cache.pool, rows.slot.transpose(0, 1), kept, rotation)
    cache.tables.set_lengths(slots, lengths_after)
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
        now=column([member.computed - member.shift - 1 for member in members]).int(),
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
    """Look at the layers one by one, so that nothing as large as the keys is held for more than one."""
    worth, protected, stats = [], [], []
    for layer in map(rows.layer, range(len(rows.slot))):
        value = policy.score.worth(layer).float()
        worth.append(value.mean(dim=1, keepdim=True).expand_as(value) if policy.score.per_layer else value)
        pinned, of_layer = policy.budget.pin(layer), policy.budget.layer_stats(layer)
        protected.append(layer.protected if pinned is None else layer.protected | pinned)
        stats.append(value.new_empty(0) if of_layer is None else of_layer)
    return Ranking(rows, torch.stack(worth), torch.stack(protected), torch.stack(stats, dim=1))
