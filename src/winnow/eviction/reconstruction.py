"""The attention of a replay's queries, and the largest of it for each KV of the context."""

from dataclasses import dataclass

import torch
from torch import Tensor

from winnow.attention import AttentionSpec, PagedCache
from winnow.cache.layout import ceil_div
from winnow.eviction.replay import ReplayPass

# Elements of the largest temporary: 32 MiB of float32.
_TEMPORARY = 2**23


@dataclass(frozen=True)
class ReplaySpan:
    """Tokens of a pass within a packed batch; their KVs are written before they are observed.

    Attributes:
        slot: of the sequence, whose rows hold the context and the pass so far, in the order of positions.
        tokens: which tokens of the batch.
        done: tokens of the pass before them.
    """

    slot: int
    replay: ReplayPass
    tokens: slice
    done: int


def observe_replay(cache: PagedCache, span: ReplaySpan, layer: int, q: Tensor, spec: AttentionSpec) -> None:
    """Raise the scores of the context's KVs to the largest attention that these queries pay them.

    The softmax of a query goes over the context's first KVs (`ReplayPass.head`), those of the chunk that the pass
    repeats, and those of the pass up to the query: as in KVzip, so that the other chunks take nothing away. The scores
    of the first two change, accumulator 0 of each. It reads keys where they lie, and holds no more than a part of the
    attention matrix at once.

    Args:
        q: [n, Hq, d], the queries of `span.tokens`, rotated at their positions.
    """
    replay, pool = span.replay, cache.pool
    held = replay.context_len + span.done + len(q)
    told = torch.cat([torch.arange(replay.head), torch.arange(replay.start, replay.end)]).to(q.device)
    position = torch.cat([told, torch.arange(replay.context_len, held, device=q.device)])
    slot = _slots(cache, span.slot, layer, held)[:, position]  # [H, J]
    keys = pool.k[pool.place(slot)].float()  # [H, J, d]
    first = -(replay.context_len + span.done) % replay.every if replay.every > 1 else 0
    counted = torch.arange(first, len(q), replay.every, device=q.device)
    if not len(counted):
        return
    heads = keys.shape[0]
    queries = (q[counted].float() * spec.scale).unflatten(1, (heads, -1)).permute(1, 2, 0, 3)  # [H, g, n, d]
    at = replay.context_len + span.done + counted
    step = max(1, _TEMPORARY // (queries.shape[0] * queries.shape[1] * len(position)))
    largest = torch.zeros((heads, len(told)), device=q.device)
    for part, where in zip(queries.split(step, dim=2), at.split(step), strict=True):
        largest = torch.maximum(largest, _largest(part, where, keys, position, len(told), spec))
    scores, place = pool.score.flatten(1)[0], slot[:, : len(told)]
    scores[place] = torch.maximum(scores[place], largest)


def _largest(
    q: Tensor, at: Tensor, keys: Tensor, position: Tensor, num_told: int, spec: AttentionSpec
) -> Tensor:
    """The largest probability over queries [H, g, n, d] at positions [n], of the first `num_told` of J keys: [H, t]."""
    group, n = q.shape[1:3]
    logits = (q.flatten(1, 2) @ keys.mT).unflatten(1, (group, n))  # [H, g, n, J]
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    age = at[:, None] - position
    hidden = age < 0
    if spec.window is not None:
        hidden |= age >= spec.window
    logits.masked_fill_(hidden, -torch.inf)
    total = logits.logsumexp(dim=-1, keepdim=True)
    if spec.sinks is not None:
        total = torch.logaddexp(total, spec.sinks.float().view(len(q), group, 1, 1))
    return (logits[..., :num_told] - total).amax(dim=(1, 2)).exp()


def _slots(cache: PagedCache, sequence: int, layer: int, count: int) -> Tensor:
    """Where the first `count` KVs of a layer's rows lie, int64 [H, count]."""
    size = cache.pool.layout.block_size
    device = cache.pool.k.device
    blocks = cache.manager.tables.lookup(
        torch.tensor([sequence], device=device), layer, ceil_div(count, size)
    )[0].long()
    offset = torch.arange(size, device=device)
    return (blocks[..., None] * size + offset).flatten(1)[:, :count]
