"""Largest attention of a replay's queries for each KV of the context."""

from dataclasses import dataclass

from torch import Tensor

from winnow.attention import AttentionSpec, BackendStep, JudgedKVs, PagedCache, ReplayQueries
from winnow.attention.replay import judged_slots, replay_shortened_rows
from winnow.eviction.replay import ReplayPass


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


def observe_replay(step: BackendStep, span: ReplaySpan, layer: int, q: Tensor, spec: AttentionSpec) -> None:
    """Raise accumulator 0 of the context's KVs to the largest attention that they receive from these queries.

    The softmax of a query goes over the context's first KVs (`ReplayPass.head`), those of the chunk that the pass
    repeats, and those of the pass up to the query: as in KVzip, so that the other chunks receive nothing. The
    accumulators of the first two change. Keys are read in place, and only a part of the attention matrix exists at a
    time.

    Args:
        q: [n, Hq, d], the queries of `span.tokens`, rotated at their positions.
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
    step.replay(layer, span.slot, ReplayQueries(q[every], _judged(replay), counted.start, replay.every), spec)


def _clear(cache: PagedCache, span: ReplaySpan, layer: int) -> None:
    """Let the KVs that a pass is the first to judge start from 0: they may come from a prefix that others watched."""
    replay = span.replay
    start = 0 if replay.start == replay.head else replay.start
    context = JudgedKVs(0, start, replay.end, replay.context_len)
    slot, _ = judged_slots(cache, layer, span.slot, context, replay.context_len)
    cache.pool.numbers.clear_accumulators(slot, 1)


def _judged(replay: ReplayPass) -> JudgedKVs:
    return JudgedKVs(replay.head, replay.start, replay.end, replay.context_len)
