"""WHEN compressed prefixes go to disk and come from there: between steps, by way of the prefix index."""

from collections.abc import Hashable
from collections.abc import Sequence as SequenceType
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from hashlib import sha256
from pathlib import Path
from typing import Any

from winnow.cache import Ledger
from winnow.cache.accounting.prefix_chain import PrefixChain, PrefixKey
from winnow.cache.accounting.prefix_index import Snapshot
from winnow.cache.layout import IntArray
from winnow.engine.executor import Executor
from winnow.engine.residency.prefix_format import SavedPrefix
from winnow.engine.residency.prefix_store import PrefixStore, SavedDocument
from winnow.engine.scheduling.orders import TenantName
from winnow.eviction import EvictionPolicy, SequenceEviction
from winnow.values.json_values import dump_json, json_value

_MOST_REASONS = 4


class SavedPrefixes:
    """Transfer of snapshots between the index and a store, and lookup of the stored ones that a prompt begins with.

    Args:
        store: where prompts look for prefixes; None: nowhere.
    """

    def __init__(self, executor: Executor, ledger: Ledger, store: PrefixStore | None) -> None:
        self._executor = executor
        self._ledger = ledger
        self._store = store
        self._num_prompts, self._is_used = 0, False
        self._reasons: dict[str, None] = {}

    def documents(self, token_ids: SequenceType[int], tenant: TenantName) -> list[SavedDocument]:
        """Return stored documents that are proper prefixes of a prompt, longest first."""
        if self._store is None:
            return []
        self._num_prompts += 1
        chain = PrefixChain(tenant or "", self._ledger.layout.block_size)
        chain.extend(token_ids)
        keys: dict[int, PrefixKey] = {}
        found = []
        for each in self._store.own_documents():
            length = each.num_tokens
            if length < len(token_ids):
                if length not in keys:
                    keys[length] = chain.document_key(token_ids[:length])
                if keys[length] == each.document:
                    found.append(each)
        return found

    def has(
        self,
        document: SavedDocument,
        token_ids: SequenceType[int],
        tenant: TenantName,
        eviction: SequenceEviction | None,
    ) -> bool:
        """Return whether the store has what `eviction` leaves of a document at a prompt's beginning; notes why not."""
        if eviction is None:
            self.note_reason("the request keeps all KVs")
            return False
        chain = chain_of(token_ids, tenant, self._ledger.layout.block_size, eviction)
        key, _ = chain.snapshots.get(document.num_tokens, (None, None))
        path = None if key is None or self._store is None else self._store.path(key)
        if path is not None and path.is_file() and is_portable(eviction.policy):
            self._is_used = True
            return True
        if document.policy != json_value(eviction.policy):
            self.note_reason("it was saved under another policy")
        elif document.kv_budget != eviction.budget:
            self.note_reason(
                f"it was saved with {document.kv_budget} KVs a row, and requests keep {eviction.budget} of its "
                f"{document.num_tokens} tokens (compression, kv_budget)"
            )
        else:
            self.note_reason("it was saved with other `protect`, after other rounds or another replay")
        return False

    def note_reason(self, reason: str) -> None:
        """Remember why a prompt that begins with a document does not start from it."""
        if len(self._reasons) < _MOST_REASONS:
            self._reasons[reason] = None

    def why_unused(self) -> str | None:
        """Return why no prompt so far could start from the store; None: one could, or there was none, or no store."""
        if self._store is None or self._is_used or not self._num_prompts:
            return None
        if not (documents := self._store.own_documents()):
            return self._store.why_foreign()
        if self._reasons:
            return "a prompt begins with one, but " + "; ".join(self._reasons)
        shortest = documents[-1].num_tokens
        return f"no prompt begins with one under its tenant (the shortest has {shortest} tokens)"

    def load(self, key: PrefixKey, token_ids: list[int], rule: SequenceEviction) -> bool:
        """Read a saved snapshot into the index. Returns False if there is none, or no memory for it."""
        if self._store is None or not is_portable(rule.policy):
            return False
        found = self._store.load(key, token_ids, rule.policy.score.num_accumulators)
        return found is not None and self.place(found, key, token_ids, rule)

    def place(self, found: SavedPrefix, key: PrefixKey, token_ids: list[int], rule: SequenceEviction) -> bool:
        """Add a snapshot that was read to the index. Returns False if there is no memory for it."""
        blocks = self.take_filled(found)
        if blocks is None:
            return False
        snapshot = Snapshot.of(
            key, token_ids, rule, found.lengths, blocks, found.num_rounds, found.position_offset
        )
        if not self._ledger.prefix_rows.keep_snapshot(snapshot):
            return False
        self._executor.write_states(key, found.states)
        self._is_used = True
        return True

    def take_filled(self, found: SavedPrefix) -> IntArray | None:
        """Take blocks and fill them with a snapshot that was read: int32 [n]; None: there is no memory."""
        blocks = self._ledger.prefix_rows.take_blocks_for(found.lengths)
        if blocks is None:
            return None
        try:
            # What the ledger has done so far may still read or write these blocks.
            self._executor.apply(self._ledger.take_update())
            self._executor.write_blocks(blocks, found.data)
        except BaseException:
            self._ledger.allocator.release(blocks)
            raise
        return blocks

    def save(self, snapshot: Snapshot, document: bytes, rule: SequenceEviction, store: PrefixStore) -> Path:
        """Write a snapshot of the index. Raises as `PrefixStore.save`."""
        self._executor.apply(self._ledger.take_update())
        notes = {"policy": json_value(rule.policy), "kv_budget": rule.budget, "tokens": snapshot.num_tokens}
        data = self._executor.read_blocks(snapshot.blocks)
        states = self._executor.read_states(snapshot.key)
        return store.save(snapshot, data, rule.policy.score.num_accumulators, document, notes, states)


def chain_of(
    token_ids: SequenceType[int], tenant: TenantName, block_size: int, eviction: SequenceEviction | None
) -> PrefixChain:
    """Return the keys of a prompt's prefixes, those of the snapshots that its policy leaves included."""
    predictor = None if eviction is None else eviction.policy.score.needs.predictor
    scored_by = None if predictor is None else predictor.path or ""
    chain = PrefixChain(tenant or "", block_size, scored_by)
    chain.extend(token_ids)
    if eviction is not None:
        chain.snapshots = snapshots_of(chain, token_ids, eviction)
        rule = eviction.after
        while rule is not None:
            chain.earlier.append(_snapshot(chain, token_ids[: rule.context_len], rule, {}))
            rule = rule.after
    return chain


def snapshots_of(
    chain: PrefixChain, token_ids: SequenceType[int], eviction: SequenceEviction
) -> dict[int, tuple[PrefixKey, Hashable]]:
    """Return the keys and rules of the snapshots that a policy leaves, by number of tokens."""
    digests: dict[SequenceEviction, bytes] = {}
    return {
        computed: _snapshot(chain, token_ids[:computed], rule, digests)
        for computed, rule in eviction.snapshots()
    }


def _snapshot(
    chain: PrefixChain,
    token_ids: SequenceType[int],
    rule: SequenceEviction,
    digests: dict[SequenceEviction, bytes],
) -> tuple[PrefixKey, Hashable]:
    if rule not in digests:
        digests[rule] = sha256(dump_json(json_value(rule)).encode()).digest()
    # The passes follow from the rest, and are as long as the context.
    return chain.snapshot_key(token_ids, digests[rule]), replace(rule, passes=())


def is_portable(policy: EvictionPolicy) -> bool:
    """Return whether what a policy keeps follows from its description in every process.

    All of it is Winnow's own, and none of it comes from another file.
    """
    return _is_own(policy) and policy.score.needs.predictor is None


def _is_own(value: Any) -> bool:
    """Return whether a value and all that it consists of are Winnow's or plain Python."""
    if isinstance(value, tuple | list | frozenset):
        return all(map(_is_own, value))
    if not is_dataclass(value):
        return value is None or isinstance(value, bool | int | float | str | Enum)
    parts = (getattr(value, each.name) for each in fields(value))
    return type(value).__module__.partition(".")[0] == "winnow" and all(map(_is_own, parts))
