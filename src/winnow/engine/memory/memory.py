"""Owner of all KVs: rows of sequences, the index of prefixes, and the stores outside of the device."""

import warnings
from collections.abc import Callable, Mapping, Sequence as SequenceType
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from winnow.cache import Ledger, OutOfBlocksError
from winnow.cache.accounting.prefix_chain import PrefixEvent, PrefixLog
from winnow.cache.layout import PAGE_ENTRIES, IntArray, ceil_div
from winnow.cache.update import CacheUpdate
from winnow.config import CacheConfig, SchedulerConfig
from winnow.engine.executor import Executor, no_format
from winnow.engine.memory.chains import chain_of
from winnow.engine.memory.file_store import FileStore
from winnow.engine.memory.prefixes import FoundPrefix, PrefixSharing
from winnow.engine.memory.room import Room
from winnow.engine.memory.sessions import Sessions
from winnow.engine.memory.spans import SpanReuse
from winnow.engine.memory.swap import Swap
from winnow.engine.plan import PlannedEviction, PlannedSequence
from winnow.engine.requests.request import KVState, Sequence
from winnow.storage.prefix_format import PrefixFormat
from winnow.values.tenants import TenantName, TenantTable


class Memory(Room):
    """Owner of all KVs of an engine. It decides where they lie, and never whose turn it is.

    Who schedules asks what `fits`, `take`s and `release`s, and makes room by `evict` and `preempt`.

    Args:
        form: of files of prefixes, where `cache` names any.
        rows: of the model for which a row of the executor's cache stands.
    """

    def __init__(
        self,
        executor: Executor,
        clock: Callable[[], float],
        config: SchedulerConfig,
        cache: CacheConfig,
        form: Callable[[], PrefixFormat] = no_format,
        rows: int = 1,
    ) -> None:
        ledger = Ledger(executor.layout, executor.size, (cache.kv_offloading_size or 0) // rows)
        self.tenants = TenantTable(config.tenants)
        self.swap = Swap(executor, ledger, clock, self.tenants)
        self.files = FileStore(executor, ledger, cache, form)
        self.sessions = Sessions(ledger, clock, self.tenants, self.files, cache.session_memory)
        self.spans = SpanReuse(ledger, cache.reuse_share, self.files.packed)
        prefixes = PrefixSharing(ledger, cache.shares_prefixes, self.files, self.sessions, self.spans)
        super().__init__(config, ledger, prefixes)
        self._executor = executor
        self._ahead = self._tier_blocks_ahead(config)
        for kind in self._ahead:
            self.ledger.allocator.withhold(kind)
        if cache.kv_offloading_size is not None:
            nbytes, *seconds = executor.time_copies(clock)
            for back, each in enumerate(seconds):
                self.swap.costs.record_copy(nbytes, each, back=bool(back))

    def start_step(self, *, idle: bool) -> None:
        """Let prefixes of ended sequences be written, and ask for memory of a tier that the step may take. With `idle`
        nothing runs, so memory that was refused is asked for again."""
        allocator = self.ledger.allocator
        if idle:
            allocator.refusal = None
        for kind, ahead in self._ahead.items():
            wanted = allocator.wanted(kind, ahead)
            if wanted and allocator.refusal is None:
                first, refusal = self._executor.grant(kind, wanted)
                allocator.supply(kind, first)
                allocator.refusal = refusal
        self.files.write()

    def take(self, sequence: Sequence, running: SequenceType[Sequence], chunk: Callable[[], int]) -> int:
        """Give a waiting sequence a slot, what others computed of its prompt, and room for its next tokens. `chunk`
        says how many, once `sequence.kv` says with what it begins. Returns that; 0: it has to wait, unchanged."""
        if not self.can_open(sequence):
            return 0
        if not self.prefixes.is_ready(sequence, lambda: self.fits(sequence, running)):
            return 0
        found = self.prefixes.find(sequence)
        sequence.kv = found.state
        self.prefixes.look_up_spans(sequence)
        count = chunk()
        if count and not self.prefixes.is_worth_waiting(sequence, count, running, found):
            if self.fits(sequence, running, found) and self._open(sequence, found, count):
                return count
            self.hold_back()
        sequence.kv = KVState()
        return 0

    def bring_back(self, sequence: Sequence, running: SequenceType[Sequence]) -> bool:
        """Resume a swapped sequence if it fits; beside others only if all have room for their next blocks. False:
        nothing was done. True, and without a slot, it has lost its copy."""
        if not self.swap.fits(sequence) or (running and not self.fits(sequence, running)):
            self.hold_back()
            return False
        self.swap.resume(sequence)
        return True

    def append(self, planned: SequenceType[tuple[Sequence, int]], *, below_threshold: bool = False) -> bool:
        """Take room for the next tokens of each sequence, `below_threshold` only what `watermark_preempt` leaves to
        them. False: there is none; nothing has changed."""
        slots, counts = [s.kv.running_slot for s, _ in planned], [count for _, count in planned]
        left = self.num_free - self._above_preempt
        if below_threshold and self._above_preempt and self.ledger.demand(slots, counts).blocks > left:
            return False
        try:
            if planned:
                self.ledger.append(slots, counts)
        except OutOfBlocksError:
            return False
        return True

    def record(
        self,
        computed: SequenceType[tuple[Sequence, PlannedSequence, int, list[int]]],
        rejected: Mapping[int, int],
    ) -> None:
        """Record a computed step.

        Args:
            computed: of each sequence its plan, the number of its computed tokens, and its new tokens.
            rejected: by slot, how many KVs of rejected draft tokens are dropped.
        """
        if rejected:
            self.ledger.take_back(list(rejected), list(rejected.values()))
        # After rows are cut back: where they slide, they say which tokens these are.
        for sequence, entry, end, accepted in computed:
            if entry.placed:
                self.spans.count(sequence, entry.reused + entry.repaired, entry.repaired)
            self.prefixes.remember(sequence, entry.start, end, accepted)
            if sequence.packed:
                self.spans.place_packed(sequence)

    def until_stop(self, sequence: Sequence) -> int:
        """Return how many tokens a sequence computes before a state is kept or a compressed document placed."""
        return min(self.prefixes.until_state(sequence), self.spans.until_packed(sequence))

    def drop_unseen(self, running: SequenceType[Sequence]) -> None:
        """Give back what no later token of a sequence sees."""
        self.ledger.drop_unseen([s.kv.running_slot for s in running if s.slides(self.layout)])

    def own(self, sequence: Sequence) -> bool:
        """Make a sequence the only holder of its blocks. False: others hold too many for copies to find room."""
        slot = sequence.kv.running_slot
        return not self.ledger.is_shared(slot) or self.ledger.own_or_forget(slot)

    def evict(self, planned: tuple[PlannedEviction, ...], lengths: IntArray | None) -> list[int]:
        """Run rounds, which cut rows to `lengths`; None: the executor ranks KVs now. Returns blocks that each frees.

        Siblings hold the same KVs and would decide alike: one decides, with the blocks to itself, and the others share
        what is left.
        """
        ledger, slots = self.ledger, [each.slot for each in planned]
        for sibling in chain.from_iterable(each.siblings for each in planned):
            ledger.clear(sibling)
        self.apply_update()
        if lengths is None:
            lengths = self._executor.plan_evictions(planned)
        for slot, kept in zip(slots, lengths, strict=True):
            ledger.own_front(slot, kept)
        self.apply_update()
        self._executor.compact()
        freed: list[int] = ledger.shrink(slots, lengths).tolist()
        for each in planned:
            for sibling in each.siblings:
                ledger.share(each.slot, sibling)
        return freed

    def preempt(self, sequence: Sequence, *, alone: bool) -> None:
        """Take the slot and the blocks of a running sequence, so that it can continue later. With `alone` nothing else
        runs, so a copy would find no more room than there is now."""
        sequence.num_tokens_preempted = sequence.num_tokens
        metrics = sequence.request.metrics
        sequence.request.update_metrics(num_preemptions=metrics.num_preemptions + 1)
        if alone or not self.swap.save(sequence):
            self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Drop the KVs of a running sequence, or its copy. It keeps its tokens and computes them again later."""
        self.swap.drop(sequence)

    def recompute_seconds(self, num_tokens: int) -> float | None:
        """Return seconds of computing the first tokens of a sequence; None: not measured."""
        return self.swap.costs.recompute_seconds(num_tokens)

    def fork(self, parent: Sequence, child: Sequence, num_computed: int | None = None) -> bool:
        """Give `child` what `parent` holds, and the blocks that it reserves. False: a slot or blocks are short.
        `num_computed` are tokens that the rows will hold then; None: as many as now."""
        ledger, slot, reserved = self.ledger, parent.kv.slot, child.request.reserved_tokens
        if slot is None or not ledger.can_fork(slot):
            return False
        # What it shares at first is copied before its next token.
        if reserved is not None and ledger.layout.blocks_for(reserved) > ledger.allocator.num_free:
            return False
        own = ledger.fork(slot)
        if reserved is not None:
            try:
                ledger.reserve(own, reserved)
            except OutOfBlocksError:  # of table pages
                ledger.close(own)
                return False
        child.kv, child.reused = parent.kv.fork(own), list(parent.reused)
        if num_computed is not None:
            child.kv.num_computed = num_computed
        return True

    def release(self, sequence: Sequence) -> None:
        """Free what a sequence holds that ends, running or waiting; later ones may find what it leaves."""
        kv, ledger = sequence.kv, self.ledger
        if kv.slot is not None:
            self.drop_replay(sequence)
            # A step that is in progress has room for one more.
            sequence.kept = _computed(ledger.lengths[kv.slot], kv)
            self.prefixes.remember_end(sequence)
            self.files.put_aside(sequence)
            self.sessions.end_turn(sequence)
            ledger.close(kv.slot)
            kv.slot = None
        elif kv.host_id is not None:
            sequence.kept = _computed(ledger.host.copies[kv.host_id].lengths, kv)
            self.drop(sequence)
        self.sessions.release(sequence)

    def drop_replay(self, sequence: Sequence) -> None:
        """Cut the rows of a running sequence back to its context, dropping the KVs of a replay."""
        if sequence.kv.replayed:
            slot = sequence.kv.running_slot
            self.ledger.shrink([slot], self.ledger.lengths[[slot]] - np.int32(sequence.kv.replayed))
            sequence.kv.replayed = 0

    def take_update(self) -> CacheUpdate:
        """Return the cache changes since the last call, which the executor has to apply."""
        return self.ledger.take_update()

    def apply_update(self) -> None:
        """Send pending cache changes to the executor."""
        self._executor.apply(self.take_update())

    def flush(self) -> None:
        """Let executor and files know of all that has happened: no step may follow that would tell them."""
        self.apply_update()
        self.files.write()

    def distrust_all(self) -> None:
        """Forget what steps left that failed half-way. Nor is it known what the executor made of the last update."""
        self.ledger.prefixes.clear()
        self.ledger.repeat_update()

    def holds_on_disk(self, token_ids: list[int], tenant: TenantName) -> bool:
        """Return whether the end of a prompt lies in files, as a request of the tenant left it."""
        chain = chain_of(token_ids, tenant, self.ledger.layout.block_size, None)
        whole = len(token_ids) % self.ledger.layout.block_size == 0
        return self.files.holds(chain.links[-1][0] if whole else chain.tail_key(token_ids))

    def save_prefix(self, sequence: Sequence, directory: Path) -> Path:
        return directory / self.prefixes.save(sequence, self.files.of_users(directory))

    def record_prefixes(self) -> None:
        self.ledger.prefixes.log = PrefixLog()

    def take_prefix_events(self) -> list[PrefixEvent]:
        log = self.ledger.prefixes.log
        return [] if log is None else log.take()

    def clear(self, disk: bool) -> None:
        self.ledger.prefixes.clear()
        if disk:
            self.files.clear()

    def close(self) -> None:
        """Write what waits for files, and warn of a `prefix_store` that was of no use."""
        why = self.files.documents.why_unused()
        if why is not None:
            warnings.warn(f"no request used the prefix_store: {why}", stacklevel=3)
        self.files.close()

    def check_integrity(self, running: SequenceType[Sequence], waiting: SequenceType[Sequence]) -> None:
        ledger = self.ledger
        self.apply_update()
        self._executor.check_integrity(ledger.holdings())
        ledger.check_integrity()
        for sequence in running:
            computed = sequence.kv.num_computed + sequence.kv.replayed
            assert (ledger.lengths[sequence.kv.slot] <= computed).all(), "a row holds more than was computed"
        assert all(sequence.kv.slot is None for sequence in waiting), "a waiting sequence has a slot"
        swapped = [s.kv.host_id for s in waiting if s.kv.host_id is not None]
        copies = sorted(ledger.host.copies)
        assert sorted(swapped) == copies, "a copy in host memory belongs to no sequence, or to two"
        assert all(s.kv.host_id is None for s in running), "a running sequence has a copy in host memory"
        slots = [sequence.kv.slot for sequence in running]
        assert len(set(slots)) == len(slots), "two sequences share a slot"
        assert len(slots) + ledger.num_free_slots == ledger.size.max_num_seqs, "a slot is lost"

    def _open(self, sequence: Sequence, found: FoundPrefix, count: int) -> bool:
        """Open a slot for a sequence that begins with a prefix, with room for its next `count` tokens. False: one kind
        of blocks is short where all together would do; nothing has changed."""
        sequence.kv.slot = slot = self.ledger.open()
        try:
            if sequence.request.reserved_tokens is not None:
                self.ledger.reserve(slot, sequence.request.reserved_tokens)
            self.prefixes.adopt(sequence, found, count)
            self.ledger.append([slot], [count])
        except OutOfBlocksError:
            self.ledger.close(slot)
            return False
        sequence.fetch = None
        return True

    def _tier_blocks_ahead(self, config: SchedulerConfig) -> dict[int, int]:
        """Return, by kind of blocks on a tier, how many a sequence of full length and a step may take: as many are
        always granted, so that a lack of memory there is met as any lack of blocks is.
        """
        layout, size = self.layout, self.size
        step = ceil_div(config.max_num_batched_tokens, layout.block_size) + config.max_num_seqs
        per_row, rows = size.pages_per_seq * PAGE_ENTRIES + step, layout.by_kind(layout.even_rows(1))
        return {kind: rows[kind] * per_row for kind, each in enumerate(layout.kinds) if each.tier is not None}


def _computed(lengths: IntArray, kv: KVState) -> NDArray[np.int32]:
    return np.minimum(lengths, kv.num_computed).astype(np.int32)
