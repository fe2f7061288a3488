"""Report of what eviction did to a sequence, once it is over."""

from collections.abc import Sequence as SequenceType

import numpy as np

from winnow.cache import CacheLayout
from winnow.engine.requests.request import Sequence
from winnow.outputs import EvictionReport

Positions = SequenceType[SequenceType[SequenceType[int]]]
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
        kept_images=None if sequence.kept_parts is None else sequence.kept_parts[0],
        kept_text=None if sequence.kept_parts is None else sequence.kept_parts[1],
    )


def kept_parts(sequence: Sequence, positions: Positions) -> tuple[float, float]:
    """Return which parts of the KVs of pictures, and of text, a sequence with pictures holds.

    Args:
        positions: of its KVs, by layer and head.
    """
    is_image = np.zeros(sequence.kv.num_computed, dtype=bool)
    for image in sequence.request.images:
        is_image[image.tokens[image.tokens < len(is_image)]] = True
    rows = [row for layer in positions for row in layer]
    held = np.concatenate([np.asarray(row, dtype=np.int64) for row in rows])
    images = int(is_image[held].sum())
    all_images = int(is_image.sum()) * len(rows)
    all_text = len(is_image) * len(rows) - all_images
    return images / max(all_images, 1), (len(held) - images) / max(all_text, 1)
