"""Keys of the prefixes with which a sequence may begin, those of snapshots that policies leave included."""

from collections.abc import Hashable, Sequence as SequenceType
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from hashlib import sha256
from typing import Any

from winnow.cache.accounting.prefix_chain import PrefixChain, PrefixKey
from winnow.eviction import EvictionPolicy, SequenceEviction
from winnow.values.json_values import dump_json, json_value
from winnow.values.tenants import TenantName


@dataclass(frozen=True)
class SessionRule:
    """Rule that a session's snapshot follows from besides its tokens: its own turns alone see it."""

    name: str
    policy: EvictionPolicy | None
    spans: tuple[tuple[int, int], ...] = ()


def chain_of(
    token_ids: SequenceType[int], tenant: TenantName, block_size: int, eviction: SequenceEviction | None
) -> PrefixChain:
    chain = PrefixChain(tenant or "", block_size)
    chain.extend(token_ids)
    digests: dict[SequenceEviction, bytes] = {}
    if eviction is not None:
        chain.snapshots = {
            computed: _snapshot(chain, token_ids[:computed], rule, digests)
            for computed, rule in eviction.snapshots()
        }
    return chain


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


def stored_accumulators(rule: Hashable) -> int | None:
    """Return accumulators per KV of a snapshot's file; None: who reads it cannot check its rule."""
    if isinstance(rule, SequenceEviction):
        return rule.policy.score.num_accumulators if is_portable(rule.policy) else None
    return 0 if isinstance(rule, SessionRule) and rule.policy is None else None


def is_portable(policy: Any) -> bool:
    """Return whether what a policy keeps follows from its description in every process: none of it is foreign."""
    if isinstance(policy, tuple | list | frozenset):
        return all(map(is_portable, policy))
    if not is_dataclass(policy):
        return policy is None or isinstance(policy, bool | int | float | str | Enum)
    parts = (getattr(policy, each.name) for each in fields(policy))
    return type(policy).__module__.partition(".")[0] == "winnow" and all(map(is_portable, parts))
