"""The attention of a replay's queries, and the largest of it for each KV of the context."""

from dataclasses import dataclass

import torch
from torch import Tensor

from winnow.attention import AttentionSpec, PagedCache
from winnow.cache.layout import ceil_div
from winnow.eviction.replay import ReplayPass

# Elements of a part of the attention matrix: of float32 what a second-level cache holds.
_TEMPORARY = 2**18


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
    first, held = replay.context_len + span.done, replay.context_len + span.done + len(q)
    judged = torch.cat([torch.arange(replay.head), torch.arange(replay.start, replay.end)])
    position = torch.cat([judged, torch.arange(replay.context_len, held)]).to(q.device)
    slot = _slots(cache, span.slot, layer, held)[:, position]  # [H, J]
    keys = pool.k[pool.place(slot)].float()  # [H, J, d]
    counted = torch.arange(-first % replay.every, len(q), replay.every, device=q.device)
    if not len(counted):
        return
    heads = len(keys)
    queries = (q[counted].float() * spec.scale).unflatten(1, (heads, -1)).permute(1, 2, 0, 3)  # [H, g, n, d]
    sinks = None if spec.sinks is None else spec.sinks.float().view(heads, -1, 1, 1)
    scores, place = pool.score.flatten(1)[0], slot[:, : len(judged)]
    largest = scores[place]
    step = max(1, _TEMPORARY // (queries.shape[1] * len(position)))
    for head in range(heads):
        for part, at in zip(queries[head].split(step, dim=1), (first + counted).split(step), strict=True):
            p = _probabilities(
                part, at, keys[head], position, len(judged), spec, None if sinks is None else sinks[head]
            )
            torch.maximum(largest[head], p.amax(dim=(0, 1)), out=largest[head])
    scores[place] = largest


def _probabilities(
    q: Tensor,
    at: Tensor,
    keys: Tensor,
    position: Tensor,
    num_judged: int,
    spec: AttentionSpec,
    sinks: Tensor | None,
) -> Tensor:
    """What queries [g, n, d] at the positions [n] pay the first `num_judged` of the keys [J, d]: [g, n, judged].

    Args:
        position: of the keys, ascending, [J].
        sinks: float32 [g, 1, 1], a logit more; None: none.
    """
    group, n = q.shape[:2]
    # Keys in the order of their positions: none behind the last query is seen, none up to the first one is not.
    seen = len(position) - int(position[-1] - at[-1])
    logits = (q.flatten(0, 1) @ keys[:seen].mT).unflatten(0, (group, n))
    if spec.softcap is not None:
        logits = logits.div_(spec.softcap).tanh_().mul_(spec.softcap)
    close = seen - int(at[-1] - at[0])
    logits[..., close:].masked_fill_(position[close:seen] > at[:, None], -torch.inf)
    if spec.window is not None:
        logits.masked_fill_(at[:, None] - position[:seen] >= spec.window, -torch.inf)
    most = logits.amax(dim=-1, keepdim=True)
    if sinks is not None:
        most = torch.maximum(most, sinks)
    mass = logits.sub_(most).exp_().sum(dim=-1, keepdim=True)
    if sinks is not None:
        mass += (sinks - most).exp()
    return logits[..., :num_judged].div_(mass)


def _slots(cache: PagedCache, sequence: int, layer: int, count: int) -> Tensor:
    """Where the first `count` KVs of a layer's rows lie, int64 [H, count]."""
    size = cache.pool.layout.block_size
    device = cache.pool.k.device
    blocks = cache.manager.tables.lookup(
        torch.tensor([sequence], device=device), layer, ceil_div(count, size)
    )[0].long()
    offset = torch.arange(size, device=device)
    return (blocks[..., None] * size + offset).flatten(1)[:, :count]
