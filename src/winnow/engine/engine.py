"""The engine: requests come in, a scheduler plans steps over a KV cache, an executor computes them, outputs go out."""

import logging
import warnings
from collections.abc import Callable, Iterable, Sequence as SequenceType
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from winnow.config import EngineConfig
from winnow.engine.admission import Admission
from winnow.engine.answer_check import AnswerCheck
from winnow.engine.counters import Counters, Occupancy, eviction_report, kept_parts, measure_occupancy
from winnow.engine.executor import Executor, ServedModel
from winnow.engine.plan import StepResult
from winnow.engine.requests.new_request import KeptKVs, NewRequest
from winnow.engine.requests.request import Request, Sequence
from winnow.engine.requests.request_limits import forked_params, inherit, with_spans
from winnow.engine.requests.request_table import FinishReason, RequestTable
from winnow.engine.scheduling.plan_builder import ScheduledStep
from winnow.engine.scheduling.scheduler import Scheduler
from winnow.errors import RequestFailedError, describe_error
from winnow.outputs import EngineStats, EvictionReport, RequestOutput
from winnow.sampling import SamplingParams
from winnow.values.logprob import LogprobDict
from winnow.values.reuse import EXACT


@dataclass(frozen=True)
class Sampled:
    """Tokens that a step computed for `sequences`, in order, and logprobs of the next tokens of prompts."""

    sequences: SequenceType[Sequence]
    result: StepResult
    prompt_tokens: int
    prompt_logprobs: dict[Sequence, list[LogprobDict]]
    time: float


class Engine:
    """Engine that serves requests from a paged KV cache that may be compressed. Its `clock` gives monotonic seconds."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        admission: Admission,
        model: ServedModel,
        config: EngineConfig,
        clock: Callable[[], float],
    ) -> None:
        self.scheduler = scheduler
        self.memory = scheduler.memory
        self.requests = RequestTable(model.tokenizer, model.eos_token_ids, clock)
        self._executor, self._admission, self._counters = executor, admission, Counters()
        self._model, self._config, self._clock = model, config, clock
        # Requests that have changed since their last output; after a failed step the next one returns them.
        self._touched: dict[Request, None] = {}
        self._looks_ahead = self._overlaps = executor.overlaps
        self._last_end: float | None = None
        layout = getattr(executor, "layout", None)  # None: an engine with a cache of another kind
        fixed = layout is None or layout.wide.any or layout.value_tier is not None
        self._check = AnswerCheck(0.0 if fixed else config.eviction.check, config.model.seed)
        if layout is not None:
            scheduler.decisions.agreement = self._check.record
        self._checked: tuple[NewRequest, Request] | None = None  # a check in progress
        self._check_counters = Counters()
        # A step that was submitted before the results of the one before it were known.
        self._ahead: tuple[ScheduledStep, Any] | None = None

    @property
    def has_unfinished(self) -> bool:
        return len(self.requests) > (self._checked is not None)

    def add(self, new: NewRequest) -> None:
        """Queue a request. Raises InvalidRequestError."""
        self._drop_check()
        self.requests.require_new(new.request_id)
        request = self._admit(new)
        self.requests.add(request)
        self.scheduler.add(request)

    def fork(
        self, request_id: str, new_id: str, params: SamplingParams | None, index: int, final_only: bool
    ) -> None:
        """Queue a request that continues from where a sample of an unfinished request is; see `LLM.fork`."""
        self._settle()
        parent = self.requests.unfinished_sample(request_id, index)
        self.requests.require_new(new_id)
        request = parent.request
        new = NewRequest(
            new_id,
            request.prompt,
            list(request.prompt_token_ids),
            forked_params(parent, params),
            request.priority,
            request.tenant,
            final_only=final_only,
            images=request.images,
        )
        child = self._admit(new)
        inherit(child, parent)
        self.requests.add(child, parent)
        first = request.sequences[0]  # it holds the KVs of all samples until the prompt is computed
        self.scheduler.fork(first if parent in first.forks else parent, child)

    def abort(self, request_id: str) -> RequestOutput | None:
        if request_id not in self.requests:
            return None
        request = self.requests[request_id]
        for sequence in request.sequences:
            if not sequence.finished:
                self._finish(sequence, "abort")
        self._touched.pop(request, None)
        return self.requests.output(request, self._report)

    def step(self) -> list[RequestOutput]:
        """Compute one step. Returns the requests that got tokens or finished, as they stand; see `NewRequest`. Safe to
        retry: on failure, or on KeyboardInterrupt, the planned sequences are recomputed."""
        if self._touched or not self.has_unfinished:
            return self._outputs()
        sampled = self._take_step()
        outputs = self._outputs()
        if sampled is not None:
            self._counters.seconds["output"] += self._clock() - sampled.time
        return outputs

    @property
    def has_check(self) -> bool:
        """Return whether `check_step` has something to do."""
        if self.has_unfinished or self._touched:
            return False
        busy, spent = self._counters.seconds, self._check_counters.seconds
        return self._checked is not None or self._check.due(busy, spent, self.requests.prompt_tokens)

    def check_step(self) -> bool:
        """Compute a step of the comparison of an answer with the full cache's, if requests leave time (`check`).
        Returns whether it did. Counts nowhere else; a fault ends the comparison alone."""
        if not self.has_check:
            return False
        index, requests = self.scheduler.ledger.prefixes, self.requests
        tokens = requests.prompt_tokens, requests.generated_tokens
        found = index.num_asked_tokens, index.num_hit_tokens
        self._counters, self._check_counters = self._check_counters, self._counters
        try:
            if self._checked is None:
                new = self._check.take()
                request = self._admit(new)
                requests.add(request)
                self.scheduler.add(request)
                self._checked = new, request
            self._take_step()
            self._touched.clear()
            self._compare(*self._checked)
        except Exception as error:
            logging.getLogger("winnow").warning("an answer was not compared: %s", describe_error(error))
            self._drop_check(again=False)
        finally:
            self._counters, self._check_counters = self._check_counters, self._counters
            requests.prompt_tokens, requests.generated_tokens = tokens
            index.num_asked_tokens, index.num_hit_tokens = found
        return True

    def _compare(self, new: NewRequest, request: Request) -> None:
        [sequence] = request.sequences
        answer = tuple(sequence.output_token_ids)
        if sequence.error is not None:
            raise RequestFailedError(sequence.error)
        if sequence.finished or answer != new.expected[: len(answer)]:
            self._drop_check(again=False)
            self._check.compared(new, answer, shares_prefixes=self._config.cache.shares_prefixes)

    def _drop_check(self, *, again: bool = True) -> None:
        """End a check in progress; it comes `again` where it gave way to a request."""
        if self._checked is not None:
            new, self._checked = self._checked[0], None
            self.abort(new.request_id)
            if again:
                self._check.put_back(new)

    def stats(self) -> EngineStats:
        kv_memory = self._config.cache.kv_memory
        found = self._counters.stats(self.scheduler, self._executor, self.requests, kv_memory)
        checks = self._checked is not None
        return replace(found, num_running=found.num_running - checks, agreement=self._check.snapshot())

    def implementation(self) -> dict[str, str]:
        return {"attention": self._executor.attention, "KVs": self._executor.layout.codec_names}

    def occupancy(self) -> Occupancy:
        return measure_occupancy(self.scheduler.running, self.scheduler.ledger, self._executor.layout)

    def kv_bytes(self, num_kvs: int) -> int:
        """Return bytes of the blocks of a sequence that sees `num_kvs` tokens, the last one decoded, and keeps them."""
        layout = replace(self._executor.layout, chunk=1)
        return layout.device_bytes(layout.by_kind(layout.row_blocks_seen(num_kvs)))

    def reset_prefix_cache(self, running: bool, disk: bool) -> None:
        self._settle()
        if running:
            self._restart()
        self.memory.clear(disk)

    def save_prefix(self, new: NewRequest, directory: Path) -> Path:
        """Write the compressed context of a request that was answered to a directory. Returns the file's path. Raises
        PrefixStoreError: it is not in the cache, or the disk refuses it."""
        self._settle()
        [sequence] = self._admit(new).sequences
        return self.memory.save_prefix(sequence, directory)

    def close(self) -> None:
        """Warn of settings that the run showed to be wrong, and free what is held."""
        self.memory.close()
        self._executor.close()

    def check_integrity(self) -> None:
        """Assert the invariants of cache and scheduler. Slow: reads tables back from the device."""
        self._settle()
        self.memory.check_integrity(self.scheduler.running, list(self.scheduler.waiting))
        for sequence in self.scheduler.running:
            self._check_rows(sequence)

    # -- what another engine does in its own way --------------------------------------------------------------------

    def _admit(self, new: NewRequest) -> Request:
        params = with_spans(new.params, new.token_ids, new.images, self.requests.tokens)
        granted = self._admission.admit(
            new.token_ids, params, new.tenant, cut_to_memory=new.cut_to_memory, images=new.images
        )
        self._counters.num_replays_replaced += granted.replay_replaced
        for eviction in granted.evictions:
            if eviction is not None:
                self._executor.prepare(eviction.policy)
        params = self._executor.with_seed(params)
        if granted.context_tokens is not None:  # a fork inherits it
            params = replace(params, context_tokens=granted.context_tokens)
        request = Request.of(
            new,
            params,
            granted.max_tokens,
            self._clock(),
            evictions=granted.evictions,
            policy_name=granted.policy_name,
            reserved_tokens=granted.reserved_tokens,
            reuse=self._reuse(params),
        )
        return request

    def _reuse(self, params: SamplingParams) -> str:
        """Return what a request takes of KVs of others. Warns once where the model allows prefixes alone."""
        asked = params.reuse or self._config.cache.usual_reuse
        if asked == EXACT or self._executor.reuse_refusal is None:
            return asked
        warnings.warn(
            f"reuse={asked} takes prefixes alone of this model: {self._executor.reuse_refusal}", stacklevel=2
        )
        return EXACT

    def _compute(self) -> Sampled | None:
        """Compute a step, of at least one unfinished request. None: no sequence could be served. On any exception roll
        back, so that the engine stays consistent and the step can be retried."""
        start = self._clock()
        if not self.scheduler.running:
            self._last_end = None  # nothing was computed since
        try:
            ahead, self._ahead = self._ahead, None
            if ahead is not None and all(sequence.finished for sequence in ahead[0].sequences):
                ahead = None  # none of its tokens are wanted any more
            step = self.scheduler.schedule() if ahead is None else ahead[0]
            if not step.plan.entries:
                return None
            scheduled = self._clock()
            handle = self._executor.submit(step.plan) if ahead is None else ahead[1]
            following = self.scheduler.plan_following(step) if self._may_look_ahead(step) else None
            if following is not None:
                self._ahead = following, self._executor.submit(following.plan)
            result = self._executor.collect(handle)
        except BaseException:  # also on KeyboardInterrupt
            self._restart()  # some were computed without their token being appended
            raise
        executed = self._clock()
        seconds = executed - scheduled
        prompt_tokens = self._counters.add_step(step, scheduled - start, seconds, result.traffic)
        period = None if self._last_end is None else executed - self._last_end
        self.scheduler.advance(step, result, seconds, period)
        self._last_end = executed
        logprobs = {step.sequences[index]: found for index, found in result.prompt_logprobs.items()}
        return Sampled(step.samplers, result, prompt_tokens, logprobs, executed)

    def _restart(self) -> None:
        self._ahead = None
        self.scheduler.running.recompute_all()

    def _release(self, sequence: Sequence, reason: str, stop_reason: int | str | None) -> None:
        request = sequence.request
        if request.images and sequence.kv.slot is not None and request.policy_name is not None:
            sequence.kept_parts = kept_parts(sequence, self._executor.kept_positions(sequence.kv.slot))
        self.scheduler.running.finish(sequence, reason, stop_reason)
        self._check.note(sequence)
        if sequence.kept is not None and sequence.asked_eviction is not None:
            layout, counters = self._executor.layout, self._counters
            counters.kv_bytes_kept += layout.device_bytes(layout.by_kind(layout.row_blocks(sequence.kept)))
            counters.kv_bytes_whole += self.kv_bytes(sequence.kv.num_computed)

    def _take_failed(self) -> Iterable[Sequence]:
        return self.scheduler.running.take_failed()

    def _report(self, sequence: Sequence) -> EvictionReport | None:
        found, record = eviction_report(sequence, self._executor.layout), self._check.record
        return found and replace(found, checked_answers=record.checked, equal_answers=record.equal)

    def _may_look_ahead(self, step: ScheduledStep) -> bool:
        """Return whether the next step may be planned now; what is proposed follows from this one's tokens."""
        if not self._looks_ahead or step.plan.drafts:
            return False
        return not self.scheduler.drafts.wanted(len(step.samplers))

    def _settle(self) -> None:
        """Append the tokens of a step in progress: nothing is half done afterwards. The next call returns them."""
        if self._ahead is not None:
            self._looks_ahead = False
            try:
                self._take_step()
            finally:
                self._looks_ahead = self._overlaps

    def _take_step(self) -> Sampled | None:
        """Compute a step, and note who has changed. None: no sequence could be served."""
        sampled = self._compute()
        if sampled is not None:
            try:
                self._append_tokens(sampled)
            except BaseException:  # tokens that were not appended are sampled again
                self._restart()
                raise
        for sequence in self._take_failed():
            if self.requests.holds(sequence.request):
                self._touched[sequence.request] = None
                self.requests.end(sequence)
        self._counters.num_steps += sampled is not None
        return sampled

    def _append_tokens(self, sampled: Sampled) -> None:
        requests, touched = self.requests, self._touched
        requests.prompt_tokens += sampled.prompt_tokens
        for sequence, found in sampled.prompt_logprobs.items():
            requests.append_prompt_logprobs(sequence.request, found)
        result = sampled.result
        errors, offsets = result.errors, result.offsets or range(len(sampled.sequences) + 1)
        for index, sequence in enumerate(sampled.sequences):
            request = sequence.request
            if sequence.finished:  # since the step was submitted
                continue
            touched[request] = None
            if request.observer is not None and sequence.num_output_tokens == 1:
                self._observe(sequence, request.observer.first_token)
            reason: FinishReason | None = None
            if index in errors:
                reason = requests.fail(sequence, errors[index])
            else:
                for at in range(offsets[index], offsets[index + 1]):
                    token, logprobs = result.token_ids[at], result.logprobs[at]
                    reason = requests.append_token(sequence, token, logprobs, sampled.time)
                    if reason is not None:
                        break
            if reason is not None:
                if request.observer is not None:
                    self._observe(sequence, request.observer.finished)
                if sequence.error is not None:
                    reason = "error", None
                self._finish(sequence, *reason)

    def _observe(self, sequence: Sequence, hook: Callable[[KeptKVs], None]) -> None:
        """Call an observer's hook for a request's first sample. What it raises fails the request alone."""
        if sequence.index != 0:
            return
        slot, executor = sequence.kv.running_slot, self._executor
        try:
            hook(KeptKVs(executor.kept_positions(slot), executor.kept_weights(slot)))
        except Exception as error:
            sequence.request.error = sequence.error = describe_error(error)

    def _finish(self, sequence: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        self._release(sequence, reason, stop_reason)
        self.requests.end(sequence)

    def _outputs(self) -> list[RequestOutput]:
        output, report = self.requests.output, self._report
        outputs = [
            found
            for request in self._touched
            if request.finished or not request.final_only
            for found in [output(request, report)]
            if request.session is None or not request.session.ages
        ]
        self._touched.clear()
        for request in self.memory.sessions.age(self._admit):
            self.requests.add(request)
            self.scheduler.add(request)
        return outputs

    def _check_rows(self, sequence: Sequence) -> None:
        eviction, evicted = sequence.eviction, tuple[int, ...]()
        protected: set[int] = set()
        if eviction is not None and sequence.kv.last_round:
            evicted = self._executor.layout.evictable
            for start, end in ((0, eviction.policy.keep.sinks), *eviction.spans):
                protected.update(range(start, min(end, sequence.kv.last_round)))
        for layer, rows in enumerate(self._executor.kept_positions(sequence.kv.running_slot)):
            for row in rows:
                assert len(set(row)) == len(row), "a row holds a token twice"
                assert layer not in evicted or protected.issubset(row), "a row lost a protected KV"
