"""Report of what eviction did to a sequence, once it is over."""

from winnow.cache import CacheLayout
from winnow.engine.requests.request import Sequence
from winnow.outputs import EvictionReport

AGED = "session"
"""Policy of answers that continue a conversation whose oldest turns were compressed."""


def eviction_report(sequence: Sequence, layout: CacheLayout) -> EvictionReport | None:
    """Return None while the sequence runs, if it never got a slot, or if all its KVs are kept."""
    name = sequence.request.policy_name or (AGED if sequence.kv.last_round else None)
    if sequence.kept is None or name is None:
        return None
    held = layout.by_kind(layout.row_blocks(sequence.kept))
    eviction = sequence.eviction
    return EvictionReport(
        policy=name,
        kv_budget=None if eviction is None else eviction.budget,
        num_tokens=sequence.kv.num_computed,
        kept=tuple(tuple(row) for row in sequence.kept.tolist()),
        bytes_held=layout.device_bytes(held),
        bytes_freed=sequence.rounds.freed_blocks * layout.block_bytes,
        rounds=sequence.rounds.rounds,
        seconds=sequence.rounds.seconds,
        replay_tokens=sequence.replay.tokens,
        replay_seconds=sequence.replay.seconds,
    )
