"""Policies whose rounds fall at different moments."""

from winnow.eviction import (
    AdaptiveRows,
    Average,
    Cumulative,
    EvictionPolicy,
    Keep,
    Reconstruction,
    Replay,
    When,
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
