"""vLLM's words that Winnow does not have: what each is called here, which values change nothing, and why others are
refused. One table, names.json, for Python, the command line and docs/vllm.md.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from winnow.values.foreign_names import ForeignName
from winnow.values.units import gibibytes

_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def _read(part: str) -> Iterator[tuple[str, ForeignName]]:
    """Yield the names of a part of the table; each of its rows has the fields of a `ForeignName`."""
    for row in _TABLE[part]:
        fields: dict[str, Any] = {
            key: tuple(value) if key == "harmless" else value for key, value in row.items()
        }
        yield from dict.fromkeys(fields.pop("names").split(), ForeignName(**fields)).items()


ENGINE: Mapping[str, ForeignName] = {
    name: replace(each, convert=gibibytes) if name == "swap_space" else each for name, each in _read("ENGINE")
}
"""Arguments of `LLM` and `EngineArgs`, which are flags too."""
SERVER: Mapping[str, ForeignName] = dict(_read("SERVER"))
"""Further flags of `vllm serve`."""
SAMPLING: Mapping[str, ForeignName] = dict(_read("SAMPLING"))
"""Fields of `SamplingParams`."""
BENCH: Mapping[str, ForeignName] = dict(_read("BENCH"))
"""Further flags of `vllm bench serve` and `vllm bench throughput`."""
STRUCTURED: Mapping[str, ForeignName] = dict(_read("STRUCTURED"))
"""Fields of `StructuredOutputsParams` and `GuidedDecodingParams`."""
CALL: Mapping[str, ForeignName] = dict(_read("CALL"))
"""Arguments of `LLM.generate` and `LLM.chat`."""
PROMPT: Mapping[str, ForeignName] = dict(_read("PROMPT"))
"""Keys of `TextPrompt` and `TokensPrompt`."""
METHODS: Mapping[str, ForeignName] = dict(_read("METHODS"))
"""Methods of `LLM`."""
CLASSES: Mapping[str, ForeignName] = dict(_read("CLASSES"))
"""Further names of the package `vllm`."""

SHARED: tuple[str, ...] = (
    "model", "revision", "dtype", "max_model_len", "load_format", "tensor_parallel_size", "generation_config",
    "seed", "device", "attention_backend", "gpu_memory_utilization", "block_size", "enable_prefix_caching",
    "kv_cache_dtype", "kv_offloading_size", "max_num_seqs", "max_num_batched_tokens", "scheduling_policy",
    "speculative_config",
)  # fmt: skip
"""Arguments of both. None, which is vLLM's default of many, is as if they were left out."""

RESPONSE_TEMPLATES: Mapping[str, str] = _TABLE["RESPONSE_TEMPLATES"]
"""Values of `tool_call_parser` and `reasoning_parser` -> the `response_template` that does the same."""

MODULES: Mapping[str, Mapping[str, str]] = _TABLE["MODULES"]
"""Modules of the package `vllm` -> the names in each that scripts import, and where they are here."""
