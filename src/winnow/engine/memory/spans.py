"""Reuse of what was computed elsewhere: runs of tokens whose KVs are placed where another prompt has them."""

from collections.abc import Iterator, Mapping
from math import ceil

from winnow.cache import Ledger, OutOfBlocksError
from winnow.cache.accounting.prefix_chain import PrefixKey, root_of
from winnow.cache.accounting.token_runs import PackedRun
from winnow.cache.layout import ceil_div
from winnow.engine.plan import PlacedSpan, PlannedSequence
from winnow.engine.requests.request import Sequence
from winnow.eviction.probes import probes_of
from winnow.values.reuse import ANYWHERE, EXACT, LIBRARY

FIRST_LAYERS = 2
"""Layers that compute all tokens: what has changed by then says which tokens the others compute."""
_LEAST_UNMARKED = 128
"""Tokens of a run that no mark of the prompt says to be a unit."""
_LEAST_OF_LIBRARY = 32
"""The same of documents that were computed ahead."""


class SpanReuse:
    """Reuse of KVs at other positions, and behind other tokens, than they were computed at.

    They are approximate: a share of the tokens, those that the new neighbours change most, is computed again
    (CacheBlend, 2405.16444), and blocks that hold any of the others are never found by another request. What is known
    is the prefix index's: blocks whose KVs were computed for a request of the same salt, whatever stood before.

    Args:
        packed: snapshots of documents by the hash of their first block: key, tokens that stand before, and their own.

    Attributes:
        num_reused, num_repaired: tokens that were not computed, and of those placed the ones that were, so far.
    """

    def __init__(
        self, ledger: Ledger, share: float, packed: Mapping[int, tuple[PrefixKey, int, list[int]]]
    ) -> None:
        self._ledger, self._share, self._packed = ledger, share, packed
        self._cost = min(1.0, share + FIRST_LAYERS / ledger.layout.num_layers)
        self.num_reused = self.num_repaired = 0

    def look_up(self, sequence: Sequence, end: int) -> None:
        """Find what is known of a waiting sequence's tokens up to `end`, behind the prefix that it begins with."""
        first, sequence.runs = sequence.kv.num_computed, []
        for start, stop, least in searches(sequence):
            sequence.runs += self._ledger.prefixes.runs.find(
                least, sequence.token_ids, max(start, first), min(stop, end)
            )

    def look_up_packed(self, sequence: Sequence) -> None:
        """Find compressed documents in a waiting sequence. Something is computed before the first, and behind it, where
        rows are of uneven length, nothing else is placed."""
        index, size, tokens = self._ledger.prefixes, self._ledger.layout.block_size, sequence.token_ids
        sequence.packed, library = [], root_of(LIBRARY)
        if not self._packed or sequence.eviction is not None or len(sequence.request.sequences) > 1:
            return
        for start, stop, least in searches(sequence):
            may_hold = stop - start >= size and library in least
            hashes = index.runs.hashes(tokens[start:stop]) if may_hold else []
            at = max(start, 1)
            while at - start < len(hashes):
                key, skipped, token_ids = self._packed.get(hashes[at - start], (b"", 0, []))
                end = at + len(token_ids)
                if index.knows(key) and tokens[at:end] == token_ids and end < sequence.prompt_len:
                    sequence.packed.append(PackedRun(at, end, key, skipped))
                    at = end
                else:
                    at += 1

    def place_packed(self, sequence: Sequence) -> None:
        """Give a running sequence the compressed documents that follow on its tokens, as far as there is room."""
        kv, index = sequence.kv, self._ledger.prefixes
        while run := next((each for each in sequence.packed if each.start == kv.num_computed), None):
            snapshot = index.snapshots.get(run.key)
            try:
                if snapshot is None:
                    raise OutOfBlocksError("it was forgotten")
                self._ledger.place(kv.running_slot, snapshot, run.skipped, run.start - run.skipped)
            except OutOfBlocksError:
                sequence.packed = []
                return
            index.touch([run.key])
            kv.num_computed = kv.last_round = run.end
            self.count(sequence, run.end - run.start, 0)

    def until_packed(self, sequence: Sequence) -> int:
        """Return how many tokens remain until a compressed document, or all that do."""
        computed = sequence.kv.num_computed
        ahead = (run.start - computed for run in sequence.packed if run.start > computed)
        return next(ahead, sequence.num_to_compute)

    def begin(self, sequence: Sequence) -> None:
        """Keep what a sequence, which has just got its slot, computes behind its first run from those who ask for exact
        prefixes."""
        chain, computed = sequence.prefix, sequence.kv.num_computed
        if chain is None:
            return
        exact = chain.num_exact(computed)
        sequence.reused = [(exact, computed)] if exact < computed else []
        if sequence.index == 0:
            sequence.request.num_reused_tokens = sequence.request.num_repaired_tokens = 0
        self.count(sequence, computed - exact, 0)
        if sequence.runs:
            chain.part(sequence.runs[0].start)

    def num_coming(self, sequence: Sequence, other: Sequence) -> int:
        """Return tokens of documents that are not known of a waiting sequence, and that a running one computes."""
        if EXACT in (sequence.request.reuse, other.request.reuse):
            return 0
        fresh = {
            tuple(other.token_ids[start + 1 : end - 1])  # letters at the ends may be in other tokens
            for start, end in other.request.documents
            if end > other.kv.num_computed and not _overlap(other, start, end)
        }
        return sum(
            end - start
            for start, end in sequence.request.documents
            if fresh
            and not _overlap(sequence, start, end)
            and tuple(sequence.token_ids[start + 1 : end - 1]) in fresh
        )

    def stretch(self, sequence: Sequence, start: int, most: int) -> int:
        """Return how many tokens from `start` on take as long as `most` that are all computed."""
        left, at = float(most), start
        for run in sequence.runs:
            if run.end <= at or left <= 0:
                continue
            before = max(min(run.start - at, ceil(left)), 0)
            left, at = left - before, at + before
            if left > 0:
                placed = min(run.end - at, int(left / self._cost))
                left, at = left - placed * self._cost, at + placed
                if at < run.end:
                    return max(at - start, most)
        return at - start + int(left)

    def place(self, sequence: Sequence, entry: PlannedSequence) -> None:
        """Plan what is still known of the tokens that a step computes next, and how many of these it computes again in
        all layers; the rest is computed."""
        index, size, placed = self._ledger.prefixes, self._ledger.layout.block_size, []
        for run in sequence.runs:
            first, last = max(run.start, entry.start), min(run.end, entry.end)
            offset = run.offset + first - run.start
            keys = run.keys[offset // size : ceil_div(offset + last - first, size)] if first < last else ()
            if keys and all(map(index.knows, keys)):
                index.touch(keys)
                placed.append(PlacedSpan(first, last - first, offset % size, index.columns(keys)))
                sequence.reused.append((first, last))
        entry.placed, count = tuple(placed), sum(span.count for span in placed)
        entry.repaired = max(ceil(self._share * count), len(placed) and 1)  # a step has a token

    def count(self, sequence: Sequence, placed: int, repaired: int) -> None:
        """Count tokens of a step."""
        self.num_reused += placed - repaired
        self.num_repaired += repaired
        if sequence.index == 0:
            sequence.request.num_reused_tokens += placed - repaired
            sequence.request.num_repaired_tokens += repaired


def searches(sequence: Sequence) -> Iterator[tuple[int, int, dict[PrefixKey, int]]]:
    """Yield tokens start..end - 1 of a waiting sequence, in order, among which runs may be placed: of these roots, and
    of as many tokens at least. A document that was computed ahead is a unit where no mark says so, too."""
    request, chain, library, at = sequence.request, sequence.prefix, root_of(LIBRARY), 0
    if request.reuse == EXACT or chain is None or request.wants_prompt_logprobs or request.images:
        return
    if sequence.eviction is not None and probes_of(sequence.eviction.policy):
        return  # they are shown every token
    if request.reuse == ANYWHERE:
        least = {chain.root: _LEAST_UNMARKED, library: _LEAST_OF_LIBRARY}
        yield 0, sequence.prompt_len, least | {chain.approximate_root: _LEAST_UNMARKED}
        return
    for start, end in request.documents:
        yield at, start, {library: _LEAST_OF_LIBRARY}
        yield start, end, {chain.root: 1, library: 1}
        at = end
    yield at, sequence.prompt_len, {library: _LEAST_OF_LIBRARY}


def _overlap(sequence: Sequence, start: int, end: int) -> bool:
    return any(run.start < end and start < run.end for run in sequence.runs)
