"""One round: rank the KVs of some sequences, decide, move what stays to the front of its row, free the rest."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from winnow.attention import AttentionBackend, PagedCache
from winnow.eviction.policy import EvictionPolicy
from winnow.eviction.positions import Rotation, reassign
from winnow.eviction.ranking import Ranking, sort_rows
from winnow.eviction.rows import LayerRows, Round
from winnow.eviction.sequence import SequenceEviction


@dataclass(frozen=True)
class Member:
    """A sequence that takes part in a round; it shares no blocks."""

    slot: int
    eviction: SequenceEviction
    computed: int
    """Tokens in the cache, less what rounds took."""
    shift: int = 0
    """What re-assigned positions lie below token indices."""


class Signals(Protocol):
    """What budgets may ask about tokens and layers."""

    def similarity(self, slots: Sequence[int]) -> Tensor:
        """float32 [B, L], cosine of the hidden state before and after attention, mean over tokens so far."""

    def kinds(self, slots: Sequence[int]) -> Tensor:
        """uint8 [B, longest], the kind of each token: 0, SPECIAL or PUNCTUATION."""


@torch.inference_mode()
def shrink(
    cache: PagedCache,
    backend: AttentionBackend,
    policy: EvictionPolicy,
    members: Sequence[Member],
    signals: Signals,
    rotation: Rotation | None = None,
) -> list[int]:
    """Shrink `members`, all under `policy`, to their budgets.

    One pass of tensor operations over all of them: one sort of KVs, one of block costs or layers where rows compete,
    one move. The device is waited for twice: for who moves, and for the rows' new lengths.

    Returns:
        Blocks that each member gave back; they are free when this returns.
    """
    slots = [member.slot for member in members]
    lengths = cache.manager.host_lengths[slots]
    rows = _Stack.gather(cache, policy, _round(cache, policy, members, signals), int(lengths.max()), signals)
    worth, order = sort_rows(rows.worth, rows.position, rows.protected, rows.valid)
    ranking = Ranking(
        rows.round,
        worth,
        order,
        rows.valid.sum(dim=-1),
        rows.protected.sum(dim=-1),
        rows.told,
        cache.pool.layout.block_size,
    )
    kept = torch.minimum(torch.maximum(policy.budget.targets(ranking), ranking.protected), ranking.length)
    stays = rows.valid & ~_lowest_of_order(order, ranking.length - kept)
    source, target = moves(stays, kept, rows.slot)
    backend.compact(cache.pool, source, target)
    if policy.score.forgets:
        cache.pool.score.flatten(1)[: policy.score.num_scores, rows.slot[rows.valid]] = 0.0
    if policy.reassign_positions:
        assert rotation is not None, "checked when the engine opened"
        reassign(cache.pool, rows.slot, kept, rotation)
    blocks = [cache.manager.blocks_held(slot) for slot in slots]
    cache.manager.shrink(slots, kept.to(torch.int32).cpu().numpy())
    return [had - cache.manager.blocks_held(slot) for slot, had in zip(slots, blocks, strict=True)]


def moves(stays: Tensor, kept: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    """Where KVs move so that each row's survivors fill its first slots (KV-Compress Algorithm 1, all rows at once).

    A row that keeps m KVs has as many holes below m as survivors at or above it: the i-th of one go to the i-th of
    the other.

    Args:
        stays: bool [..., N], survivors; kept: int64 [...], their number; slot: int64 [..., N], where each KV lies.

    Returns:
        Source and target slots, int64 [n] each, disjoint.
    """
    front = torch.arange(stays.shape[-1], device=stays.device) < kept[..., None]
    return slot[stays & ~front], slot[front & ~stays]


def _lowest_of_order(order: Tensor, count: Tensor) -> Tensor:
    """Mark the first `count`, [...], entries of each row's order, [..., N]."""
    first = torch.arange(order.shape[-1], device=order.device) < count[..., None]
    return torch.zeros_like(first).scatter_(-1, order, first)


def _round(cache: PagedCache, policy: EvictionPolicy, members: Sequence[Member], signals: Signals) -> Round:
    device = cache.pool.k.device

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    slots = tuple(member.slot for member in members)
    return Round(
        slots=slots,
        now=column([member.computed - member.shift - 1 for member in members]),
        budget=column([member.eviction.target for member in members]),
        sinks=policy.keep.sinks,
        recent=column([member.eviction.recent for member in members]),
        spans=tuple(member.eviction.spans for member in members),
        tokens=column([member.computed for member in members]),
        similarity=signals.similarity(slots)
        if policy.budget.needs_similarity
        else torch.empty(0, device=device),
    )


@dataclass(frozen=True)
class _Stack:
    """The rows of all layers: [B, L, H, N] each, padded to the longest."""

    round: Round
    slot: Tensor
    worth: Tensor
    position: Tensor
    protected: Tensor
    valid: Tensor
    told: Tensor

    @classmethod
    def gather(
        cls, cache: PagedCache, policy: EvictionPolicy, round_: Round, num_slots: int, signals: Signals
    ) -> "_Stack":
        """Look at the layers one by one, so that nothing as large as the keys is held for more than one."""
        kinds = signals.kinds(round_.slots) if policy.budget.needs_kinds else None
        fields: list[list[Tensor]] = []
        for layer in range(cache.pool.layout.num_layers):
            rows = LayerRows(cache, round_, layer, num_slots, kinds)
            worth = policy.score.worth(rows).float()
            if policy.score.per_layer:
                worth = worth.mean(dim=1, keepdim=True).expand_as(worth)
            pinned, told = policy.budget.pin(rows), policy.budget.tell(rows)
            protected = rows.protected if pinned is None else rows.protected | pinned
            told = worth.new_empty(0) if told is None else told
            fields.append([rows.slot, worth, rows.position, protected, rows.valid, told])
        return cls(round_, *(torch.stack(field, dim=1) for field in zip(*fields, strict=True)))
