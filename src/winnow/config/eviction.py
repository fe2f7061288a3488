"""Options of eviction."""

from dataclasses import dataclass, replace
from typing import Any, Self

from winnow.config.option import Effect, option, optional_int
from winnow.errors import ConfigError
from winnow.values.checks import check_integer, check_number
from winnow.values.eviction_request import AUTO, Amount, check_one_amount

TEXT = "text"
"""The `pool` that follows from the tokenizer."""
FULL, COMPRESSING = "full", "winnow"
"""Presets that stand for an `eviction` that was left out: without, and with, an amount to keep."""


def _amount(text: str) -> float | str:
    return text if text == AUTO else float(text)


def _pool(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdigit() else text


@dataclass(frozen=True)
class EvictionConfig:
    """Options of eviction: which KVs are kept when they cannot all be, and how many. Requests may bring their own."""

    eviction: Any = option(
        None,
        "what decides which KVs stay: a preset's name (`winnow policies` lists them), on the command line also "
        "path.py:name, in Python an EvictionPolicy; "
        "left out: winnow where compression or kv_budget is given, else full",
        parse=str,
        metavar="NAME",
    )
    compression: float | str | None = option(
        None,
        "how many times fewer bytes the KVs of a prompt take, such as 8, by their format and by keeping fewer; where "
        "eviction or kv_cache_dtype is given, tokens of the prompt per KV kept in each row on average (states that "
        "layers keep in place of KVs stay whole); auto: every KV while memory suffices, and as much less as keeps "
        "answers for requests that start while others wait for memory; left out, with no kv_budget: what the preset's "
        "paper uses, else 4",
        parse=_amount,
    )
    kv_budget: int | None = option(None, "KVs kept in each row on average, in place of compression")
    pool: Any = option(
        None,
        "neighbours over which a policy pools its scores: an odd number of tokens, or text: as many as cover what 7 "
        "tokens did in the papers (21 where each digit is a token); left out: as the policy says",
        parse=_pool,
    )
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
    check: float = option(
        0.05,
        "share of the answers under a policy, at least 4, that are computed from all KVs too, once nothing else is to "
        "be done, and of the time that this may take: how many are equal is shown; 0: none",
        effect=Effect.NEVER,
    )

    def for_policy(self, eviction: Any, *, pools: bool, amount: Amount | None = None) -> Self:
        """Return the options with another policy, and amount if given; without `pool` where it does not pool."""
        amounts = {} if amount is None else vars(amount)
        return replace(self, eviction=eviction, pool=self.pool if pools else None, **amounts)

    def __post_init__(self) -> None:
        check_one_amount(self.compression, self.kv_budget)
        _ = self.amount
        if self.pool is not None and self.pool != TEXT:
            check_integer("pool", self.pool, 1)
        for name in ("kv_floor", "max_round_kvs"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        check_number("check", self.check, 0, 1)
        for name in ("compression", "kv_budget"):
            if self.eviction == FULL and (asked := getattr(self, name)) is not None:
                asked = asked if asked == AUTO else f"{asked:g}"
                raise ConfigError(
                    f"eviction={FULL} keeps every KV and {name}={asked} asks for fewer: give one"
                )
        if self.num_accumulators is not None:
            check_integer("num_accumulators", self.num_accumulators, 0, 2)

    @property
    def amount(self) -> Amount:
        """Amount to keep; with `compression=auto` there is none before a request starts."""
        compression: Any = None if self.compression == AUTO else self.compression
        return Amount(compression, self.kv_budget)

    @property
    def chosen(self) -> Any:
        """Policy that decides: `eviction`, or the preset that stands for it where it was left out."""
        if self.eviction is not None:
            return self.eviction
        return FULL if self.compression is None and self.kv_budget is None else COMPRESSING
