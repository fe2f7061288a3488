"""The keyword arguments of `LLM`, written out for static type checkers; `winnow.config` says what they mean.

Checkers cannot read dataclasses' fields into a signature, so each option stands here once more.
tests/test_engine_options.py fails where the two differ, and prints the line to add.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from typing import Any, TypedDict

from winnow.config import PARTS
from winnow.errors import ConfigError
from winnow.eviction import EvictionPolicy
from winnow.values.foreign_names import accept_fields
from winnow.values.tenants import Tenant
from winnow.vllm import names as vllm_names


class EngineOptions(TypedDict, total=False):
    """Fields of the parts of `EngineConfig`, less `model`, which `LLM` takes by position too."""

    # ModelConfig
    revision: str | None
    tokenizer: str | Path | None
    engine: str
    dtype: str
    weight_dtype: str
    weight_wide: str
    device: str
    threads: int | None
    tensor_parallel_size: int
    load_format: str
    max_model_len: int | None
    attention_backend: str
    language_model_only: bool
    optimize: bool
    generation_config: str
    verify_model: bool
    model_cache: bool
    seed: int
    # CacheConfig
    kv_memory: int | str
    gpu_memory_utilization: float | None
    block_size: int
    enable_prefix_caching: bool
    prefix_store: str | Path | None
    prefix_cache_dir: str | Path | None
    prefix_cache_disk: int | str
    session_memory: int | str | None
    kv_offloading_size: int | str | None
    image_memory: int | str
    kv_reservation: str
    kv_cache_dtype: str
    kv_group: int | None
    kv_rotate: str
    kv_bias: bool
    kv_wide: str | None
    value_tier: str | None
    # SchedulerConfig
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk: int | None
    scheduling_policy: str
    aging: float | None
    watermark_high: float
    watermark_low: float | None
    max_queued_requests: int | None
    max_queued_tokens: int | None
    tenants: str | Path | Mapping[str, Mapping[str, float]] | Sequence[Tenant]
    speculative_config: str | Mapping[str, Any] | None
    # EvictionConfig
    eviction: str | EvictionPolicy
    compression: float | str | None
    kv_budget: int | None
    pool: int | str | None
    kv_floor: int
    num_accumulators: int | None
    max_round_kvs: int | None
    # PaddedConfig
    padded_mode: str
    prefill_group: int
    group_padding: float
    park_memory: int | str | None
    park_above: float
    admit_below: float
    overlap_prefill: bool | None
    # MediaConfig
    limit_mm_per_prompt: int | Mapping[str, int]
    allowed_media_domains: tuple[str, ...]
    allowed_local_media_path: str | Path | None


_FIELDS = [
    # None, as what is left out on a GPU is no size that could be written here.
    (each.name, each.type, field(default=None, metadata=each.metadata) if each.name == "kv_memory" else each)
    for part in PARTS.values()
    for each in fields(part)
]
EngineArgs: Any = make_dataclass("EngineArgs", _FIELDS, namespace={"__module__": __name__})
"""Options to open an `LLM` with, as in vLLM: `LLM(**vars(EngineArgs(model=..., max_model_len=2048)))`."""
accept_fields(vllm_names.ENGINE, ConfigError, "option")(EngineArgs)
