"""A small Llama with random weights that are large enough for its answers to vary, saved where an LLM can load it."""

import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from winnow import SamplingParams

VOCAB = 97


def save_tiny_llama(
    path: Path, seed: int, spread: float = 0.3, kind: type[PretrainedConfig] = LlamaConfig, **options: Any
) -> Path:
    """Write config.json and weights to `path`: 2 layers, 4 query and 2 KV heads, unless `options` say otherwise.

    kind: of a model like Llama.
    """
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(kind(**shape | options))
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.data.normal_(0, spread)
    model.save_pretrained(path)
    return path


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * seed + length).choices(range(3, VOCAB), k=length)


def greedy(**options: object) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | options))  # type: ignore[arg-type]
