"""Policies whose rounds fall at different moments."""

from winnow.eviction import (
    AdaptiveRows,
    Average,
    Cumulative,
    EqualHeads,
    EvictionPolicy,
    Keep,
    Recency,
    Reconstruction,
    Replay,
    When,
    Window,
)

AFTER = EvictionPolicy(when=When(after_prefill=True))
EVERY_8 = EvictionPolicy(when=When(after_prefill=True, prefill_every=8, decode_every=4))
BATCH_MAX = EvictionPolicy(Average(), when=When(prefill_every=8, decode_every=8, within=True))
PRESSURE = EvictionPolicy(when=When(after_prefill=True, pressure=True))
UNEVEN = EvictionPolicy(
    budget=AdaptiveRows(), when=When(after_prefill=True, prefill_every=8, decode_every=4, pressure=True)
)
REPLAYED = EvictionPolicy(Reconstruction(Replay(chunk=10)), AdaptiveRows(), Keep(), When(after_prefill=True))
LISTENING = EvictionPolicy(Cumulative(), when=When(after_prefill=True, decode_every=1))
POLICIES = [
    None,
    AFTER,
    EVERY_8,
    BATCH_MAX,
    PRESSURE,
    LISTENING,
    EvictionPolicy(
        Window(4, continual=True), EqualHeads(), Keep(recent=4), When(after_prefill=True, pressure=True)
    ),
    EvictionPolicy(Recency(), when=When(after_prefill=True, prefill_every=16, every_steps=3)),
    EvictionPolicy(Window(6), when=When(prefill_every=7, uncompressed_tokens=40, pressure=True)),
    UNEVEN,
    EvictionPolicy(budget=AdaptiveRows(), when=When(after_prefill=True, join_prefill=True, pressure=True)),
    EvictionPolicy(when=When(after_prefill=True, join_prefill=True, make_room=True)),
    EvictionPolicy(budget=AdaptiveRows(), when=When(prefill_every=8, make_room=True)),
    EvictionPolicy(budget=AdaptiveRows(), when=When(after_prefill=True, prefill_every=7, decode_every=3)),
    EvictionPolicy(budget=AdaptiveRows(), when=When(after_prefill=True, decode_every=1)),
    EvictionPolicy(budget=AdaptiveRows(), when=When(prefill_every=5, decode_every=6, within=True)),
    REPLAYED,
]
