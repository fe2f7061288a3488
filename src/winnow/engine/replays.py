"""WHEN contexts are repeated: whose replay goes on, and when what it wrote is dropped."""

from collections.abc import Sequence as SequenceType

import numpy as np

from winnow.cache import CacheManager
from winnow.engine.request import Sequence


def drop_finished(cache: CacheManager, running: SequenceType[Sequence]) -> None:
    """Drop the KVs of passes that are computed to their ends."""
    for sequence in running:
        replay = sequence.next_pass
        if replay is not None and sequence.replayed == replay.length:
            drop(cache, sequence)
            sequence.passes_done += 1


def drop(cache: CacheManager, sequence: Sequence) -> None:
    """Cut the rows of a running sequence back to its context: what a pass wrote behind it goes."""
    if sequence.replayed:
        slot = sequence.running_slot
        held = cache.host_lengths[[slot]]
        cache.shrink([slot], np.minimum(held, sequence.num_computed).astype(held.dtype))
        sequence.replayed = 0


def replaying(
    cache: CacheManager, running: SequenceType[Sequence]
) -> tuple[set[Sequence], dict[Sequence, int]]:
    """Sequences that may not go on before the round that follows their replay.

    Samples of one prompt that hold the same KVs have one replay among them, and then share what its round leaves.

    Returns:
        All of them, and of those that have a pass to compute how many of its tokens are missing.
    """
    before = {s for s in running if s.before_replay_round}
    missing: dict[Sequence, int] = {}
    led: set[Sequence] = set()
    # Who is furthest leads: another may have taken its place while it waited for a round.
    for sequence in sorted(before, key=lambda s: (s.passes_done, s.replayed, -s.index), reverse=True):
        if sequence in led:
            continue
        led.update(siblings(cache, sequence, running))
        replay = sequence.next_pass
        if replay is not None:
            missing[sequence] = replay.length - sequence.replayed
    return before, missing


def siblings(cache: CacheManager, leader: Sequence, running: SequenceType[Sequence]) -> list[Sequence]:
    """Samples of the same prompt that still hold the very same blocks."""
    if not cache.is_shared(leader.running_slot):
        return []
    return [
        s
        for s in running
        if s.request is leader.request
        and s is not leader
        and s.num_computed == leader.num_computed
        and s.eviction == leader.eviction
        and cache.is_shared(s.running_slot)
    ]
