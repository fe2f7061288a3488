"""The loop that the paged and the padded engine share: requests come in, a step is computed, outputs go out."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceType
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from winnow.config import SchedulerConfig
from winnow.engine.memory.memory import Memory
from winnow.engine.memory.occupancy import Occupancy
from winnow.engine.requests.beams import Continuation
from winnow.engine.requests.new_request import KeptKVs, NewRequest
from winnow.engine.requests.output_state import FinishReason
from winnow.engine.requests.request import Request, Sequence
from winnow.engine.requests.request_table import RequestTable
from winnow.engine.scheduling.queue import WaitingQueue
from winnow.errors import InvalidRequestError, PrefixStoreError, describe_error
from winnow.outputs import EngineStats, EvictionReport, LogprobDict, RequestOutput
from winnow.sampling import SamplingParams
from winnow.sampling.turns import Turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Sampled:
    """Tokens that a step computed.

    Attributes:
        sequences: those that sampled; the three that follow are theirs, in the same order.
        token_ids: the next tokens of each.
        logprobs: of these tokens, where they are asked for.
        errors: by index: why a sequence got no token. Its request fails; others are unaffected.
        prompt_tokens: number of prompt tokens computed.
        prompt_logprobs: by sequence: those of its prompt's next tokens.
        time: when it was sampled, by the engine's clock.
    """

    sequences: SequenceType[Sequence]
    token_ids: SequenceType[int]
    logprobs: SequenceType[LogprobDict | None]
    errors: dict[int, str]
    prompt_tokens: int
    prompt_logprobs: dict[Sequence, list[LogprobDict]]
    time: float
    offsets: SequenceType[int] | None = None
    """Offsets at which the tokens of each begin, and after the last where they end; None: one each."""


class RequestLoop(ABC):
    """Life of an engine's requests from arrival to last output. Subclasses implement the step.

    Args:
        tokenizer: for the text of answers; None: they have none.
        eos_token_ids: tokens that end an answer.
        clock: seconds, monotonic; intervals in metrics are differences of it.
        limits: how much may wait; the rest of the configuration is the subclass's.
    """

    memory: Memory | None = None
    """Owner of all KVs; None: each request has its own."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase | None",
        eos_token_ids: frozenset[int],
        clock: Callable[[], float],
        limits: SchedulerConfig,
    ) -> None:
        self._clock = clock
        self._limits = limits
        self._requests = RequestTable(tokenizer, eos_token_ids, clock)
        # Requests that have changed since their last output; after a failed step the next one returns them.
        self._touched: dict[Request, None] = {}
        self._num_steps = 0
        self._output_seconds = 0.0

    # -- for callers -----------------------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        """Return whether a step has anything to compute."""
        return len(self._requests) > 0

    @property
    def begun(self) -> frozenset[str]:
        """Ids of unfinished requests whose computation has begun."""
        return self._requests.begun

    @property
    def turns(self) -> Turns:
        """Conversations that were answered."""
        return self._requests.turns

    def add(self, new: NewRequest) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError (or a subclass): the request cannot be served. Other requests are unaffected.
            QueueFullError: too much waits already.
        """
        self._requests.require_new(new.request_id)
        request = self._admit(new)
        limits = self._limits
        self._waiting.require_room(len(new.token_ids), limits.max_queued_requests, limits.max_queued_tokens)
        self._requests.add(request)
        self._enqueue(request)

    def fork(
        self, request_id: str, new_id: str, params: SamplingParams | None, index: int, final_only: bool
    ) -> None:
        """Queue a request that continues from where a sample of an unfinished request is; see `LLM.fork`.

        Raises:
            InvalidRequestError (or a subclass): there is nothing to fork, or it cannot go on in this way.
        """
        raise InvalidRequestError(f"request_id {request_id!r} cannot be forked: that needs engine=paged")

    def abort(self, request_id: str) -> RequestOutput | None:
        """Abort a request. Returns its output so far, or None if there is no such request."""
        if request_id not in self._requests:
            return None
        request = self._requests[request_id]
        for sequence in request.sequences:
            if not sequence.finished:
                self._finish(sequence, "abort")
        self._touched.pop(request, None)
        return self._requests.output(request, self._report)

    def step(self) -> list[RequestOutput]:
        """Compute one step. Returns the requests that got tokens or finished, as they stand; see `NewRequest`.

        Safe to retry: on failure, or on KeyboardInterrupt, the planned sequences are recomputed.
        """
        if self._touched or not self.has_unfinished:
            return self._outputs()
        sampled = self._take_step()
        outputs = self._outputs()
        if sampled is not None:
            self._output_seconds += self._clock() - sampled.time
        return outputs

    @abstractmethod
    def stats(self) -> EngineStats:
        """Return counters and sizes as they are now."""

    def implementation(self) -> dict[str, str]:
        """Return the names of what computes attention and of how KVs are stored; empty where neither is chosen."""
        return {}

    def occupancy(self) -> Occupancy:
        """Return the present use of the KV memory by holder; empty for engines without rows."""
        return Occupancy({}, [])

    @abstractmethod
    def kv_bytes(self, num_kvs: int) -> int:
        """Return bytes of a sequence of `num_kvs` tokens, the last one decoded, that keeps all it sees."""

    def close(self) -> None:  # noqa: B027  # most have nothing to say
        """Warn of settings that the run showed to be wrong. Called when no further request comes."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Assert the engine's invariants. Slow: may read tables back from the device."""

    # -- for subclasses --------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def _waiting(self) -> WaitingQueue:
        """Queue of what waits for its turn."""

    @abstractmethod
    def _admit(self, new: NewRequest) -> Request:
        """Check a request. Raises as `add`."""

    @abstractmethod
    def _enqueue(self, request: Request) -> None:
        """Let an admitted request wait for its turn."""

    @abstractmethod
    def _compute(self) -> Sampled | None:
        """Compute a step, of at least one unfinished request. None: no sequence could be served.

        On any exception roll back, so that the engine stays consistent and the step can be retried.
        """

    @abstractmethod
    def _restart(self) -> None:
        """Recompute the running sequences: some were computed without their token being appended."""

    @abstractmethod
    def _release(self, sequence: Sequence, reason: str, stop_reason: int | str | None) -> None:
        """Set why a sequence ends, and free what it holds, whether it runs or waits."""

    def _take_failed(self) -> Iterable[Sequence]:
        """Return the sequences that ended by an error outside of sampling since the last call."""
        return ()

    def _continue_beams(self, request: Request, chosen: SequenceType[Continuation]) -> None:
        """Let the chosen beams of a request take the place of those before."""
        raise AssertionError("this engine admits no beams")

    def reset_prefix_cache(self, running: bool, disk: bool) -> None:
        """See `LLM.reset_prefix_cache`."""
        if running:
            self._restart()

    def save_prefix(self, new: NewRequest, directory: Path) -> Path:
        """See `LLM.save_prefix`."""
        raise PrefixStoreError("engine must be paged to save a prefix")

    def _kept(self, sequence: Sequence) -> KeptKVs:
        raise AssertionError("this engine admits no observers")

    def _report(self, sequence: Sequence) -> EvictionReport | None:
        """Return what eviction did to a sequence; None while it runs, or where nothing was evicted."""
        return None

    # -- inside ----------------------------------------------------------------------------------------------------

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
            if self._requests.holds(sequence.request):
                self._touched[sequence.request] = None
                self._requests.end(sequence)
        self._num_steps += sampled is not None
        return sampled

    def _append_tokens(self, sampled: Sampled) -> None:
        """Append the step's tokens to their sequences."""
        requests, touched = self._requests, self._touched
        requests.prompt_tokens += sampled.prompt_tokens
        for sequence, found in sampled.prompt_logprobs.items():
            requests.append_prompt_logprobs(sequence.request, found)
        errors, offsets = sampled.errors, sampled.offsets or range(len(sampled.sequences) + 1)
        for index, sequence in enumerate(sampled.sequences):
            request = sequence.request
            if sequence.finished:  # since the step was submitted
                continue
            touched[request] = None
            if request.beams is not None:
                self._append_candidates(
                    sequence, sampled.logprobs[offsets[index]], errors.get(index), sampled.time
                )
                continue
            if request.observer is not None and sequence.num_output_tokens == 1:
                self._observe(sequence, request.observer.first_token)
            reason: FinishReason | None = None
            if index in errors:
                reason = requests.fail(sequence, errors[index])
            else:
                for at in range(offsets[index], offsets[index + 1]):
                    token, logprobs = sampled.token_ids[at], sampled.logprobs[at]
                    reason = requests.append_token(sequence, token, logprobs, sampled.time)
                    if reason is not None:
                        break
            if reason is not None:
                if request.observer is not None:
                    self._observe(sequence, request.observer.finished)
                if sequence.error is not None:
                    reason = "error", None
                self._finish(sequence, *reason)

    def _append_candidates(
        self, sequence: Sequence, candidates: LogprobDict | None, error: str | None, now: float
    ) -> None:
        """Offer the next tokens of a beam. Once those of all are there, the best go on."""
        request = sequence.request
        beams = request.beams
        assert beams is not None, "only beams have candidates"
        if request.finished:  # another beam has failed in this step
            return
        if error is not None or candidates is None:
            for each in request.sequences:
                self._requests.fail(each, error or "no candidates")
                self._finish(each, "error")
            return
        beams.offer(sequence.index, candidates)
        if not beams.is_complete:
            return
        chosen = beams.select({index: request.sequences[index].output_token_ids for index in beams.logprobs})
        self._requests.append_beams(request, len(chosen), now)
        if chosen:
            self._continue_beams(request, chosen)
            return
        for each, hypothesis in zip(request.sequences, beams.finished, strict=False):
            self._finish(each, *self._requests.end_beam(each, hypothesis))
        for each in request.sequences[len(beams.finished) :]:  # a tiny vocabulary has no more answers
            self._release(each, "abort", None)
            self._requests.forget(each)

    def _observe(self, sequence: Sequence, hook: Callable[[KeptKVs], None]) -> None:
        """Call an observer's hook for a request's first sample. What it raises fails the request alone."""
        if sequence.index != 0:
            return
        try:
            hook(self._kept(sequence))
        except Exception as error:
            sequence.request.error = sequence.error = describe_error(error)

    def _finish(self, sequence: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        self._release(sequence, reason, stop_reason)
        self._requests.end(sequence)

    def _outputs(self) -> list[RequestOutput]:
        output, report = self._requests.output, self._report
        outputs = [
            found
            for request in self._touched
            if request.has_output
            for found in [output(request, report)]
            if request.session is None or not request.session.ages
        ]
        self._touched.clear()
        self._age_sessions()
        return outputs

    def _age_sessions(self) -> None:
        """Queue what compresses conversations that have grown too large, behind all others."""
        sessions = None if self.memory is None else self.memory.sessions
        while sessions is not None and (new := sessions.next_aging()) is not None:
            try:
                request = self._admit(new)
            except InvalidRequestError:  # its budget is too small for what stays whole
                sessions.drop_unless_kept(new)
                continue
            self._requests.add(request)
            self._enqueue(request)
