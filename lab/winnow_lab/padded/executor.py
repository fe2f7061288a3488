"""Computing a step: make room, run the forward pass, sample, and move queries into and out of the batch."""

from collections.abc import Callable, Sequence as SequenceType
from copy import copy
from functools import partial
from typing import Any

from torch import Tensor

from winnow.engine.engine import Sampled
from winnow.engine.plan import StepResult
from winnow.engine.requests.request import Request, Sequence
from winnow.engine.scheduling.queue import WaitingQueue
from winnow.sampling import SamplingParams
from winnow.values.logprob import LogprobDict
from winnow_lab.padded.background import Background, Underway
from winnow_lab.padded.batch_state import BatchState
from winnow_lab.padded.cache import Shape
from winnow_lab.padded.model import PaddedModel
from winnow_lab.padded.modes import Mode, Prefill
from winnow_lab.padded.prefill import Prefilled, prefill
from winnow_lab.padded.stats import PaddedStats


class NoMemory:
    """Memory of an engine that keeps no KVs after a request ends: every query is answered with nothing."""

    def __init__(self) -> None:
        self.sessions = self.files = self

    def do_nothing(self, *_: Any) -> None: ...

    def find_nothing(self, *_: Any, **__: Any) -> list[Any]:
        return []

    def drop(self, *_: Any) -> bool:
        return False

    clear = record_prefixes = write_all = do_nothing
    list = age = take_prefix_events = find_nothing


class PaddedExecutor:
    """Executor of the steps that the mode chooses.

    A group that is prefilled apart is `_underway` while it is computed in the background, then `_arrived`, then, with
    its first tokens sampled, `_group`; the next step embeds or offloads it.

    Args:
        prefill_chunk: maximum columns of one forward pass of a prefill; None: all.
        background: prefills groups while the batch runs; None: the batch waits meanwhile.
    """

    overlaps = False
    memory = NoMemory()

    def __init__(
        self,
        model: PaddedModel,
        mode: Mode,
        state: BatchState,
        clock: Callable[[], float],
        prefill_chunk: int | None,
        background: Background | None,
    ) -> None:
        self._model = model
        self._mode = mode
        self._state = state
        self._queue, self._batch, self._budget = state.queue, state.batch, state.budget
        self._sampler_slots, self._counters = state.sampler_slots, state.counters
        self._clock = clock
        self._prefill_chunk = prefill_chunk
        self._background = background
        self._underway: Underway | None = None
        self._arrived: Prefilled | None = None
        self._group: Prefilled | None = None

    # -- requests --------------------------------------------------------------------------------------------------

    def with_seed(self, params: SamplingParams) -> SamplingParams:
        return self._sampler_slots.with_seed(params)

    def add(self, request: Request) -> None:
        """Queue a request's first sample; the others follow when the prompt is computed."""
        self.waiting.add(request)

    @property
    def waiting(self) -> WaitingQueue:
        return self._queue.waiting

    def remove(self, sequence: Sequence) -> None:
        """Free what a sequence holds, whether it runs, waits or is being prefilled."""
        batch, queue, underway = self._batch, self._queue, self._underway
        if sequence.kv.slot is not None:
            batch.leave(sequence, keep_row=self._mode.keeps_rows)
        elif sequence in queue:
            queue.pop(sequence)
        self._sampler_slots.leave(sequence)
        if underway is not None and all(each.finished for each in underway.sequences):
            underway.cancel()
            self._underway, batch.reserved_bytes = None, 0
        if not queue and not batch.running and self._underway is None:
            self._group, batch.reserved_bytes = None, 0

    def recompute_all(self, unfinished: SequenceType[Sequence]) -> None:
        """Recover from a failed step: recompute every sequence that is neither queued nor under way."""
        batch, queue = self._batch, self._queue
        self._arrived = self._group = None
        batch.reset()
        if self._underway is None:
            batch.reserved_bytes = 0
        self._sampler_slots.clear()
        queue.drop_fetched()
        for sequence in queue.on_device:
            queue.pop(sequence)
        safe = {*queue.waiting, *queue.parked, *self._computing}
        safe |= {fork for sequence in unfinished for fork in sequence.forks}
        for sequence in unfinished:
            if sequence not in safe:
                sequence.kv.slot = None
                queue.requeue(sequence)

    # -- steps -----------------------------------------------------------------------------------------------------

    def receive(self) -> BaseException | None:
        """Accept the group prefilled in the background if it is done; wait for it if nothing else can be computed.

        Returns the exception that the prefill failed with, if it did; its queries then wait again. Others are
        unaffected.
        """
        underway, batch = self._underway, self._batch
        if underway is None:
            return None
        # A pass takes one more column, and no query is parked for it while a group is under way.
        goes_on = batch.running and self._budget.fits(
            len(batch.rows), batch.cache.longest + 1, batch.reserved_bytes
        )
        if goes_on and not underway.done:
            return None
        start = self._clock()
        underway.wait()
        waited = self._clock() - start
        self._counters.prefill_seconds += waited
        self._underway = None
        if underway.failure is not None:
            batch.reserved_bytes = 0
            for sequence in underway.sequences:
                if not sequence.finished:
                    self._queue.requeue(sequence)
            return underway.failure
        self._arrived, seconds = underway.result()
        self._counters.overlapped_seconds += max(seconds - waited, 0.0)
        return None

    def step(self) -> Sampled:
        """Compute the step that the mode chooses, given at least one unfinished query.

        While a group is under way the batch only decodes; which queries enter is decided once the group is there.
        """
        start = self._clock()
        group, self._arrived = self._arrived, None
        joiners: tuple[Sequence, ...] = ()
        if group is None and self._underway is None:
            self._place()
            step = self._mode.next(self._state)
            if isinstance(step, Prefill):
                group = self._prefill(step.sequences)
            else:
                joiners = step.joiners
        if group is not None:
            sampled = self._begin(group)
            self._counters.prefill_seconds += self._clock() - start
        else:
            sampled = self._decode(joiners)
            self._counters.decode_seconds += self._clock() - start
        return sampled

    def _place(self) -> None:
        """Embed the group prefilled last into the batch, and offload the queries for which there is no room."""
        group, self._group = self._group, None
        if group is None:
            return
        if (
            not self._mode.prefills_first
            or self._queue.nbytes(self._queue.on_device) > self._queue.free_bytes
        ):
            self._state.enter(group, keep_rows=self._mode.keeps_rows)
        self._queue.offload()
        self._batch.reserved_bytes = 0

    def _prefill(self, sequences: list[Sequence]) -> Prefilled | None:
        """Prefill a group apart from the batch. Returns None if it is under way in the background."""
        batch, budget = self._batch, self._budget
        self._queue.drop_fetched()
        width = max(sequence.num_tokens for sequence in sequences)
        shape = Shape(len(sequences), width)
        if not batch.running and not self._mode.prefills_first:  # it will be the batch
            roomy = budget.tensor_shape(len(sequences), width)
            assert roomy is not None, "every admitted query fits alone"
            shape = roomy
        batch.reserve_bytes(shape.rows * shape.columns * budget.kv_shape.nbytes)
        self._note_start(sequences)
        for sequence in sequences:
            self._queue.pop(sequence)
        compute = partial(prefill, self._model, sequences, budget.kv_shape, shape, self._prefill_chunk)
        if self._background is None or not batch.running:
            return compute()
        self._underway = self._background.start(sequences, compute)
        return None

    def _begin(self, group: Prefilled) -> Sampled:
        self._group = group
        self._counters.add(group.counters)
        asking, prompt_tokens = [], 0
        for row, sequence in enumerate(group.sequences):
            if sequence.finished:  # aborted meanwhile
                continue
            sequence.kv.num_computed = sequence.num_tokens
            prompt_tokens += min(sequence.kv.num_computed, sequence.prompt_len)
            kvs = group.cache.view(row)
            for each in (sequence, *_fork(sequence)):
                self._queue.hold(each, kvs)
                asking.append((each, row))
        return self._sample(asking, group.logits, prompt_tokens, group.prompt_logprobs)

    def _decode(self, joiners: tuple[Sequence, ...]) -> Sampled:
        batch = self._batch
        assert batch.running, "a mode with unfinished queries finds a step for one of them"
        self._queue.drop_fetched()
        if not self._mode.keeps_rows or batch.columns == self._state.max_columns:
            batch.release_front()
        joiners = self._state.make_room(joiners)
        if not joiners:
            if self._underway is None:
                self._state.fetch_parked()
            sequences, logits = batch.decode()
            return self._sample([(sequence, row) for row, sequence in enumerate(sequences)], logits)
        self._note_start(joiners)
        for sequence in joiners:
            self._queue.pop(sequence)
        sequences, logits = batch.decode_with(joiners)
        asking = [(sequence, row) for row, sequence in enumerate(sequences)]
        for sequence in joiners:
            forks = _fork(sequence)
            if forks:
                self._queue.park(forks, batch.view(sequence))
                asking += [(fork, sequences.index(sequence)) for fork in forks]
        prompt_tokens = sum(min(sequence.kv.num_computed, sequence.prompt_len) for sequence in joiners)
        return self._sample(asking, logits, prompt_tokens)

    def _sample(
        self,
        asking: list[tuple[Sequence, int]],
        logits: Tensor,
        prompt_tokens: int = 0,
        prompt_logprobs: dict[Sequence, list[LogprobDict]] | None = None,
    ) -> Sampled:
        """Sample a token for each sequence, from its row of the logits [n, V]."""
        sequences, rows = [sequence for sequence, _ in asking], [row for _, row in asking]
        for sequence in sequences:
            self._queue.waiting.order.charge(sequence.request.tenant, 0, 1)
        if rows != list(range(len(logits))):
            logits = logits[rows]
        found = self._sampler_slots.sample(sequences, logits)
        errors = {index: fault.explain(self._model.dtype) for index, fault in found.faults.items()}
        result = StepResult(found.token_ids, found.logprobs, {}, errors)
        return Sampled(sequences, result, prompt_tokens, prompt_logprobs or {}, self._clock())

    def _note_start(self, sequences: SequenceType[Sequence]) -> None:
        for sequence in sequences:
            if sequence.request.metrics.first_scheduled_time is None:
                self._queue.waiting.order.charge(sequence.request.tenant, sequence.prompt_len, 0)
                sequence.request.update_metrics(first_scheduled_time=self._clock())

    # -- state ----------------------------------------------------------------------------------------------------

    @property
    def _computing(self) -> list[Sequence]:
        """Unfinished queries whose prefill is under way."""
        return [s for s in self._underway.sequences if not s.finished] if self._underway else []

    def stats(self) -> PaddedStats:
        batch, queue, counters = self._batch, self._queue, self._counters
        return PaddedStats(
            num_running=len(batch.running),
            num_waiting=len(queue.waiting) + len(queue.parked) + len(self._computing),
            kv_bytes_used=batch.cache.nbytes + batch.reserved_bytes + queue.fetched_bytes,
            kv_bytes_peak=batch.peak_bytes,
            kv_bytes_budget=self._budget.kv_memory,
            num_preemptions=counters.parks,
            elapsed={"prefill": counters.prefill_seconds, "decode": counters.decode_seconds},
            num_parked=len(queue.offloaded),
            parked_bytes=queue.nbytes(queue.offloaded),
            columns_held=batch.columns,
            columns_needed=batch.cache.longest,
            counters=copy(counters),
        )

    def kv_bytes(self, num_kvs: int) -> int:
        """Bytes of a query of `num_kvs` KVs, without padding."""
        return num_kvs * self._budget.kv_shape.nbytes

    def check_integrity(self, unfinished: SequenceType[Sequence]) -> None:
        """Assert that every unfinished sequence is in one place, and that the batch is what it should be."""
        batch, queue = self._batch, self._queue
        uncomputed = [*queue.waiting, *self._computing]
        forks = {fork for sequence in uncomputed for fork in sequence.forks if not fork.finished}
        placed = [*batch.running, *uncomputed, *queue.parked, *forks]
        assert len(placed) == len(set(placed)), "a sequence is in two places"
        assert set(placed) == set(unfinished), "a sequence is lost"
        batch.check_integrity()
        for sequence in queue.parked:
            assert queue.length_parked(sequence) == sequence.kv.num_computed, "a parked query lacks KVs"
        assert batch.reserved_bytes == 0 or self._underway or self._group, (
            "memory is reserved without a group"
        )
        assert batch.peak_bytes <= self._budget.kv_memory, "the KV memory was exceeded"
        assert queue.free_bytes >= 0, "the host memory for parked queries was exceeded"


def _fork(sequence: Sequence) -> list[Sequence]:
    """Take the other samples of a sequence's prompt, which share its KVs so far; returns them."""
    forks, sequence.forks = sequence.forks, []
    for fork in forks:
        fork.kv.num_computed = sequence.kv.num_computed
    return forks
