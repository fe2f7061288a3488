"""vLLM's words that Winnow does not have: what each is called here, which values change nothing, and why others are
refused. One table, names.json, for Python, the command line and docs/vllm.md.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from winnow.values.foreign_names import ForeignName
from winnow.values.units import gibibytes

_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def _read(part: str) -> Iterator[tuple[str, ForeignName]]:
    """Yield the names of a part of the table; each of its rows has the fields of a `ForeignName`."""
    for row in _TABLE[part]:
        fields = {key: tuple(value) if key == "harmless" else value for key, value in row.items()}
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

RESPONSE_TEMPLATES: Mapping[str, str] = {
    "hermes": "hermes",
    **dict.fromkeys(("qwen3_coder", "qwen3_xml"), "qwen3-coder"),
    **dict.fromkeys(("deepseek_r1", "qwen3"), "think"),
}
"""Values of `tool_call_parser` and `reasoning_parser` -> the `response_template` that does the same."""

_HERE = "winnow_vllm"
_METRICS = {name: "winnow.vllm.metrics" for name in ("Metric", "Counter", "Gauge", "Histogram", "Vector")}
_PARSER = {"FlexibleArgumentParser": _HERE}
_ENGINE_ARGS = {"EngineArgs": _HERE, "AsyncEngineArgs": _HERE}
_ENGINES = {"LLMEngine": _HERE, "AsyncLLMEngine": _HERE, "AsyncLLM": _HERE}
_PROMPTS = {"TextPrompt": "winnow.prompts", "TokensPrompt": "winnow.prompts", "PromptType": "winnow.prompts"}

MODULES: Mapping[str, Mapping[str, str]] = {
    **{name: {} for name in ("beam_search", "entrypoints", "lora", "lora.request", "usage")},
    **{name: {} for name in ("v1", "v1.engine", "v1.metrics")},
    **dict.fromkeys(("engine.llm_engine", "engine.async_llm_engine"), _ENGINES),
    **dict.fromkeys(("v1.engine.async_llm", "v1.engine.llm_engine"), _ENGINES),
    "sampling_params": {
        **dict.fromkeys(("SamplingParams", "RequestOutputKind"), "winnow.sampling.params"),
        **dict.fromkeys(("GuidedDecodingParams", "StructuredOutputsParams"), "winnow.sampling.structured"),
    },
    **dict.fromkeys(("inputs", "inputs.data"), _PROMPTS),
    "engine.arg_utils": _ENGINE_ARGS,
    "entrypoints.llm": {"LLM": "winnow.llm"},
    "v1.metrics.reader": _METRICS,
    "utils": {**_PARSER, "random_uuid": _HERE},
    "utils.argparse_utils": _PARSER,
    **{
        name: {"cleanup_dist_env_and_memory": _HERE} for name in ("distributed", "distributed.parallel_state")
    },
    "usage.usage_lib": {"UsageContext": _HERE},
    "logger": {"init_logger": _HERE},
}
"""Modules of the package `vllm` -> the names in each that scripts import, and where they are here."""
