"""The hash behind every draw: right, even and without memory."""

import numpy as np

from winnow.sampling.randomness import stream_key, uniform, words


def test_words_are_splitmix64s() -> None:
    """The first outputs for seed 1234567, as published with the reference implementation."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    got = words(np.full(5, 1234567, dtype=np.uint64), np.arange(5))
    assert got.tolist() == published


def test_uniform_fills_the_unit_interval_evenly() -> None:
    draws = uniform(np.full(100_000, stream_key(1, 0), dtype=np.uint64), np.arange(100_000))
    assert draws.min() >= 0 and draws.max() < 1
    counts = np.histogram(draws, bins=100, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 149  # chi-square, 99 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.01


def test_neighbouring_seeds_samples_and_positions_are_unrelated() -> None:
    keys = np.array(
        [stream_key(seed, sample) for seed in range(-5, 45) for sample in range(20)], dtype=np.uint64
    )
    table = np.stack([uniform(keys, np.full(1000, position)) for position in range(50)])
    assert len(np.unique(table)) == table.size
    correlations = np.corrcoef(table) - np.eye(len(table))
    assert abs(correlations).max() < 0.15


def test_negative_and_large_seeds_have_streams_of_their_own() -> None:
    seeds = [0, 1, -2, 2**63 - 1, -(2**63) + 1, 2**32]
    assert len({stream_key(seed, sample) for seed in seeds for sample in (0, 1)}) == 2 * len(seeds)
