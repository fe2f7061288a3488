"""Who is in the batch, who waits outside it, and how queries move between the two."""

from dataclasses import dataclass

from winnow.engine.request import Sequence
from winnow.padded.batch import Batch
from winnow.padded.counters import Counters
from winnow.padded.groups import Grouping
from winnow.padded.memory_budget import MemoryBudget
from winnow.padded.prefill import Prefilled
from winnow.padded.queue import Queue
from winnow.padded.sampler_slots import SamplerSlots


@dataclass(frozen=True)
class BatchState:
    """What modes decide upon."""

    queue: Queue
    batch: Batch
    budget: MemoryBudget
    sampler_slots: SamplerSlots
    counters: Counters
    grouping: Grouping
    max_columns: int | None
    """Columns that the model allows at most; None: any number."""

    @property
    def max_rows(self) -> int:
        return self.budget.max_rows

    @property
    def waiting_is_urgent(self) -> bool:
        """Whether the first waiting query comes before all that are parked."""
        first, parked = self.queue.waiting.first, self.queue.parked
        return first is not None and (not parked or first.request.priority > parked[0].request.priority)

    def admits(self, length: int, reserved_bytes: int = 0) -> bool:
        """Whether one more query of so many KVs may enter the batch beside others, or enter an empty one."""
        batch = self.batch
        if not batch.running:
            return True  # whatever was admitted fits alone
        rows, columns = len(batch.rows) + 1, max(batch.columns, length)
        return rows <= self.max_rows and self.budget.admits(
            rows, columns, batch.reserved_bytes + reserved_bytes
        )

    def make_way(self, sequence: Sequence, length: int, reserved_bytes: int = 0) -> bool:
        """Park queries of lower priority until `sequence` may enter. False: there are none, or not enough."""
        while not self.admits(length, reserved_bytes):
            least = self.queue.choose_victim(self.batch.running)
            if least.request.priority >= sequence.request.priority:
                return False
            self.park(least)
            self.batch.release_front()
        return True

    def make_room(self, joiners: tuple[Sequence, ...]) -> tuple[Sequence, ...]:
        """Make room for the columns of a pass, whoever has to give way. Returns the joiners that can stay."""
        batch = self.batch
        while True:
            width = max((joiner.num_tokens for joiner in joiners), default=1)
            rows = len(batch.rows) + len(joiners)
            left = width - 1 if batch.keeps_gaps else max(width - batch.columns - 1, 0)
            if batch.reserve(rows, left, width):
                return joiners
            batch.release_front()
            if batch.reserve(rows, left, width):
                return joiners
            if joiners:
                joiners = ()
            elif len(batch.running) < len(batch.rows):
                batch.drop_idle_rows()
            else:
                self.park(self.queue.choose_victim(batch.running))

    def park(self, sequence: Sequence) -> None:
        """Take a running sequence out, its KVs to host memory if that has room."""
        self.queue.park([sequence], self.batch.view(sequence))
        self.batch.leave(sequence, keep_row=False)
        self.sampler_slots.leave(sequence)
        self.counters.parks += 1
        sequence.request.update_metrics(num_preemptions=sequence.request.metrics.num_preemptions + 1)

    def enter(self, group: Prefilled, *, keep_rows: bool) -> None:
        """Put a group that was prefilled apart into the batch, as far as there is room. An empty batch becomes it."""
        batch, queue = self.batch, self.queue
        if batch.running or len(group.sequences) > self.max_rows:
            self.embed_parked()
            return
        rows = [None if sequence.finished else sequence for sequence in group.sequences]
        for sequence in rows:
            if sequence is not None:
                queue.pop(sequence)
        queue.offload()
        batch.adopt(group.cache, rows)
        if not keep_rows:
            batch.drop_idle_rows()
        if not batch.running:
            batch.reset()

    def embed_parked(self) -> None:
        """Put parked queries into the batch, as far as there is room, unless a more urgent one waits."""
        queue = self.queue
        while queue.parked:
            first = queue.parked[0]
            if self.waiting_is_urgent:
                return
            if not self.make_way(first, queue.length_parked(first)):
                return
            kvs = queue.pop(first)
            assert kvs is not None, "only a parked sequence is embedded"
            self.batch.join(first, kvs)
