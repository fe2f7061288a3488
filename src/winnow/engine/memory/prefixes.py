"""Who begins with KVs that another has computed, and who must have its blocks for itself."""

from collections.abc import Callable, Iterable, Sequence as SequenceType
from dataclasses import dataclass, field
from itertools import islice

from winnow.cache import Ledger
from winnow.cache.accounting.prefix_chain import PrefixChain, PrefixKey, Snapshot
from winnow.engine.memory.chains import SessionRule, chain_of, is_portable
from winnow.engine.memory.file_store import FileStore
from winnow.engine.memory.sessions import Sessions
from winnow.engine.memory.spans import SpanReuse
from winnow.engine.requests.request import KVState, Sequence
from winnow.errors import PrefixStoreError
from winnow.storage.prefix_files import PrefixFiles
from winnow.values.reuse import EXACT

_LOOKED_AT = 256
"""Waiting sequences whose prefixes are kept for them."""

_STATE_TOKENS = 2048
"""Tokens of a prompt after each of which the states of layers are kept for others."""


@dataclass(frozen=True)
class FoundPrefix:
    """The KVs with which a waiting sequence may begin: those of `keys` as they were computed, or a snapshot of rounds.

    Attributes:
        state: of the sequence then, less its slot.
    """

    state: KVState = field(default_factory=KVState)
    keys: tuple[PrefixKey, ...] = ()
    snapshot: Snapshot | None = None

    def __bool__(self) -> bool:
        return self.state.num_computed > 0


class PrefixSharing:
    """Sharing of prefixes: the sequences that take part in the ledger's index, and with how many tokens.

    KVs are shared as they were computed, or as a round left them that every prompt that begins alike has there too
    (`SequenceEviction.snapshots`). A policy's sequence has copies of its own before its first round, and before the
    first query that adds to accumulators. Samples of one prompt share with others only where all rounds come before
    they part.

    Where layers keep states in place of KVs, a prefix is found as far as a state is kept. That is after the last whole
    block of a prompt that leaves a token to compute, where prompts were seen to part, every `_STATE_TOKENS` tokens, and
    at the end of a sequence, so that a conversation continues where it was.
    """

    def __init__(
        self, ledger: Ledger, enabled: bool, files: FileStore, sessions: Sessions, spans: SpanReuse
    ) -> None:
        self._files, self._ledger, self._sessions, self._enabled = files, ledger, sessions, enabled
        self._spans = spans

    def look_up_spans(self, sequence: Sequence) -> None:
        """Find what may be placed of a waiting sequence, whose `kv` says with what it begins."""
        self._spans.look_up(sequence, 0 if sequence.kv.last_round else self._most_as_computed(sequence))

    def find(self, sequence: Sequence) -> FoundPrefix:
        if not self._enabled or not _takes_part(sequence):
            return FoundPrefix()
        chain = self._known_chain(sequence)
        chain.extend(sequence.prefix_ids)
        self._spans.look_up_packed(sequence)
        if sequence.request.wants_prompt_logprobs:
            return FoundPrefix()
        index, most = self._ledger.prefixes, self._most_as_computed(sequence)
        keys, computed = index.match(chain, most), 0
        if sequence.request.reuse != EXACT and sequence.eviction is None and not chain.is_parted:
            chain, keys = self._parted(sequence, chain, keys, most)
        if self._ledger.layout.state_bytes:
            chain.branches.add(len(keys) * self._ledger.layout.block_size)
            keys = index.longest_resumable(chain, keys, sequence.prefix_ids, most)
        elif sequence.eviction is None and not self._ledger.layout.wide.any:
            tail = index.common_tail(chain, keys, sequence.prefix_ids, most)
            if tail is not None:
                computed = index.num_tokens(keys) + tail[1]
                keys.append(tail[0])
        computed, snapshot = computed or index.num_tokens(keys), self._snapshot(sequence)
        if snapshot is not None and snapshot.num_tokens > computed:
            computed = snapshot.num_tokens
            # A session's last round lies further back, so that the next one may come at once.
            last = computed - isinstance(snapshot.rule, SessionRule)
            return FoundPrefix(KVState(None, computed, last, snapshot.num_rounds), snapshot=snapshot)
        return FoundPrefix(KVState(None, computed), tuple(keys))

    def _parted(
        self, sequence: Sequence, chain: PrefixChain, keys: list[PrefixKey], most: int
    ) -> tuple[PrefixChain, list[PrefixKey]]:
        """Return what a sequence begins with that another, of the same tokens, has placed in part, if that is more."""
        index, size = self._ledger.prefixes, self._ledger.layout.block_size
        for parts in reversed(range(min(len(keys) + 1, len(chain.links)))):
            if index.knows(chain.first_if_parted(parts)):
                parted = chain.fork()
                parted.part(parts * size)
                parted.extend(sequence.prefix_ids)
                found = index.match(parted, most)
                if len(found) > len(keys):
                    sequence.prefix = parted
                    return parted, found
        return chain, keys

    def prefetch(self, sequence: Sequence) -> None:
        if self._files.has_any and self._may_begin_with_others(sequence):
            self._files.prefetch(sequence, self._most_as_computed(sequence))

    def is_ready(self, sequence: Sequence, has_room: Callable[[], bool]) -> bool:
        """Return whether nothing is being read from disk for a waiting sequence. Unless it `has_room` to start beside
        those that run, what was read stays where it is."""
        if not self._files.has_any or not self._may_begin_with_others(sequence):
            return True
        return self._files.is_ready(sequence, self._most_as_computed(sequence), has_room)

    def note_wanted(self, waiting: Iterable[Sequence]) -> None:
        """Mark the compressed prefixes that waiting sequences begin with, so that they are evicted last."""
        index = self._ledger.prefixes
        if not self._enabled or not index.snapshots:
            return
        keys: list[PrefixKey] = []
        for sequence in islice(waiting, _LOOKED_AT):
            if _takes_part(sequence):
                keys += (key for key, _ in self._known_chain(sequence).snapshots.values())
        index.want(keys)

    def num_wanted(self, sequence: Sequence) -> int:
        """Return blocks of compressed prefixes that other waiting sequences begin with, and no running one holds."""
        own = {} if sequence.prefix is None else sequence.prefix.snapshots
        return self._ledger.prefixes.num_wanted([key for key, _ in own.values()])

    def is_worth_waiting(
        self,
        sequence: Sequence,
        count: int,
        running: SequenceType[Sequence],
        found: FoundPrefix | None = None,
    ) -> bool:
        """Return whether running sequences compute half the `count` tokens that a waiting one would compute next."""
        found = found or self.find(sequence)
        if sequence.prefix is None or sequence.request.wants_prompt_logprobs:
            return False
        return any(2 * self._to_be_found(sequence, found, other) >= count for other in running)

    def adopt(self, sequence: Sequence, found: FoundPrefix, count: int) -> None:
        """Give a sequence, which has just got its slot and computes `count` tokens next, the prefix found for it."""
        request, index, slot = sequence.request, self._ledger.prefixes, sequence.kv.running_slot
        if found.snapshot is not None:
            if isinstance(found.snapshot.rule, SessionRule) and sequence.prefix is not None:
                sequence.prefix.snapshots = {}  # what its rounds leave is not what others' would
            self._ledger.prefix_rows.resume(slot, found.snapshot)
            sequence.rounds.rounds += found.snapshot.num_rounds
        else:
            self._ledger.prefix_rows.adopt(slot, found.keys, found.state.num_computed)
            if sequence.slides(self._ledger.layout):
                self._ledger.drop_unseen([slot])
        if request.metrics.first_scheduled_time is None and sequence.prefix is not None:
            request.num_cached_tokens = exact = sequence.prefix.num_exact(sequence.kv.num_computed)
            index.num_asked_tokens += sequence.prompt_len
            index.num_hit_tokens += exact
            self._sessions.count_hit(sequence)
        self._spans.begin(sequence)
        if found and _observes(sequence, sequence.kv.num_computed, count):
            owns = self._ledger.own_or_forget(slot)
            assert owns, "there is room for all of its blocks"

    def num_held(self, sequence: Sequence, found: FoundPrefix) -> int:
        """Return blocks of a found prefix that running sequences hold and it will not change."""
        index = self._ledger.prefixes
        if sequence.eviction is None:
            whole = found.state.num_computed // self._ledger.layout.block_size
            return index.num_held(index.blocks_of(found.keys[:whole]))
        if found.snapshot is None or sequence.owns_blocks:
            return 0
        # Without rounds while it decodes, the one after the context was the last.
        is_last = found.snapshot.num_tokens == sequence.eviction.context_len
        return index.num_held(found.snapshot.blocks) if is_last else 0

    def remember(self, sequence: Sequence, start: int, end: int, accepted: SequenceType[int] = ()) -> None:
        """Index the blocks that tokens start..end - 1 of a sequence have filled; the last it gets now: `accepted`."""
        size, chain, eviction = self._ledger.layout.block_size, sequence.prefix, sequence.eviction
        if chain is None or start // size == end // size or sequence.kv.last_round:
            return
        num_computed = end
        if eviction is not None:
            if _observes(sequence, start, end - start):
                return
            end = min(end, eviction.num_shareable)
        if self._ledger.layout.value_tier is not None:
            end = min(end, sequence.prompt_len)  # later tokens read some values, and as part of a prompt all
        chain.extend([*sequence.prefix_ids, *accepted] if accepted else sequence.prefix_ids)
        keeps_state = num_computed in self._state_points(sequence, start)
        slot, rows = sequence.kv.running_slot, self._ledger.prefix_rows
        for index in range(start // size, end // size):
            # KVs that are approximate already are placed again only where nothing else is known.
            placed = any(first < (index + 1) * size and end > index * size for first, end in sequence.reused)
            resumable = keeps_state and (index + 1) * size == num_computed
            before, link = chain.key_after(index), chain.links[index]
            root = chain.approximate_root if placed else chain.root
            rows.remember(slot, index, *link, num_computed, before=before, resumable=resumable, root=root)

    def remember_end(self, sequence: Sequence) -> None:
        """Let later requests find the block in which a sequence ends, too."""
        chain, computed = sequence.prefix, sequence.kv.num_computed
        if chain is None or sequence.eviction is not None or sequence.kv.last_round or not computed:
            return
        # Drafts behind its end may have been right, and their blocks are indexed with them.
        if computed > sequence.num_tokens:
            return
        # Later tokens read some values of a tier; see `remember`.
        end = computed if self._ledger.layout.value_tier is None else min(computed, sequence.prompt_len)
        size, token_ids = self._ledger.layout.block_size, sequence.prefix_ids[:end]
        chain.extend(token_ids)
        whole = end // size
        if end % size:
            index, key, rest = whole, chain.tail_key(token_ids), tuple(token_ids[whole * size :])
        else:
            index, (key, rest) = whole - 1, chain.links[whole - 1]
        slot, before, rows = sequence.kv.running_slot, chain.key_after(index), self._ledger.prefix_rows
        rows.remember(slot, index, key, rest, computed, before=before, resumable=end == computed)

    def until_state(self, sequence: Sequence) -> int:
        """Return how many tokens of a prompt remain until a state is to be kept. What policies keep depends on where
        chunks end, so theirs end where they do without: rounds keep states."""
        if sequence.eviction is not None:
            return sequence.num_to_compute
        points = self._state_points(sequence, sequence.kv.num_computed)
        return min(points) - sequence.kv.num_computed if points else sequence.num_to_compute

    def remember_round(self, sequence: Sequence) -> None:
        """Index the rows that a round has just left, for later requests under the same rule."""
        if sequence.prefix is None or sequence.kv.num_computed not in sequence.prefix.snapshots:
            return
        kv = sequence.kv
        key, rule = sequence.prefix.snapshots[kv.num_computed]
        token_ids = sequence.prefix_ids[: kv.num_computed]
        self._ledger.prefix_rows.take_snapshot(kv.running_slot, key, token_ids, rule, kv.num_rounds)

    def is_about_to_change(self, sequence: Sequence, most: int) -> bool:
        """Return whether a replay or queries of the next `most` tokens may add to accumulators of shared blocks."""
        eviction = sequence.eviction
        if not sequence.may_share_outside or eviction is None:
            return False
        slot, computed = sequence.kv.running_slot, sequence.kv.num_computed
        if sequence.before_replay_round:
            return self._ledger.is_shared(slot)
        run = max((end - start for start, end in sequence.request.two_way), default=0)
        if not eviction.may_observe(computed, most + run):
            return False
        # A sequence that finds these blocks in the index later writes every accumulator before it reads any.
        if eviction.replaces_accumulators(computed):
            return self._ledger.is_shared_with_sequences(slot)
        return self._ledger.is_shared(slot)

    def save(self, sequence: Sequence, files: PrefixFiles) -> str:
        """Save the rows left by the round after a context, which an earlier request computed. Returns a file's name.
        Raises PrefixStoreError: there is no such snapshot, or the disk refuses it."""
        eviction = sequence.eviction
        if eviction is None or eviction.target >= eviction.context_len:
            raise PrefixStoreError("eviction must leave less than all of the prompt, or nothing is saved")
        if not is_portable(eviction.policy):
            raise PrefixStoreError(
                "eviction must be a policy of Winnow's own: what another keeps, another process cannot check"
            )
        if not self._enabled:
            raise PrefixStoreError("enable_prefix_caching must be on to save a prefix, got False")
        chain = self._chain(sequence)
        if eviction.context_len not in chain.snapshots:
            raise PrefixStoreError(
                "eviction must be a policy with a round after the prompt that learns nothing of its queries for later "
                f"rounds, got {type(eviction.policy.score).__name__} with {type(eviction.policy.budget).__name__}"
            )
        key, rule = chain.snapshots[eviction.context_len]
        found = self._ledger.prefixes.snapshot(key, sequence.prefix_ids[: eviction.context_len], rule)
        if found is None:
            raise PrefixStoreError("kv_memory is too small to keep the prefix beside other requests")
        document = chain.document_key(sequence.prefix_ids[: eviction.context_len])
        return self._files.save(files, found, document, eviction, chain.root)

    def _may_begin_with_others(self, sequence: Sequence) -> bool:
        if not self._enabled or not _takes_part(sequence) or sequence.request.wants_prompt_logprobs:
            return False
        self._known_chain(sequence).extend(sequence.prefix_ids)
        return True

    def _most_as_computed(self, sequence: Sequence) -> int:
        """Return how many tokens of a waiting sequence may come from others as they were computed."""
        most = sequence.num_tokens - 1  # logits come from the last one
        if sequence.packed:
            most = sequence.packed[0].start - 1
        if sequence.forks:
            most = min(most, sequence.request.fork_at - 1)
        # Blocks bring no recent KVs in 16 bits: those are the last ones of what is left to compute.
        most = min(most, sequence.num_tokens - self._ledger.layout.wide.recent)
        return _num_shareable(sequence, most)

    def _state_points(self, sequence: Sequence, computed: int) -> set[int]:
        """Return numbers of tokens above `computed` after which the states of a prompt's layers are kept."""
        layout, chain = self._ledger.layout, sequence.prefix
        if not layout.state_bytes or chain is None:
            return set()
        last = (sequence.prompt_len - 1) // layout.block_size * layout.block_size
        every = max(_STATE_TOKENS // layout.block_size, 1) * layout.block_size
        following = (computed // every + 1) * every
        return {point for point in (*chain.branches, last, min(following, last)) if point > computed}

    def _chain(self, sequence: Sequence) -> PrefixChain:
        size = self._ledger.layout.block_size
        return chain_of(sequence.prefix_ids, sequence.request.tenant, size, sequence.eviction)

    def _known_chain(self, sequence: Sequence) -> PrefixChain:
        if sequence.prefix is None:
            sequence.prefix = chain = self._chain(sequence)
            if self._ledger.prefixes.log is not None:
                self._ledger.prefixes.log.name_root(chain.key_after(0), chain.salt)
            self._sessions.continue_chain(sequence, chain)
        return sequence.prefix

    def _to_be_found(self, sequence: Sequence, found: FoundPrefix, other: Sequence) -> int:
        """Return tokens beyond those found that a waiting sequence will find when a running one has computed them."""
        mine, theirs, known = sequence.prefix, other.prefix, found.state.num_computed
        if mine is None or theirs is None or other.is_decoding:
            return 0
        for computed, (key, _) in mine.snapshots.items():
            is_theirs = theirs.snapshots.get(computed, (b"",))[0] == key
            if is_theirs and computed > max(known, other.kv.last_round):
                return computed - known
        if other.kv.last_round:
            return 0
        if sequence.request.documents and mine.root == theirs.root:
            coming = self._spans.num_coming(sequence, other)
            if coming:
                return coming
        size = self._ledger.layout.block_size
        theirs.extend(other.prefix_ids)
        most = min(_num_shareable(sequence, sequence.num_tokens - 1), _num_shareable(other, other.num_tokens))
        first = max(known, other.kv.num_computed) // size
        end = first
        while end < most // size and mine.links[end][0] == theirs.links[end][0]:
            end += 1
        if end > first and self._ledger.layout.state_bytes:
            theirs.branches.add(end * size)
        return end * size - known if end > first else 0

    def _snapshot(self, sequence: Sequence) -> Snapshot | None:
        """Return the known snapshot of most tokens of a waiting sequence."""
        assert sequence.prefix is not None, "who looks for a prefix has a chain"
        for computed, (key, rule) in sequence.prefix.snapshots.items():
            found = self._ledger.prefixes.snapshot(key, sequence.prefix_ids[:computed], rule)
            if found is not None and self._ledger.prefix_rows.has_pages_for(found):
                return found
        return None


def _takes_part(sequence: Sequence) -> bool:
    request, eviction = sequence.request, sequence.eviction
    if eviction is None or len(request.sequences) == 1:
        return True
    # Samples share what they hold among themselves, so no round may come when they are already several.
    return not sequence.owns_blocks and eviction.context_len < eviction.prompt_len


def _num_shareable(sequence: Sequence, num_tokens: int) -> int:
    """Return how many of a sequence's first `num_tokens` tokens may be shared as they were computed."""
    return num_tokens if sequence.eviction is None else min(num_tokens, sequence.eviction.num_shareable)


def _observes(sequence: Sequence, start: int, count: int) -> bool:
    """Return whether the queries of `count` tokens, from token `start` on, add to accumulators."""
    return sequence.eviction is not None and sequence.eviction.observe(start, start + count)[0] is not None
