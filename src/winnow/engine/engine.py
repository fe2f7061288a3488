"""The loop: requests come in, a step is scheduled and computed, answers go out."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from winnow.engine.admission import Admission
from winnow.engine.answer import Finish
from winnow.engine.eviction_report import eviction_report
from winnow.engine.executor import Executor
from winnow.engine.plan import StepResult
from winnow.engine.request import ReplayTally, Request, RequestObserver, Sequence
from winnow.engine.request_table import RequestTable
from winnow.engine.scheduler import ScheduledStep, Scheduler
from winnow.errors import InvalidRequestError
from winnow.outputs import EngineStats, RequestMetrics, RequestOutput
from winnow.sampling import SamplingParams

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

    def add(
        self,
        request_id: str,
        prompt: str | None,
        token_ids: list[int],
        params: SamplingParams,
        observer: RequestObserver | None = None,
        priority: int = 0,
        final_only: bool = False,
    ) -> None:
        """Queue a request; a greater priority is served first. `observer` is filled while it runs.

        With `final_only`, steps tell of it once, when it is finished.

        Raises:
            InvalidRequestError: and its kinds, if the request cannot be served; nobody else notices.
        """
        self._requests.require_new(request_id)
        granted = self._admission.admit(token_ids, params)
        for eviction in granted.evictions:
            if eviction is not None:
                self._executor.prepare(eviction.policy)
            if observer is not None and eviction is not None and eviction.policy.reassign_positions:
                raise InvalidRequestError(
                    "inspect cannot follow re-assigned positions: after a round of this policy "
                    "they are no token indices"
                )
        request = Request(
            request_id,
            prompt,
            token_ids,
            self._executor.with_seed(params),
            granted.max_tokens,
            RequestMetrics(arrival_time=self._clock()),
            granted.evictions,
            granted.policy_name,
            observer,
            priority,
            final_only=final_only,
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
        scheduled_step = self._scheduler.schedule()
        plan = scheduled_step.plan
        if not plan.entries:
            return self._outputs(self._take_failed())
        scheduled = self._clock()
        try:
            result = self._executor.execute(plan)
        except BaseException:  # also an impatient Ctrl-C: whatever comes next finds a sound engine
            self._scheduler.start_anew()
            raise
        executed = self._clock()
        self._scheduler.advance(scheduled_step)
        self._count_replays(scheduled_step, executed - scheduled)
        touched = self._take(scheduled_step, result, executed)
        touched += [request for request in self._take_failed() if request not in touched]
        outputs = self._outputs(request for request in touched if request.tells)
        self._num_steps += 1
        for part, seconds in zip(
            self._elapsed, (scheduled - start, executed - scheduled, self._clock() - executed), strict=True
        ):
            self._elapsed[part] += seconds
        return outputs

    def stats(self) -> EngineStats:
        ledger, rounds = self._scheduler.ledger, self._scheduler.rounds
        schedule = self._elapsed["schedule"] - rounds.seconds  # rounds run while a step is scheduled
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            kv_bytes_used=ledger.used_bytes,
            kv_bytes_peak=ledger.peak_bytes,
            kv_bytes_budget=self._kv_memory,
            prompt_tokens=self._requests.prompt_tokens,
            generated_tokens=self._requests.generated_tokens,
            num_preemptions=self._scheduler.num_preemptions,
            num_steps=self._num_steps,
            num_rounds=rounds.rounds,
            replay_tokens=self._replay.tokens,
            kv_bytes_freed=rounds.freed_blocks * ledger.layout.block_bytes,
            replay_seconds=self._replay.seconds,
            elapsed=self._elapsed | {"schedule": schedule, "evict": rounds.seconds},
        )

    def kv_bytes(self, num_kvs: int) -> int:
        """Bytes of the blocks of a sequence that keeps `num_kvs` KVs in every row."""
        layout = self._executor.layout
        return layout.blocks_for(num_kvs) * layout.block_bytes

    def check_integrity(self) -> None:
        """Assert the invariants of cache and scheduler. Slow: reads tables back from the device."""
        ledger = self._scheduler.ledger
        ledger.check_integrity()
        self._executor.apply(ledger.take_update())
        self._executor.check_integrity(ledger)
        for sequence in self._scheduler.running:
            computed = sequence.kv.num_computed + sequence.kv.replayed
            assert (ledger.lengths[sequence.kv.slot] <= computed).all(), "a row holds more than was computed"
        assert all(sequence.kv.slot is None for sequence in self._scheduler.waiting), (
            "a waiting sequence has a slot"
        )
        for sequence in self._scheduler.running:
            self._check_rows(sequence)
        slots = [sequence.kv.slot for sequence in self._scheduler.running]
        assert len(set(slots)) == len(slots), "two sequences share a slot"
        assert len(slots) + ledger.num_free_slots == ledger.size.max_num_seqs, "a slot is lost"

    def _check_rows(self, sequence: Sequence) -> None:
        """Assert that each row holds a token once, and all that is protected."""
        eviction = sequence.eviction
        protected: set[int] = set()
        if eviction is not None and sequence.kv.last_round:
            for start, end in ((0, eviction.policy.keep.sinks), *eviction.spans):
                protected.update(range(start, min(end, sequence.kv.last_round)))
        for layer in self._executor.kept_positions(sequence.kv.running_slot):
            for row in layer:
                assert len(set(row)) == len(row), "a row holds a token twice"
                assert protected.issubset(row), "a row lost a protected KV"

    def _count_replays(self, step: ScheduledStep, seconds: float) -> None:
        """Count for each sequence what its replay took of a step's time, by tokens."""
        for entry, sequence in zip(step.plan.entries, step.sequences, strict=True):
            if entry.replay is not None:
                share = seconds * entry.count / step.plan.num_tokens
                for tally in (sequence.replay, self._replay):
                    tally.add(entry.count, share)

    def _take(self, step: ScheduledStep, result: StepResult, now: float) -> list[Request]:
        """Hand the step's tokens to their sequences. Returns the requests concerned, each once."""
        requests = self._requests
        touched: dict[Request, None] = {}
        for entry, sequence in zip(step.plan.entries, step.sequences, strict=True):
            prompt_len = sequence.prompt_len
            if entry.replay is None and entry.start < prompt_len:
                requests.prompt_tokens += min(entry.end, prompt_len) - entry.start
        for index, found in result.prompt_logprobs.items():
            requests.take_prompt_logprobs(step.sequences[index].request, found)
        for index, sequence in enumerate(step.samplers):
            observer = sequence.request.observer
            touched[sequence.request] = None
            if observer is not None and sequence.num_output_tokens == 1:
                observer.after_prompt = self._executor.kept_positions(sequence.kv.running_slot)
            if index in result.errors:
                reason: Finish | None = requests.fail(sequence, result.errors[index])
            else:
                reason = requests.take(sequence, result.token_ids[index], result.logprobs[index], now)
            if reason is not None:
                if observer is not None:
                    observer.at_end = self._executor.kept_positions(sequence.kv.running_slot)
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
        report, output = partial(eviction_report, layout=self._executor.layout), self._requests.output
        return [output(request, report) for request in requests]
