"""The loop: requests come in, a step is scheduled and computed, answers go out."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from winnow.engine.admission import Admission
from winnow.engine.answer import Finish
from winnow.engine.eviction_report import eviction_report
from winnow.engine.executor import Executor
from winnow.engine.new_request import NewRequest
from winnow.engine.plan import StepPlan, StepResult
from winnow.engine.request import ReplayTally, Request, Sequence
from winnow.engine.request_table import RequestTable
from winnow.engine.scheduler import Scheduler
from winnow.errors import InvalidRequestError
from winnow.outputs import EngineStats, RequestOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Engine:
    """Requests in, answers out, one step at a time.

    Args:
        clock: seconds, monotonic; intervals in metrics are differences of it.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        tokenizer: "PreTrainedTokenizerBase | None",
        eos_token_ids: frozenset[int],
        admission: Admission,
        kv_memory: int,
        clock: Callable[[], float],
    ) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._admission = admission
        self._kv_memory = kv_memory
        self._clock = clock
        self._requests = RequestTable(tokenizer, eos_token_ids, clock)
        self._num_steps = 0
        self._replay = ReplayTally()
        self._elapsed = {"schedule": 0.0, "execute": 0.0, "output": 0.0}

    @property
    def has_unfinished(self) -> bool:
        return len(self._requests) > 0

    def add(self, new: NewRequest) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError (or a subclass): the request cannot be served. Other requests are unaffected.
        """
        self._requests.require_new(new.request_id)
        granted = self._admission.admit(new.token_ids, new.params)
        for eviction in granted.evictions:
            if eviction is not None:
                self._executor.prepare(eviction.policy)
            if new.observer is not None and eviction is not None and eviction.policy.reassign_positions:
                raise InvalidRequestError(
                    "inspect cannot follow re-assigned positions: after a round of this policy "
                    "they are no token indices"
                )
        request = Request.of(
            new,
            self._executor.settle(new.params),
            granted.max_tokens,
            self._clock(),
            granted.evictions,
            granted.policy_name,
        )
        self._requests.add(request)
        self._scheduler.add(request)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request at once. Returns what it had, or None if there is no such request."""
        if request_id not in self._requests:
            return None
        request = self._requests[request_id]
        for sequence in request.sequences:
            if not sequence.finished:
                self._finish(sequence, "abort")
        return self._outputs([request])[0]

    def step(self) -> list[RequestOutput]:
        """Compute one step. Returns the requests that got tokens or finished, as they stand; see `add`.

        If it fails or is interrupted, requests lose time and nothing else: call it again.
        """
        start = self._clock()
        plan = self._scheduler.schedule()
        if not plan.entries:
            return self._outputs(self._take_failed())
        scheduled = self._clock()
        try:
            result = self._executor.execute(plan)
        except BaseException:  # also an impatient Ctrl-C: whatever comes next finds a sound engine
            self._scheduler.start_anew()
            raise
        executed = self._clock()
        self._scheduler.advance(plan)
        self._count_replays(plan, executed - scheduled)
        touched = self._take(plan, result, executed)
        touched += [request for request in self._take_failed() if request not in touched]
        outputs = self._outputs(request for request in touched if request.tells)
        self._num_steps += 1
        for part, seconds in zip(
            self._elapsed, (scheduled - start, executed - scheduled, self._clock() - executed), strict=True
        ):
            self._elapsed[part] += seconds
        return outputs

    def stats(self) -> EngineStats:
        cache, rounds = self._executor.cache, self._scheduler.rounds
        schedule = self._elapsed["schedule"] - rounds.seconds  # rounds run while a step is scheduled
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            kv_bytes_used=cache.used_bytes,
            kv_bytes_peak=cache.peak_bytes,
            kv_bytes_budget=self._kv_memory,
            prompt_tokens=self._requests.prompt_tokens,
            generated_tokens=self._requests.generated_tokens,
            num_preemptions=self._scheduler.num_preemptions,
            num_steps=self._num_steps,
            num_rounds=rounds.rounds,
            replay_tokens=self._replay.tokens,
            kv_bytes_freed=rounds.freed_blocks * cache.layout.block_bytes,
            replay_seconds=self._replay.seconds,
            elapsed=self._elapsed | {"schedule": schedule, "evict": rounds.seconds},
        )

    def kv_bytes(self, num_kvs: int) -> int:
        """Bytes of the blocks of a sequence that keeps `num_kvs` KVs in every row."""
        layout = self._executor.cache.layout
        return layout.blocks_for(num_kvs) * layout.block_bytes

    def check_integrity(self) -> None:
        """Assert the invariants of cache and scheduler. Slow: reads tables back from the device."""
        self._executor.cache.check_integrity()
        cache = self._executor.cache
        for sequence in self._scheduler.running:
            computed = sequence.num_computed + sequence.replayed
            assert (cache.host_lengths[sequence.slot] <= computed).all(), "a row holds more than was computed"
        assert all(sequence.slot is None for sequence in self._scheduler.waiting), (
            "a waiting sequence has a slot"
        )
        for sequence in self._scheduler.running:
            self._check_rows(sequence)
        slots = [sequence.slot for sequence in self._scheduler.running]
        assert len(set(slots)) == len(slots), "two sequences share a slot"
        assert len(slots) + cache.num_free_slots == cache.size.max_num_seqs, "a slot is lost"

    def _check_rows(self, sequence: Sequence) -> None:
        """Assert that each row holds a token once, and all that is protected."""
        eviction = sequence.eviction
        protected: set[int] = set()
        if eviction is not None and sequence.last_round:
            for start, end in ((0, eviction.policy.keep.sinks), *eviction.spans):
                protected.update(range(start, min(end, sequence.last_round)))
        for layer in self._executor.kept_positions(sequence.running_slot):
            for row in layer:
                assert len(set(row)) == len(row), "a row holds a token twice"
                assert protected.issubset(row), "a row lost a protected KV"

    def _count_replays(self, plan: StepPlan, seconds: float) -> None:
        """Tell each sequence what its replay took of a step's time, by tokens."""
        for entry in plan.entries:
            if entry.replay is not None:
                share = seconds * entry.count / plan.num_tokens
                for tally in (entry.sequence.replay, self._replay):
                    tally.add(entry.count, share)

    def _take(self, plan: StepPlan, result: StepResult, now: float) -> list[Request]:
        """Hand the step's tokens to their sequences. Returns the requests concerned, each once."""
        requests = self._requests
        touched: dict[Request, None] = {}
        for entry in plan.entries:
            prompt_len = entry.sequence.prompt_len
            if entry.replay is None and entry.start < prompt_len:
                requests.prompt_tokens += min(entry.end, prompt_len) - entry.start
        for index, found in result.prompt_logprobs.items():
            requests.take_prompt_logprobs(plan.entries[index].sequence.request, found)
        for index, sequence in enumerate(plan.samplers):
            observer = sequence.request.observer
            touched[sequence.request] = None
            if observer is not None and sequence.num_output_tokens == 1:
                observer.first_token(self._executor.kept_positions(sequence.running_slot))
            if index in result.errors:
                reason: Finish | None = requests.fail(sequence, result.errors[index])
            else:
                reason = requests.take(sequence, result.token_ids[index], result.logprobs[index], now)
            if reason is not None:
                if observer is not None:
                    observer.finished(self._executor.kept_positions(sequence.running_slot))
                self._finish(sequence, *reason)
        return list(touched)

    def _take_failed(self) -> list[Request]:
        """End the answers that the scheduler has given up. Returns the requests concerned, each once."""
        failed = [s for s in self._scheduler.take_failed() if self._requests.holds(s.request)]
        for sequence in failed:
            self._requests.end(sequence)
        return list(dict.fromkeys(sequence.request for sequence in failed))

    def _finish(self, sequence: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        self._scheduler.finish(sequence, reason, stop_reason)
        self._requests.end(sequence)

    def _outputs(self, requests: Iterable[Request]) -> list[RequestOutput]:
        report, output = partial(eviction_report, layout=self._executor.cache.layout), self._requests.output
        return [output(request, report) for request in requests]
