"""What files hold of a prompt beyond what memory knows: parts to read for a sequence, and documents of users."""

from collections.abc import Hashable, Sequence as SequenceType
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import takewhile

from winnow.cache import Ledger
from winnow.cache.accounting.prefix_chain import PrefixChain, PrefixKey, root_of
from winnow.engine.memory.chains import chain_of, is_portable, stored_accumulators
from winnow.engine.memory.spans import searches
from winnow.engine.requests.request import Sequence
from winnow.eviction import SequenceEviction
from winnow.storage.prefix_files import DiskPart, PrefixFiles, SavedDocument, run_key
from winnow.storage.prefix_format import SavedPrefix
from winnow.values.json_values import json_value
from winnow.values.reuse import LIBRARY
from winnow.values.tenants import TenantName


@dataclass(eq=False)
class Fetch:
    """Parts of files that are read for a waiting sequence.

    Attributes:
        parts: runs of blocks, or one snapshot of `rule`; none: there is nothing to read.
        early: it was made when the sequence came; memory may have lost since what it knew then.
        tries: how often the sequence, which could have started, read; memory loses during a read too.
    """

    parts: list[DiskPart]
    rule: Hashable = None
    files: PrefixFiles | None = None
    future: "Future[list[SavedPrefix]] | None" = None
    early: bool = False
    tries: int = 0

    @property
    def is_reading(self) -> bool:
        return self.future is not None and not self.future.done()

    @property
    def nbytes(self) -> int:
        return sum(part.file.nbytes for part in self.parts)


class FileLookup:
    def __init__(
        self,
        ledger: Ledger,
        sources: SequenceType[PrefixFiles],
        cached: PrefixFiles | None,
        library: PrefixFiles | None,
    ) -> None:
        self._layout = ledger.layout
        self._index = ledger.prefixes
        self._sources = sources
        self._cached, self._library = cached, library

    def fetch(self, sequence: Sequence, most_tokens: int) -> Fetch:
        """Return what is to be read for a sequence. Nothing is read yet."""
        assert sequence.prefix is not None, "who looks for a prefix has a chain"
        fetch = self._snapshot_fetch(sequence)
        if fetch is None and self._cached is not None:
            fetch = self._run_fetch(self._cached, sequence, sequence.prefix, most_tokens)
        if fetch is not None and fetch.parts:
            return fetch
        for files in self._sources:
            if parts := self._span_parts(files, sequence, sequence.prefix, most_tokens):
                return Fetch(parts, None, files)
        return Fetch([])

    def _snapshot_fetch(self, sequence: Sequence) -> Fetch | None:
        assert sequence.prefix is not None, "who looks for a prefix has a chain"
        for computed, (key, rule) in sequence.prefix.snapshots.items():
            if self._index.knows(key):
                return Fetch([])
            if (accumulators := stored_accumulators(rule)) is None:
                continue
            for files in self._sources:
                if (file := files.snapshot(key)) is not None:
                    part = DiskPart(file, key, sequence.prefix_ids[:computed], accumulators)
                    return Fetch([part], rule, files)
        return None

    def _run_fetch(
        self, tier: PrefixFiles, sequence: Sequence, chain: PrefixChain, most_tokens: int
    ) -> Fetch:
        index, size = self._index, self._layout.block_size
        keys = [key for key, _ in chain.links[: max(most_tokens, 0) // size]]
        known = index.match(chain, most_tokens)
        index.touch(known)
        places = [None if index.knows(key) else tier.place(key) for key in keys]
        reach = 0
        while reach < len(keys) and (places[reach] is not None or index.knows(keys[reach])):
            reach += 1
        last = reach  # blocks that are needed
        if self._layout.state_bytes:
            start = index.num_tokens(index.longest_resumable(chain, known, sequence.prefix_ids, most_tokens))
            last, tail = self._resume_point(tier, sequence.prefix_ids, chain, reach, most_tokens, start)
            places = places[:last] + ([tier.place(tail)] if tail else [])
            if last and not tail and index.knows(keys[last - 1]):  # but not with states
                places[last - 1] = tier.place(keys[last - 1])
        elif not self._layout.wide.any:  # as in memory: first tokens of a block bring no KVs in 16 bits
            tail = self._longest_tail(tier, sequence.prefix_ids, chain, last, most_tokens)[1]
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
                DiskPart(file, run_key(file.links), sequence.prefix_ids[begin : begin + tokens], 0, skip)
            )
        return Fetch(parts, None, tier)

    def _span_parts(
        self, files: PrefixFiles, sequence: Sequence, chain: PrefixChain, end: int
    ) -> list[DiskPart]:
        """Return runs of blocks that stand elsewhere in a prompt, with the blocks beside them, of which some tokens may
        stand there too: behind the prefix that the index knows, and where it knows no run."""
        size, root = self._layout.block_size, root_of(LIBRARY) if files is self._library else chain.root
        parts: list[DiskPart] = []
        start = self._index.num_tokens(self._index.match(chain, end))
        for first, stop, least in searches(sequence):
            if root not in least:
                continue
            at, token_ids = max(first, start), sequence.token_ids[: min(stop, end)]
            hashes = self._index.runs.hashes(token_ids[at:]) if len(token_ids) - at >= size else []
            begin = at
            while at - begin < len(hashes):
                place = files.place((root, hashes[at - begin]))
                if place is None:
                    at += 1
                    continue
                file, number = place
                if not file.links:  # compressed
                    hashed = tuple(hashes[at - begin :: size][: len(file.contents)])
                    tokens = 0 if file.document is None else file.document.num_tokens
                    whole = hashed == tuple(each for _, each in file.contents)
                    if whole and not self._index.knows(file.key):
                        parts.append(DiskPart(file, file.key, tokens))
                    at += tokens - file.skipped if whole else 1
                    continue
                pairs = zip(hashes[at - begin :: size], file.contents[number:], strict=False)
                count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1][1], pairs))
                skip, until = max(number - 1, 0), min(number + count + 1, len(file.links))
                links = file.links[skip:until]
                if count * size > least[root] - 2 * size and not all(
                    self._index.knows(each.key) for each in links
                ):
                    tokens = sum(each.num_tokens for each in links)
                    parts.append(DiskPart(file, run_key(file.links), tokens, 0, skip))
                at += count * size
        return parts

    def _resume_point(
        self,
        files: PrefixFiles,
        token_ids: list[int],
        chain: PrefixChain,
        reach: int,
        most_tokens: int,
        start: int,
    ) -> tuple[int, PrefixKey | None]:
        """Return after how many blocks, and which tail, states are on disk; 0: nowhere behind `start` tokens."""
        size = self._layout.block_size
        for count in range(reach, -1, -1):
            num_tokens, tail = self._longest_tail(files, token_ids, chain, count, most_tokens)
            if tail is not None and count * size + num_tokens > start:
                return count, tail
            if count * size <= start:
                break
            if files.holds(chain.key_after(count), resumable=True):
                return count, None
        return 0, None

    def _longest_tail(
        self, files: PrefixFiles, token_ids: list[int], chain: PrefixChain, count: int, most_tokens: int
    ) -> tuple[int, PrefixKey | None]:
        """Return tokens and key of the longest tail on disk with which a prompt continues after `count` blocks."""
        size = self._layout.block_size
        return files.longest_tail(
            chain, count, token_ids[count * size : min((count + 1) * size, most_tokens)]
        )


_MOST_REASONS = 4


class SavedDocuments:
    """Lookup of the saved documents that a prompt begins with; `is_used` once a request could start from one."""

    def __init__(self, files: PrefixFiles | None, block_size: int) -> None:
        self._files = files
        self._block_size = block_size
        self.is_used = False
        self._num_prompts = 0
        self._reasons: dict[str, None] = {}

    def documents(self, token_ids: SequenceType[int], tenant: TenantName) -> list[SavedDocument]:
        """Return stored documents that are proper prefixes of a prompt, longest first."""
        if self._files is None:
            return []
        self._num_prompts += 1
        chain = PrefixChain(tenant or "", self._block_size)
        chain.extend(token_ids)
        keys: dict[int, PrefixKey] = {}
        found = []
        for each in self._own():
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
        chain = chain_of(token_ids, tenant, self._block_size, eviction)
        key, _ = chain.snapshots.get(document.num_tokens, (None, None))
        file = None if key is None or self._files is None else self._files.snapshot(key)
        if file is not None and is_portable(eviction.policy):
            self.is_used = True
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
        if len(self._reasons) < _MOST_REASONS:
            self._reasons[reason] = None

    def why_unused(self) -> str | None:
        """Return why no prompt so far could start from the store; None: one could, or there was none, or no store."""
        if self._files is None or self.is_used or not self._num_prompts:
            return None
        if not (documents := self._own()):
            return self._files.why_foreign()
        if self._reasons:
            return "a prompt begins with one, but " + "; ".join(self._reasons)
        shortest = documents[-1].num_tokens
        return f"no prompt begins with one under its tenant (the shortest has {shortest} tokens)"

    def _own(self) -> list[SavedDocument]:
        assert self._files is not None, "only files have documents"
        return [each for each in self._files.documents() if each.made_for == self._files.form.made_for]
