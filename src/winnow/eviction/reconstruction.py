"""The attention of a replay's queries, and the largest of it for each KV of the context."""

from dataclasses import dataclass

from torch import Tensor

from winnow.attention import AttentionBackend, AttentionSpec, JudgedKVs, PagedCache
from winnow.attention.replay import judged_slots
from winnow.eviction.replay import ReplayPass

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
        slot, _ = judged_slots(cache, layer, span.slot, _judged(span.replay), span.replay.context_len)
        values = cache.pool.values(slot)  # [H, judged, d]
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
    backend.replay(
        cache,
        layer,
        span.slot,
        q[every],
        spec,
        judged=_judged(replay),
        first=counted.start,
        every=replay.every,
        query_logs=query_logs,
        key_logs=key_logs,
    )


def _judged(replay: ReplayPass) -> JudgedKVs:
    return JudgedKVs(replay.head, replay.start, replay.end, replay.context_len)
