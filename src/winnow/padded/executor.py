"""Carries out a step: makes room, runs the forward pass, samples, and moves queries in and out of the batch."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceType
from copy import copy
from dataclasses import dataclass

from torch import Tensor

from winnow.engine.request import Sequence
from winnow.outputs import LogprobDict
from winnow.padded.batch import Batch
from winnow.padded.cache import Extent
from winnow.padded.groups import Grouping
from winnow.padded.model import PaddedModel
from winnow.padded.modes import Decode, Mode, Prefill, Situation
from winnow.padded.prefill import Prefilled, prefill
from winnow.padded.queue import Queue
from winnow.padded.room import Room
from winnow.padded.seats import Seats
from winnow.padded.stats import PaddedStats
from winnow.padded.tally import Tally
from winnow.sampling import SamplingParams


@dataclass(frozen=True)
class Sampled:
    """What a step brought."""

    sequences: list[Sequence]
    token_ids: list[int]
    logprobs: list[LogprobDict | None]
    prompt_tokens: int
    """Prompt tokens computed."""
    prompt_logprobs: dict[Sequence, list[LogprobDict]]


class PaddedExecutor:
    """Owns the batch, the queue and the sampler's seats.

    Args:
        max_columns: columns that the model allows at most; None: any number.
        prefill_chunk: most columns of one forward pass of a prefill; None: all.
    """

    def __init__(
        self,
        model: PaddedModel,
        mode: Mode,
        room: Room,
        grouping: Grouping,
        seats: Seats,
        clock: Callable[[], float],
        max_columns: int | None,
        prefill_chunk: int | None,
    ) -> None:
        self._model = model
        self._mode = mode
        self._room = room
        self._seats = seats
        self._clock = clock
        self._prefill_chunk = prefill_chunk
        self._max_columns = max_columns
        self._tally = Tally()
        self._queue = Queue()
        self._batch = Batch(model, room, self._tally)
        self._peak_bytes = 0
        self._group: Prefilled | None = None
        self._now = Situation(
            self._queue, self._batch, room, grouping, max_columns, park=self._park, embed=self._embed
        )

    # -- requests --------------------------------------------------------------------------------------------------

    def settle(self, params: SamplingParams) -> SamplingParams:
        """Decide what the parameters leave open, once, when a request arrives."""
        return self._seats.settle(params)

    def add(self, sequence: Sequence) -> None:
        """Queue a request's first sequence; its siblings follow when the prompt is computed."""
        self._queue.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """A sequence has ended, wherever it was."""
        if sequence.slot is not None:
            self._leave(sequence, keep_row=self._mode.keeps_rows)
        elif sequence in self._queue:
            self._queue.take(sequence)
        self._seats.leave(sequence)
        self._queue.forget(sequence)
        if not self._queue and not self._batch.running:
            self._group = None

    def start_anew(self, unfinished: SequenceType[Sequence]) -> None:
        """After a step that failed: whoever is not safely queued computes all KVs again."""
        batch, queue = self._batch, self._queue
        self._group = None
        batch.reset()
        batch.elsewhere = 0
        self._seats.clear()
        for sequence in queue.loose:
            queue.take(sequence)
        safe = {each for sequence in queue.waiting for each in (sequence, *sequence.forks)} | set(
            queue.parked
        )
        for sequence in unfinished:
            if sequence not in safe:
                sequence.num_computed, sequence.slot = 0, None
                queue.add(sequence)

    # -- steps -----------------------------------------------------------------------------------------------------

    def step(self) -> Sampled:
        """Compute what the mode wants next, of at least one unfinished query."""
        start = self._clock()
        self._place()
        step = self._mode.next(self._now)
        if isinstance(step, Prefill):
            sampled = self._prefill(step.sequences)
            self._tally.prefill_seconds += self._clock() - start
        else:
            sampled = self._decode(step)
            self._tally.decode_seconds += self._clock() - start
        return sampled

    def _place(self) -> None:
        """Find a place for those of the group prefilled last that have gone on after their first token."""
        group, self._group = self._group, None
        if group is None:
            return
        batch, queue = self._batch, self._queue
        if not self._mode.prefills_first:
            if batch.running or len(group.sequences) > self._room.max_rows:
                self._now.embed_parked()
            else:
                rows = [None if sequence.finished else sequence for sequence in group.sequences]
                for sequence in rows:
                    if sequence is not None:
                        queue.take(sequence)
                queue.stow()
                batch.adopt(group.cache, rows)
                if not self._mode.keeps_rows:
                    batch.drop_idle_rows()
                if not batch.running:
                    batch.reset()
        queue.stow()
        batch.elsewhere = 0

    def _prefill(self, sequences: list[Sequence]) -> Sampled:
        batch, queue, room = self._batch, self._queue, self._room
        width = max(sequence.num_tokens for sequence in sequences)
        extent = Extent(len(sequences), width)
        if batch.running:
            batch.elsewhere = room.nbytes(extent.rows, extent.columns)
            batch.release_front()
            fits = batch.reserve(len(batch.rows), 0, 0)
            assert fits, "what is prefilled beside the batch has been found to fit"
        elif not self._mode.prefills_first:  # it will be the batch
            roomy = room.extent(len(sequences), width)
            assert roomy is not None, "what was admitted fits alone"
            extent = roomy
        self._note_start(sequences)
        group = prefill(self._model, self._tally, sequences, room.shape, extent, self._prefill_chunk)
        self._peak_bytes = max(self._peak_bytes, batch.nbytes + group.cache.nbytes)
        self._group = group
        asking = []
        for row, sequence in enumerate(sequences):
            queue.take(sequence)
            kvs = group.cache.view(row)
            for each in (sequence, *_fork(sequence)):
                queue.park(each, kvs, loose=True)
                asking.append((each, row))
        prompt_tokens = sum(min(sequence.num_computed, sequence.prompt_len) for sequence in sequences)
        return self._sample(asking, group.logits, prompt_tokens, group.prompt_logprobs)

    def _decode(self, step: Decode) -> Sampled:
        assert self._batch.running, "a mode that has queries finds a step for one of them"
        joiners = self._make_room(step.joiners)
        if not joiners:
            sequences, logits = self._batch.decode()
            return self._sample([(sequence, row) for row, sequence in enumerate(sequences)], logits)
        self._note_start(joiners)
        for sequence in joiners:
            self._queue.take(sequence)
        sequences, logits = self._batch.decode_with(joiners)
        asking = [(sequence, row) for row, sequence in enumerate(sequences)]
        for sequence in joiners:
            forks = _fork(sequence)
            if forks:
                kvs = self._batch.view(sequence).on_host()
                for fork in forks:
                    self._queue.park(fork, kvs)
                    asking.append((fork, sequences.index(sequence)))
        prompt_tokens = sum(min(sequence.num_computed, sequence.prompt_len) for sequence in joiners)
        return self._sample(asking, logits, prompt_tokens)

    def _sample(
        self,
        asking: list[tuple[Sequence, int]],
        logits: Tensor,
        prompt_tokens: int = 0,
        prompt_logprobs: dict[Sequence, list[LogprobDict]] | None = None,
    ) -> Sampled:
        """A token for each sequence, from its row of the logits [n, V]."""
        sequences, rows = [sequence for sequence, _ in asking], [row for _, row in asking]
        if rows != list(range(len(logits))):
            logits = logits[rows]
        found = self._seats.sample(sequences, logits)
        return Sampled(sequences, found.token_ids, found.logprobs, prompt_tokens, prompt_logprobs or {})

    # -- places ----------------------------------------------------------------------------------------------------

    def _make_room(self, joiners: tuple[Sequence, ...]) -> tuple[Sequence, ...]:
        """Make room for the columns of a pass, whoever has to give way. Returns the joiners that can stay."""
        batch = self._batch
        if not self._mode.keeps_rows or batch.columns == self._max_columns:
            batch.release_front()
        while True:
            width = max((joiner.num_tokens for joiner in joiners), default=1)
            rows, left = len(batch.rows) + len(joiners), max(width - batch.columns - 1, 0)
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
                self._park(self._queue.least(batch.running))

    def _park(self, sequence: Sequence) -> None:
        kvs = self._batch.view(sequence).on_host()
        self._leave(sequence, keep_row=False)
        self._seats.leave(sequence)
        self._queue.park(sequence, kvs)
        self._tally.parks += 1
        sequence.request.metrics.num_preemptions += 1

    def _embed(self, sequence: Sequence) -> None:
        kvs = self._queue.take(sequence)
        assert kvs is not None, "only a parked sequence is embedded"
        self._batch.join(sequence, kvs)

    def _leave(self, sequence: Sequence, keep_row: bool) -> None:
        self._batch.leave(sequence, keep_row=keep_row)
        if not self._batch.running:
            self._batch.reset()

    def _note_start(self, sequences: SequenceType[Sequence]) -> None:
        for sequence in sequences:
            if sequence.request.metrics.first_scheduled_time is None:
                sequence.request.metrics.first_scheduled_time = self._clock()

    # -- what is told ----------------------------------------------------------------------------------------------

    def stats(self) -> PaddedStats:
        """The executor's part of the statistics."""
        batch, queue, tally = self._batch, self._queue, self._tally
        group = self._group.cache.nbytes if self._group else 0
        return PaddedStats(
            num_running=len(batch.running),
            num_waiting=len(queue.waiting) + len(queue.parked),
            kv_bytes_used=batch.nbytes + group,
            kv_bytes_peak=max(self._peak_bytes, batch.peak_bytes),
            kv_bytes_budget=self._room.kv_memory,
            num_preemptions=tally.parks,
            elapsed={"prefill": tally.prefill_seconds, "decode": tally.decode_seconds},
            num_parked=len(queue.stowed),
            parked_bytes=queue.stowed_bytes,
            columns_held=batch.columns,
            columns_needed=batch.cache.longest,
            tally=copy(tally),
        )

    def kv_bytes(self, num_kvs: int) -> int:
        """Bytes of a query of `num_kvs` KVs, without padding."""
        return num_kvs * self._room.shape.nbytes

    def check_integrity(self, unfinished: SequenceType[Sequence]) -> None:
        """Assert that every unfinished sequence is in one place, and that the batch is what it should be."""
        batch, queue = self._batch, self._queue
        forks = {fork for sequence in queue.waiting for fork in sequence.forks if not fork.finished}
        places = [*batch.running, *queue.waiting, *queue.parked, *forks]
        assert len(places) == len(set(places)), "a sequence is in two places"
        assert set(places) == set(unfinished), "a sequence is lost"
        batch.check_integrity()
        for sequence in queue.parked:
            assert queue.length_parked(sequence) == sequence.num_computed, "a parked query lacks KVs"
        assert max(self._peak_bytes, batch.peak_bytes) <= self._room.kv_memory, "the KV memory was exceeded"


def _fork(sequence: Sequence) -> list[Sequence]:
    """The samples that share what a first sequence has computed; from now on they go their own ways."""
    forks, sequence.forks = sequence.forks, []
    for fork in forks:
        fork.num_computed = sequence.num_computed
    return forks
