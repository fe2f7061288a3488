"""Options of the engine, each once: keyword arguments of `LLM`, command-line flags and the docs come from here."""

from winnow.config.cache import KV_RESERVATIONS, PREFIX_DISK, CacheConfig
from winnow.config.engine import EFFECTS, PARTS, EngineConfig, present_options
from winnow.config.eviction import AUTO, COMPRESSING, FULL, EvictionConfig
from winnow.config.media import MediaConfig
from winnow.config.model import ATTENTION_BACKENDS, DTYPES, WEIGHT_DTYPES, ModelConfig
from winnow.config.option import Effect, option, optional_int
from winnow.config.scheduler import SCHEDULING_POLICIES, SchedulerConfig

__all__ = [
    "ATTENTION_BACKENDS", "AUTO", "COMPRESSING", "DTYPES", "EFFECTS", "FULL",
    "KV_RESERVATIONS", "PARTS", "PREFIX_DISK", "SCHEDULING_POLICIES", "WEIGHT_DTYPES",
    "CacheConfig", "Effect", "EngineConfig", "EvictionConfig", "MediaConfig", "ModelConfig",
    "SchedulerConfig", "option", "optional_int", "present_options",
]  # fmt: skip
