"""A tiny Llama for tests of eviction through `LLM`, and requests for it."""

import random
from pathlib import Path

from tiny_llama import VOCAB, save_tiny_llama

from winnow import SamplingParams

LAYERS, HEADS, BLOCK = 3, 2, 4


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * seed + length).choices(range(3, VOCAB), k=length)


def greedy(**options: object) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | options))  # type: ignore[arg-type]


def save_evicted_llama(path: Path) -> Path:
    """Save the model. Returns `path`."""
    return save_tiny_llama(path, seed=5, num_hidden_layers=LAYERS)
