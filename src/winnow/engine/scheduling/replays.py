"""WHEN contexts are repeated: whose replay continues, and when what it wrote is dropped."""

from collections.abc import Sequence as SequenceType

from winnow.cache import Ledger
from winnow.engine.memory.memory import Memory
from winnow.engine.requests.request import Sequence


def drop_finished(memory: Memory, running: SequenceType[Sequence]) -> None:
    """Drop the KVs of passes that are computed to their ends."""
    for sequence in running:
        replay = sequence.next_pass
        if replay is not None and sequence.kv.replayed == replay.length:
            memory.drop_replay(sequence)
            sequence.kv.passes_done += 1


def replaying(ledger: Ledger, running: SequenceType[Sequence]) -> tuple[set[Sequence], dict[Sequence, int]]:
    """Return sequences that must wait for the round that follows their replay.

    Samples of one prompt that hold the same KVs have one replay among them, and then share what its round leaves.

    Returns:
        All of them, and of those that have a pass to compute how many of its tokens are missing.
    """
    before = {s for s in running if s.before_replay_round}
    missing: dict[Sequence, int] = {}
    led: set[Sequence] = set()
    # Who is furthest leads: another may have taken its place while it waited for a round.
    for sequence in sorted(before, key=lambda s: (s.kv.passes_done, s.kv.replayed, -s.index), reverse=True):
        if sequence in led:
            continue
        led.update(siblings(ledger, sequence, running))
        replay = sequence.next_pass
        if replay is not None:
            missing[sequence] = replay.length - sequence.kv.replayed
    return before, missing


def siblings(ledger: Ledger, leader: Sequence, running: SequenceType[Sequence]) -> list[Sequence]:
    """Return samples of the same prompt that still hold the very same blocks."""
    if not ledger.is_shared(leader.kv.running_slot):
        return []
    return [
        s
        for s in running
        if s.request is leader.request
        and s is not leader
        and s.kv.num_computed == leader.kv.num_computed
        and s.eviction == leader.eviction
        and ledger.is_shared(s.kv.running_slot)
    ]
