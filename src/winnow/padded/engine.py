"""The loop of the padded engine: the same face as the paged one's, over a batch that transformers understands."""

from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from winnow.engine.answer import Finish
from winnow.engine.new_request import NewRequest
from winnow.engine.request import Request, Sequence
from winnow.engine.request_table import RequestTable
from winnow.errors import InvalidRequestError
from winnow.outputs import RequestOutput
from winnow.padded.admission import PaddedAdmission
from winnow.padded.executor import PaddedExecutor, Sampled
from winnow.padded.stats import PaddedStats


class PaddedEngine:
    """Requests in, answers out, one step at a time: a pass of the running batch, or a prefill apart from it.

    Args:
        clock: seconds, monotonic; intervals in metrics are differences of it.
    """

    def __init__(
        self,
        executor: PaddedExecutor,
        tokenizer: PreTrainedTokenizerBase | None,
        eos_token_ids: frozenset[int],
        admission: PaddedAdmission,
        clock: Callable[[], float],
    ) -> None:
        self._executor = executor
        self._admission = admission
        self._clock = clock
        self._requests = RequestTable(tokenizer, eos_token_ids, clock)
        self._num_steps = 0

    @property
    def has_unfinished(self) -> bool:
        return len(self._requests) > 0

    def add(self, new: NewRequest) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError (or a subclass): the request cannot be served. Other requests are unaffected.
        """
        self._requests.require_new(new.request_id)
        if new.observer is not None:
            raise InvalidRequestError("inspect needs engine=paged: a padded cache keeps all KVs of a query")
        max_tokens = self._admission.admit(new.token_ids, new.params)
        request = Request.of(new, self._executor.settle(new.params), max_tokens, self._clock())
        self._requests.add(request)
        self._executor.add(request.sequences[0])

    @torch.inference_mode()
    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request at once. Returns what it had, or None if there is no such request."""
        if request_id not in self._requests:
            return None
        request = self._requests[request_id]
        for sequence in request.sequences:
            if not sequence.finished:
                self._finish(sequence, "abort")
        return self._requests.output(request)

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Compute one step. Returns the requests that got tokens or finished, as they stand; see `add`.

        If it fails or is interrupted, requests lose time and nothing else: call it again.
        """
        if not self._requests:
            return []
        try:
            failure = self._executor.receive()
            if failure is None:
                sampled = self._executor.step()
        except BaseException:  # also an impatient Ctrl-C: whatever comes next finds a sound engine
            self._executor.start_anew(self._requests.unfinished)
            raise
        if failure is not None:  # of a prefill in the background: the batch is as it was
            raise failure
        now = self._clock()
        touched = self._take(sampled, now)
        self._num_steps += 1
        return [self._requests.output(request) for request in touched if request.tells]

    def stats(self) -> PaddedStats:
        """The engine as it stands."""
        held = self._executor.stats()
        return replace(
            held,
            prompt_tokens=self._requests.prompt_tokens,
            generated_tokens=self._requests.generated_tokens,
            num_steps=self._num_steps,
        )

    def kv_bytes(self, num_kvs: int) -> int:
        """Bytes of a query of `num_kvs` KVs, without padding."""
        return self._executor.kv_bytes(num_kvs)

    def check_integrity(self) -> None:
        """Assert the invariants of batch and queue."""
        self._executor.check_integrity(self._requests.unfinished)

    def _take(self, sampled: Sampled, now: float) -> list[Request]:
        """Hand the step's tokens to their sequences. Returns the requests concerned, each once."""
        requests = self._requests
        touched: dict[Request, None] = {}
        requests.prompt_tokens += sampled.prompt_tokens
        for sequence, found in sampled.prompt_logprobs.items():
            requests.take_prompt_logprobs(sequence.request, found)
        for index, sequence in enumerate(sampled.sequences):
            touched[sequence.request] = None
            if index in sampled.errors:
                reason: Finish | None = requests.fail(sequence, sampled.errors[index])
            else:
                reason = requests.take(sequence, sampled.token_ids[index], sampled.logprobs[index], now)
            if reason is not None:
                self._finish(sequence, *reason)
        return list(touched)

    def _finish(self, sequence: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        self._executor.remove(sequence)
        self._requests.end(sequence)
