"""Presets of eviction side by side, all within the same KV memory."""

from collections.abc import Iterable
from typing import Any

from winnow.bench.kv_memory import kv_memory_for
from winnow.config import EngineConfig
from winnow.eviction import find_preset


def options_by_eviction(
    evictions: Iterable[str], compression: float, options: dict[str, Any], kv_seqs: int, num_kvs: int
) -> dict[str, dict[str, Any]]:
    """Return options of `LLM` for each preset, by a name that tells the compression.

    Args:
        compression: of those that evict.
        options: what they have in common, the model at least.
        kv_seqs, num_kvs: the KV memory holds `kv_seqs` sequences of `num_kvs` KVs a row, none evicted.

    Raises:
        ConfigError: a value is out of range, or there is no such preset.
    """
    config = EngineConfig.from_options(options | {"compression": compression})
    options = options | {"kv_memory": kv_memory_for(config, kv_seqs, num_kvs)}
    found = {}
    for eviction in evictions:
        find_preset(eviction)  # an unknown name is refused before anything is measured
        if eviction == "full":
            found[eviction] = options
        else:
            found[f"{eviction} {compression:g}x"] = options | {
                "eviction": eviction,
                "compression": compression,
            }
    return found
