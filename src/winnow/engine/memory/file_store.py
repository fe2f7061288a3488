"""Store of prefixes in files: what sequences leave goes there as they end, and comes back before others start."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

from winnow.cache import Ledger
from winnow.cache.accounting.prefix_chain import PrefixChain, PrefixKey, Snapshot, root_of
from winnow.cache.layout import IntArray
from winnow.config import CacheConfig
from winnow.engine.executor import Executor
from winnow.engine.memory.chains import stored_accumulators
from winnow.engine.memory.file_lookup import Fetch, FileLookup, SavedDocuments
from winnow.engine.requests.request import Sequence
from winnow.eviction import SequenceEviction
from winnow.storage.folders import SavedDirectory, open_folder
from winnow.storage.prefix_files import DiskFile, DiskLink, PrefixFiles, run_key
from winnow.storage.prefix_format import PrefixFormat, SavedPrefix
from winnow.values.json_values import json_value
from winnow.values.reuse import LIBRARY, LIBRARY_FOLDER

_RUN_BYTES = 16 * 2**20
"""KVs of a file of blocks: large enough that reading it is quick, small enough to be forgotten alone."""

_MOST_PENDING = 256 * 2**20
"""Bytes that may wait in host memory to be written, and as many that were read for waiting sequences."""

_MOST_TRIES = 4
"""Reads after which a sequence starts with what memory has, in place of waiting until nothing was lost meanwhile."""


class FileStore:
    """Mover of prefixes between the index and files: those that users `saved`, the `cached` that come and go, and a
    `library` of documents.

    What a sequence leaves in the index is read from the cache when it ends, and written meanwhile. What a new one can
    begin with is read while it waits, and put into the index when there is room for the sequence.
    """

    def __init__(
        self, executor: Executor, ledger: Ledger, cache: CacheConfig, form: Callable[[], PrefixFormat]
    ) -> None:
        self._form, cached, library = form, None, None
        self._saved = saved = None if cache.prefix_store is None else self.of_users(cache.prefix_store)
        if cache.documents is not None:
            library = self.of_users(Path(cache.documents, LIBRARY_FOLDER), "documents")
        if cache.prefix_cache_dir is not None:
            cached = PrefixFiles(open_folder(cache.prefix_cache_dir), cache.prefix_cache_disk, form())
        self.cached = cached
        self._sources = [files for files in (saved, cached, library) if files is not None]
        self.has_any = bool(self._sources)
        self._executor, self._ledger, layout = executor, ledger, ledger.layout
        self._lookup = FileLookup(ledger, self._sources, cached, library)
        self.documents = SavedDocuments(saved, layout.block_size)
        self.packed: dict[int, tuple[PrefixKey, int, list[int]]] = {}
        self._puts: deque[Callable[[], None]] = deque()
        self._put_keys: set[PrefixKey] = set()
        self._fetches: WeakSet[Fetch] = WeakSet()
        self._block_bytes = layout.host_bytes(layout.by_kind(layout.row_blocks(layout.even_rows(1))))

    def of_users(self, directory: str | Path, name: str = "prefix_store") -> PrefixFiles:
        """Return the files of a directory in which users save. Raises ConfigError: it is none."""
        return PrefixFiles(SavedDirectory(Path(directory), name), None, self._form())

    def holds(self, key: PrefixKey) -> bool:
        files = self.cached
        return files is not None and (files.place(key) is not None or files.snapshot(key) is not None)

    def put_aside(self, sequence: Sequence) -> None:
        """Queue the indexed prefixes of a sequence that ends for writing, unless they are on disk."""
        chain, tier = sequence.prefix, self.cached
        if chain is None or tier is None or not tier.is_writing:
            return
        links = self._known_links(chain, sequence.prefix_ids[: sequence.kv.num_computed])
        tier.touch(
            dict.fromkeys(found[0].name for link in links if (found := tier.place(link.key)) is not None)
        )

        found_by = self._ledger.prefixes.runs.contents

        def is_new(link: DiskLink) -> bool:
            # Where some were placed, those are of no use that only this sequence could find.
            if chain.is_parted and not found_by([link.key], chain.root):
                return False
            return link.key not in self._put_keys and not tier.holds(link.key, resumable=link.resumable)

        most, first = max(_RUN_BYTES // self._block_bytes, 1), 0
        while first < len(links):
            end = first
            while end < min(len(links), first + most) and is_new(links[end]):
                end += 1
            if end > first:
                run = links[first:end]
                self._puts.append(partial(self._write_run, tier, chain, first, run))
                self._put_keys.update(link.key for link in run)
            first = max(end, first + 1)
        for key, rule in chain.snapshots.values():
            if isinstance(rule, SequenceEviction) and key in self._ledger.prefixes.snapshots:
                self.put_snapshot(key)
                return  # the longest: shorter ones are of use to few

    def put_snapshot(self, key: PrefixKey) -> None:
        """Queue a snapshot of the index for writing, unless it is on disk, or its rule is of one process alone."""
        tier, snapshot = self.cached, self._ledger.prefixes.snapshots.get(key)
        if tier is None or not tier.is_writing or snapshot is None:
            return
        can_be_checked = stored_accumulators(snapshot.rule) is not None
        if can_be_checked and tier.snapshot(key) is None and key not in self._put_keys:
            self._puts.append(partial(self._write_snapshot, tier, snapshot))
            self._put_keys.add(key)

    def write(self, *, all_of_it: bool = False) -> None:
        """Copy queued prefixes from the cache, up to the limit of memory or all; threads write them to disk."""
        files = self.cached
        if not self._puts or files is None:
            return
        self._executor.apply(self._ledger.take_update())
        while self._puts and (all_of_it or files.pending_bytes < _MOST_PENDING):
            if files.pending_bytes >= _MOST_PENDING:
                files.wait()
            self._puts.popleft()()

    def write_all(self) -> None:
        """Write all queued prefixes, and wait until they are there."""
        self.write(all_of_it=True)
        if self.cached is not None:
            self.cached.wait()

    def close(self) -> None:
        try:
            self.write(all_of_it=True)
        finally:
            for files in self._sources:
                files.close()

    def clear(self) -> None:
        self._puts.clear()
        self._put_keys.clear()
        if self.cached is not None:
            self.cached.clear()

    def save(
        self, files: PrefixFiles, snapshot: Snapshot, document: bytes, rule: SequenceEviction, root: PrefixKey
    ) -> str:
        """Write a snapshot of the index as the document of a user. Raises as `PrefixFiles.save`."""
        self._executor.apply(self._ledger.take_update())
        notes = {"policy": json_value(rule.policy), "kv_budget": rule.budget, "tokens": snapshot.num_tokens}
        if root == root_of(LIBRARY):  # what is protected stands before a document
            skipped, token_ids = rule.spans[0][1] if rule.spans else 0, snapshot.token_ids.tolist()
            contents = self._ledger.prefixes.runs.hashes(token_ids[skipped:])[
                :: self._ledger.layout.block_size
            ]
            notes |= {"skipped": skipped, "root": root.hex(), "contents": contents}
        encode = self._encoder(files, snapshot, notes, document=document.hex())[1]
        return files.save(snapshot.key, encode())

    def prefetch(self, sequence: Sequence, most_tokens: int) -> None:
        """Start to read prefixes of a new sequence from disk, unless many reads are outstanding."""
        outstanding = sum(fetch.nbytes for fetch in self._fetches if fetch.parts)
        if outstanding < _MOST_PENDING:
            sequence.fetch = self._fetch(sequence, most_tokens)
            sequence.fetch.early = True

    def is_ready(self, sequence: Sequence, most_tokens: int, has_room: Callable[[], bool]) -> bool:
        """Return whether a sequence may start, as far as disks are concerned. If it `has_room` besides, the index knows
        then what is on disk for it."""
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

    def _write_snapshot(self, files: PrefixFiles, snapshot: Snapshot) -> None:
        self._put_keys.discard(snapshot.key)
        if self._ledger.prefixes.snapshots.get(snapshot.key) is snapshot:
            nbytes, encode = self._encoder(files, snapshot, {})
            files.write(snapshot.key, DiskFile("", nbytes), encode)

    def _write_run(self, files: PrefixFiles, chain: PrefixChain, first: int, run: list[DiskLink]) -> None:
        """Write the blocks of an ended sequence, from number `first` on, as far as the index still has them."""
        layout, links, token_ids = self._ledger.layout, list[DiskLink](), list[int]()
        self._put_keys.difference_update(link.key for link in run)
        for link in run:
            entry = self._ledger.prefixes.link(link.key)
            if entry is None:
                break
            links.append(link._replace(resumable=entry.resumable))
            token_ids += entry.token_ids
        if not links:
            return
        blocks = self._ledger.prefixes.columns([link.key for link in links]).T.ravel()
        states = {
            f"{number}.{name}": array
            for number, link in enumerate(links)
            for name, array in self._executor.read_states(link.key).items()
        }
        before, keys = chain.key_after(first), [link.key for link in links]
        contents = self._ledger.prefixes.runs.contents(keys, chain.root)
        snapshot = Snapshot.of(run_key(links), token_ids, None, layout.even_rows(len(token_ids)), blocks)
        notes = {
            "first": first * layout.block_size,
            "before": before.hex(),
            "links": [(link.key.hex(), link.num_tokens, link.resumable) for link in links],
            "root": chain.root.hex(),
            "contents": contents,
        }
        data = self._executor.read_blocks(blocks)
        found_by = tuple((chain.root, each) for each in contents)
        file = DiskFile("", data.nbytes, links=tuple(links), before=before, contents=found_by)
        files.write(snapshot.key, file, partial(files.form.encode, snapshot, data, 0, notes, states))

    def _encoder(
        self, files: PrefixFiles, snapshot: Snapshot, notes: Mapping[str, Any], **more: str
    ) -> tuple[int, Callable[[], bytes]]:
        """Copy a snapshot from the cache. Returns its bytes, and a function that returns those of its file."""
        data, states = self._executor.read_blocks(snapshot.blocks), self._executor.read_states(snapshot.key)
        accumulators = stored_accumulators(snapshot.rule)
        assert accumulators is not None, "what cannot be checked is not written"
        return data.nbytes, partial(files.form.encode, snapshot, data, accumulators, notes, states, **more)

    def _fetch(self, sequence: Sequence, most_tokens: int) -> Fetch:
        for files in self._sources:
            files.refresh()
        fetch = self._lookup.fetch(sequence, most_tokens)
        if fetch.files is not None and fetch.parts:
            fetch.future = fetch.files.read(fetch.parts)
            self._fetches.add(fetch)
        return fetch

    def _place(self, fetch: Fetch) -> None:
        """Let the index know what was read, once, as far as memory lasts."""
        parts, future, files = fetch.parts, fetch.future, fetch.files
        fetch.parts, fetch.future = [], None
        if future is None or files is None or future.exception() is not None:
            return
        for part, prefix in zip(parts, future.result(), strict=False):
            token_ids = prefix.token_ids
            if not part.file.links and fetch.rule is None:
                skipped = part.file.skipped
                own, content = token_ids[skipped:], part.file.contents[0][1]
                known = self._ledger.prefixes.knows(part.key)
                if known or self._place_snapshot(prefix, part.key, token_ids, LIBRARY):
                    self.packed[content] = part.key, skipped, own
                continue
            if fetch.rule is not None:
                if self._ledger.prefixes.knows(part.key) or self._place_snapshot(
                    prefix, part.key, token_ids, fetch.rule
                ):
                    files.count_loaded(len(token_ids))
                    self.documents.is_used |= files is self._saved
                return
            blocks = self._take_filled(prefix)
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
            first, root = prefix.notes["first"] // size, bytes.fromhex(prefix.notes.get("root", "")) or None
            kept = self._ledger.prefix_rows.keep_run(first, before, links, blocks, root)
            numbers = {key: number for number, (key, _, _) in enumerate(links)}
            for key in kept:
                states = {
                    name.partition(".")[2]: array
                    for name, array in prefix.states.items()
                    if int(name.partition(".")[0]) == numbers[key] + skip
                }
                if states:
                    self._executor.write_states(key, states)
            files.count_loaded(sum(len(links[numbers[key]][1]) for key in kept))

    def _place_snapshot(
        self, found: SavedPrefix, key: PrefixKey, token_ids: list[int], rule: Hashable
    ) -> bool:
        blocks = self._take_filled(found)
        if blocks is None:
            return False
        snapshot = Snapshot.of(key, token_ids, rule, found.lengths, blocks, found.num_rounds)
        if not self._ledger.prefix_rows.keep_snapshot(snapshot):
            return False
        self._executor.write_states(key, found.states)
        return True

    def _take_filled(self, found: SavedPrefix) -> IntArray | None:
        """Take blocks and fill them with what was read: int32 [n]; None: there is no memory."""
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
