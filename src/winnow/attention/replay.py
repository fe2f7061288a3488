"""The largest attention that a repetition of a context pays each of its KVs (KVzip), in plain torch."""

from dataclasses import replace

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
    q, judged, first, every = queries.q, queries.judged, queries.first, queries.every
    at_all = range(first, first + every * len(q), every)
    slots, position = judged_slots(cache, layer, slot, judged, at_all[-1] + 1)
    keys = cache.pool.of_layer(layer).keys(slots)  # [H, J, d]
    heads = len(keys)
    grouped = (q.float() * spec.scale).unflatten(1, (heads, -1)).permute(1, 2, 0, 3)  # [H, g, n, d]
    by_head = [
        replace(
            spec,
            sinks=None if spec.sinks is None else spec.sinks.float().view(heads, -1, 1, 1)[head],
            slopes=None if spec.slopes is None else spec.slopes.float().view(heads, -1, 1, 1)[head],
        )
        for head in range(heads)
    ]
    accumulator, place = cache.pool.accumulators.flatten(1)[0], slots[:, : judged.count]
    largest = accumulator[place]
    step = max(1, _TEMPORARY[q.device.type == "cpu"] // (grouped.shape[1] * len(position)))
    for start in range(0, len(q), step):
        at = at_all[start : start + step]
        for head in range(heads):
            part = grouped[head, :, start : start + step]
            logs = _log_probabilities(part, at, keys[head], position, at_all[-1], judged.count, by_head[head])
            torch.maximum(largest[head], logs.amax(dim=(0, 1)).exp_(), out=largest[head])
    accumulator[place] = largest


def replay_shortened_rows(
    cache: PagedCache, layer: int, slot: int, queries: ReplayQueries, spec: AttentionSpec, *, again: bool
) -> None:
    """Compute `BackendStep.replay` for rows that hold less than the whole context: KVs are found by their positions.

    Args:
        again: the judged KVs start from 0.
    """
    q, judged, numbers = queries.q, queries.judged, cache.pool.numbers
    pool, heads, device = cache.pool.of_layer(layer), cache.pool.layout.heads[layer], q.device
    at = queries.first + queries.every * torch.arange(len(q), device=device)
    lengths = cache.tables.host_lengths[slot, layer].tolist()
    num_blocks = ceil_div(max(lengths), cache.pool.layout.block_size)
    blocks = cache.tables.lookup(torch.tensor([slot], device=device), layer, num_blocks)[0].long()
    accumulator = cache.pool.accumulators.flatten(1)[0]
    grouped = (q.float() * spec.scale).unflatten(1, (heads, -1)).permute(1, 2, 0, 3)  # [H, g, n, d]
    for head, part in enumerate(grouped):
        slots = numbers.slots_of(blocks[head])[: lengths[head]]
        position = numbers.positions_of(blocks[head])[: lengths[head]]
        own = (position < judged.head) | ((position >= judged.start) & (position < judged.end))
        read = own | (position >= judged.context_len)
        slots, position, own = slots[read], position[read], own[read]
        keys, place = pool.keys(slots), slots[own]
        bias = pool.biases(slots) if cache.pool.layout.has_bias else 0.0
        largest = torch.zeros(len(place), device=device) if again else accumulator[place]
        step = max(1, _TEMPORARY[device.type == "cpu"] // (len(part) * len(slots)))
        for start in range(0, len(q), step):
            logits = part[:, start : start + step] @ keys.mT
            if spec.softcap is not None:
                logits = logits.div_(spec.softcap).tanh_().mul_(spec.softcap)
            of_query = at[start : start + step, None]
            if spec.slopes is not None:
                logits -= spec.slopes.float().view(heads, -1, 1, 1)[head] * (of_query - position)
            hidden = position > of_query
            if spec.window is not None:
                hidden |= of_query - position >= spec.reach(of_query)
            logits = (logits + bias).masked_fill_(hidden, -torch.inf)
            total = logits.logsumexp(dim=-1, keepdim=True)
            if spec.sinks is not None:
                total = torch.logaddexp(total, spec.sinks.float().view(heads, -1, 1, 1)[head])
            highest = (logits[..., own] - total).amax(dim=(0, 1)).exp_()
            largest = torch.maximum(largest, highest)
        accumulator[place] = largest


def judged_slots(
    cache: PagedCache, layer: int, slot: int, judged: JudgedKVs, end: int
) -> tuple[Tensor, Tensor]:
    """Return the KVs in the softmax of a replay.

    Their slots, int64 [H, J], and their positions, ascending below `end`, [J].

    The first `judged.count` of them are judged; the rest lie behind the context.
    """
    parts = ((0, judged.head), (judged.start, judged.end), (judged.context_len, end))
    device = cache.pool.device
    position = torch.cat([torch.arange(*part) for part in parts]).to(device)
    blocks = cache.tables.lookup(
        torch.tensor([slot], device=device), layer, ceil_div(end, cache.pool.layout.block_size)
    )[0, : cache.pool.layout.heads[layer]]
    return cache.pool.numbers.slots_of(blocks.long())[:, position], position


def _log_probabilities(
    q: Tensor, at: range, keys: Tensor, position: Tensor, last: int, num_judged: int, spec: AttentionSpec
) -> Tensor:
    """Return logarithms of what queries [g, n, d] at n positions pay the first `num_judged` of the keys: [g, n,
    judged].

    Args:
        keys: [J, d].
        position: of the keys, ascending, [J]; the last ones are consecutive, from before the queries on.
        last: the last of these positions.
        spec: with sinks and slopes of the group alone, float32 [g, 1, 1] each.
    """
    group, n = q.shape[:2]
    # Keys are in the order of their positions: none after the last query is visible, all up to the first one are.
    seen = len(position) - (last - at[-1])
    logits = (q.flatten(0, 1) @ keys[:seen].mT).unflatten(0, (group, n))
    if spec.softcap is not None:
        logits = logits.div_(spec.softcap).tanh_().mul_(spec.softcap)
    close = seen - (at[-1] - at[0])
    of_query = torch.arange(at.start, at.stop, at.step, device=q.device)[:, None]
    logits[..., close:].masked_fill_(position[close:seen] > of_query, -torch.inf)
    if spec.slopes is not None:
        logits -= spec.slopes * (of_query - position[:seen])
    if spec.window is not None:
        logits.masked_fill_(of_query - position[:seen] >= spec.reach(of_query), -torch.inf)
    total = logits.logsumexp(dim=-1, keepdim=True)
    if spec.sinks is not None:
        total = torch.logaddexp(total, spec.sinks)
    return logits[..., :num_judged].sub_(total)
