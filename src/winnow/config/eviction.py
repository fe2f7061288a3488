"""Options of eviction."""

from dataclasses import dataclass
from typing import Any

from winnow.checks import check_integer, check_number
from winnow.config.option import Effect, option, optional_int
from winnow.errors import ConfigError

FULL, COMPRESSING = "full", "winnow"
"""Presets that stand for an `eviction` that was left out: without, and with, an amount to keep."""


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
