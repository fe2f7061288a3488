"""What several tests of the sampler need."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from winnow.sampling import Sampler, SamplingParams
from winnow.sampling.randomness import stream_key, uniform
from winnow.sampling.rows import Fault

CPU = torch.device("cpu")


def make_sampler(
    max_num_seqs: int = 8, vocab_size: int = 12, eos: Sequence[int] = (), seed: int = 0
) -> Sampler:
    return Sampler(max_num_seqs, vocab_size, CPU, frozenset(eos), seed)


def random_logits(*shape: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def draws(seed: int, positions: Sequence[int], sample_index: int = 0) -> list[float]:
    """The random numbers that a request with this seed meets at these positions."""
    keys = np.full(len(positions), stream_key(seed, sample_index), dtype=np.uint64)
    return [float(each) for each in uniform(keys, np.array(positions, dtype=np.int64))]


def sample_once(logits: Tensor, eos: Sequence[int] = (), **params: Any) -> int:
    """The first token of a lone request; logits [V]."""
    sampler = make_sampler(1, len(logits), eos)
    sampler.add(0, SamplingParams(**params), [])
    return sampler.sample(logits[None], [0]).token_ids[0]


def fault_of(logits: Tensor, **params: Any) -> Fault | None:
    """What a lone request meets instead of its first token; logits [V]."""
    sampler = make_sampler(1, len(logits))
    sampler.add(0, SamplingParams(**params), [])
    return sampler.sample(logits[None], [0]).faults.get(0)


def sample_many(logits: Tensor, count: int, steps: int = 1, **params: Any) -> list[int]:
    """The first tokens of `count` requests of seeds 0, 1, ... in one batch, always from the same logits [V]."""
    sampler = make_sampler(count, len(logits))
    for slot in range(count):
        sampler.add(slot, SamplingParams(seed=slot, **params), [])
    rows = logits.expand(count, -1)
    return [token for _ in range(steps) for token in sampler.sample(rows, range(count)).token_ids]
