"""The unfinished requests of an engine, and their answers as they grow."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from winnow.engine.answer import Answer, Finish
from winnow.engine.request import Request, Sequence
from winnow.errors import InvalidRequestError, describe_error
from winnow.outputs import EvictionReport, LogprobDict, RequestOutput
from winnow.sampling.faults import Fault
from winnow.sampling.logprobs import decode_logprobs
from winnow.sampling.token_table import TokenTable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RequestTable:
    """Whom an engine serves: by name, with answers and times. When and how they are computed is the engine's.

    Args:
        clock: seconds, monotonic; intervals in metrics are differences of it.

    Attributes:
        prompt_tokens: computed so far, over all requests.
        generated_tokens: sampled so far, over all requests.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase | None",
        eos_token_ids: frozenset[int],
        clock: Callable[[], float],
    ) -> None:
        self._tokens = None if tokenizer is None else TokenTable(tokenizer)
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._answers: dict[Sequence, Answer] = {}
        self.prompt_tokens = self.generated_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __getitem__(self, request_id: str) -> Request:
        return self._requests[request_id]

    @property
    def unfinished(self) -> list[Sequence]:
        return [s for request in self._requests.values() for s in request.sequences if not s.finished]

    def require_new(self, request_id: str) -> None:
        """Check a name.

        Raises:
            InvalidRequestError: an unfinished request has it.
        """
        if request_id in self._requests:
            raise InvalidRequestError(f"request_id {request_id!r} is in use by an unfinished request")

    def add(self, request: Request) -> None:
        """Begin its answers."""
        answers = {s: Answer(s, self._tokens, self._eos_token_ids) for s in request.sequences}
        self._requests[request.request_id] = request
        self._answers |= answers

    def holds(self, request: Request) -> bool:
        """Whether this very request is unfinished, or its last output was not asked for."""
        return self._requests.get(request.request_id) is request

    def take(self, sequence: Sequence, token: int, logprobs: LogprobDict | None, now: float) -> Finish | None:
        """Append a token that was sampled at `now`. Returns why the answer ends with it, or None.

        Whatever this raises, such as by the tokenizer's own code, is the request's fault, which fails alone.
        """
        request = sequence.request
        if request.metrics.first_token_time is None:
            request.note(first_token_time=now)
        if request.error is not None:
            return self.fail(sequence, request.error)
        try:
            reason = self._answers[sequence].take(token, logprobs)
        except Exception as error:
            return self.fail(sequence, describe_error(error))
        self.generated_tokens += 1
        return reason

    def fail(self, sequence: Sequence, error: str) -> Finish:
        """A sequence can have no further token; its answer so far stays. Returns why it ends."""
        sequence.error = error
        return "error", None

    def take_prompt_logprobs(self, request: Request, found: list[LogprobDict]) -> None:
        """Append those of a prompt's next tokens."""
        if any(math.isnan(entry.logprob) for each in found for entry in each.values()):
            request.error = Fault.NOT_FINITE.explain()
        try:
            if self._tokens is not None:
                skip = request.params.skip_special_tokens
                found = [decode_logprobs(self._tokens, each, skip_special_tokens=skip) for each in found]
        except Exception as error:  # as in `take`
            request.error = describe_error(error)
        request.prompt_logprobs += found

    def end(self, sequence: Sequence) -> None:
        """An answer has ended; its sequence knows why."""
        try:
            self._answers[sequence].finish()
        except Exception as error:  # as in `take`
            sequence.error = sequence.error or describe_error(error)
            sequence.finish_reason, sequence.stop_reason = "error", None

    def output(
        self, request: Request, report: Callable[[Sequence], EvictionReport | None] = lambda _: None
    ) -> RequestOutput:
        """A request as it stands, with what `report` tells of eviction. A finished one is let go."""
        finished = request.finished
        if finished and request.metrics.finished_time is None:
            request.note(finished_time=self._clock())
        answers = self._answers
        output = RequestOutput(  # by position, as in `Answer.output`
            request.request_id,
            request.prompt,
            request.prompt_token_ids,
            [answers[sequence].output(report(sequence)) for sequence in request.sequences],
            finished,
            request.metrics,
            request.prompt_logprobs or None,
        )
        if finished:
            del self._requests[request.request_id]
            for sequence in request.sequences:
                del self._answers[sequence]
        return output
