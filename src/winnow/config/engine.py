"""Configuration of an engine: all options together."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Self

from winnow.config.cache import CacheConfig
from winnow.config.eviction import AUTO, EvictionConfig
from winnow.config.media import MediaConfig
from winnow.config.model import ModelConfig
from winnow.config.option import Effect
from winnow.config.scheduler import SchedulerConfig
from winnow.errors import ConfigError
from winnow.values.foreign_names import translate
from winnow.values.json_values import json_value
from winnow.vllm import names as vllm_names


@dataclass(frozen=True)
class EngineConfig:
    """The parts together."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    eviction: EvictionConfig = field(default_factory=EvictionConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    codec_factor: float = 1.0
    """By what the format that `compression` chose divides the bytes of KVs; set once the model is loaded."""

    @property
    def counts_bytes(self) -> bool:
        """Whether `compression` is of bytes, for which a format of KVs is to be chosen."""
        cache, eviction = self.cache, self.eviction
        said = cache.kv_cache_dtype, cache.kv_group, cache.kv_wide, cache.value_tier, eviction.eviction
        return eviction.compression is not None and not any(said)

    def __post_init__(self) -> None:
        if self.scheduler.batch_invariant and (self.cache.enable_prefix_caching or not self.model.optimize):
            raise ConfigError(
                "batch_invariant needs enable_prefix_caching false, since others cut what they share elsewhere, and "
                f"optimize, got {self.cache.enable_prefix_caching} and {self.model.optimize}"
            )
        if self.model.tensor_parallel_size > 1 and self.cache.value_tier is not None:
            raise ConfigError(
                "value_tier does not go with tensor_parallel_size above 1, got "
                f"{self.cache.value_tier} and {self.model.tensor_parallel_size}"
            )

    def settings(self) -> dict[str, Any]:
        """Return every option of every part by name, as JSON values: what resume, fingerprints and reports go by.

        A policy without a name is described by all its fields; one that was left out is the preset that stands for it.
        """
        values = {
            each.name: json_value(getattr(part, each.name))
            for part in (getattr(self, name) for name in PARTS)
            for each in fields(part)
        }
        stored = self.cache.kv_cache_dtype or (None if self.counts_bytes else AUTO)
        return values | {"eviction": json_value(self.eviction.chosen), "kv_cache_dtype": stored}

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Sort flat keyword arguments into the parts.

        Raises:
            ConfigError: an unknown option, a value out of range, or an option of vLLM's for what Winnow does not do;
                names what it has instead.
        """
        names = {part: [f.name for f in fields(config)] for part, config in PARTS.items()}
        options = present_options(options)
        # Only here is known what was left out.
        if "kv_memory" in options:
            options["gpu_memory_utilization"] = None
        elif options.get("gpu_memory_utilization") is None:
            options["gpu_memory_utilization"] = GPU_PART
        return cls(
            **{
                part: config(**{name: options[name] for name in names[part] if name in options})
                for part, config in PARTS.items()
            }
        )


def present_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options under their present names, vLLM's translated; values are not checked. Raises as `from_options`."""
    given = {name: each for name, each in options.items() if each is not None or name not in _NEVER_NONE}
    for name in given.keys() & _EARLIER_NAMES.keys():
        present = _EARLIER_NAMES[name]
        if present in options:
            raise ConfigError(f"{name} is the earlier name of {present}: give {present} alone")
        given[present] = given.pop(name)
    return translate(given, vllm_names.ENGINE, EFFECTS, ConfigError, "option")


GPU_PART = 0.9
"""Part of a GPU's memory in use where no option says it; as vLLM's."""

PARTS: Mapping[str, Any] = {
    each.name: each.default_factory for each in fields(EngineConfig) if each.default_factory is not MISSING
}

_OPTIONS = {each.name: each for config in PARTS.values() for each in fields(config)}
_EARLIER_NAMES = {
    alias: name for name, each in _OPTIONS.items() for alias in each.metadata.get("aliases", ())
}
_NEVER_NONE = {name for name in (*vllm_names.SHARED, "kv_memory") if _OPTIONS[name].default is not None}

EFFECTS: Mapping[str, Effect] = {name: each.metadata["effect"] for name, each in _OPTIONS.items()}
"""Option -> when another value of it changes answers."""
