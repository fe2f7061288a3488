"""WHOSE conversations continue: handles on what the prefix index holds of their last states."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice
from math import inf

import numpy as np

from winnow.attention import Smoothing
from winnow.cache import Ledger
from winnow.cache.accounting.prefix_chain import PrefixChain, PrefixKey
from winnow.cache.layout import IntArray
from winnow.engine.memory.chains import SessionRule
from winnow.engine.memory.file_store import FileStore
from winnow.engine.requests.new_request import NewRequest
from winnow.engine.requests.request import Request, Sequence
from winnow.engine.requests.tenant_table import TenantTable
from winnow.errors import CapacityError, InvalidRequestError
from winnow.eviction import EvictionPolicy
from winnow.eviction.budgets import AdaptiveRows
from winnow.eviction.keep import Keep
from winnow.eviction.scores import Leverage
from winnow.eviction.when import When
from winnow.outputs import SessionStats
from winnow.sampling import SamplingParams
from winnow.values.images import PromptImage, prefix_ids
from winnow.values.session_request import SessionRequest
from winnow.values.tenants import TenantName
from winnow.values.units import format_bytes

MAX_SESSIONS = 10_000
TIERS = ("device", "partly", "disk", "gone")
"""Names of places where the KVs of a session lie: all on the device, some, none but on disk, or none."""
AGING_PRIORITY = -(2**62)
"""Behind all that clients may ask for."""
_SINKS = 4
_MOST_COMPRESSION = 8
"""Tokens of old turns per KV that stays, at most: beyond it answers suffer, and a session goes as a whole."""
_KEPT_PART = 0.5
"""Part of the KV memory that sessions with a ttl may hold, so that requests find room beside them."""
_FILLED = 0.75
"""Part of its budget that a session is compressed to, so that it has room for turns to come."""
# By keys alone, which is known without any query: leverage costs no replay, and no accumulators.
_AGING = EvictionPolicy(
    Leverage(pool=Smoothing(3, "average")), AdaptiveRows(), Keep(sinks=_SINKS), When(after_prefill=True)
)


@dataclass(eq=False)
class Session:
    """A conversation's last state.

    Attributes:
        token_ids: int64 [n], all that were computed.
        images: pictures among them.
        turns: numbers of tokens at which its turns begin.
        system: tokens of the system prompt.
        snapshot: the key of what rounds left of the first tokens; None: all are kept as they were computed.
        num_compressed: how many these are.
        rule: of the snapshot; a policy of None has compressed it for its age, and any request continues with it.
        keys: under which the index may hold it, those of the first tokens first.
        whole_from: the first token behind which compressions for its age have left everything.
        kept: no room is made of it until `kept_until`, where it is idle; else it gives way after others.
    """

    name: str
    tenant: TenantName
    chain: PrefixChain
    token_ids: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    images: tuple[PromptImage, ...] = ()
    turns: list[int] = field(default_factory=lambda: [0])
    system: int = 0
    snapshot: PrefixKey | None = None
    num_compressed: int = 0
    rule: SessionRule | None = None
    whole_from: int = 0
    memory: int | None = None
    kept: bool = False
    kept_until: float = 0.0
    last_used: float = 0.0
    num_turns: int = 0
    aging: bool = False
    keys: list[PrefixKey] = field(default_factory=list)

    @property
    def prefix_ids(self) -> list[int]:
        """Its token ids as the keys of prefixes have them."""
        return prefix_ids(self.token_ids.tolist(), self.images)

    def note_keys(self, block_size: int) -> None:
        """Set its keys anew."""
        whole = len(self.token_ids) // block_size
        self.keys = [key for key, _ in self.chain.links[:whole]]
        if len(self.token_ids) % block_size:
            self.keys.append(self.chain.tail_key(self.prefix_ids))
        if self.snapshot is not None:
            self.keys = [self.snapshot]


class Sessions:
    """Table of sessions. A session holds no memory: it names prefixes in the index, which may be evicted.

    A request of a session begins with the longest prefix that is known, to the last common token; where rounds have
    compressed the session, with what they left, if all its tokens and its policy are the same.

    Args:
        clock: seconds.
        memory: bytes of the device that a session may take before its oldest turns are compressed; None: no limit.
        tenants: what all sessions of each may take, of which the least recently used are forgotten.
        caching: False: there are no prefixes to keep.
    """

    def __init__(
        self,
        ledger: Ledger,
        clock: Callable[[], float],
        tenants: TenantTable,
        files: FileStore,
        memory: int | None = None,
        caching: bool = False,
    ) -> None:
        self._ledger = ledger
        self._clock = clock
        self._memory = memory
        self._caching = caching
        self._tenants = tenants
        self._files = files
        self._sessions: OrderedDict[tuple[TenantName, str], Session] = OrderedDict()
        self._due: list[Session] = []
        self._turns: dict[str, tuple[tuple[TenantName, str], int]] = {}  # unfinished: session, blocks to keep
        self._expiry = inf
        self.reused_tokens = self.num_compressions = self.num_dropped = self.num_released = 0

    # -- what is kept --------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Check that the session of a request can be kept for its ttl.

        Raises:
            InvalidRequestError: it is not of a kind that is kept whole, or there is nothing to prefetch from.
            CapacityError: it is too large beside others that are kept.
        """
        blocks, alone = self._blocks_to_keep(request), len(request.sequences) == 1 and request.beams is None
        fetches = request.session is not None and request.session.prefetch
        if fetches and not (alone and self._caching and self._files.has_any):
            raise InvalidRequestError("prefetch needs prefix caching with a prefix_cache_dir, and one answer")
        if not blocks:
            return
        self.expire()
        layout, ledger = self._ledger.layout, self._ledger
        parts = layout.has_windows or layout.has_prefix_state or layout.value_tier is not None
        if parts or request.sequences[0].eviction is not None or not (alone and self._caching):
            raise InvalidRequestError(
                "ttl needs prefix caching, a model whose layers keep KVs alone, on the device, and one answer without "
                "eviction, or the session cannot be kept whole"
            )
        key, most = _key(request), int(_KEPT_PART * ledger.size.num_blocks)
        others = Counter[tuple[TenantName, str]]()
        for each, session in self._sessions.items():
            if session.kept:
                known = filter(ledger.prefixes.knows, session.keys)
                others[each] = len(ledger.prefixes.blocks_of([*known]))
        for each, turn in self._turns.values():
            others[each] = max(others[each], turn)
        left = most - others.total() + others[key]
        if blocks > left:
            raise CapacityError(
                f"ttl: the session needs {format_bytes(ledger.bytes_of(blocks))} to be kept, and of the "
                f"{format_bytes(ledger.bytes_of(most))} in which sessions are kept "
                f"{format_bytes(ledger.bytes_of(max(left, 0)))} are left"
            )

    def begin(self, request: Request) -> None:
        """Note a turn that is queued: its session is not idle until it ends."""
        if request.session is not None:
            self._turns[request.request_id] = _key(request), self._blocks_to_keep(request)
            self._note_kept(_key(request))

    def expire(self) -> None:
        """Let sessions whose ttl is over be the first to give way."""
        if self._expiry == inf or (now := self._clock()) < self._expiry:
            return
        for session in self._sessions.values():
            if session.kept and session.kept_until <= now:
                session.kept = False
                self._ledger.prefixes.age(self._own_keys(session, session.keys))
        self._note_pinned()

    def _note_kept(self, key: tuple[TenantName, str]) -> None:
        if (session := self._sessions.get(key)) is not None and session.kept:
            self._note_pinned()

    def _blocks_to_keep(self, request: Request) -> int:
        """Return the most blocks that the session of a request holds when that has ended; 0: it is not kept."""
        terms, session = request.session, self._sessions.get(_key(request))
        if terms is None or terms.ages or terms.release or terms.prefetch:
            return 0
        kept = session is not None and session.kept
        if terms.ttl is not None and not terms.hint:
            kept = terms.ttl > 0
        return (
            self._ledger.layout.blocks_for(request.sequences[0].prompt_len + request.max_tokens)
            if kept
            else 0
        )

    # -- turns ---------------------------------------------------------------------------------------------------

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
        if rule.policy is not None:
            protected = () if eviction is None else [span for span in eviction.spans if span[0] < length]
            if eviction is None or eviction.policy != rule.policy or not set(protected) <= set(rule.spans):
                return
        elif eviction is not None and not continues(eviction.policy):
            return
        snapshots = {**chain.snapshots, length: (session.snapshot, rule)}
        chain.snapshots = dict(sorted(snapshots.items(), reverse=True))

    def count_hit(self, sequence: Sequence) -> None:
        """Count the tokens that a turn finds computed."""
        if (
            (terms := sequence.request.session) is not None
            and not terms.ages
            and self._of(sequence) is not None
        ):
            self.reused_tokens += sequence.kv.num_computed

    def end_turn(self, sequence: Sequence) -> None:
        """Remember the state with which a sequence ends that still has its slot."""
        request, chain, kv = sequence.request, sequence.prefix, sequence.kv
        terms, computed = request.session, kv.num_computed
        if terms is None or chain is None or request.beams is not None or len(request.sequences) > 1:
            return
        if not 1 < computed <= sequence.num_tokens:
            return
        key = request.tenant, terms.name
        session = self._sessions.pop(key, None)
        if session is None and terms.ages:  # it was dropped meanwhile
            return
        session = session or Session(terms.name, request.tenant, chain)
        self._sessions[key] = session
        if terms.ages and session.num_turns != terms.turn:  # another turn came first
            session.aging = False
            return
        chain.extend(sequence.prefix_ids[:computed])
        before = set(session.keys) if session.snapshot is None else set()
        self._drop_snapshot(session)
        if kv.last_round:
            self._take_snapshot(session, sequence, chain)
        session.chain = chain
        session.token_ids = np.array(sequence.token_ids[:computed], dtype=np.int64)
        session.images = request.images
        session.note_keys(self._ledger.layout.block_size)
        if terms.ages:
            session.aging = False
            if session.snapshot is not None:
                self.num_compressions += 1
                self._discard(session, before)
        else:
            self._note_turn(session, terms)
        self._ledger.prefixes.touch(session.keys)
        self._note_pinned()
        self._keep_budgets(session, may_age=not terms.ages)

    def _note_turn(self, session: Session, terms: SessionRequest) -> None:
        session.turns = [turn for turn in session.turns if turn < len(session.token_ids)]
        session.turns.append(len(session.token_ids))
        session.system = terms.system
        session.num_turns += 1
        session.last_used = now = self._clock()
        session.memory = terms.memory if terms.memory is not None else self._memory
        if terms.ttl is not None and not (terms.hint and session.kept):
            session.kept, session.kept_until = terms.ttl > 0 and not terms.hint, now + terms.ttl

    def release(self, sequence: Sequence) -> None:
        """Keep the session of a sequence that has ended for its ttl, or forget it, if that was its last turn."""
        terms = sequence.request.session
        if (turn := self._turns.pop(sequence.request.request_id, None)) is not None:
            self._note_kept(turn[0])
        if terms is not None and terms.release:
            self.num_released += self.drop(terms.name, sequence.request.tenant)

    def next_aging(self) -> NewRequest | None:
        """Return a request that compresses a session's oldest turns; None: none is due."""
        while self._due:
            session = self._due.pop(0)
            request = self._aging(session)
            if request is not None:
                session.aging = True
                return request
        return None

    # -- for callers -----------------------------------------------------------------------------------------------

    def list(self, tenant: TenantName = None, *, all_tenants: bool = False) -> "list[SessionStats]":
        """Return sessions of a tenant, or all; the most recently used first."""
        found = [s for s in reversed(self._sessions.values()) if all_tenants or s.tenant == tenant]
        return [self._stats(session) for session in found]

    def drop(self, name: str, tenant: TenantName = None) -> bool:
        """Delete a session and the prefixes that only it names. Returns False if there is none."""
        session = self._sessions.pop((tenant, name), None)
        if session is None:
            return False
        self._discard(session, set(session.keys))
        self._note_pinned()
        return True

    def count_tiers(self) -> dict[str, int]:
        """Return how many sessions lie where."""
        return dict.fromkeys(TIERS, 0) | Counter(map(self._tier, self._sessions.values()))

    # -- inside ----------------------------------------------------------------------------------------------------

    def _of(self, sequence: Sequence) -> Session | None:
        terms = sequence.request.session
        return None if terms is None else self._sessions.get((sequence.request.tenant, terms.name))

    def _take_snapshot(self, session: Session, sequence: Sequence, chain: PrefixChain) -> None:
        eviction, kv, index = sequence.eviction, sequence.kv, self._ledger.prefixes
        terms = sequence.request.session
        aged = eviction is None or (terms is not None and terms.ages)
        if eviction is not None and not continues(eviction.policy):
            return
        slot, computed = kv.running_slot, kv.num_computed
        # What the index holds of it is another's prefix.
        if not self._ledger.own_or_forget(slot):
            return
        if aged:
            # A round for its age comes between the last two tokens. Both are computed once more for it: a sequence
            # that begins where its round is due would pass it.
            last = 1 if eviction is not None else 2
            self._ledger.take_back([slot], [last])
            computed -= last
        token_ids = sequence.prefix_ids[:computed]
        key = chain.snapshot_key(token_ids, sha256(b"session" + session.name.encode()).digest())
        rule = SessionRule(session.name, None)
        if eviction is not None and not aged:
            rule = SessionRule(session.name, eviction.policy, eviction.spans)
        self._ledger.prefix_rows.take_snapshot(slot, key, token_ids, rule, kv.num_rounds)
        if index.knows(key):
            session.snapshot, session.rule, session.num_compressed = key, rule, computed
            self._files.put_snapshot(key)

    def _drop_snapshot(self, session: Session) -> None:
        if session.snapshot is not None and self._ledger.prefixes.knows(session.snapshot):
            self._ledger.prefixes.drop(session.snapshot)
        session.snapshot = session.rule = None

    def _discard(self, session: Session, keys: set[PrefixKey]) -> None:
        """Forget keys in the index that no other session has."""
        index = self._ledger.prefixes
        for key in self._own_keys(session, keys):
            if index.knows(key):
                index.drop(key)

    def _own_keys(self, session: Session, keys: Iterable[PrefixKey]) -> tuple[PrefixKey, ...]:
        """Return those of some keys, in order, that no other session has."""
        others = {key for each in self._sessions.values() if each is not session for key in each.keys}
        return tuple(key for key in keys if key not in others)

    def _note_pinned(self) -> None:
        now = self._clock()
        pinned = [s for s in self._sessions.values() if s.kept_until > now]
        self._ledger.prefixes.pin(key for session in pinned for key in session.keys)
        kept, busy = [s for s in pinned if s.kept], {key for key, _ in self._turns.values()}
        idle = [s for s in kept if (s.tenant, s.name) not in busy]
        self._ledger.prefixes.keep([key for session in idle for key in session.keys])
        self._expiry = min((s.kept_until for s in kept), default=inf)

    def _bytes(self, session: Session) -> int:
        return self._ledger.prefixes.bytes_of(session.keys)

    def _keep_budgets(self, session: Session, *, may_age: bool) -> None:
        """Compress a session that is too large, or forget it, and the least recently used ones of its tenant."""
        if session.memory is not None and self._bytes(session) > session.memory:
            if may_age:
                self._due.append(session)
            else:  # compressed as far as it may be
                self._drop_for_room(session)
        for each in [*islice(self._sessions.values(), max(len(self._sessions) - MAX_SESSIONS, 0))]:
            self._drop_for_room(each)
        limit = self._tenants.of(session.tenant).session_memory
        if limit is None:
            return
        own = [s for s in self._sessions.values() if s.tenant == session.tenant]
        total = sum(map(self._bytes, own))
        for each in sorted(own, key=lambda s: s.kept_until > self._clock()):
            if total <= limit:
                return
            total -= self._bytes(each)
            self._drop_for_room(each)

    def drop_unless_kept(self, new: NewRequest) -> None:
        """Forget the session that a request was to compress, which was refused."""
        assert new.session is not None, "it is a session's"
        if (session := self._sessions.get((new.tenant, new.session.name))) is not None:
            self._drop_for_room(session)

    def _drop_for_room(self, session: Session) -> None:
        session.aging = False
        if not session.kept:
            self.num_dropped += 1
            self.drop(session.name, session.tenant)

    def _aging(self, session: Session) -> NewRequest | None:
        """Return a request whose prompt is a session's tokens, all of which it finds, with a round before the last."""
        length, layout = len(session.token_ids), self._ledger.layout
        if session.memory is None or session.aging or self._of_name(session) is not session:
            return None
        foreign = session.rule is not None and session.rule.policy is not None
        # The state of a recurrent layer cannot be taken back to where a round leaves off.
        fixed = layout.has_windows or layout.value_tier is not None or layout.state_bytes
        if foreign or fixed:
            self._drop_for_room(session)
            return None
        whole = layout.device_bytes(layout.by_kind(layout.row_blocks(layout.even_rows(layout.block_size))))
        budget = int(_FILLED * session.memory * layout.block_size / whole)
        spans = self._kept_whole(session, budget)
        if spans is None:
            self._drop_for_room(session)
            return None
        params = SamplingParams(
            temperature=0,
            max_tokens=1,
            detokenize=False,
            eviction=_AGING,
            kv_budget=min(budget, length - 1),
            context_tokens=length - 1,
            protect=spans,
        )
        session.whole_from = spans[-1][0]
        return NewRequest(
            f"session-{session.tenant or ''}-{session.name}-{session.num_turns}",
            None,
            session.token_ids.tolist(),
            params,
            AGING_PRIORITY,
            session.tenant,
            final_only=True,
            session=SessionRequest(session.name, session.memory, ages=True, turn=session.num_turns),
            images=session.images,
        )

    def _kept_whole(self, session: Session, budget: int) -> tuple[tuple[int, int], ...] | None:
        """Return spans that a budget, in KVs a row, leaves whole: the system prompt, and the last two turns or one.

        None: even so too little would stay of the others.
        """
        length = len(session.token_ids) - 1
        for begin in session.turns[-3:-1]:
            begin = min(max(begin, session.whole_from, session.system), length - 1)
            spans = ((0, session.system), (begin, length)) if session.system else ((begin, length),)
            protected = session.system + length - begin
            if protected + _SINKS + (length - protected) // _MOST_COMPRESSION < budget:
                return spans
        return None

    def _of_name(self, session: Session) -> Session | None:
        return self._sessions.get((session.tenant, session.name))

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
            retained_seconds=max(session.kept_until - self._clock(), 0.0),
        )


def _key(request: Request) -> tuple[TenantName, str]:
    return request.tenant, "" if request.session is None else request.session.name


def continues(policy: EvictionPolicy) -> bool:
    """Return whether rounds of a policy may compress again the rows that its rounds of an earlier turn left.

    What is learnt of queries beside KVs is not kept, and a replay repeats tokens whose KVs are gone.
    """
    needs = policy.score.needs
    signals = needs.queries
    return not signals and policy.score.replay is None and policy.compact is None
