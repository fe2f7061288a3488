"""The attention of a replay's queries, and the largest of it for each KV of the context."""

from dataclasses import dataclass

import torch
from torch import Tensor

from winnow.attention import AttentionBackend, AttentionSpec, PagedCache
from winnow.attention.native import NativeBackend
from winnow.cache.layout import ceil_div
from winnow.eviction.replay import ReplayPass

# Elements of a part of the attention matrix by whether a CPU computes it: there, what a second-level cache holds.
_TEMPORARY = {True: 2**18, False: 2**24}

# Of a hidden state that a score is divided by.
_LEAST_LENGTH = 1e-20


@dataclass(frozen=True)
class ReplaySpan:
    """Tokens of a pass within a packed batch; their KVs are written before they are observed.

    Attributes:
        slot: of the sequence, whose rows hold the context and the pass so far, in the order of positions.
        tokens: which tokens of the batch.
        done: tokens of the pass before them.
        normalized: whether attention is weighed, see `ReplayWeights`.
    """

    slot: int
    replay: ReplayPass
    tokens: slice
    done: int
    normalized: bool = False


@dataclass(frozen=True)
class ReplayWeights:
    """What KVzip+ multiplies attention by: |W v| of the KV over |h| of the query's token.

    Attributes:
        products: W W^T, float32 [Hq, d, d], of the layer's output weights by query head.
        inputs: h, [n, hidden_size], what the layer's attention is computed from, for the tokens of the span.
    """

    products: Tensor
    inputs: Tensor

    def logs(self, cache: PagedCache, span: ReplaySpan, layer: int, queries: slice) -> tuple[Tensor, Tensor]:
        """float32 [n], logarithms of |h| of some of the span's tokens, and [Hq, judged KVs], those of |W v|."""
        slot, _ = _taking_part(cache, span, layer, span.replay.context_len)
        values = cache.pool.v[cache.pool.place(slot)].float()  # [H, judged, d]
        by_head = values.repeat_interleave(len(self.products) // len(values), dim=0)
        squares = ((by_head @ self.products) * by_head).sum(dim=-1).clamp_min_(0.0)
        lengths = self.inputs[queries].float().norm(dim=-1).clamp_min_(_LEAST_LENGTH)
        return lengths.log(), squares.log().mul_(0.5)


def observe_replay(
    cache: PagedCache,
    backend: AttentionBackend,
    span: ReplaySpan,
    layer: int,
    q: Tensor,
    spec: AttentionSpec,
    weights: ReplayWeights | None = None,
) -> None:
    """Raise the scores of the context's KVs to the largest attention that these queries pay them.

    The softmax of a query goes over the context's first KVs (`ReplayPass.head`), those of the chunk that the pass
    repeats, and those of the pass up to the query: as in KVzip, so that the other chunks take nothing away. The scores
    of the first two change, accumulator 0 of each. It reads keys where they lie, and holds no more than a part of the
    attention matrix at once.

    Args:
        q: [n, Hq, d], the queries of `span.tokens`, rotated at their positions.
        weights: what attention is multiplied by before the largest is taken; None: nothing.
    """
    replay = span.replay
    first = replay.context_len + span.done
    every = slice(-first % replay.every, None, replay.every)
    counted = range(first, first + len(q))[every]
    if not counted:
        return
    query_logs, key_logs = (None, None) if weights is None else weights.logs(cache, span, layer, every)
    if isinstance(backend, NativeBackend):
        backend.replay(
            cache,
            layer,
            span.slot,
            q[every],
            spec,
            judged=(replay.head, replay.start, replay.end),
            context_len=replay.context_len,
            first=counted.start,
            every=replay.every,
            query_logs=query_logs,
            key_logs=key_logs,
        )
        return
    slot, position = _taking_part(cache, span, layer, counted[-1] + 1)
    keys = cache.pool.k[cache.pool.place(slot)].float()  # [H, J, d]
    heads = len(keys)
    queries = q[every].float() * spec.scale
    queries = queries.unflatten(1, (heads, -1)).permute(1, 2, 0, 3)  # [H, g, n, d]
    sinks = None if spec.sinks is None else spec.sinks.float().view(heads, -1, 1, 1)
    key_logs = None if key_logs is None else key_logs.unflatten(0, (heads, -1))
    scores, place = cache.pool.score.flatten(1)[0], slot[:, : replay.num_judged]
    largest = scores[place]
    step = max(1, _TEMPORARY[q.device.type == "cpu"] // (queries.shape[1] * len(position)))
    for start in range(0, len(counted), step):
        at = counted[start : start + step]
        for head in range(heads):
            part, sink = queries[head, :, start : start + step], None if sinks is None else sinks[head]
            logs = _log_probabilities(
                part, at, keys[head], position, counted[-1], replay.num_judged, spec, sink
            )
            if query_logs is not None:
                logs -= query_logs[start : start + step, None]
            highest = logs.amax(dim=1)  # [g, judged]
            if key_logs is not None:
                highest += key_logs[head]
            torch.maximum(largest[head], highest.amax(dim=0).exp_(), out=largest[head])
    scores[place] = largest


def _log_probabilities(
    q: Tensor,
    at: range,
    keys: Tensor,
    position: Tensor,
    last: int,
    num_judged: int,
    spec: AttentionSpec,
    sinks: Tensor | None,
) -> Tensor:
    """Logarithms of what queries [g, n, d] at n positions pay the first `num_judged` of the keys: [g, n, judged].

    Args:
        keys: [J, d].
        position: of the keys, ascending, [J]; the last ones follow one another, from before the queries on.
        last: of these positions.
        sinks: float32 [g, 1, 1], a logit more; None: none.
    """
    group, n = q.shape[:2]
    # Keys in the order of their positions: none behind the last query is seen, none up to the first one is not.
    seen = len(position) - (last - at[-1])
    logits = (q.flatten(0, 1) @ keys[:seen].mT).unflatten(0, (group, n))
    if spec.softcap is not None:
        logits = logits.div_(spec.softcap).tanh_().mul_(spec.softcap)
    close = seen - (at[-1] - at[0])
    of_query = torch.arange(at.start, at.stop, at.step, device=q.device)[:, None]
    logits[..., close:].masked_fill_(position[close:seen] > of_query, -torch.inf)
    if spec.window is not None:
        logits.masked_fill_(of_query - position[:seen] >= spec.window, -torch.inf)
    total = logits.logsumexp(dim=-1, keepdim=True)
    if sinks is not None:
        total = torch.logaddexp(total, sinks)
    return logits[..., :num_judged].sub_(total)


def _taking_part(cache: PagedCache, span: ReplaySpan, layer: int, end: int) -> tuple[Tensor, Tensor]:
    """The KVs of a pass's softmax: where they lie, int64 [H, J], and their positions, ascending up to `end`, [J]."""
    replay = span.replay
    parts = ((0, replay.head), (replay.start, replay.end), (replay.context_len, end))
    position = torch.cat([torch.arange(*part) for part in parts]).to(cache.pool.k.device)
    return _slots(cache, span.slot, layer, end)[:, position], position


def _slots(cache: PagedCache, sequence: int, layer: int, count: int) -> Tensor:
    """Where the first `count` KVs of a layer's rows lie, int64 [H, count]."""
    size = cache.pool.layout.block_size
    device = cache.pool.k.device
    blocks = cache.tables.lookup(torch.tensor([sequence], device=device), layer, ceil_div(count, size))[
        0
    ].long()
    offset = torch.arange(size, device=device)
    return (blocks[..., None] * size + offset).flatten(1)[:, :count]
