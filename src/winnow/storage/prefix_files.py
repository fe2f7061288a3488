"""Files of prefixes in a folder: what is there, who reads and writes, what goes for room."""

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from hashlib import sha256
from json import loads
from threading import Lock
from typing import Any, NamedTuple

from winnow.cache.accounting.prefix_chain import PrefixChain, PrefixKey
from winnow.cache.accounting.token_runs import BlockContent
from winnow.errors import ConfigError, PrefixStoreError
from winnow.storage.folders import FileState, PrefixFolder
from winnow.storage.prefix_format import FAULTS, PrefixFormat, SavedPrefix, read_header
from winnow.values.disk_stats import DiskTierStats

_RETRY_SECONDS = 10.0
"""Seconds for which a folder that failed is left alone."""
_CLOSE_SECONDS = 3.0
"""Seconds for which closing waits for what is still to be written to another machine."""
_HEADERS_AT_ONCE = 16
"""Headers of a slow folder's files that are read at a time."""


class DiskLink(NamedTuple):
    """A block of tokens in a file: its key, how many tokens it has, and whether layers' states after it are there."""

    key: PrefixKey
    num_tokens: int
    resumable: bool


class SavedDocument(NamedTuple):
    """A compressed document that a user saved, as its file's header describes it; nothing of it is checked yet.

    Attributes:
        made_for: format, model and cache; another engine's file is of no use.
        document: `PrefixChain.document_key` of its tokens.
        policy, kv_budget: under which it was compressed; the policy as `json_value` gives it.
    """

    made_for: str
    document: bytes
    num_tokens: int
    policy: Any
    kv_budget: int


class DiskFile(NamedTuple):
    """State of a file.

    Attributes:
        is_own: it is of this engine's model and cache.
        links: blocks of tokens that follow one another behind the prefix `before`; none: a snapshot, or of no use.
        contents: by which those of whole blocks are found behind other tokens, as `TokenRuns` has them.
        document: what a user saved in it.
        key: of a snapshot that is a document, found by its contents behind its first `skipped` tokens.
    """

    name: str
    nbytes: int
    is_own: bool = False
    links: tuple[DiskLink, ...] = ()
    before: PrefixKey = b""
    document: SavedDocument | None = None
    contents: tuple[BlockContent, ...] = ()
    key: PrefixKey = b""
    skipped: int = 0


class DiskPart(NamedTuple):
    """Part of a file that is to be read, as `PrefixFormat.read` takes it."""

    file: DiskFile
    key: PrefixKey
    token_ids: Sequence[int] | int
    num_accumulators: int = 0
    skip: int = 0


def run_key(links: Sequence[DiskLink]) -> PrefixKey:
    return sha256(b"run" + links[0].key + links[-1].key).digest()


class PrefixFiles:
    """Files of prefixes, written and read by threads of its own. Raises ConfigError: the folder cannot be listed.

    Any number of processes may share the folder. A file appears whole or not at all, so a process that ends while it
    writes leaves nothing that counts; what is known of the folder is found by listing it. The files used least recently
    go first when `limit` (bytes) is reached, other models' as well; None: those of a user, which stay. A folder is a
    cache: one that refuses a file gets none for `_RETRY_SECONDS`, and in one of another machine that does not answer
    nothing is looked for as long. KVs of `pending_bytes` wait in memory to be written.
    """

    def __init__(self, folder: PrefixFolder, limit: int | None, form: PrefixFormat) -> None:
        self._folder, self._limit, self.form = folder, limit, form
        self._lock = Lock()  # of the fields below it, which all threads use
        self._files: dict[str, DiskFile] = {}
        self._places: dict[PrefixKey, tuple[str, int]] = {}
        self._by_content: dict[BlockContent, tuple[str, int]] = {}
        self._tails: dict[PrefixKey, dict[PrefixKey, int]] = {}
        self._stats = DiskTierStats(bytes_budget=limit or 0)
        self.pending_bytes = 0
        self._writes_from = self._reads_from = 0.0
        self._reader = ThreadPoolExecutor(1, "prefix-reader")
        self._writer = ThreadPoolExecutor(1, "prefix-writer")
        self._listing: Future[None] | None = None
        folder.has_changed()
        try:
            self._learn(folder.listing())
        except OSError as error:
            raise ConfigError(f"prefix_cache_dir: cannot use {folder}: {error.strerror}") from error

    # -- what is there -------------------------------------------------------------------------------------------

    @property
    def is_writing(self) -> bool:
        return time.monotonic() >= self._writes_from

    @property
    def _is_away(self) -> bool:
        return time.monotonic() < self._reads_from

    def refresh(self) -> None:
        """List the folder again if it has changed, as other processes may have done; a slow one in the background."""
        if self._is_away or (self._listing is not None and not self._listing.done()):
            return
        if self._folder.has_changed():
            if self._folder.is_slow:
                self._listing = self._reader.submit(self._list)
            else:
                self._list()

    def _list(self) -> None:
        try:
            found = self._folder.listing()
        except OSError as error:  # it went away: nothing can be found there
            self._leave_alone(error)
            if self._folder.is_slow:
                return
            found = {}
        self._learn(found)

    def _leave_alone(self, error: OSError) -> None:
        """Look for nothing in another machine's folder for a while after it failed, and write nothing."""
        if self._folder.is_slow and not isinstance(error, FileNotFoundError):
            if not self._is_away:
                warnings.warn(
                    f"prefix_cache_dir: {self._folder} does not answer, and is left alone for {_RETRY_SECONDS:.0f} "
                    f"seconds: {error.strerror}",
                    stacklevel=2,
                )
            self._reads_from = self._writes_from = time.monotonic() + _RETRY_SECONDS

    def _learn(self, found: Mapping[str, FileState]) -> None:
        with self._lock:
            gone, new = self._files.keys() - found, found.keys() - self._files
            for name in gone:
                self._drop(name)
            self._stats.bytes_used = sum(state.nbytes for state in found.values())
        states = [(name, found[name].nbytes) for name in new]
        if self._folder.is_slow and states:
            with ThreadPoolExecutor(_HEADERS_AT_ONCE) as pool:
                described = list(pool.map(self._describe, *zip(*states, strict=True)))
        else:
            described = [self._describe(*state) for state in states]
        with self._lock:
            for file in described:
                if file is not None and file.name not in self._files:
                    self._enter(file)

    def snapshot(self, key: PrefixKey) -> DiskFile | None:
        file = None if self._is_away else self._files.get(self.form.file_name(key))
        return file if file is not None and file.is_own else None

    def place(self, key: PrefixKey | BlockContent) -> tuple[DiskFile, int] | None:
        """Return in which file a block of tokens is, and as which of its blocks."""
        places: Mapping[Any, tuple[str, int]] = self._places if isinstance(key, bytes) else self._by_content
        with self._lock:
            name, number = ("", 0) if self._is_away else places.get(key, ("", 0))
            return (self._files[name], number) if name else None

    def longest_tail(
        self, chain: PrefixChain, num_blocks: int, rest: Sequence[int]
    ) -> tuple[int, PrefixKey | None]:
        """Return length and key of the longest tail behind blocks of a chain with which `rest` begins; or 0, None."""
        with self._lock:
            tails = list(self._tails.get(chain.key_after(num_blocks), {}).items())
        for key, count in sorted(tails, key=lambda tail: -tail[1]):
            if count <= len(rest) and chain.tail_key_after(num_blocks, rest[:count]) == key:
                return count, key
        return 0, None

    def holds(self, key: PrefixKey, *, resumable: bool) -> bool:
        found = self.place(key)
        return found is not None and (found[0].links[found[1]].resumable or not resumable)

    def stats(self) -> DiskTierStats:
        self.refresh()
        with self._lock:
            own = sum(each.is_own for each in self._files.values())
            return replace(self._stats, num_files=own, is_writing=self.is_writing)

    def documents(self) -> list[SavedDocument]:
        """Return the documents that users saved, for this and other engines, longest first."""
        self.refresh()
        found = [each.document for each in self._files.values() if each.document is not None]
        return sorted(found, key=lambda each: -each.num_tokens)

    def why_foreign(self) -> str:
        if not self._files:
            return "it holds no prefix"
        found = self.documents()
        if not found:
            return "none of its files can be read as a prefix with its tokens"
        if all(loads(each.made_for)[1] != self.form.model for each in found):
            return "its prefixes were saved for another model, dtype or weight_dtype"
        return "its prefixes were saved for another cache (kv_cache_dtype, kv_group, kv_wide, block_size)"

    # -- reading and writing -------------------------------------------------------------------------------------

    def read(self, parts: Sequence[DiskPart]) -> "Future[list[SavedPrefix]]":
        """Begin to read parts of files, each of which needs those before it. The first that is of no use ends it."""
        return self._reader.submit(self._read, parts)

    def write(self, key: PrefixKey, file: DiskFile, encode: Callable[[], bytes]) -> None:
        """Begin to write a file; its `nbytes` are those before `encode`, which the writing thread calls."""
        file = file._replace(name=self.form.file_name(key), is_own=True)
        with self._lock:
            self.pending_bytes += file.nbytes
        self._writer.submit(self._write, file, encode)

    def save(self, key: PrefixKey, content: bytes) -> str:
        """Write a file at once. Returns its name. Raises PrefixStoreError, and the folder is as it was."""
        name = self.form.file_name(key)
        try:
            self._folder.write(name, content)
        except OSError as error:
            raise PrefixStoreError(f"cannot save a prefix in {self._folder}: {error.strerror}") from error
        return name

    def count_loaded(self, num_tokens: int) -> None:
        self._stats.loaded_tokens += num_tokens

    def touch(self, files: Iterable[str]) -> None:
        """Mark files as used; the first are kept longest."""
        names = list(files)
        if names:
            self._writer.submit(self._touch, names)

    def wait(self) -> None:
        self._writer.submit(lambda: None).result()

    def clear(self) -> None:
        self.wait()
        with self._folder.locked():
            with self._lock:
                own = [each.name for each in self._files.values() if each.is_own]
            for name in own:
                self._remove(name)

    def close(self) -> None:
        """Write what waits, to another machine as far as it takes it within `_CLOSE_SECONDS`, and end the threads."""
        if self._folder.is_slow:
            wait([self._writer.submit(lambda: None)], _CLOSE_SECONDS)
            self._folder.close()  # which ends waiting
        self._writer.shutdown(cancel_futures=self._folder.is_slow)
        self._reader.shutdown(cancel_futures=True)
        self._folder.close()

    # -- on threads of its own -----------------------------------------------------------------------------------

    def _read(self, parts: Sequence[DiskPart]) -> list[SavedPrefix]:
        found, start = [], time.perf_counter()
        for part in parts:
            name = part.file.name
            if self._is_away:
                break
            try:
                found.append(self.form.read(partial(self._folder.read, name), *part[1:]))
            except FAULTS as error:
                if isinstance(error, OSError):
                    self._leave_alone(error)
                self._warn_of_saved(name, error)
                with self._lock:
                    self._drop(name)
                    if not isinstance(error, OSError):  # a later listing may find it again
                        self._enter(DiskFile(name, part.file.nbytes))  # it takes up room, and no more
                        self._stats.num_damaged += 1
                break
        self._touch([part.file.name for part in parts[: len(found)]])
        with self._lock:
            self._stats.bytes_read += sum(part.file.nbytes for part in parts[: len(found)])
            self._stats.read_seconds += time.perf_counter() - start
        return found

    def _touch(self, names: list[str]) -> None:
        if not self._is_away:
            self._folder.touch(names)

    def _write(self, file: DiskFile, encode: Callable[[], bytes]) -> None:
        try:
            if not self.is_writing:
                return
            content = encode()
            if self._limit is not None and len(content) > self._limit:
                return
            with self._folder.locked():
                self._make_room(len(content))
                self._folder.write(file.name, content)
            with self._lock:
                self._drop(file.name)
                self._enter(file._replace(nbytes=len(content)))
                self._stats.bytes_written += len(content)
        except OSError as error:
            self._writes_from = time.monotonic() + _RETRY_SECONDS
            warnings.warn(
                f"prefix_cache_dir: {self._folder} refuses a file, so none is written for {_RETRY_SECONDS:.0f} "
                f"seconds: {error.strerror}",
                stacklevel=2,
            )
        finally:
            with self._lock:
                self.pending_bytes -= file.nbytes

    def _make_room(self, nbytes: int) -> None:
        if self._limit is None:
            return
        found = self._folder.listing()
        total = sum(state.nbytes for state in found.values())
        used = sorted(found, key=lambda name: found[name].used_at, reverse=True)
        while used and total + nbytes > self._limit:
            name = used.pop()
            total -= found[name].nbytes
            self._remove(name)
            self._stats.num_dropped += 1

    def _describe(self, name: str, nbytes: int) -> DiskFile | None:
        """Return what a file's header says; None: it cannot be read now."""
        if self._is_away:
            return None
        try:
            header = read_header(partial(self._folder.read, name))
            document = _document(header) if "document" in header else None
            if header["made_for"] != self.form.made_for:
                self._stats.num_foreign += 1
                return DiskFile(name, nbytes, document=document)
            notes = loads(header["notes"])
            links = [
                DiskLink(bytes.fromhex(key), int(n), bool(state)) for key, n, state in notes.get("links", ())
            ]
            before, root = (bytes.fromhex(notes.get(each, "")) for each in ("before", "root"))
            contents = tuple((root, int(each)) for each in notes.get("contents", ()))
            key, skipped = bytes.fromhex(header["key"]), int(notes.get("skipped", 0))
            return DiskFile(name, nbytes, True, tuple(links), before, document, contents, key, skipped)
        except OSError as error:
            self._leave_alone(error)
            return None
        except FAULTS as error:
            self._warn_of_saved(name, error)
            self._stats.num_damaged += 1
        return DiskFile(name, nbytes)

    def _warn_of_saved(self, name: str, error: Exception) -> None:
        if self._limit is None:
            warnings.warn(f"the saved prefix {self._folder}/{name} is not used: {error}", stacklevel=2)

    def _enter(self, file: DiskFile) -> None:
        """Learn of a file; the lock is held."""
        self._files[file.name] = file
        before = file.before
        for number, link in enumerate(file.links):
            known = self._places.get(link.key)
            if known is None or not self._files[known[0]].links[known[1]].resumable:
                self._places[link.key] = file.name, number
            if link.num_tokens < self.form.block_size:
                self._tails.setdefault(before, {})[link.key] = link.num_tokens
            before = link.key
        for number, content in enumerate(file.contents[: len(file.links) or 1]):
            self._by_content[content] = file.name, number

    def _drop(self, name: str) -> None:
        """Forget a file; the lock is held."""
        file = self._files.pop(name, None)
        if file is None:
            return
        before = file.before
        for link in file.links:
            if self._places.get(link.key, ("",))[0] == name:
                del self._places[link.key]
                tails = self._tails.get(before, {})
                tails.pop(link.key, None)
                if not tails:
                    self._tails.pop(before, None)
            before = link.key
        for content in file.contents:
            if self._by_content.get(content, ("",))[0] == name:
                del self._by_content[content]

    def _remove(self, name: str) -> None:
        with self._lock:
            self._drop(name)
        self._folder.delete(name)


def _document(header: Mapping[str, str]) -> SavedDocument:
    notes, made_for = loads(header["notes"]), header["made_for"]
    loads(made_for)[1]  # `why_foreign` reads it
    document, budget = bytes.fromhex(header["document"]), int(notes["kv_budget"])
    return SavedDocument(made_for, document, int(notes["tokens"]), notes["policy"], budget)
