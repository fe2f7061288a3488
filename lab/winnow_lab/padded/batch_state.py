"""The batch, the queries outside it, and moves between the two."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from winnow.engine.requests.request import Sequence
from winnow_lab.padded.batch import Batch
from winnow_lab.padded.memory_budget import MemoryBudget
from winnow_lab.padded.prefill import Prefilled
from winnow_lab.padded.queue import Queue
from winnow_lab.padded.sampler_slots import SamplerSlots
from winnow_lab.padded.stats import Counters


@dataclass(frozen=True)
class Grouping:
    """Limits of a group of queries that are prefilled together. The first waiting query is always in it.

    Attributes:
        padding: maximum padding, as a fraction of the group's positions.
        positions: maximum positions of a group of several queries, padding included.
        lookahead: number of waiting queries that are considered.
    """

    size: int
    padding: float
    positions: int
    lookahead: int

    def choose(self, waiting: Iterable[Sequence], fits: Callable[[int, int], bool]) -> list[Sequence]:
        """The next group in serving order, given a waiting query; `fits`: whether memory holds (rows, columns)."""
        oldest, *rest = islice(waiting, max(self.lookahead, 1))
        if oldest.request.wants_prompt_logprobs:  # the logits of all its positions are kept, so it goes alone
            return [oldest]
        others = [
            sequence
            for sequence in rest
            if sequence.request.priority == oldest.request.priority
            and not sequence.request.wants_prompt_logprobs
        ]
        others.sort(key=lambda sequence: abs(sequence.num_tokens - oldest.num_tokens))
        group, total, longest = [oldest], oldest.num_tokens, oldest.num_tokens
        for sequence in others:
            if len(group) == self.size:
                break
            width, tokens = max(longest, sequence.num_tokens), total + sequence.num_tokens
            area = width * (len(group) + 1)
            little = area - tokens <= self.padding * area and area <= self.positions
            if little and fits(len(group) + 1, width):
                group.append(sequence)
                total, longest = tokens, width
        return group


@dataclass(frozen=True)
class BatchState:
    """The state that modes decide on; `max_columns`: the most columns that the model allows, None: any."""

    queue: Queue
    batch: Batch
    budget: MemoryBudget
    sampler_slots: SamplerSlots
    counters: Counters
    grouping: Grouping
    max_columns: int | None

    @property
    def max_rows(self) -> int:
        return self.budget.max_rows

    @property
    def urgent(self) -> Sequence | None:
        """The first waiting query, if none is parked or it may park all parked ones."""
        first, parked = self.queue.waiting.first, self.queue.parked
        if first is None or (parked and not self.queue.waiting.order.may_park(first, parked[0])):
            return None
        return first

    def admits(self, length: int, reserved_bytes: int = 0) -> bool:
        """Whether one more query of `length` KVs may enter the batch."""
        batch = self.batch
        if not batch.running:
            return True  # every admitted query fits alone
        rows, columns = len(batch.rows) + 1, max(batch.columns, length)
        return rows <= self.max_rows and self.budget.admits(
            rows, columns, batch.reserved_bytes + reserved_bytes
        )

    def make_way(self, sequence: Sequence, length: int, reserved_bytes: int = 0) -> bool:
        """Park queries of lower priority until `sequence` may enter. False: there are not enough of them."""
        while not self.admits(length, reserved_bytes):
            least = self.queue.choose_victim(self.batch.running)
            if not self.queue.waiting.order.may_park(sequence, least):
                return False
            self.park(least)
            self.batch.release_front()
        return True

    def make_room(self, joiners: tuple[Sequence, ...]) -> tuple[Sequence, ...]:
        """Make room for the columns of a pass, parking queries if necessary. Returns the joiners that still fit."""
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
        """Remove a running sequence from the batch; copy its KVs to host memory if there is room."""
        self.queue.park([sequence], self.batch.view(sequence))
        self.batch.leave(sequence, keep_row=False)
        self.sampler_slots.leave(sequence)
        self.counters.parks += 1
        sequence.request.update_metrics(num_preemptions=sequence.request.metrics.num_preemptions + 1)

    def enter(self, group: Prefilled, *, keep_rows: bool) -> None:
        """Put a prefilled group into the batch as far as there is room; if the batch is empty, the group becomes it."""
        batch, queue = self.batch, self.queue
        if batch.running or len(group.sequences) > self.max_rows:
            self.embed_parked()
            return
        rows = [None if sequence.finished else sequence for sequence in group.sequences]
        for sequence in filter(None, rows):
            queue.pop(sequence)
        queue.offload()
        batch.adopt(group.cache, rows)
        if not keep_rows:
            batch.drop_idle_rows()
        if not batch.running:
            batch.reset()

    def embed_parked(self) -> None:
        """Put parked queries into the batch as far as there is room, unless a query of higher priority waits."""
        queue, batch = self.queue, self.batch
        while queue.parked:
            first = queue.parked[0]
            if self.urgent is not None:
                return
            if not self.make_way(first, queue.length_parked(first)):
                return
            rows, columns = len(batch.rows) + 1, max(batch.columns, queue.length_parked(first))
            if not self.budget.fits(rows, columns, batch.reserved_bytes + queue.fetched_bytes):
                queue.drop_fetched()
            fetched = queue.fetched_bytes
            kvs = queue.pop(first)
            assert kvs is not None, "only a parked sequence is embedded"
            batch.reserved_bytes += fetched
            batch.join(first, kvs)
            batch.reserved_bytes -= fetched

    def fetch_parked(self) -> None:
        """Start to copy the first parked query's KVs to the device if a running one ends with the pass to come (4.2).

        Only where there is memory for them beside the batch's tensors. Before the next pass they are embedded or
        dropped.
        """
        queue, batch = self.queue, self.batch
        ends = any(each.num_tokens + 1 >= each.prompt_len + each.request.max_tokens for each in batch.running)
        if not queue.parked or not ends:
            return
        shape, nbytes = batch.cache.shape, queue.length_parked(queue.parked[0]) * self.budget.kv_shape.nbytes
        if self.budget.fits(shape.rows, shape.columns, batch.reserved_bytes + nbytes):
            queue.fetch()
            batch.note_peak(batch.cache.nbytes + queue.fetched_bytes)
