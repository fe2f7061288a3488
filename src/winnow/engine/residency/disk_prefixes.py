"""WHEN prefixes go to disk by themselves, and come back: as sequences end, and before others start."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from weakref import WeakSet

from winnow.cache import Ledger
from winnow.cache.accounting.prefix_chain import PrefixChain, PrefixKey
from winnow.cache.accounting.prefix_index import Snapshot
from winnow.engine.executor import Executor
from winnow.engine.requests.request import Sequence
from winnow.engine.residency.disk_tier import DiskFile, DiskLink, DiskPart, DiskTier, run_key
from winnow.engine.residency.prefix_format import SavedPrefix
from winnow.engine.residency.saved_prefixes import SavedPrefixes, is_portable
from winnow.eviction import SequenceEviction

_RUN_BYTES = 16 * 2**20
"""KVs of a file of blocks: large enough that reading it is quick, small enough to be forgotten alone."""

_MOST_PENDING = 256 * 2**20
"""Bytes that may wait in host memory to be written, and as many that were read for waiting sequences."""

_MOST_TRIES = 4
"""Reads after which a sequence starts with what memory has, in place of waiting until nothing was lost meanwhile."""


@dataclass(eq=False)
class Fetch:
    """Parts of files that are read for a waiting sequence.

    Attributes:
        parts: runs of blocks, or one snapshot; none: there is nothing to read.
        first: number of each run's first block in the prefix.
        rule: that of the snapshot.
        early: it was made when the sequence came; memory may have lost since what it knew then.
        tries: how often the sequence, which could have started, read; memory loses during a read too.
    """

    parts: list[DiskPart]
    first: list[int]
    rule: SequenceEviction | None = None
    future: "Future[list[SavedPrefix]] | None" = None
    early: bool = False
    tries: int = 0

    @property
    def is_reading(self) -> bool:
        return self.future is not None and not self.future.done()

    @property
    def nbytes(self) -> int:
        return sum(part.file.nbytes for part in self.parts)


@dataclass(frozen=True)
class _Put:
    """A run of an ended sequence's blocks, or its snapshot, that is to be written."""

    first: int = 0
    before: PrefixKey = b""
    links: tuple[DiskLink, ...] = ()
    snapshot: Snapshot | None = None


class DiskPrefixes:
    """Mover of prefixes between the index and the disk tier.

    What a sequence leaves in the index is read from the cache when it ends, and written meanwhile. What a new one can
    begin with is read while it waits, and put into the index when there is room for the sequence.
    """

    def __init__(self, executor: Executor, ledger: Ledger, saved: SavedPrefixes, tier: DiskTier) -> None:
        self.tier = tier
        self._executor = executor
        self._ledger = ledger
        self._saved = saved
        self._puts: deque[_Put] = deque()
        self._put_keys: set[PrefixKey] = set()
        self._fetches: WeakSet[Fetch] = WeakSet()
        layout = ledger.layout
        self._block_bytes = layout.host_bytes(layout.by_kind(layout.row_blocks(layout.even_rows(1))))

    def holds(self, key: PrefixKey) -> bool:
        """Return whether files have a block of tokens, or a snapshot."""
        return self.tier.place(key) is not None or self.tier.snapshot(key) is not None

    # -- to disk -------------------------------------------------------------------------------------------------

    def put_aside(self, sequence: Sequence) -> None:
        """Queue the indexed prefixes of a sequence that ends for writing, unless they are on disk."""
        chain, tier = sequence.prefix, self.tier
        if chain is None or chain.scored_by is not None or not tier.is_writing:
            return
        links = self._known_links(chain, sequence.token_ids[: sequence.kv.num_computed])
        tier.touch(
            dict.fromkeys(found[0].name for link in links if (found := tier.place(link.key)) is not None)
        )
        most, first = max(_RUN_BYTES // self._block_bytes, 1), 0
        while first < len(links):
            end = first
            while end < min(len(links), first + most) and self._is_new(links[end]):
                end += 1
            if end > first:
                before = chain.key_after(first)
                self._puts.append(_Put(first, before, tuple(links[first:end])))
                self._put_keys.update(link.key for link in links[first:end])
            first = max(end, first + 1)
        for key, rule in chain.snapshots.values():
            snapshot = self._ledger.prefixes.find_snapshot(key)
            if snapshot is not None and isinstance(rule, SequenceEviction):
                if is_portable(rule.policy) and tier.snapshot(key) is None and key not in self._put_keys:
                    self._puts.append(_Put(snapshot=snapshot))
                    self._put_keys.add(key)
                return  # the longest: shorter ones are of use to few

    def write(self, *, all_of_it: bool = False) -> None:
        """Copy queued prefixes from the cache, up to the limit of memory or all; threads write them to disk."""
        if not self._puts:
            return
        self._executor.apply(self._ledger.take_update())
        while self._puts and (all_of_it or self.tier.pending_bytes < _MOST_PENDING):
            if self.tier.pending_bytes >= _MOST_PENDING:
                self.tier.wait()
            put = self._puts.popleft()
            if put.snapshot is not None:
                self._put_keys.discard(put.snapshot.key)
                self._write_snapshot(put.snapshot)
            else:
                self._put_keys.difference_update(link.key for link in put.links)
                self._write_run(put)

    def close(self) -> None:
        """Write all queued prefixes, and end the threads."""
        try:
            self.write(all_of_it=True)
        finally:
            self.tier.close()

    def clear(self) -> None:
        """Forget everything, on disk too."""
        self._puts.clear()
        self._put_keys.clear()
        self.tier.clear()

    # -- from disk -----------------------------------------------------------------------------------------------

    def prefetch(self, sequence: Sequence, most_tokens: int) -> None:
        """Start to read prefixes of a new sequence from disk, unless many reads are outstanding."""
        outstanding = sum(fetch.nbytes for fetch in self._fetches if fetch.parts)
        if outstanding < _MOST_PENDING:
            sequence.fetch = self._fetch(sequence, most_tokens)
            sequence.fetch.early = True

    def is_ready(self, sequence: Sequence, most_tokens: int, has_room: Callable[[], bool]) -> bool:
        """Return whether a sequence may start, as far as disks are concerned.

        If it `has_room` besides, the index knows then what is on disk for it.
        """
        if sequence.is_reading:
            return False
        if not has_room():
            return True
        fetch: Fetch | None = sequence.fetch
        if fetch is not None:
            self._place(fetch)
        tries = 0 if fetch is None or fetch.early else fetch.tries
        if fetch is None or tries < _MOST_TRIES:
            sequence.fetch = fetch = self._fetch(sequence, most_tokens)
            fetch.tries = tries + 1
            if fetch.is_reading:
                return False
            self._place(fetch)
        fetch.early = True  # if it does not start now
        return True

    def await_any(self, waiting: Iterable[Sequence]) -> bool:
        """Wait until something was read for a waiting sequence. False: nothing is being read."""
        for sequence in waiting:
            if sequence.is_reading:
                wait([sequence.fetch.future])
                return True
        return False

    # -- inside --------------------------------------------------------------------------------------------------

    def _is_new(self, link: DiskLink) -> bool:
        return link.key not in self._put_keys and not self.tier.holds(link.key, resumable=link.resumable)

    def _known_links(self, chain: PrefixChain, token_ids: list[int]) -> list[DiskLink]:
        """Return what the index knows of the first blocks of a chain, and of the tail that follows on the last."""
        index, links = self._ledger.prefixes, list[DiskLink]()
        for key, tokens in chain.links:
            entry = index.link(key)
            if entry is None or entry.token_ids != tokens:
                return links
            links.append(DiskLink(key, len(tokens), entry.resumable))
        size = self._ledger.layout.block_size
        if len(token_ids) // size == len(links) and len(token_ids) % size:
            key = chain.tail_key(token_ids)
            entry = index.link(key)
            if entry is not None:
                links.append(DiskLink(key, len(entry.token_ids), entry.resumable))
        return links

    def _write_run(self, put: _Put) -> None:
        """Read the blocks of a run that the index still knows, and let them be written."""
        layout, found = self._ledger.layout, []
        for link in put.links:
            entry = self._ledger.prefixes.link(link.key)
            if entry is None:
                break
            found.append(entry)
        if not found:
            return
        token_ids = [token for entry in found for token in entry.token_ids]
        links = [
            DiskLink(link.key, link.num_tokens, entry.resumable)
            for link, entry in zip(put.links, found, strict=False)
        ]
        blocks = self._ledger.prefixes.columns([link.key for link in links]).T.ravel()
        states = {
            f"{number}.{name}": array
            for number, link in enumerate(links)
            for name, array in self._executor.read_states(link.key).items()
        }
        snapshot = Snapshot.of(run_key(links), token_ids, None, layout.even_rows(len(token_ids)), blocks)
        notes = {
            "first": put.first * layout.block_size,
            "before": put.before.hex(),
            "links": [(link.key.hex(), link.num_tokens, link.resumable) for link in links],
        }
        data = self._executor.read_blocks(blocks)
        file = DiskFile("", data.nbytes, links=tuple(links), before=put.before)
        self.tier.write(snapshot.key, file, partial(self.tier.form.encode, snapshot, data, 0, notes, states))

    def _write_snapshot(self, snapshot: Snapshot) -> None:
        if self._ledger.prefixes.find_snapshot(snapshot.key) is not snapshot:
            return
        rule = snapshot.rule
        assert isinstance(rule, SequenceEviction), "made by `put_aside`"
        data, states = self._executor.read_blocks(snapshot.blocks), self._executor.read_states(snapshot.key)
        accumulators = rule.policy.score.num_accumulators
        self.tier.write(
            snapshot.key,
            DiskFile("", data.nbytes),
            partial(self.tier.form.encode, snapshot, data, accumulators, {}, states),
        )

    def _fetch(self, sequence: Sequence, most_tokens: int) -> Fetch:
        """Look for more than the index knows, and begin to read it."""
        assert sequence.prefix is not None, "who looks for a prefix has a chain"
        self.tier.refresh()
        fetch = self._snapshot_fetch(sequence) or self._run_fetch(sequence, sequence.prefix, most_tokens)
        if fetch.parts:
            fetch.future = self.tier.read(fetch.parts)
            self._fetches.add(fetch)
        return fetch

    def _snapshot_fetch(self, sequence: Sequence) -> Fetch | None:
        assert sequence.prefix is not None, "who looks for a prefix has a chain"
        for computed, (key, rule) in sequence.prefix.snapshots.items():
            if self._ledger.prefixes.knows(key):
                return Fetch([], [])
            file = self.tier.snapshot(key)
            if file is not None and isinstance(rule, SequenceEviction) and is_portable(rule.policy):
                accumulators = rule.policy.score.num_accumulators
                return Fetch([DiskPart(file, key, sequence.token_ids[:computed], accumulators)], [0], rule)
        return None

    def _run_fetch(self, sequence: Sequence, chain: PrefixChain, most_tokens: int) -> Fetch:
        index, tier, size = self._ledger.prefixes, self.tier, self._ledger.layout.block_size
        if chain.scored_by is not None:
            return Fetch([], [])
        keys = [key for key, _ in chain.links[: max(most_tokens, 0) // size]]
        known = index.match(chain, most_tokens)
        index.touch(known)
        places = [None if index.knows(key) else tier.place(key) for key in keys]
        reach = 0
        while reach < len(keys) and (places[reach] is not None or index.knows(keys[reach])):
            reach += 1
        last = reach  # blocks that are needed
        if self._ledger.layout.state_bytes:
            start = index.num_tokens(index.longest_resumable(chain, known, sequence.token_ids, most_tokens))
            last, tail = self._resume_point(sequence.token_ids, chain, reach, most_tokens, start)
            places = places[:last] + ([tier.place(tail)] if tail else [])
            if last and not tail and index.knows(keys[last - 1]):  # but not with states
                places[last - 1] = tier.place(keys[last - 1])
        else:
            tail = self._longest_tail(sequence.token_ids, chain, last, most_tokens)[1]
            places = places[:last] + ([tier.place(tail)] if tail and not index.knows(tail) else [])
        wanted: dict[str, tuple[int, list[int]]] = {}  # by file: its first block, and which of its blocks
        for number, place in enumerate(places):
            if place is not None:
                wanted.setdefault(place[0].name, (number - place[1], []))[1].append(place[1])
        files = {place[0].name: place[0] for place in places if place is not None}
        parts = []
        for name, (start, numbers) in wanted.items():
            file, skip = files[name], min(numbers)
            tokens = sum(link.num_tokens for link in file.links[skip : max(numbers) + 1])
            begin = (start + skip) * size
            parts.append(
                DiskPart(file, run_key(file.links), sequence.token_ids[begin : begin + tokens], 0, skip)
            )
        return Fetch(parts, [start + min(numbers) for start, numbers in wanted.values()])

    def _resume_point(
        self, token_ids: list[int], chain: PrefixChain, reach: int, most_tokens: int, start: int
    ) -> tuple[int, PrefixKey | None]:
        """Return after how many blocks, and which tail, states are on disk; 0: nowhere behind `start` tokens."""
        size = self._ledger.layout.block_size
        for count in range(reach, -1, -1):
            num_tokens, tail = self._longest_tail(token_ids, chain, count, most_tokens)
            if tail is not None and count * size + num_tokens > start:
                return count, tail
            if count * size <= start:
                break
            if self.tier.holds(chain.key_after(count), resumable=True):
                return count, None
        return 0, None

    def _longest_tail(
        self, token_ids: list[int], chain: PrefixChain, count: int, most_tokens: int
    ) -> tuple[int, PrefixKey | None]:
        """Return tokens and key of the longest tail on disk with which a prompt continues after `count` blocks."""
        first = count * self._ledger.layout.block_size
        found: tuple[int, PrefixKey | None] = 0, None
        if self._ledger.layout.wide.any and not self._ledger.layout.state_bytes:
            return found  # as in memory: first tokens of a block bring no KVs in 16 bits
        for key, num_tokens in self.tier.tails(chain.key_after(count)):
            end = first + num_tokens
            is_longer = found[0] < num_tokens and end <= most_tokens
            if is_longer and chain.tail_key_after(count, token_ids[first:end]) == key:
                found = num_tokens, key
        return found

    def _place(self, fetch: Fetch) -> None:
        """Let the index know what was read, once, as far as memory lasts."""
        future, fetch.future = fetch.future, None
        if future is not None and future.exception() is None:
            self._place_parts(fetch, future.result())
        fetch.parts = []

    def _place_parts(self, fetch: Fetch, found: list[SavedPrefix]) -> None:
        for part, first, prefix in zip(fetch.parts, fetch.first, found, strict=False):
            token_ids = list(part.token_ids)
            if fetch.rule is not None:
                if self._ledger.prefixes.knows(part.key) or self._saved.place(
                    prefix, part.key, token_ids, fetch.rule
                ):
                    self.tier.count_loaded(len(token_ids))
                return
            blocks = self._saved.take_filled(prefix)
            if blocks is None:
                return
            size = self._ledger.layout.block_size
            every, skip = part.file.links, part.skip
            links = [
                (link.key, tuple(token_ids[number * size : (number + 1) * size]), link.resumable)
                for number, link in enumerate(every[skip:])
                if number * size < len(token_ids)
            ]
            before = every[skip - 1].key if skip else part.file.before
            kept = self._ledger.prefix_rows.keep_run(first, before, links, blocks)
            numbers = {key: number for number, (key, _, _) in enumerate(links)}
            for key in kept:
                states = {
                    name.partition(".")[2]: array
                    for name, array in prefix.states.items()
                    if int(name.partition(".")[0]) == numbers[key] + skip
                }
                if states:
                    self._executor.write_states(key, states)
            self.tier.count_loaded(sum(len(links[numbers[key]][1]) for key in kept))
