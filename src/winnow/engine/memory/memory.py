"""Owner of all KVs: rows of sequences, the index of prefixes, and the stores outside of the device."""

from collections.abc import Callable, Sequence as SequenceType
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from winnow.cache import Ledger, OutOfBlocksError
from winnow.cache.accounting.prefix_chain import PrefixEvent, PrefixLog
from winnow.cache.layout import PAGE_ENTRIES, IntArray, ceil_div
from winnow.config import SchedulerConfig
from winnow.engine.executor import Executor
from winnow.engine.memory.chains import chain_of
from winnow.engine.memory.file_store import FileStore
from winnow.engine.memory.prefixes import FoundPrefix, PrefixSharing
from winnow.engine.memory.room import Room
from winnow.engine.memory.sessions import Sessions
from winnow.engine.memory.spans import SpanReuse
from winnow.engine.memory.swap import Swap
from winnow.engine.memory.swap_costs import SwapCosts
from winnow.engine.requests.request import KVState, Sequence
from winnow.storage.folders import SavedDirectory
from winnow.storage.prefix_files import PrefixFiles
from winnow.storage.prefix_format import PrefixFormat
from winnow.values.tenants import TenantName, TenantTable


class Memory:
    """Owner of all KVs of an engine. It decides where they lie, and never whose turn it is.

    Args:
        prefix_caching: False: no sequence begins with what another computed.
        host_bytes: most bytes of copies in host memory.
        saved, cached, library: see `FileStore`.
        session_memory: bytes of the device that a session may take; None: no limit.
        costs: what copies and recomputing cost; None: they are measured.
        reuse_share: part of the tokens of placed spans that is computed again.
    """

    def __init__(
        self,
        executor: Executor,
        clock: Callable[[], float],
        config: SchedulerConfig,
        *,
        prefix_caching: bool = False,
        host_bytes: int = 0,
        saved: PrefixFiles | None = None,
        cached: PrefixFiles | None = None,
        library: PrefixFiles | None = None,
        session_memory: int | None = None,
        costs: SwapCosts | None = None,
        reuse_share: float = 0.15,
    ) -> None:
        self.ledger = Ledger(executor.layout, executor.size, host_bytes)
        self.tenants = TenantTable(config.tenants)
        self.swap = Swap(executor, self.ledger, clock, self.tenants, costs or SwapCosts())
        self.files = FileStore(executor, self.ledger, saved, cached, library)
        self.sessions = Sessions(self.ledger, clock, self.tenants, self.files, session_memory)
        self.spans = SpanReuse(self.ledger, reuse_share, self.files.packed)
        self.prefixes = PrefixSharing(self.ledger, prefix_caching, self.files, self.sessions, self.spans)
        self.room = Room(config, self.ledger, self.prefixes)
        self._executor = executor
        self._ahead = self._tier_blocks_ahead(config)
        for kind in self._ahead:
            self.ledger.allocator.withhold(kind)

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

    def fits(
        self, sequence: Sequence, running: SequenceType[Sequence], found: FoundPrefix | None = None
    ) -> bool:
        """Return whether all tokens of a waiting sequence fit beside what the running ones were promised."""
        return self.room.lacking(sequence, running, prefix=found) <= 0

    def take(self, sequence: Sequence, running: SequenceType[Sequence], chunk: Callable[[], int]) -> int:
        """Give a waiting sequence a slot, what others computed of its prompt, and room for its next tokens. `chunk`
        says how many, once `sequence.kv` says with what it begins. Returns that; 0: it has to wait, unchanged."""
        if not self.ledger.can_open(sequence.longest_row(self.ledger.layout)):
            return 0
        if not self.prefixes.is_ready(sequence, lambda: self.fits(sequence, running)):
            return 0
        found = self.prefixes.find(sequence)
        sequence.kv = found.state
        self.prefixes.look_up_spans(sequence)
        count = chunk()
        if count and not self.prefixes.is_worth_waiting(sequence, found, count, running):
            if self.fits(sequence, running, found) and self._open(sequence, found, count):
                return count
            self.room.hold_back()
        sequence.kv = KVState()
        return 0

    def bring_back(self, sequence: Sequence, running: SequenceType[Sequence]) -> bool:
        """Resume a swapped sequence if it fits; beside others only if all have room for their next blocks. False:
        nothing was done. True, and without a slot, it has lost its copy."""
        if not self.swap.fits(sequence) or (running and not self.fits(sequence, running)):
            self.room.hold_back()
            return False
        self.swap.resume(sequence)
        return True

    def append(self, planned: SequenceType[tuple[Sequence, int]]) -> None:
        """Take room for the next tokens of each sequence. Raises OutOfBlocksError, and nothing has changed."""
        if planned:
            self.ledger.append([s.kv.running_slot for s, _ in planned], [count for _, count in planned])

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
            self.close(sequence)
        elif kv.host_id is not None:
            sequence.kept = _computed(ledger.host.copies[kv.host_id].lengths, kv)
            self.swap.discard(sequence)
        self.sessions.release(sequence)

    def close(self, sequence: Sequence) -> None:
        self.ledger.close(sequence.kv.running_slot)
        sequence.kv.slot = None

    def drop_replay(self, sequence: Sequence) -> None:
        """Cut the rows of a running sequence back to its context, dropping the KVs of a replay."""
        if sequence.kv.replayed:
            slot = sequence.kv.running_slot
            self.ledger.shrink([slot], self.ledger.lengths[[slot]] - np.int32(sequence.kv.replayed))
            sequence.kv.replayed = 0

    def flush(self) -> None:
        """Let executor and files know of all that has happened: no step may follow that would tell them."""
        self._executor.apply(self.ledger.take_update())
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

    def save_prefix(self, sequence: Sequence, directory: Path, form: PrefixFormat) -> Path:
        return directory / self.prefixes.save(sequence, PrefixFiles(SavedDirectory(directory), None, form))

    def record_prefixes(self) -> None:
        self.ledger.prefixes.log = PrefixLog()

    def take_prefix_events(self) -> list[PrefixEvent]:
        log = self.ledger.prefixes.log
        return [] if log is None else log.take()

    def clear(self, disk: bool) -> None:
        self.ledger.prefixes.clear()
        if disk:
            self.files.clear()

    def check_integrity(self, running: SequenceType[Sequence], waiting: SequenceType[Sequence]) -> None:
        ledger = self.ledger
        ledger.check_integrity()
        for sequence in running:
            computed = sequence.kv.num_computed + sequence.kv.replayed
            assert (ledger.lengths[sequence.kv.slot] <= computed).all(), "a row holds more than was computed"
        assert all(sequence.kv.slot is None for sequence in waiting), "a waiting sequence has a slot"
        swapped = [s.kv.host_id for s in waiting if s.kv.host_id is not None]
        assert set(swapped) == set(ledger.host.copies) and len(set(swapped)) == len(swapped), (
            "a copy in host memory belongs to no sequence, or to two"
        )
        assert all(sequence.kv.host_id is None for sequence in running), (
            "a running sequence has a copy in host memory"
        )
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
        layout, size = self.ledger.layout, self.ledger.size
        step = ceil_div(config.max_num_batched_tokens, layout.block_size) + config.max_num_seqs
        per_row, rows = size.pages_per_seq * PAGE_ENTRIES + step, layout.by_kind(layout.even_rows(1))
        return {kind: rows[kind] * per_row for kind, each in enumerate(layout.kinds) if each.tier is not None}


def _computed(lengths: IntArray, kv: KVState) -> NDArray[np.int32]:
    return np.minimum(lengths, kv.num_computed).astype(np.int32)
