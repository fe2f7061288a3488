"""Options of the padded engine, behind its name: `engine="padded:mode=static,prefill_group=4"`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from winnow.config import PARTS, EngineConfig
from winnow.errors import ConfigError
from winnow.values.checks import check_choice, check_integer, check_number
from winnow.values.units import parse_bytes

PADDED_MODES = ("embedding", "shaping", "pd", "static")
BENCH_PADDED_MODES = ("shaping-gaps",)  # for `python -m winnow_lab.papers baton` alone

_READ = {
    "model", "revision", "tokenizer", "engine", "dtype", "device", "threads", "load_format", "max_model_len",
    "optimize", "generation_config", "verify_model", "model_cache", "seed", "kv_memory",
    "gpu_memory_utilization", "enable_prefix_caching", "max_num_seqs", "max_num_batched_tokens",
    "prefill_chunk", "scheduling_policy", "aging", "tenants",
    "limit_mm_per_prompt", "allowed_media_domains", "allowed_local_media_path", "check",
}  # fmt: skip
"""Options of every engine that mean something to this one."""


@dataclass(frozen=True)
class PaddedOptions:
    """Options of the padded engine besides those of every engine.

    Attributes:
        mode: embedding: queries are prefilled apart and join at any step; shaping: prefilled in the batch's own pass;
            pd: prefilled apart, batches run to completion; static: batches run to completion.
        prefill_group: most queries that are prefilled together, apart from the batch.
        group_padding: most padding in such a group, as a part of what it computes.
        park_memory: most host memory for KVs of queries that are out of the batch, which are computed again if they do
            not fit; None: as much as kv_memory.
        park_above: queries are parked in host memory above this part of kv_memory.
        admit_below: queries join others only up to this part of kv_memory.
        overlap_prefill: prefill queries in the background while the batch decodes (mode=embedding); None: where the
            model lies on CUDA.
    """

    mode: str = "embedding"
    prefill_group: int = 8
    group_padding: float = 0.02
    park_memory: int | None = None
    park_above: float = 1.0
    admit_below: float = 0.9
    overlap_prefill: bool | None = None

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        """Read them from `engine`. Raises ConfigError: one is unknown or out of range, or an option has no meaning
        here."""
        for part in (getattr(config, name) for name in PARTS):
            for each in fields(part):
                value = getattr(part, each.name)
                if each.name not in _READ and value not in (each.default, "auto"):
                    raise ConfigError(f"{each.name} needs engine=paged, got {value!r} and engine=padded")
        quotas = [tenant.name for tenant in config.scheduler.tenants if tenant.has_quota]
        if quotas:
            raise ConfigError(
                f"tenants: guarantee and limit need engine=paged, got those of {', '.join(quotas)}"
            )
        given = {}
        for part in filter(None, config.model.engine.partition(":")[2].split(",")):
            name, _, text = part.strip().partition("=")
            check_choice("an option of engine=padded", name, _PARSE)
            try:
                given[name] = _PARSE[name](text)
            except ConfigError:
                raise
            except (ValueError, KeyError):
                raise ConfigError(f"engine: {name} cannot be {text!r}") from None
        return cls(**given)

    def __post_init__(self) -> None:
        if self.mode not in BENCH_PADDED_MODES:
            check_choice("mode", self.mode, PADDED_MODES)
        if self.overlap_prefill and self.mode != "embedding":
            raise ConfigError(f"overlap_prefill needs mode=embedding, got on and mode={self.mode}")
        check_integer("prefill_group", self.prefill_group, 1, 1024)
        for name in ("group_padding", "park_above", "admit_below"):
            check_number(name, getattr(self, name), 0.0, 1.0)
        if not self.park_above:
            raise ConfigError("park_above must be greater than 0, got 0")
        if self.admit_below > self.park_above:
            raise ConfigError(
                f"admit_below must be at most park_above ({self.park_above:g}), got {self.admit_below:g}"
            )


_PARSE: Mapping[str, Callable[[str], Any]] = {
    "mode": str,
    "prefill_group": int,
    "group_padding": float,
    "park_memory": lambda text: parse_bytes(text, "park_memory"),
    "park_above": float,
    "admit_below": float,
    "overlap_prefill": {"on": True, "off": False}.__getitem__,
}
