"""A conversation's last state, as a handle on what the prefix index holds of it, and how long it is kept while idle."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

import numpy as np

from winnow.cache import Ledger
from winnow.cache.accounting.prefix_chain import PrefixChain, PrefixKey
from winnow.cache.layout import IntArray
from winnow.engine.memory.chains import SessionRule
from winnow.engine.memory.file_store import FileStore
from winnow.engine.requests.request import Request
from winnow.errors import CapacityError, InvalidRequestError
from winnow.values.images import PromptImage, prefix_ids
from winnow.values.session_request import SessionRequest
from winnow.values.tenants import TenantName
from winnow.values.units import format_bytes

SessionKey = tuple[TenantName, str]


@dataclass(eq=False)
class Session:
    """A conversation's last state.

    Attributes:
        token_ids: int64 [n], all that were computed.
        snapshot: the key of what rounds left of the first tokens; None: all are kept as they were computed.
        num_compressed: how many these are.
        rule: of the snapshot.
        keys: under which the index may hold it, those of the first tokens first.
        kept: no room is made of it until `kept_until`, where it is idle; else it gives way after others.
    """

    name: str
    tenant: TenantName
    chain: PrefixChain
    token_ids: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    images: tuple[PromptImage, ...] = ()
    snapshot: PrefixKey | None = None
    num_compressed: int = 0
    rule: SessionRule | None = None
    kept: bool = False
    kept_until: float = 0.0
    last_used: float = 0.0
    num_turns: int = 0
    keys: list[PrefixKey] = field(default_factory=list)

    @property
    def prefix_ids(self) -> list[int]:
        return prefix_ids(self.token_ids.tolist(), self.images)

    def note_keys(self, block_size: int) -> None:
        whole = len(self.token_ids) // block_size
        self.keys = [key for key, _ in self.chain.links[:whole]]
        if len(self.token_ids) % block_size:
            self.keys.append(self.chain.tail_key(self.prefix_ids))
        if self.snapshot is not None:
            self.keys = [self.snapshot]


SessionMap = Mapping[SessionKey, Session]


def session_key(request: Request) -> SessionKey:
    """Return tenant and name of the session of a request; an empty name: it has none."""
    return request.tenant, "" if request.session is None else request.session.name


def own_keys(sessions: SessionMap, session: Session, keys: Iterable[PrefixKey]) -> tuple[PrefixKey, ...]:
    """Return those of some keys, in order, that no other session has."""
    others = {key for each in sessions.values() if each is not session for key in each.keys}
    return tuple(key for key in keys if key not in others)


_KEPT_PART = 0.5
"""Part of the KV memory that sessions with a ttl may hold, so that requests find room beside them."""


class Retention:
    """Pins of sessions in the prefix index, by their ttl. See `Sessions` for the arguments."""

    def __init__(
        self,
        ledger: Ledger,
        clock: Callable[[], float],
        files: FileStore,
        sessions: SessionMap,
        caching: bool,
    ) -> None:
        self._ledger, self._clock, self._files = ledger, clock, files
        self._sessions, self._caching = sessions, caching
        self._turns: dict[str, tuple[SessionKey, int]] = {}  # unfinished: session, blocks to keep
        self._expiry = inf

    def check(self, request: Request) -> None:
        """Check that the session of a request can be kept for its ttl.

        Raises:
            InvalidRequestError: it is not of a kind that is kept whole, or there is nothing to prefetch from.
            CapacityError: it is too large beside others that are kept.
        """
        blocks, alone = self._blocks_to_keep(request), len(request.sequences) == 1
        fetches = request.session is not None and request.session.prefetch
        if fetches and not (alone and self._caching and self._files.has_any):
            raise InvalidRequestError("prefetch needs prefix caching with a prefix_cache_dir, and one answer")
        if not blocks:
            return
        self.expire()
        layout, ledger = self._ledger.layout, self._ledger
        parts = layout.has_windows or layout.state_bytes or layout.value_tier is not None
        if parts or request.sequences[0].eviction is not None or not (alone and self._caching):
            raise InvalidRequestError(
                "ttl needs prefix caching, a model whose layers keep KVs alone, on the device, and one answer without "
                "eviction, or the session cannot be kept whole"
            )
        key, most = session_key(request), int(_KEPT_PART * ledger.size.num_blocks)
        others = Counter[SessionKey]()
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
            self._turns[request.request_id] = session_key(request), self._blocks_to_keep(request)
            self._note_kept(session_key(request))

    def end(self, request: Request) -> None:
        if (turn := self._turns.pop(request.request_id, None)) is not None:
            self._note_kept(turn[0])

    def renew(self, session: Session, terms: SessionRequest) -> None:
        now = self._clock()
        if terms.ttl is not None and not (terms.hint and session.kept):
            session.kept, session.kept_until = terms.ttl > 0 and not terms.hint, now + terms.ttl

    def expire(self) -> None:
        """Let sessions whose ttl is over be the first to give way."""
        if self._expiry == inf or (now := self._clock()) < self._expiry:
            return
        for session in self._sessions.values():
            if session.kept and session.kept_until <= now:
                session.kept = False
                self._ledger.prefixes.age(own_keys(self._sessions, session, session.keys))
        self.pin()

    def pin(self) -> None:
        """Tell the index anew which prefixes stay."""
        now = self._clock()
        pinned = [s for s in self._sessions.values() if s.kept_until > now]
        self._ledger.prefixes.pin(key for session in pinned for key in session.keys)
        kept, busy = [s for s in pinned if s.kept], {key for key, _ in self._turns.values()}
        idle = [s for s in kept if (s.tenant, s.name) not in busy]
        self._ledger.prefixes.keep([key for session in idle for key in session.keys])
        self._expiry = min((s.kept_until for s in kept), default=inf)

    def _note_kept(self, key: SessionKey) -> None:
        if (session := self._sessions.get(key)) is not None and session.kept:
            self.pin()

    def _blocks_to_keep(self, request: Request) -> int:
        """Return the most blocks that the session of a request holds when that has ended; 0: it is not kept."""
        terms, session = request.session, self._sessions.get(session_key(request))
        if terms is None or terms.release or terms.prefetch:
            return 0
        kept = session is not None and session.kept
        if terms.ttl is not None and not terms.hint:
            kept = terms.ttl > 0
        most = request.sequences[0].prompt_len + request.max_tokens
        return self._ledger.layout.blocks_for(most) if kept else 0
