"""Candidates of a search."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from winnow.config import FULL, CacheConfig, EvictionConfig
from winnow.errors import ConfigError
from winnow.eviction import find_preset, resolve_policy

PRESETS = (
    "winnow",
    "winnow-seen",
    "leverage",
    "kv-compress",
    "kv-compress-pd",
    "snapkv",
    "ada-snapkv",
    "winnow-keys",
    "streaming",
)
"""Tried where the user names none: one or two of each kind that needs no files of its own."""
COMPRESSIONS = (2.0, 4.0, 8.0)
KV_DTYPE = "kv_cache_dtype"
"""The engine's option for stored KVs, where it has one."""


@dataclass(frozen=True, order=True)
class Candidate:
    """Options of an engine.

    Attributes:
        compression: None: the policy takes none.
        max_num_seqs: most sequences at the same time.
        kv_cache_dtype: format of stored KVs; auto: the model's.
    """

    eviction: str
    compression: float | None
    max_num_seqs: int
    kv_cache_dtype: str = "auto"

    @property
    def engine(self) -> dict[str, Any]:
        """Options that an engine is opened with; those of requests are `request`."""
        options: dict[str, Any] = {"max_num_seqs": self.max_num_seqs}
        return options if self.kv_cache_dtype == "auto" else options | {KV_DTYPE: self.kv_cache_dtype}

    @property
    def request(self) -> dict[str, Any]:
        """Sampling parameters that choose the policy."""
        if self.eviction == FULL:
            return {"eviction": FULL}
        options: dict[str, Any] = {"eviction": self.eviction}
        return options if self.compression is None else options | {"compression": self.compression}

    @property
    def flags(self) -> dict[str, str]:
        """Command-line flags by name."""
        options = self.request | self.engine
        return {
            f"--{name.replace('_', '-')}": f"{value:g}" if isinstance(value, float) else str(value)
            for name, value in options.items()
        }

    def __str__(self) -> str:
        parts = [self.eviction]
        if self.compression is not None:
            parts.append(f"{self.compression:g}x")
        parts.append(f"{self.max_num_seqs} at once")
        if self.kv_cache_dtype != "auto":
            parts.append(self.kv_cache_dtype)
        return ", ".join(parts)


def candidates(
    presets: Sequence[str] = PRESETS,
    compressions: Sequence[float] = COMPRESSIONS,
    batches: Sequence[int] = (64,),
    kv_dtypes: Sequence[str] = ("auto",),
) -> list[Candidate]:
    """Return all combinations, and the full cache with each batch; policies that decide how much they keep stand once.

    Raises:
        ConfigError: no such preset, a compression below 1, or formats of KVs where the engine has no choice.
    """
    if set(kv_dtypes) != {"auto"} and KV_DTYPE not in {each.name for each in fields(CacheConfig)}:
        raise ConfigError(
            f"kv_dtypes must be auto: this engine has no option {KV_DTYPE}, got {list(kv_dtypes)}"
        )
    for rate in compressions:
        EvictionConfig(compression=rate)
    return sorted(set(_all(presets, compressions, batches, kv_dtypes)), key=str)


def _all(
    presets: Sequence[str], compressions: Sequence[float], batches: Sequence[int], kv_dtypes: Sequence[str]
) -> Iterator[Candidate]:
    for batch in batches:
        for kv_dtype in kv_dtypes:
            yield Candidate(FULL, None, batch, kv_dtype)
            for name in presets:
                find_preset(name)
                takes = resolve_policy(EvictionConfig(eviction=name)).takes_amount
                for rate in compressions if takes else (None,):
                    yield Candidate(name, rate, batch, kv_dtype)


def from_json(values: Mapping[str, Any]) -> Candidate:
    """Return a candidate as a journal holds it."""
    return Candidate(**values)
