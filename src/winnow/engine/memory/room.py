"""Whether requests fit into KV memory: blocks that are free, promised to running requests, and held."""

from collections.abc import Iterable, Iterator, Sequence as SequenceType
from itertools import islice

import numpy as np

from winnow.cache import Ledger
from winnow.config import SchedulerConfig
from winnow.engine.memory.prefixes import FoundPrefix, PrefixSharing
from winnow.engine.requests.request import Sequence
from winnow.eviction import SequenceEviction
from winnow.values.units import format_bytes


class Room:
    """Questions of the memory: blocks that sequences hold, will take and would free, as their policies have it.

    Requests join others only up to the high watermark. After one was held back, none joins until use has fallen to the
    low one. None is held back while nothing runs.
    """

    def __init__(self, config: SchedulerConfig, ledger: Ledger, prefixes: PrefixSharing) -> None:
        self.ledger, self.layout, self.size = ledger, ledger.layout, ledger.size
        self.prefixes = prefixes
        low = config.watermark_high if config.watermark_low is None else config.watermark_low
        num_blocks = ledger.size.num_blocks
        high = min(config.watermark_high, config.watermark_preempt)
        self._above_high = num_blocks - int(high * num_blocks)
        self._above_preempt = num_blocks - int(config.watermark_preempt * num_blocks)
        self._low = int(low * num_blocks)
        self._closed = False

    def is_open(self, running: SequenceType[Sequence]) -> bool:
        if not running or self.ledger.allocator.num_used <= self._low:
            self._closed = False
        return not self._closed

    def hold_back(self) -> None:
        self._closed = True

    @property
    def num_free(self) -> int:
        return self.ledger.allocator.num_free

    def can_open(self, sequence: Sequence) -> bool:
        """Return whether there are a slot and table pages for a waiting sequence; no block is asked."""
        return self.ledger.can_open(sequence.longest_row(self.layout))

    def fits(
        self, newcomer: Sequence, running: SequenceType[Sequence], found: FoundPrefix | None = None
    ) -> bool:
        """Return whether all tokens of a waiting sequence fit beside what the running ones were promised."""
        return self.lacking(newcomer, running, prefix=found) <= 0

    def fits_for(
        self,
        newcomer: Sequence,
        leaving: SequenceType[Sequence],
        running: SequenceType[Sequence],
        beside: SequenceType[Sequence],
    ) -> bool:
        """Return whether a waiting sequence fits once `leaving`, some of `running`, have left for it, and other waiting
        ones have entered `beside` it. Decoding sequences take their next KVs before."""
        ledger = self.ledger
        pages = [
            min(self.layout.pages_for(each.longest_row(self.layout)), self.size.num_pages)
            for each in (newcomer, *beside)
        ]
        given = sum(len(ledger.pages.of(each.kv.running_slot)) for each in leaving)
        slots = len(pages) - len(leaving) - ledger.num_free_slots
        if slots > 0 or sum(pages) - given > ledger.pages.num_free:
            return False
        # Once others run, another block a row will be promised to them.
        taken = sum(self.need(each) + self.layout.rows_per_seq for each in beside)
        freed = sum(self.freed(each) + self.growth(each) for each in leaving)
        return self.lacking(newcomer, running, len(leaving)) + self.next_blocks(running) + taken <= freed

    def is_short(self, waiting: Iterable[Sequence], running: SequenceType[Sequence]) -> bool:
        """Return whether the waiting sequences for which there are slots do not all fit beside the running ones."""
        layout, left = self.layout, self.num_free
        for sequence in running:
            growth = self.growth(sequence)
            if sequence.eviction is None:
                held = self.ledger.blocks_held(sequence.kv.running_slot)
                growth = max(growth, layout.blocks_seen(sequence.expected_tokens) - held)
            left -= growth
        for sequence in islice(waiting, self.ledger.num_free_slots):
            left -= layout.blocks_seen(sequence.expected_tokens)
            if left < 0:
                return True
        return False

    def num_fitting(self, waiting: Iterable[Sequence], running: SequenceType[Sequence]) -> int:
        """Return how many of the waiting sequences, first to last, would start if a step began now."""
        left, slots, count = -self.promised(running), self.ledger.num_free_slots, 0
        for sequence in waiting:
            slots -= 1 + len(sequence.forks)
            left -= self.need(sequence)
            if (slots < 0 or left + self.num_free < 0) and (count or running):
                break
            count += 1
        return count

    def promised(self, running: Iterable[Sequence]) -> int:
        """Return blocks that running sequences will take until their prompts are computed, or soon."""
        return sum(map(self.growth, running))

    def lacking(
        self,
        newcomer: Sequence,
        running: SequenceType[Sequence],
        without: int = 0,
        prefix: FoundPrefix | None = None,
    ) -> int:
        """Return blocks that must become free before all tokens of `newcomer` fit beside those already promised room.

        Prompts in progress will take the rest of their blocks, and each running sequence may soon need another block in
        every row, unless its policy shrinks it first; admitting into that room would only mean preempting right after.
        Some of `running`, as many as `without` says, are about to leave; with all of them the watermark goes too.
        """
        promised = self.promised(running)
        # To compress a prefix again costs more than to wait until one that runs has ended.
        reserve = self._above_high + self.prefixes.num_wanted(newcomer) if len(running) > without else 0
        return self.need(newcomer, prefix) + promised + reserve - self.num_free

    def need(self, newcomer: Sequence, prefix: FoundPrefix | None = None) -> int:
        """Return blocks that a waiting sequence takes until all its tokens are computed."""
        if newcomer.kv.host_id is not None:
            blocks = self.ledger.host.copies[newcomer.kv.host_id].num_blocks
            return blocks + self._growth_from(newcomer, blocks)
        if prefix is None:
            prefix = self.prefixes.find(newcomer)
        peak = newcomer.peak_blocks(self.layout, state=prefix.state)
        return peak - self.prefixes.num_held(newcomer, prefix)

    def explain_lack(self, sequence: Sequence) -> str:
        """Return the error text of a sequence that does not fit even alone."""
        ledger, layout, slot, size = self.ledger, self.layout, sequence.kv.slot, self.size
        blocks, pages = sequence.peak_blocks(layout), layout.pages_for(sequence.longest_row(layout))
        if slot is not None:
            more = ledger.demand([slot], [1])
            blocks, pages = ledger.blocks_held(slot) + more.blocks, len(ledger.pages.of(slot)) + more.pages
        return (
            f"kv_memory is too small for this request alone: with {sequence.num_tokens} tokens it needs at least "
            f"{blocks} blocks ({format_bytes(ledger.bytes_of(blocks))}) and {pages} table pages, and there are "
            f"{size.num_blocks} ({format_bytes(ledger.bytes_of(size.num_blocks))}) and {size.num_pages}"
            + _explain_kinds(ledger)
        )

    def held(self, running: Iterable[Sequence]) -> int:
        """Return distinct blocks in the tables of running sequences."""
        slots = [sequence.kv.running_slot for sequence in running]
        if not self.ledger.any_shared:
            return sum(map(self.ledger.blocks_held, slots))
        return len(np.unique(np.concatenate([self.ledger.blocks_of(slot) for slot in slots]))) if slots else 0

    def growth(self, sequence: Sequence) -> int:
        """Return blocks that a running sequence needs to compute its known tokens and one more block."""
        return self._growth_from(sequence, self.ledger.blocks_held(sequence.kv.running_slot))

    def freed(self, sequence: Sequence) -> int:
        """Return blocks that become free without a running sequence: no other sequence holds them."""
        return self.ledger.num_freed_by(sequence.kv.running_slot)

    def next_blocks(self, running: Iterable[Sequence]) -> int:
        """Return blocks that the next tokens of those that decode take."""
        slots = [sequence.kv.running_slot for sequence in running if sequence.is_decoding]
        return self.ledger.demand(slots, [1] * len(slots)).blocks

    def mean_kvs(self, running: SequenceType[Sequence]) -> list[float]:
        """Return the KVs of each sequence in a row that policies evict from, on average."""
        # At once: one by one, this would take longer than all else that is decided in a step.
        lengths = self.ledger.lengths[[sequence.kv.running_slot for sequence in running]]
        if self.layout.has_windows:
            lengths = lengths[:, list(self.layout.evictable)]
        means: list[float] = lengths.mean(axis=(1, 2)).tolist()
        return means

    def num_evictable(self, sequence: Sequence) -> int:
        """Return the KVs in all rows that policies evict from."""
        return int(self.ledger.lengths[sequence.kv.running_slot, list(self.layout.evictable)].sum())

    def sharing(self, sequences: Iterable[Sequence]) -> Iterator[Sequence]:
        """Yield those of which other sequences, or the index, hold a block, each by what it holds when it comes."""
        for sequence in list(sequences) if self.ledger.any_shared else ():
            if sequence.kv.slot is not None and self.ledger.is_shared(sequence.kv.slot):
                yield sequence

    def copied_by(self, sequence: Sequence, eviction: SequenceEviction) -> int:
        """Return blocks that a round copies, since other sequences hold them. What the index alone holds of them is
        copied only where there is room."""
        slot = sequence.kv.running_slot
        if not sequence.may_share_outside or not self.ledger.is_shared_with_sequences(slot):
            return 0
        return eviction.blocks_after(self.layout, sequence.kv.num_computed)

    def yields(self, sequence: Sequence, eviction: SequenceEviction) -> int:
        """Return blocks that a round of a decoding sequence frees at least, less those that it takes again soon."""
        held = self.ledger.blocks_held(sequence.kv.running_slot)
        left = min(eviction.blocks_after(self.layout, sequence.num_tokens), held)
        # What others hold too frees nothing, and is copied.
        shared = held - self.freed(sequence) if eviction.policy.when.late else 0
        return held - shared - left + self._growth_from(sequence, held) - self._growth_from(sequence, left)

    def _growth_from(self, sequence: Sequence, held: int) -> int:
        layout = self.layout
        if not sequence.is_decoding or sequence.before_replay_round:
            return max(sequence.peak_blocks(layout, ahead=layout.block_size) - held, 0)
        # The peak of its prompt is behind it.
        num_tokens, eviction = sequence.num_tokens + layout.block_size, sequence.sure_eviction
        most = (
            layout.blocks_seen(num_tokens) if eviction is None else eviction.decode_blocks(layout, num_tokens)
        )
        return min(max(most - held, 0), layout.rows_per_seq)


def _explain_kinds(ledger: Ledger) -> str:
    layout, allocator = ledger.layout, ledger.allocator
    if allocator.refusal is not None:
        return f"; value_tier={layout.value_tier} has no room for more values: {allocator.refusal}"
    if len(layout.kinds) == 1:
        return ""
    parts = []
    for number, (kind, count) in enumerate(zip(layout.kinds, ledger.size.by_kind, strict=True)):
        rows = int(((layout.kind_of == number) & layout.has_row).sum())
        where = "" if kind.tier is None else f" with values on value_tier={kind.tier}"
        parts.append(f"{count} serve {rows} of {layout.rows_per_seq} rows{where}")
    return f", of which {', '.join(parts[:-1])} and {parts[-1]}"
