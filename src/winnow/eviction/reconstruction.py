"""Largest attention of a replay's queries for each KV of the context."""

from dataclasses import dataclass

from torch import Tensor

from winnow.attention import AttentionSpec, BackendStep, JudgedKVs, PagedCache, ReplayQueries
from winnow.attention.replay import judged_slots, replay_shortened_rows
from winnow.eviction.replay import ReplayPass

# Lower bound of the norm of a hidden state, which divides attention.
_LEAST_LENGTH = 1e-20


@dataclass(frozen=True)
class ReplaySpan:
    """Tokens of a pass within a packed batch; their KVs are written before they are observed.

    Attributes:
        slot: of the sequence, whose rows hold the context and the pass so far, in the order of positions.
        tokens: which tokens of the batch.
        done: tokens of the pass before them.
        normalized: whether attention is weighted by `ReplayWeights`.
    """

    slot: int
    replay: ReplayPass
    tokens: slice
    done: int
    normalized: bool = False


@dataclass(frozen=True)
class ReplayWeights:
    """The factor of attention in KVzip+: |W v| of the KV over |h| of the query's token.

    Attributes:
        products: W W^T, float32 [Hq, d, d], of the layer's output weights by query head.
        inputs: h, [n, hidden_size], the inputs of the layer's attention at the tokens of the span.
    """

    products: Tensor
    inputs: Tensor

    def logs(self, cache: PagedCache, span: ReplaySpan, layer: int, queries: slice) -> tuple[Tensor, Tensor]:
        """Return logarithms of |h| of some of a span's tokens, float32 [n], and of |W v|, float32 [Hq, judged KVs]."""
        slot, _ = judged_slots(cache, layer, span.slot, _judged(span.replay), span.replay.context_len)
        values = cache.pool.of_layer(layer).values(slot)  # [H, judged, d]
        by_head = values.repeat_interleave(len(self.products) // len(values), dim=0)
        squares = ((by_head @ self.products) * by_head).sum(dim=-1).clamp_min_(0.0)
        lengths = self.inputs[queries].float().norm(dim=-1).clamp_min_(_LEAST_LENGTH)
        return lengths.log(), squares.log().mul_(0.5)


def observe_replay(
    step: BackendStep,
    span: ReplaySpan,
    layer: int,
    q: Tensor,
    spec: AttentionSpec,
    weights: ReplayWeights | None = None,
) -> None:
    """Raise accumulator 0 of the context's KVs to the largest attention that they receive from these queries.

    The softmax of a query goes over the context's first KVs (`ReplayPass.head`), those of the chunk that the pass
    repeats, and those of the pass up to the query: as in KVzip, so that the other chunks receive nothing. The
    accumulators of the first two change. Keys are read in place, and only a part of the attention matrix exists at a
    time.

    Args:
        q: [n, Hq, d], the queries of `span.tokens`, rotated at their positions.
        weights: factors of attention, applied before the maximum where rows hold the whole context; None: 1.
    """
    replay, cache = span.replay, step.cache
    held = cache.tables.host_lengths[span.slot, layer, : cache.pool.layout.heads[layer]]
    is_whole = held.min() >= replay.context_len + span.done + len(q)
    if span.done == 0 and is_whole:
        _clear(cache, span, layer)
    first = replay.context_len + span.done
    every = slice(-first % replay.every, None, replay.every)
    counted = range(first, first + len(q))[every]
    if not counted:
        return
    if not is_whole:  # an earlier round has taken some
        found = ReplayQueries(q[every], _judged(replay), counted.start, replay.every)
        replay_shortened_rows(cache, layer, span.slot, found, spec, again=span.done == 0)
        return
    query_logs, key_logs = (None, None) if weights is None else weights.logs(cache, span, layer, every)
    queries = ReplayQueries(
        q[every], _judged(replay), counted.start, replay.every, query_logs=query_logs, key_logs=key_logs
    )
    step.replay(layer, span.slot, queries, spec)


def _clear(cache: PagedCache, span: ReplaySpan, layer: int) -> None:
    """Let the KVs that a pass is the first to judge start from 0: they may come from a prefix that others watched."""
    replay = span.replay
    start = 0 if replay.start == replay.head else replay.start
    context = JudgedKVs(0, start, replay.end, replay.context_len)
    slot, _ = judged_slots(cache, layer, span.slot, context, replay.context_len)
    cache.pool.numbers.clear_accumulators(slot, 1)


def _judged(replay: ReplayPass) -> JudgedKVs:
    return JudgedKVs(replay.head, replay.start, replay.end, replay.context_len)
