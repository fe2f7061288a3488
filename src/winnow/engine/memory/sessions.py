"""Whose conversations continue, as handles on what the prefix index holds of their last states."""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from hashlib import sha256
from itertools import islice

import numpy as np

from winnow.cache import Ledger
from winnow.cache.accounting.prefix_chain import PrefixChain, PrefixKey
from winnow.engine.memory.chains import SessionRule
from winnow.engine.memory.file_store import FileStore
from winnow.engine.memory.session import Session, SessionKey, own_keys
from winnow.engine.requests.request import Sequence
from winnow.eviction import EvictionPolicy
from winnow.outputs import SessionStats
from winnow.values.reuse import ANYWHERE
from winnow.values.tenants import TenantName

_log = logging.getLogger("winnow")

MAX_SESSIONS = 10_000
TIERS = ("device", "partly", "disk", "gone")
"""Names of places where the KVs of a session lie: all on the device, some, none but on disk, or none."""


class Sessions:
    """Table of sessions. A session holds no memory: it names prefixes in the index, which may be evicted.

    A request of a session begins with the longest prefix that is known, to the last common token; where rounds have
    compressed the session, with what they left, if all its tokens and its policy are the same.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float], files: FileStore) -> None:
        self._ledger, self._clock, self._files = ledger, clock, files
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()
        self.reused_tokens = self.num_dropped = self.num_released = 0

    def continue_chain(self, sequence: Sequence, chain: PrefixChain) -> None:
        """Add the compressed state of its session to a sequence's chain, if the sequence may continue from it."""
        session = self._of(sequence)
        if session is None or session.snapshot is None or session.rule is None:
            return
        length, rule, eviction = session.num_compressed, session.rule, sequence.eviction
        if length >= sequence.num_tokens or sequence.prefix_ids[:length] != session.prefix_ids[:length]:
            return
        if eviction is None or eviction.policy != rule.policy:
            return
        if not {span for span in eviction.spans if span[0] < length} <= set(rule.spans):
            return
        snapshots = {**chain.snapshots, length: (session.snapshot, rule)}
        chain.snapshots = dict(sorted(snapshots.items(), reverse=True))

    def count_hit(self, sequence: Sequence) -> None:
        if self._of(sequence) is not None:
            self.reused_tokens += sequence.kv.num_computed

    def end_turn(self, sequence: Sequence) -> None:
        """Remember the state with which a sequence ends that still has its slot."""
        request, chain, kv = sequence.request, sequence.prefix, sequence.kv
        terms, computed = request.session, kv.num_computed
        if terms is None or chain is None or len(request.sequences) > 1:
            return
        if not 1 < computed <= sequence.num_tokens:
            return
        key = request.tenant, terms.name
        session = self._sessions.pop(key, None) or Session(terms.name, request.tenant, chain)
        self._sessions[key] = session
        chain.extend(sequence.prefix_ids[:computed])
        before = set(session.keys)
        self._renew_snapshot(session, sequence, chain)
        session.chain = chain
        session.token_ids = np.array(sequence.token_ids[:computed], dtype=np.int64)
        session.images = request.images
        session.note_keys(self._ledger.layout.block_size)
        session.num_turns += 1
        session.last_used = self._clock()
        if request.reuse == ANYWHERE:  # what left its middle, and what stood elsewhere behind that
            self._discard(session, before.difference(session.keys))
        self._ledger.prefixes.touch(session.keys)
        for each in [*islice(self._sessions.values(), max(len(self._sessions) - MAX_SESSIONS, 0))]:
            self.num_dropped += 1
            self.drop(each.name, each.tenant)

    def release(self, sequence: Sequence) -> None:
        """Forget the session of a sequence that has ended, if that was its last turn."""
        terms = sequence.request.session
        if terms is not None and terms.release:
            self.num_released += self.drop(terms.name, sequence.request.tenant)

    def list(self, tenant: TenantName = None, *, all_tenants: bool = False) -> "list[SessionStats]":
        found = [s for s in reversed(self._sessions.values()) if all_tenants or s.tenant == tenant]
        return [self._stats(session) for session in found]

    def drop(self, name: str, tenant: TenantName = None) -> bool:
        """Delete a session and the prefixes that only it names. Returns False if there is none."""
        session = self._sessions.pop((tenant, name), None)
        if session is None:
            return False
        self._discard(session, set(session.keys))
        return True

    def find(self, name: str, tenant: TenantName = None) -> Session | None:
        return self._sessions.get((tenant, name))

    def count_tiers(self) -> dict[str, int]:
        return dict.fromkeys(TIERS, 0) | Counter(map(self._tier, self._sessions.values()))

    def _of(self, sequence: Sequence) -> Session | None:
        terms = sequence.request.session
        return None if terms is None else self._sessions.get((sequence.request.tenant, terms.name))

    def _renew_snapshot(self, session: Session, sequence: Sequence, chain: PrefixChain) -> None:
        eviction, kv, index = sequence.eviction, sequence.kv, self._ledger.prefixes
        if session.snapshot is not None and index.knows(session.snapshot):
            index.drop(session.snapshot)
        session.snapshot = session.rule = None
        if not kv.last_round or eviction is None or not continues(eviction.policy):
            return
        slot, computed = kv.running_slot, kv.num_computed
        # What the index holds of it is another's prefix.
        if not self._ledger.own_or_forget(slot):
            return
        token_ids = sequence.prefix_ids[:computed]
        key = chain.snapshot_key(token_ids, sha256(b"session" + session.name.encode()).digest())
        rule = SessionRule(session.name, eviction.policy, eviction.spans)
        self._ledger.prefix_rows.take_snapshot(slot, key, token_ids, rule, kv.num_rounds)
        if index.knows(key):
            session.snapshot, session.rule, session.num_compressed = key, rule, computed

    def _discard(self, session: Session, keys: set[PrefixKey]) -> None:
        index = self._ledger.prefixes
        for key in filter(index.knows, own_keys(self._sessions, session, keys)):
            index.drop(key)

    def _bytes(self, session: Session) -> int:
        return self._ledger.prefixes.bytes_of(session.keys)

    def _tier(self, session: Session) -> str:
        # The end of a prefix gives way before its front.
        ends = [self._ledger.prefixes.knows(key) for key in (session.keys[0], session.keys[-1])]
        if any(ends):
            return TIERS[0] if all(ends) else TIERS[1]
        return TIERS[2] if self._files.holds(session.keys[-1]) else TIERS[3]

    def _stats(self, session: Session) -> SessionStats:
        return SessionStats(
            name=session.name,
            tenant=session.tenant,
            tier=self._tier(session),
            num_bytes=self._bytes(session),
            num_tokens=len(session.token_ids),
            num_turns=session.num_turns,
            compressed=session.snapshot is not None,
            idle_seconds=self._clock() - session.last_used,
        )


def continues(policy: EvictionPolicy) -> bool:
    """Return whether rounds of a policy may compress again the rows that its rounds of an earlier turn left. What is
    learnt of queries beside KVs is not kept, and a replay repeats tokens whose KVs are gone."""
    score = policy.score
    return not score.needs.probes and score.replay is None and policy.compact is None
