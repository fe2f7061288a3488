"""Random numbers without a state: each draw is a function of who asks and of where in the answer it stands.

A generator object would have to be saved when a sequence is preempted, and would advance differently in another batch.
A hash of (seed, sample index, position) needs neither: the draw is the same alone, in any batch, in any slot.

The hash is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) with the
constants of Vigna's `splitmix64.c`. Output number p of that generator is `mix(key + (p + 1) * gamma)`.
"""

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # the golden ratio, odd
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = 2**64 - 1


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the finaliser of SplitMix64: a bijection of 64-bit words that spreads every bit. Arithmetic wraps."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def words(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the output number `positions[i]` of the SplitMix64 generator that starts at `keys[i]`; both [B]."""
    return _mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)


def stream_key(seed: int, sample_index: int) -> int:
    """Return where the random stream of one sample of one request starts; neighbours start far apart."""
    seed_key = words(np.array([seed & _MASK], dtype=np.uint64), np.zeros(1, dtype=np.int64))
    return int(words(seed_key, np.array([sample_index], dtype=np.int64))[0])


def uniform(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one draw per row, [B], even over [0, 1) in steps of 2**-53, for a key of `stream_key`, [B], and the number
    of tokens that the answer already holds, [B]."""
    return (words(keys, positions) >> np.uint64(11)).astype(np.float64) * 2.0**-53
