"""The unfinished requests of an engine, with their outputs so far."""

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from winnow.engine.requests.output_state import FinishReason, OutputState
from winnow.engine.requests.request import Request, Sequence
from winnow.errors import InvalidRequestError, describe_error
from winnow.outputs import EvictionReport, LogprobDict, RequestOutput
from winnow.sampling.logprobs import decode_logprobs
from winnow.sampling.rows import Fault
from winnow.sampling.token_table import TokenTable
from winnow.sampling.turns import Turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger("winnow")


class RequestTable:
    """Table of requests by id, each with its output state and times. When they are computed is the engine's business.

    An exception raised over one request, such as in a tokenizer's own code, fails that request alone.

    Args:
        tokenizer: for the text of outputs; None: they have none.
        eos_token_ids: tokens that end an output.
        clock: seconds, monotonic; intervals in metrics are differences of it.

    Attributes:
        tokens: what each token adds to a text; None: there is no tokenizer.
        turns: conversations that were answered.
        prompt_tokens: computed so far, over all requests.
        generated_tokens: sampled so far, over all requests.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase | None",
        eos_token_ids: frozenset[int],
        clock: Callable[[], float],
    ) -> None:
        self.tokens = None if tokenizer is None else TokenTable(tokenizer)
        self.turns = Turns(self.tokens)
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._states: dict[Sequence, OutputState] = {}
        self._warned_of_length = False
        self.prompt_tokens = self.generated_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __getitem__(self, request_id: str) -> Request:
        return self._requests[request_id]

    @property
    def unfinished(self) -> list[Sequence]:
        """All sequences without a finish reason, waiting or running."""
        return [s for request in self._requests.values() for s in request.sequences if not s.finished]

    @property
    def begun(self) -> frozenset[str]:
        """Ids of the requests whose computation has begun."""
        found = self._requests.items()
        return frozenset(name for name, each in found if each.metrics.first_scheduled_time is not None)

    def unfinished_sample(self, request_id: str, index: int) -> Sequence:
        """Return a sample of an unfinished request.

        Raises:
            InvalidRequestError: there is no such request, or no such sample, or it is finished.
        """
        if request_id not in self._requests:
            raise InvalidRequestError(f"request_id must be that of an unfinished request, got {request_id!r}")
        samples = self._requests[request_id].sequences
        if not 0 <= index < len(samples):
            raise InvalidRequestError(
                f"index must be between 0 and {len(samples) - 1}, the samples of {request_id!r}, got {index}"
            )
        if samples[index].finished:
            raise InvalidRequestError(
                f"index must be that of an unfinished sample of {request_id!r}, got {index}, which has finished"
            )
        return samples[index]

    def require_new(self, request_id: str) -> None:
        """Check that an id is free.

        Raises:
            InvalidRequestError: an unfinished request has it.
        """
        if request_id in self._requests:
            raise InvalidRequestError(f"request_id {request_id!r} is in use by an unfinished request")

    def add(self, request: Request, parent: Sequence | None = None) -> None:
        """Add a request with an unused id. The outputs of a fork continue those of `parent`."""
        states = {s: OutputState(s, self.tokens, self._eos_token_ids) for s in request.sequences}
        if parent is not None:
            for state in states.values():
                state.resume(self._states[parent])
        self._requests[request.request_id] = request
        self._states |= states

    def holds(self, request: Request) -> bool:
        """Return whether this very request is in the table: unfinished, or its last output not yet taken."""
        return self._requests.get(request.request_id) is request

    def append_token(
        self, sequence: Sequence, token: int, logprobs: LogprobDict | None, now: float
    ) -> FinishReason | None:
        """Append a token sampled at `now`. Returns why the output ends with it; None: it continues."""
        request = sequence.request
        if request.metrics.first_token_time is None:
            request.update_metrics(first_token_time=now)
        if request.error is not None:
            return self.fail(sequence, request.error)
        try:
            reason = self._states[sequence].append_token(token, logprobs)
        except Exception as error:
            return self.fail(sequence, describe_error(error))
        self.generated_tokens += 1
        return reason

    def fail(self, sequence: Sequence, error: str) -> FinishReason:
        """Set a sequence's error; its output so far stays. Returns the reason to finish it with."""
        sequence.error = error
        return "error", None

    def append_prompt_logprobs(self, request: Request, found: list[LogprobDict]) -> None:
        """Append the logprobs of a prompt's next tokens."""
        if any(math.isnan(entry.logprob) for each in found for entry in each.values()):
            request.error = Fault.NOT_FINITE.explain()
        try:
            if self.tokens is not None:
                skip = request.params.skip_special_tokens
                found = [decode_logprobs(self.tokens, each, skip_special_tokens=skip) for each in found]
        except Exception as error:
            request.error = describe_error(error)
        request.prompt_logprobs += found

    def end(self, sequence: Sequence) -> None:
        """Complete the text of a sequence whose finish reason is set."""
        if sequence.finish_reason == "length" and sequence.request.params.max_tokens is None:
            self._warn_of_length(sequence)
        try:
            self._states[sequence].finish()
            request, tail = sequence.request, sequence.request.params.template_tail
            if (
                request.prompt is not None and tail and not request.images and sequence.output_token_ids
            ):  # a chat template made it
                self.turns.add(
                    request.tenant, request.prompt, request.prompt_token_ids, tail, sequence.output_token_ids
                )
        except Exception as error:
            sequence.error = sequence.error or describe_error(error)
            sequence.finish_reason, sequence.stop_reason = "error", None

    def _warn_of_length(self, sequence: Sequence) -> None:
        """Log, once, that an answer without max_tokens was not ended by the model."""
        if not self._warned_of_length:
            self._warned_of_length = True
            _log.warning(
                "winnow: an answer without max_tokens reached the end of the context, or of the KV memory, after %d "
                "tokens: its finish_reason is length; later ones are not reported",
                sequence.num_output_tokens,
            )

    def output(
        self, request: Request, report: Callable[[Sequence], EvictionReport | None] = lambda _: None
    ) -> RequestOutput:
        """Return a request's output so far; a finished request leaves the table with it.

        Args:
            report: what eviction did to a sequence; None where nothing was evicted.
        """
        finished = request.finished
        if finished and request.metrics.finished_time is None:
            request.update_metrics(finished_time=self._clock())
        states = self._states
        output = RequestOutput(  # by position, as in `OutputState.output`
            request.request_id,
            request.prompt,
            request.prompt_token_ids,
            [states[sequence].output(report(sequence)) for sequence in request.sequences],
            finished,
            request.metrics,
            request.prompt_logprobs or None,
            request.num_cached_tokens,
            request.images,
        )
        if finished:
            del self._requests[request.request_id]
            for sequence in request.sequences:
                del self._states[sequence]
        return output
