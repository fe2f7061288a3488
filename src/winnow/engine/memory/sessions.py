"""Whose conversations continue, as handles on what the prefix index holds of their last states; and how they age."""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import islice

import numpy as np

from winnow.cache import Ledger
from winnow.cache.accounting.prefix_chain import PrefixChain, PrefixKey
from winnow.cache.layout import CacheLayout
from winnow.engine.memory.chains import SessionRule
from winnow.engine.memory.file_store import FileStore
from winnow.engine.memory.session import Session, SessionKey
from winnow.engine.requests.new_request import NewRequest
from winnow.engine.requests.request import Request, Sequence
from winnow.errors import InvalidRequestError
from winnow.eviction import EvictionPolicy
from winnow.eviction.presets import AGING
from winnow.outputs import SessionStats
from winnow.sampling import SamplingParams
from winnow.values.reuse import ANYWHERE
from winnow.values.session_request import SessionRequest
from winnow.values.tenants import TenantName, TenantTable
from winnow.values.units import format_bytes

_log = logging.getLogger("winnow")

MAX_SESSIONS = 10_000
TIERS = ("device", "partly", "disk", "gone")
"""Names of places where the KVs of a session lie: all on the device, some, none but on disk, or none."""


class Sessions:
    """Table of sessions. A session holds no memory: it names prefixes in the index, which may be evicted.

    A request of a session begins with the longest prefix that is known, to the last common token; where rounds have
    compressed the session, with what they left, if all its tokens and its policy are the same. A session of more than
    `memory` bytes has its oldest turns compressed (None: no limit); one that cannot be so small is left to the prefix
    cache. Beyond what one of `tenants` may take, the least recently used of it are forgotten.
    """

    def __init__(
        self,
        ledger: Ledger,
        clock: Callable[[], float],
        tenants: TenantTable,
        files: FileStore,
        memory: int | None,
    ) -> None:
        self._ledger, self._clock, self._files = ledger, clock, files
        self._memory, self._tenants = memory, tenants
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()
        self._due: list[Session] = []
        self.reused_tokens = self.num_compressions = self.num_outgrown = 0
        self.num_dropped = self.num_released = 0

    def continue_chain(self, sequence: Sequence, chain: PrefixChain) -> None:
        """Add the compressed state of its session to a sequence's chain, if the sequence may continue from it."""
        session, terms = self._of(sequence), sequence.request.session
        if terms is not None and terms.ages:
            chain.snapshots = {}  # what its round leaves is no other's prefix
        if session is None or session.snapshot is None or session.rule is None:
            return
        length, rule, eviction = session.num_compressed, session.rule, sequence.eviction
        if length >= sequence.num_tokens or sequence.prefix_ids[:length] != session.prefix_ids[:length]:
            return
        if rule.policy is None:
            fits = eviction is None or continues(eviction.policy)
        else:
            spans = () if eviction is None else (span for span in eviction.spans if span[0] < length)
            fits = eviction is not None and eviction.policy == rule.policy and {*spans} <= {*rule.spans}
        if not fits:
            return
        snapshots = {**chain.snapshots, length: (session.snapshot, rule)}
        chain.snapshots = dict(sorted(snapshots.items(), reverse=True))

    def count_hit(self, sequence: Sequence) -> None:
        terms = sequence.request.session
        if terms is not None and not terms.ages and self._of(sequence) is not None:
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
        session = self._sessions.pop(key, None)
        if session is None and terms.ages:  # it was dropped meanwhile
            return
        session = self._sessions[key] = session or Session(terms.name, request.tenant, chain)
        if terms.ages and sequence.prefix_ids[: len(session.token_ids)] != session.prefix_ids:
            return  # another turn came first
        chain.extend(sequence.prefix_ids[:computed])
        before = set(session.keys)
        self._renew_snapshot(session, sequence, chain)
        session.chain = chain
        session.token_ids = np.array(sequence.token_ids[:computed], dtype=np.int64)
        session.images = request.images
        session.note_keys(self._ledger.layout.block_size)
        if terms.ages:
            self.num_compressions += session.snapshot is not None
        else:
            session.turns = [turn for turn in session.turns if turn < computed] + [computed]
            session.system = terms.system
            session.num_turns += 1
            session.last_used = self._clock()
            session.memory = terms.memory if terms.memory is not None else self._memory
        # ANYWHERE: what left its middle, and what stood elsewhere behind that.
        if terms.ages or request.reuse == ANYWHERE:
            self._discard(session, before.difference(session.keys))
        self._ledger.prefixes.touch(session.keys)
        self._keep_budgets(session, may_age=not terms.ages)

    def release(self, sequence: Sequence) -> None:
        """Forget the session of a sequence that has ended, if that was its last turn."""
        terms, session = sequence.request.session, self._of(sequence)
        if terms is None or session is None:
            return
        sequence.request.outgrown = session.outgrown
        session.aging &= not terms.ages
        if terms.release:
            self.num_released += self.drop(terms.name, session.tenant)

    def age(self, admit: Callable[[NewRequest], Request]) -> Iterator[Request]:
        """Yield admitted requests, each of which compresses the oldest turns of a session that is too large."""
        while self._due:
            session = self._due.pop(0)
            if session.aging or self._sessions.get((session.tenant, session.name)) is not session:
                continue
            try:
                new = aging_request(session, self._ledger.layout)
                request = None if new is None else admit(new)
            except InvalidRequestError:  # its budget is too small for what stays whole
                request = None
            if request is None:
                self._leave_to_cache(session)
            else:
                session.aging = True
                yield request

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
        terms = sequence.request.session
        aged = eviction is None or (terms is not None and terms.ages)
        if not kv.last_round or (eviction is not None and not continues(eviction.policy)):
            return
        slot, computed = kv.running_slot, kv.num_computed
        # What the index holds of it is another's prefix.
        if not self._ledger.own_or_forget(slot):
            return
        rule = SessionRule(session.name, None)
        if aged:
            # A round for its age comes between the last two tokens. Both are computed once more for it: a sequence
            # that begins where its round is due would pass it.
            last = 1 if eviction is not None else 2
            self._ledger.take_back([slot], [last])
            computed -= last
        elif eviction is not None:
            rule = SessionRule(session.name, eviction.policy, eviction.spans)
        token_ids = sequence.prefix_ids[:computed]
        key = chain.snapshot_key(token_ids, sha256(b"session" + session.name.encode()).digest())
        self._ledger.prefix_rows.take_snapshot(slot, key, token_ids, rule, kv.num_rounds)
        if index.knows(key):
            session.snapshot, session.rule, session.num_compressed = key, rule, computed
            self._files.put_snapshot(key)

    def _discard(self, session: Session, keys: set[PrefixKey]) -> None:
        index = self._ledger.prefixes
        others = {key for each in self._sessions.values() if each is not session for key in each.keys}
        for key in filter(index.knows, keys - others):
            index.drop(key)

    def _bytes(self, session: Session) -> int:
        return self._ledger.prefixes.bytes_of(session.keys)

    def _keep_budgets(self, session: Session, *, may_age: bool) -> None:
        """Compress a session that is too large, or forget it, and the least recently used ones of its tenant."""
        if session.memory is None or self._bytes(session) <= session.memory:
            session.outgrown = False
        elif may_age:
            self._due.append(session)
        else:  # compressed as far as it may be
            self._leave_to_cache(session)
        dropped = [*islice(self._sessions.values(), max(len(self._sessions) - MAX_SESSIONS, 0))]
        if (limit := self._tenants.of(session.tenant).session_memory) is not None:
            own = [s for s in self._sessions.values() if s.tenant == session.tenant]
            beyond = sum(map(self._bytes, own)) - limit
            for each in own:
                if beyond <= 0:
                    break
                beyond -= self._bytes(each)
                dropped.append(each)
        for each in dropped:
            self.num_dropped += self.drop(each.name, each.tenant)

    def _leave_to_cache(self, session: Session) -> None:
        """Let a session be larger than its memory, for computing it anew would cost more; the prefix cache makes room
        of it like of any prefix."""
        if not session.outgrown:
            session.outgrown = True
            self.num_outgrown += 1
            assert session.memory is not None, "else nothing is too large"
            has, most = format_bytes(self._bytes(session)), format_bytes(session.memory)
            why = f"cannot be compressed to its session_memory of {most}: the prefix cache keeps it while it has room"
            _log.warning("session %r has %s, and its turns %s", session.name, has, why)

    def _tier(self, session: Session) -> str:
        # The end of a prefix gives way before its front.
        ends = [self._ledger.prefixes.knows(key) for key in (session.keys[0], session.keys[-1])]
        if any(ends):
            return TIERS[0] if all(ends) else TIERS[1]
        return TIERS[2] if self._files.holds(session.keys[-1]) else TIERS[3]

    def _stats(self, session: Session) -> SessionStats:
        return SessionStats(
            session.name,
            session.tenant,
            self._tier(session),
            num_bytes=self._bytes(session),
            num_tokens=len(session.token_ids),
            num_turns=session.num_turns,
            compressed=session.snapshot is not None,
            outgrown=session.outgrown,
            idle_seconds=self._clock() - session.last_used,
        )


def continues(policy: EvictionPolicy) -> bool:
    """Return whether rounds of a policy may compress again the rows that its rounds of an earlier turn left. What is
    learnt of queries beside KVs is not kept, and a replay repeats tokens whose KVs are gone."""
    score = policy.score
    return not score.needs.probes and score.replay is None and policy.compact is None


_PRIORITY = -(2**62)
"""Priority of compressions: lower than any that a client may give."""
_MOST_COMPRESSION = 8
"""Tokens of old turns per KV that stays, at most: beyond it answers suffer, and a session goes as a whole."""
_FILLED = 0.75
"""Part of its budget that a session is compressed to, so that it has room for turns to come."""


def aging_request(session: Session, layout: CacheLayout) -> NewRequest | None:
    """Return a request whose prompt is a session's tokens, all of which it finds, with a round before the last. None:
    the session cannot be compressed, or not to the `memory` that it may take."""
    length = len(session.token_ids)
    foreign = session.rule is not None and session.rule.policy is not None
    # The state of a recurrent layer cannot be taken back to where a round leaves off.
    fixed = layout.has_windows or layout.value_tier is not None or layout.state_bytes
    if foreign or fixed or session.memory is None:
        return None
    whole = layout.device_bytes(layout.by_kind(layout.row_blocks(layout.even_rows(layout.block_size))))
    budget = int(_FILLED * session.memory * layout.block_size / whole)
    if (spans := _kept_whole(session, budget)) is None:
        return None
    params = SamplingParams(
        temperature=0, max_tokens=1, detokenize=False, eviction=AGING, kv_budget=min(budget, length - 1),
        context_tokens=length - 1, protect=spans,
    )  # fmt: skip
    session.whole_from = spans[-1][0]
    terms = SessionRequest(session.name, session.memory, ages=True)
    return NewRequest(
        f"session-{session.tenant or ''}-{session.name}-{session.num_turns}", None, session.token_ids.tolist(), params,
        _PRIORITY, session.tenant, final_only=True, session=terms, images=session.images,
    )  # fmt: skip


def _kept_whole(session: Session, budget: int) -> tuple[tuple[int, int], ...] | None:
    """Return spans that a budget, in KVs a row, leaves whole: the system prompt, and the last two turns or one. None:
    even so too little would stay of the others."""
    length = len(session.token_ids) - 1
    for begin in session.turns[-3:-1]:
        begin = min(max(begin, session.whole_from, session.system), length - 1)
        spans = ((0, session.system), (begin, length)) if session.system else ((begin, length),)
        protected = session.system + length - begin
        if protected + AGING.keep.sinks + (length - protected) // _MOST_COMPRESSION < budget:
            return spans
    return None
