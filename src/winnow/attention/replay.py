"""The largest attention that a repetition of a context pays each of its KVs (KVzip), in plain torch."""

import torch
from torch import Tensor

from winnow.attention.interface import AttentionSpec, JudgedKVs, ReplayQueries
from winnow.cache import PagedCache
from winnow.cache.layout import ceil_div

# Elements of a part of the attention matrix by whether a CPU computes it: there, what a second-level cache holds.
_TEMPORARY = {True: 2**18, False: 2**24}


def replay_rows(
    cache: PagedCache, layer: int, slot: int, queries: ReplayQueries, spec: AttentionSpec
) -> None:
    """Compute `BackendStep.replay`. No more than a part of the attention matrix is held at once."""
    slots, position = judged_slots(cache, layer, slot, queries.judged, _positions(queries)[-1] + 1)
    for head, row in enumerate(slots):
        _raise_largest(cache, layer, head, queries, spec, row, position, queries.judged.count)


def replay_shortened_rows(
    cache: PagedCache, layer: int, slot: int, queries: ReplayQueries, spec: AttentionSpec, *, again: bool
) -> None:
    """Compute `BackendStep.replay` for rows that hold less than the whole context: KVs are found by their positions.

    Args:
        again: the judged KVs start from 0.
    """
    judged, numbers, tables = queries.judged, cache.pool.numbers, cache.tables
    lengths = tables.host_lengths[slot, layer, : cache.pool.layout.heads[layer]].tolist()
    num_blocks = ceil_div(max(lengths), cache.pool.layout.block_size)
    blocks = tables.lookup(torch.tensor([slot], device=cache.pool.device), layer, num_blocks)[0].long()
    for head, length in enumerate(lengths):
        slots, position = (of(blocks[head])[:length] for of in (numbers.slots_of, numbers.positions_of))
        own = (position < judged.head) | ((position >= judged.start) & (position < judged.end))
        behind = (position >= judged.context_len) & (position <= _positions(queries)[-1])
        behind_at = behind.nonzero()[:, 0]
        order = torch.cat([own.nonzero()[:, 0], behind_at[position[behind_at].argsort()]])
        if again:
            numbers.clear_accumulators(slots[own], 1)
        _raise_largest(cache, layer, head, queries, spec, slots[order], position[order], int(own.sum()))


def judged_slots(
    cache: PagedCache, layer: int, slot: int, judged: JudgedKVs, end: int
) -> tuple[Tensor, Tensor]:
    """Return slots, int64 [H, J], and ascending positions below `end`, [J], of the KVs in the softmax of a replay.

    The first `judged.count` of them are judged; the rest lie behind the context.
    """
    parts = ((0, judged.head), (judged.start, judged.end), (judged.context_len, end))
    device = cache.pool.device
    position = torch.cat([torch.arange(*part) for part in parts]).to(device)
    num_blocks = ceil_div(end, cache.pool.layout.block_size)
    blocks = cache.tables.lookup(torch.tensor([slot], device=device), layer, num_blocks)
    heads = cache.pool.layout.heads[layer]
    return cache.pool.numbers.slots_of(blocks[0, :heads].long())[:, position], position


def _positions(queries: ReplayQueries) -> range:
    return range(queries.first, queries.first + queries.every * len(queries.q), queries.every)


def _raise_largest(
    cache: PagedCache,
    layer: int,
    head: int,
    queries: ReplayQueries,
    spec: AttentionSpec,
    slots: Tensor,
    position: Tensor,
    num_judged: int,
) -> None:
    """Raise the accumulators of the first `num_judged` KVs of one row, in slots int64 [J], at positions [J].

    The KVs behind the context are the last ones, consecutive up to the last query.
    """
    pool, heads = cache.pool.of_layer(layer), cache.pool.layout.heads[layer]
    q = queries.q.unflatten(1, (heads, -1))[:, head].transpose(0, 1).float() * spec.scale  # [g, n, d]
    keys, bias = pool.keys(slots), pool.biases(slots) if pool.has_bias else None
    sinks, slopes = (
        None if x is None else x.float().view(heads, -1, 1, 1)[head] for x in (spec.sinks, spec.slopes)
    )
    accumulator, judged = cache.pool.accumulators.flatten(1)[0], slots[:num_judged]
    largest, every_at = accumulator[judged], _positions(queries)
    step = max(1, _TEMPORARY[q.device.type == "cpu"] // (len(q) * len(slots)))
    for start in range(0, len(every_at), step):
        at = every_at[start : start + step]
        # No KV after the last query of the part is visible, all up to the first one are.
        seen = len(position) - (every_at[-1] - at[-1])
        logits = q[:, start : start + step] @ keys[:seen].mT
        if spec.softcap is not None:
            logits = logits.div_(spec.softcap).tanh_().mul_(spec.softcap)
        if bias is not None:
            logits += bias[:seen]
        close = seen - (at[-1] - at[0])
        of_query = torch.arange(at.start, at.stop, at.step, device=q.device)[:, None]
        logits[..., close:].masked_fill_(position[close:seen] > of_query, -torch.inf)
        if slopes is not None:
            logits -= slopes * (of_query - position[:seen])
        if spec.window is not None:
            logits.masked_fill_(of_query - position[:seen] >= spec.reach(of_query), -torch.inf)
        total = logits.logsumexp(dim=-1, keepdim=True)
        if sinks is not None:
            total = torch.logaddexp(total, sinks)
        highest = logits[..., :num_judged].sub_(total).amax(dim=(0, 1)).exp_()
        torch.maximum(largest, highest, out=largest)
    accumulator[judged] = largest
