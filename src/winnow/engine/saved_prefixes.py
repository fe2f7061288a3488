"""WHEN compressed prefixes go to disk and come from there: between steps, by way of the prefix index."""

from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from winnow.cache import Ledger
from winnow.cache.prefix_index import PrefixKey, Snapshot
from winnow.engine.executor import Executor
from winnow.engine.prefix_store import PrefixStore
from winnow.eviction import EvictionPolicy, SequenceEviction
from winnow.json_values import json_value


class SavedPrefixes:
    """Moves snapshots between the index and a store.

    Args:
        store: where prompts look for prefixes; None: nowhere.
    """

    def __init__(self, executor: Executor, ledger: Ledger, store: PrefixStore | None) -> None:
        self._executor = executor
        self._ledger = ledger
        self._store = store

    def load(self, key: PrefixKey, token_ids: list[int], rule: SequenceEviction) -> bool:
        """Let the index know a saved snapshot. False: there is none, or memory lacks."""
        if self._store is None or not is_portable(rule.policy):
            return False
        found = self._store.load(key, token_ids, rule.policy.score.num_accumulators)
        if found is None:
            return False
        blocks = self._ledger.prefix_rows.take_blocks_for(found.lengths)
        if blocks is None:
            return False
        try:
            # What the ledger has done so far may still read or write these blocks.
            self._executor.apply(self._ledger.take_update())
            self._executor.write_blocks(blocks, found.data)
        except BaseException:
            self._ledger.allocator.release(blocks)
            raise
        snapshot = Snapshot.of(
            key, token_ids, rule, found.lengths, blocks, found.num_rounds, found.position_offset
        )
        if not self._ledger.prefix_rows.keep_snapshot(snapshot):
            return False
        self._executor.write_wide(key, found.wide)
        return True

    def save(self, snapshot: Snapshot, rule: SequenceEviction, store: PrefixStore) -> Path:
        """Write a snapshot of the index. Raises as `PrefixStore.save`."""
        self._executor.apply(self._ledger.take_update())
        notes = {"policy": json_value(rule.policy), "kv_budget": rule.budget, "tokens": snapshot.num_tokens}
        data = self._executor.read_blocks(snapshot.blocks)
        wide = self._executor.read_wide(snapshot.key)
        return store.save(snapshot, data, rule.policy.score.num_accumulators, notes, wide)


def is_portable(policy: EvictionPolicy) -> bool:
    """Whether what a policy keeps follows from its description in every process: all of it is Winnow's own, and none of
    it comes from another file."""
    return _is_own(policy) and policy.score.needs.predictor is None


def _is_own(value: Any) -> bool:
    """Whether a value and all that it consists of are Winnow's or plain Python."""
    if isinstance(value, tuple | list | frozenset):
        return all(map(_is_own, value))
    if not is_dataclass(value):
        return value is None or isinstance(value, bool | int | float | str | Enum)
    parts = (getattr(value, each.name) for each in fields(value))
    return type(value).__module__.partition(".")[0] == "winnow" and all(map(_is_own, parts))
