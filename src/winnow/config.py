"""Every option of the engine, once: the keyword arguments of `LLM`, the command-line flags and the docs come from here.

Each field's metadata holds `help`, where needed `choices` (allowed values), `parse` (text -> value) and `aliases`
(earlier names), and `effect` where the option changes fewer answers than others do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, Self

from winnow.checks import MAX_COUNT as MAX_COUNT
from winnow.checks import check_choice, check_integer, check_number, require
from winnow.errors import ConfigError
from winnow.json_values import json_value
from winnow.kv_dtype import ROTATIONS, KVDtype, WideParts, check_group
from winnow.tenants import parse_tenants
from winnow.units import format_bytes, parse_bytes

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "dummy")
ATTENTION_BACKENDS = ("auto", "native", "triton", "reference")
ENGINES = ("paged", "padded")
FULL, COMPRESSING = "full", "winnow"
"""Presets that stand for an `eviction` that was left out: without, and with, an amount to keep."""
PREDICTOR = "kv_scores.safetensors"
"""What `winnow fit` adds to a model's directory."""
KV_RESERVATIONS = ("on-demand", "prompt", "max")
_LEAST_OFFLOADING = 2**16
PADDED_MODES = ("embedding", "shaping", "pd", "static")
SCHEDULING_POLICIES = ("fcfs", "priority", "srtf", "fair")
BENCH_PADDED_MODES = ("shaping-gaps",)
"""For `python -m benchmarks.papers baton` alone: as the paper does it, and of no other use."""


class Effect(Enum):
    """When another value of an option changes answers; a run is resumed under another value only where it does not."""

    ALWAYS = "always"
    BATCHES = "batches"
    """Which requests share a batch: changes sampled answers, and what eviction under memory pressure takes."""
    MEMORY = "memory"
    """How much room there is: changes what eviction under memory pressure takes."""
    NEVER = "never"


def option(default: Any, help: str, effect: Effect = Effect.ALWAYS, **extra: Any) -> Any:
    """A dataclass field that documents itself; `effect` says when another value changes answers."""
    return field(default=default, metadata={"help": help, "effect": effect, **extra})


def optional_int(text: str) -> int | None:
    """ "none" -> None, else an int: for limits that can be switched off."""
    return None if text.lower() == "none" else int(text)


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and how it is loaded."""

    model: str | Path | None = option(
        None,
        "directory with config.json and safetensors weights, a GGUF file, or org/name on the Hugging Face Hub; left "
        "out: the demo model that ships with Winnow",
    )
    revision: str | None = option(
        None,
        "branch, tag or commit of a model on the Hub; left out: its main branch",
        effect=Effect.NEVER,  # the model's files are compared
    )
    engine: str = option(
        "paged",
        "what runs the model: paged, or padded for any causal model of transformers as it is, without eviction",
        choices=ENGINES,
    )
    dtype: str = option(
        "auto",
        "number format of weights and KVs; auto: float32 on CPU, the checkpoint's own elsewhere",
        choices=DTYPES,
    )
    device: str = option(
        "auto", "torch device, such as cpu or cuda:0; auto: cuda where there is one, else cpu"
    )
    threads: int | None = option(
        None,
        "threads that compute on the CPU; left out: one per core that affinity and control groups let this process "
        "use, or what OMP_NUM_THREADS says",
        effect=Effect.BATCHES,
    )
    load_format: str = option(
        "auto",
        "auto: weights from safetensors; dummy: random weights from config.json alone",
        choices=LOAD_FORMATS,
    )
    max_model_len: int | None = option(
        None,
        "longest prompt plus answer, in tokens; left out: the model's own limit",
        parse=optional_int,
    )
    attention_backend: str = option(
        "auto", "what computes attention over the paged cache", choices=ATTENTION_BACKENDS
    )
    optimize: bool = option(
        True,
        "on CPU, compute layers in fused native passes and keep weights packed for the processor, wherever that gives "
        "what the model's own code gives",
    )
    generation_config: str = option(
        "auto",
        "whose sampling parameters serve requests that bring none: auto: those of the model's generation_config.json; "
        "winnow: Winnow's own; or a directory with a generation_config.json",
    )
    verify_model: bool = option(
        True,
        "compare the model at load with its own code, on a few tokens, and refuse it where they differ",
        effect=Effect.NEVER,
    )
    seed: int = option(0, "seed of requests that bring none, and of dummy weights")

    def __post_init__(self) -> None:
        check_choice("engine", self.engine, ENGINES)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("load_format", self.load_format, LOAD_FORMATS)
        check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        if self.max_model_len is not None:
            check_integer("max_model_len", self.max_model_len, 1)
        if self.threads is not None:
            check_integer("threads", self.threads, 1, 1024)
        check_integer("seed", self.seed, 0, 2**63 - 1)


@dataclass(frozen=True)
class CacheConfig:
    """How much memory the KVs may take, and in what pieces."""

    kv_memory: int = option(
        512 * 2**20,
        "all memory of the KV cache: keys, values, positions, accumulators and tables, such as 512MiB",
        parse=parse_bytes,
        effect=Effect.MEMORY,
    )
    block_size: int = option(16, "slots of one block; memory is handed out and given back in blocks")
    enable_prefix_caching: bool = option(
        True,
        "keep the KVs of prompts while memory lasts, and let later requests that begin alike take them",
        effect=Effect.BATCHES,
    )
    prefix_store: str | Path | None = option(
        None,
        "directory of compressed prefixes that `winnow prefix save` wrote; prompts that begin so start from them",
        effect=Effect.BATCHES,
    )
    kv_offloading_size: int | None = option(
        None,
        "host memory for the KVs of preempted requests, which come back as they were, such as 4GiB; left out: none, "
        "they are computed again",
        parse=parse_bytes,
        effect=Effect.BATCHES,
        aliases=("swap_space",),
    )
    kv_reservation: str = option(
        "on-demand",
        "blocks that a request holds from its start, as engines with contiguous caches do, to compare with: on-demand: "
        "those of its first tokens; prompt: for its prompt and max_tokens; max: for max_model_len. With the last two "
        "nothing is shared, and no prefix is kept",
        choices=KV_RESERVATIONS,
        effect=Effect.BATCHES,
    )
    kv_cache_dtype: str = option(
        "auto",
        "format of stored KVs: auto (as dtype), float32, bfloat16, float16, fp8_e4m3, int8, int4, int4-outlier, int3, "
        "int2; or one each for keys and values, such as k=int8,v=int4; kivi4 and kivi2, for comparison, without "
        "eviction",
        aliases=("kv_dtype",),
    )
    kv_group: int | None = option(
        None,
        "channels that share a scale, which takes 2 bytes, or 4 at 4 bits and below; left out: a head at 8 bits, 32 "
        "(or the most below that divide a head) at 4 bits and below",
    )
    kv_rotate: str = option(
        "auto",
        "what a Hadamard transform spreads over the channels of a head before it is quantized: none, k (keys), kv; "
        "auto: keys of 4 bits and below",
        choices=ROTATIONS,
    )

    kv_wide: str | None = option(
        None,
        "KVs that are kept in 16 bits beside narrow ones, such as layers=1,sinks=4,recent=64: first layers, and in the "
        "others first and last tokens; room for them is set aside for max_num_seqs sequences, and no prefix is shared",
    )

    def __post_init__(self) -> None:
        check_choice("kv_reservation", self.kv_reservation, KV_RESERVATIONS)
        # "512MiB" is accepted wherever bytes are; a frozen dataclass is normalised once, here.
        object.__setattr__(self, "kv_memory", parse_bytes(self.kv_memory, "kv_memory"))
        if self.kv_offloading_size is not None:
            size = parse_bytes(self.kv_offloading_size, "kv_offloading_size")
            object.__setattr__(self, "kv_offloading_size", size)
            # vLLM's --swap-space 4 means 4 GiB, which a size without a unit is not.
            what = f"a size of {format_bytes(_LEAST_OFFLOADING)} or more, with its unit, such as 4GiB"
            require(size >= _LEAST_OFFLOADING, "kv_offloading_size", what, self.kv_offloading_size)
        if self.prefix_store is not None and not self.enable_prefix_caching:
            raise ConfigError(f"prefix_store needs enable_prefix_caching, got {self.prefix_store} without it")
        if self.prefix_store is not None and self.kv_reservation != "on-demand":
            raise ConfigError(
                f"prefix_store needs kv_reservation=on-demand, got {self.prefix_store} and {self.kv_reservation}"
            )
        check_integer("block_size", self.block_size, 1, 1024)
        check_group("kv_group", self.kv_group)
        check_choice("kv_rotate", self.kv_rotate, ROTATIONS)
        KVDtype.parse(self.kv_cache_dtype)
        WideParts.parse(self.kv_wide)


@dataclass(frozen=True)
class SchedulerConfig:
    """How many requests and tokens a step may hold."""

    max_num_seqs: int = option(64, "most sequences that hold KVs at the same time", effect=Effect.BATCHES)
    max_num_batched_tokens: int = option(
        2048, "most tokens computed in one step, over all requests", effect=Effect.BATCHES
    )
    prefill_chunk: int | None = option(
        512, "most prompt tokens of one request in one step; none: whole prompts", parse=optional_int
    )
    scheduling_policy: str = option(
        "priority",
        "who is served first: fcfs: who came first; priority: the greater priority, which may park lower ones that "
        "run; srtf: the shortest remaining; fair: the tenant that got the fewest tokens for its weight",
        choices=SCHEDULING_POLICIES,
        effect=Effect.BATCHES,
    )
    aging: float | None = option(
        60.0,
        "seconds of waiting that count as one level of priority, or as 1000 tokens less under srtf, so that nobody "
        "waits for ever; none: no aging",
        effect=Effect.BATCHES,
    )
    fair_input_price: float = option(
        1.0,
        "what a computed prompt token costs its tenant under scheduling_policy=fair",
        effect=Effect.BATCHES,
    )
    fair_output_price: float = option(2.0, "what an output token costs, likewise", effect=Effect.BATCHES)
    max_passes: int = option(
        0,
        "how often later requests that fit may be served before one that does not fit yet; 0: they wait behind it",
        effect=Effect.BATCHES,
    )
    watermark_high: float = option(
        1.0,
        "requests join others only up to this part of the blocks; the rest is for the growth of those that run",
        effect=Effect.BATCHES,
    )
    watermark_low: float | None = option(
        None,
        "after a request was held back, none joins until use has fallen to this part of the blocks; left out: "
        "watermark_high, so that requests join as soon as they fit",
        effect=Effect.BATCHES,
    )
    max_queued_requests: int | None = option(
        None, "requests that may wait; further ones are refused; left out: no limit", effect=Effect.NEVER
    )
    max_queued_tokens: int | None = option(
        None,
        "tokens of requests that may wait; further requests are refused, unless none waits; left out: no limit",
        effect=Effect.NEVER,
    )
    tenants: Any = option(
        (),
        'tenants with weight, guarantee, limit and host_limit: a JSON object {"NAME": {"weight": 2}, ...} or the '
        "file of one",
        parse=parse_tenants,
        metavar="JSON",
        effect=Effect.BATCHES,
    )

    def __post_init__(self) -> None:
        check_integer("max_num_seqs", self.max_num_seqs, 1, 65536)
        check_integer("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        for name in ("prefill_chunk", "max_queued_requests", "max_queued_tokens"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        check_choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        if self.aging is not None:
            check_number("aging", self.aging, 1e-3)
        for name in ("fair_input_price", "fair_output_price"):
            check_number(name, getattr(self, name), 0.0, 1e6)
        check_integer("max_passes", self.max_passes, 0)
        check_number("watermark_high", self.watermark_high, 0.01, 1.0)
        if self.watermark_low is not None:
            check_number("watermark_low", self.watermark_low, 0.0, 1.0)
            if self.watermark_low > self.watermark_high:
                raise ConfigError(
                    f"watermark_low must be at most watermark_high ({self.watermark_high:g}), "
                    f"got {self.watermark_low:g}"
                )
        object.__setattr__(self, "tenants", parse_tenants(self.tenants))
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), so that every running "
                f"request can take a step, got {self.max_num_batched_tokens}"
            )


@dataclass(frozen=True)
class EvictionConfig:
    """Which KVs are kept when they cannot all be, and how many. Requests may bring their own."""

    eviction: Any = option(
        None,
        "what decides which KVs stay: a preset's name (`winnow policies` lists them), or in Python an EvictionPolicy; "
        "left out: winnow where compression or kv_budget is given, else full",
        parse=str,
    )
    compression: float | None = option(
        None,
        "tokens of the prompt per KV kept in each row on average, such as 8; left out, with no kv_budget: what the "
        "preset's paper uses, else 4",
    )
    kv_budget: int | None = option(None, "KVs kept in each row on average, in place of compression")
    kv_floor: int = option(128, "compression never keeps fewer KVs per row on average")
    num_accumulators: int | None = option(
        None,
        "float32 accumulators per KV that policies of requests may use, 0 to 2; left out: what the engine's own "
        "policy needs, at least 1",
        effect=Effect.MEMORY,
        aliases=("num_scores",),
    )
    max_round_kvs: int | None = option(
        2**24,
        "most KVs that one round of eviction ranks, over all its requests; none: no limit",
        parse=optional_int,
    )

    def __post_init__(self) -> None:
        if self.compression is not None:
            check_number("compression", self.compression, 1.0)
        for name in ("kv_budget", "kv_floor", "max_round_kvs"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        if self.compression is not None and self.kv_budget is not None:
            raise ConfigError(
                f"compression and kv_budget mean the same, give one; got {self.compression} and {self.kv_budget}"
            )
        for name in ("compression", "kv_budget"):
            if self.eviction == FULL and getattr(self, name) is not None:
                raise ConfigError(
                    f"eviction={FULL} keeps every KV and {name}={getattr(self, name):g} asks for fewer: give one"
                )
        if self.num_accumulators is not None:
            check_integer("num_accumulators", self.num_accumulators, 0, 2)

    @property
    def chosen(self) -> Any:
        """What decides: `eviction`, or the preset that stands for it where it was left out."""
        if self.eviction is not None:
            return self.eviction
        return FULL if self.compression is None and self.kv_budget is None else COMPRESSING


@dataclass(frozen=True)
class PaddedConfig:
    """How the padded engine batches (engine=padded)."""

    padded_mode: str = option(
        "embedding",
        "embedding: queries are prefilled apart and join at any step; shaping: prefilled in the batch's own pass; pd: "
        "prefilled apart, batches run to completion; static: batches run to completion",
        choices=PADDED_MODES,
        effect=Effect.BATCHES,
    )
    prefill_group: int = option(
        8, "most queries that are prefilled together, apart from the batch", effect=Effect.BATCHES
    )
    group_padding: float = option(
        0.02, "most padding in such a group, as a part of what it computes", effect=Effect.BATCHES
    )
    park_memory: int | None = option(
        None,
        "most host memory for KVs of queries that are out of the batch, which are computed again if they do not fit; "
        "left out: as much as kv_memory",
        parse=parse_bytes,
        effect=Effect.MEMORY,
    )
    park_above: float = option(
        1.0, "queries are parked in host memory above this part of kv_memory", effect=Effect.BATCHES
    )
    admit_below: float = option(
        0.9, "queries join others only up to this part of kv_memory", effect=Effect.BATCHES
    )
    overlap_prefill: bool | None = option(
        None,
        "prefill queries in the background while the batch decodes (padded_mode=embedding); left out: where the model "
        "lies on cuda",
        effect=Effect.BATCHES,
    )

    def __post_init__(self) -> None:
        if self.padded_mode not in BENCH_PADDED_MODES:
            check_choice("padded_mode", self.padded_mode, PADDED_MODES)
        if self.overlap_prefill and self.padded_mode != "embedding":
            raise ConfigError(
                f"overlap_prefill needs padded_mode=embedding, got {self.overlap_prefill!r} and "
                f"padded_mode={self.padded_mode}"
            )
        check_integer("prefill_group", self.prefill_group, 1, 1024)
        if self.park_memory is not None:
            object.__setattr__(self, "park_memory", parse_bytes(self.park_memory, "park_memory"))
        for name in ("group_padding", "park_above", "admit_below"):
            check_number(name, getattr(self, name), 0.0, 1.0)
        if not self.park_above:
            raise ConfigError("park_above must be greater than 0, got 0")
        if self.admit_below > self.park_above:
            raise ConfigError(
                f"admit_below must be at most park_above ({self.park_above:g}), got {self.admit_below:g}"
            )


# What means nothing to an engine, so that giving it is a mistake.
_ONLY_PAGED = {
    "model": ("attention_backend",),
    "cache": (
        "block_size",
        "prefix_store",
        "kv_reservation",
        "kv_cache_dtype",
        "kv_group",
        "kv_rotate",
        "kv_wide",
    ),
    "scheduler": ("max_passes", "watermark_high", "watermark_low"),
    "eviction": ("eviction", "compression", "kv_budget", "kv_floor", "num_accumulators", "max_round_kvs"),
}
_ONLY_PADDED = {"padded": tuple(each.name for each in fields(PaddedConfig))}


@dataclass(frozen=True)
class EngineConfig:
    """The five parts together."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    eviction: EvictionConfig = field(default_factory=EvictionConfig)
    padded: PaddedConfig = field(default_factory=PaddedConfig)

    def __post_init__(self) -> None:
        other, foreign = ("paged", _ONLY_PAGED) if self.model.engine == "padded" else ("padded", _ONLY_PADDED)
        for part, names in foreign.items():
            config = getattr(self, part)
            for each in fields(config):
                value = getattr(config, each.name)
                if each.name in names and value != each.default:
                    raise ConfigError(
                        f"{each.name} needs engine={other}, got {value!r} and engine={self.model.engine}"
                    )

        quotas = [tenant.name for tenant in self.scheduler.tenants if tenant.has_quota]
        if quotas and self.model.engine != "paged":
            raise ConfigError(
                f"tenants: guarantee and limit need engine=paged, got those of {', '.join(quotas)} and "
                f"engine={self.model.engine}"
            )

    def settings(self) -> dict[str, Any]:
        """Every option of every part by name, as JSON values: what resume, fingerprints and reports go by.

        A policy without a name is described by all its fields; one that was left out is the preset that stands for it.
        """
        values = {
            each.name: json_value(getattr(part, each.name))
            for part in (getattr(self, name) for name in PARTS)
            for each in fields(part)
        }
        return values | {"eviction": json_value(self.eviction.chosen)}

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Sort flat keyword arguments into the parts.

        Raises:
            ConfigError: an unknown option, or a value out of range.
        """
        names = {part: [f.name for f in fields(config)] for part, config in PARTS.items()}
        known = [name for part in names.values() for name in part]
        options = _by_present_name(options)
        for name in options:
            if name not in known:
                raise ConfigError(f"unknown option {name!r}; known are {', '.join(sorted(known))}")
        return cls(
            **{
                part: config(**{name: options[name] for name in names[part] if name in options})
                for part, config in PARTS.items()
            }
        )


def _by_present_name(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with every earlier name replaced by the present one.

    Raises:
        ConfigError: an option is given by both names.
    """
    renamed = {}
    for name, value in options.items():
        present = _ALIASES.get(name, name)
        if present in renamed or (present != name and present in options):
            raise ConfigError(f"{name} is the earlier name of {present}: give {present} alone")
        renamed[present] = value
    return renamed


PARTS: Mapping[str, Any] = {each.name: each.default_factory for each in fields(EngineConfig)}
"""Name -> dataclass of each part of the configuration."""

_ALIASES: Mapping[str, str] = {
    alias: each.name
    for config in PARTS.values()
    for each in fields(config)
    for alias in each.metadata.get("aliases", ())
}

EFFECTS: Mapping[str, Effect] = {
    each.name: each.metadata["effect"] for config in PARTS.values() for each in fields(config)
}
"""Option -> when another value of it changes answers."""
