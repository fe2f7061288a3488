"""Lines about an engine that a command has opened."""

import os
from typing import TYPE_CHECKING

from winnow.config import EngineConfig
from winnow.values.units import format_bytes

if TYPE_CHECKING:
    from winnow.llm import LLM

_SAMPLE_TOKENS = 1024


def engine_lines(llm: "LLM", name: str) -> list[str]:
    """Return the model and its context, what computes it, and the memory that KVs have: a line each."""
    config: EngineConfig = llm.config
    scheduler = config.scheduler
    tokens = config.cache.kv_memory * _SAMPLE_TOKENS // max(1, llm.kv_bytes(_SAMPLE_TOKENS))
    return [
        f"winnow: {name}, context {llm.max_model_len} tokens",
        "winnow: " + ", ".join(f"{what} {which}" for what, which in _implementation(llm).items()),
        f"winnow: KV memory {format_bytes(config.cache.kv_memory)} ({tokens} tokens uncompressed), at most "
        f"{scheduler.max_num_seqs} answers in a batch, {scheduler.max_num_batched_tokens} tokens in a step",
        memory_line(llm),
    ]


def memory_line(llm: "LLM") -> str:
    """Return the line on memory: weights and their formats, the limit of KVs, and the rest of the process."""
    dtype = str(llm.dtype).removeprefix("torch.")
    formats = dtype if llm.weight_dtype == "auto" else f"{dtype}, linear layers {llm.weight_dtype}"
    weights, kvs, rest = (
        format_bytes(each) for each in (llm.weight_bytes, llm.config.cache.kv_memory, llm.program_bytes)
    )
    return f"winnow: memory: weights {weights} ({formats}) + KVs up to {kvs} + about {rest} for all else"


def _implementation(llm: "LLM") -> dict[str, str]:
    from winnow import native

    found = llm.implementation()
    if native.is_installed() and llm.device.type == "cpu":
        found["kernels"] = os.environ.get(native.ISA_VARIABLE) or native.instruction_sets()[-1]
    return found
