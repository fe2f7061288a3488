"""The loop: requests come in, a step is scheduled and computed, answers go out."""

from collections.abc import Callable
from copy import copy

from transformers import PreTrainedTokenizerBase

from winnow.engine.admission import Admission
from winnow.engine.answer import Answer, decode_logprobs
from winnow.engine.eviction_report import eviction_report
from winnow.engine.executor import Executor
from winnow.engine.plan import StepPlan, StepResult
from winnow.engine.request import Request, Sequence, Watch
from winnow.engine.scheduler import Scheduler
from winnow.errors import InvalidRequestError
from winnow.outputs import EngineStats, RequestMetrics, RequestOutput
from winnow.sampling import SamplingParams


class Engine:
    """Requests in, answers out, one step at a time.

    Args:
        clock: seconds, monotonic; intervals in metrics are differences of it.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        tokenizer: PreTrainedTokenizerBase | None,
        eos_token_ids: frozenset[int],
        admission: Admission,
        kv_memory: int,
        clock: Callable[[], float],
    ) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._admission = admission
        self._kv_memory = kv_memory
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._answers: dict[Sequence, Answer] = {}
        self._prompt_tokens = self._generated_tokens = self._num_steps = 0
        self._elapsed = {"schedule": 0.0, "execute": 0.0, "output": 0.0}

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def add(
        self,
        request_id: str,
        prompt: str | None,
        token_ids: list[int],
        params: SamplingParams,
        watch: Watch | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a request; `watch` is filled while it runs. All have priority 0: first come, first served.

        Raises:
            InvalidRequestError: and its kinds, if the request cannot be served; nobody else notices.
        """
        if request_id in self._requests:
            raise InvalidRequestError(f"request_id {request_id!r} is in use by an unfinished request")
        if priority:
            raise InvalidRequestError(f"priority needs engine=padded, got {priority}")
        granted = self._admission.admit(token_ids, params)
        for eviction in granted.evictions:
            if eviction is not None:
                self._executor.prepare(eviction.policy)
            if watch is not None and eviction is not None and eviction.policy.reassign_positions:
                raise InvalidRequestError(
                    "inspect cannot follow re-assigned positions: after a round of this policy "
                    "they are no token indices"
                )
        request = Request(
            request_id,
            prompt,
            token_ids,
            self._executor.settle(params),
            granted.max_tokens,
            RequestMetrics(arrival_time=self._clock()),
            granted.evictions,
            granted.policy_name,
            watch,
        )
        self._requests[request_id] = request
        for sequence in request.sequences:
            self._answers[sequence] = Answer(sequence, self._tokenizer, self._eos_token_ids)
        self._scheduler.add(request)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request at once. Returns what it had, or None if there is no such request."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        for sequence in request.sequences:
            if not sequence.finished:
                self._scheduler.finish(sequence, "abort")
                self._answers[sequence].finish()
        return self._output(request)

    def step(self) -> list[RequestOutput]:
        """Compute one step. Returns the requests that got tokens or finished, as they stand.

        If it fails or is interrupted, requests lose time and nothing else: call it again.
        """
        start = self._clock()
        plan = self._scheduler.schedule()
        if not plan.entries:
            return []
        scheduled = self._clock()
        try:
            result = self._executor.execute(plan)
        except BaseException:  # also an impatient Ctrl-C: whatever comes next finds a sound engine
            self._scheduler.abandon(plan)
            raise
        executed = self._clock()
        self._scheduler.advance(plan)
        touched = self._take(plan, result, executed)
        outputs = [self._output(request) for request in touched]
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
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            num_preemptions=self._scheduler.num_preemptions,
            num_steps=self._num_steps,
            num_rounds=rounds.rounds,
            kv_bytes_freed=rounds.freed_blocks * cache.layout.block_bytes,
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
            assert (cache.host_lengths[sequence.slot] <= sequence.num_computed).all(), (
                "a row holds more than was computed"
            )
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

    def _take(self, plan: StepPlan, result: StepResult, now: float) -> list[Request]:
        """Hand the step's tokens to their sequences. Returns the requests concerned, each once."""
        touched: dict[Request, None] = {}
        for entry in plan.entries:
            prompt_len = entry.sequence.prompt_len
            if entry.start < prompt_len:
                self._prompt_tokens += min(entry.end, prompt_len) - entry.start
        for index, found in result.prompt_logprobs.items():
            known = plan.entries[index].sequence.request.prompt_logprobs
            known += [decode_logprobs(self._tokenizer, logprobs) for logprobs in found]
        for sequence, token, logprobs in zip(plan.samplers, result.token_ids, result.logprobs, strict=True):
            request = sequence.request
            touched[request] = None
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = now
            self._generated_tokens += 1
            if request.watch is not None and sequence.num_output_tokens == 1:
                request.watch.after_prompt = self._executor.kept_positions(sequence.running_slot)
            reason = self._answers[sequence].take(token, logprobs)
            if reason is not None:
                if request.watch is not None:
                    request.watch.at_end = self._executor.kept_positions(sequence.running_slot)
                self._scheduler.finish(sequence, *reason)
                self._answers[sequence].finish()
        return list(touched)

    def _output(self, request: Request) -> RequestOutput:
        finished = request.finished
        if finished and request.metrics.finished_time is None:
            request.metrics.finished_time = self._clock()
        layout = self._executor.cache.layout
        output = RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[
                self._answers[sequence].output(eviction_report(sequence, layout))
                for sequence in request.sequences
            ],
            finished=finished,
            metrics=copy(request.metrics),
            prompt_logprobs=request.prompt_logprobs or None,
        )
        if finished:
            del self._requests[request.request_id]
            for sequence in request.sequences:
                del self._answers[sequence]
        return output
