"""The unfinished requests of an engine, with their outputs so far: text, logprobs, and why each ends."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace

from winnow.engine.requests.request import Request, Sequence
from winnow.errors import InvalidRequestError, describe_error
from winnow.outputs import CompletionOutput, EvictionReport, RequestOutput
from winnow.prompt.chat import Tokenizer
from winnow.sampling import TextStream
from winnow.sampling.logprobs import decode_logprobs
from winnow.sampling.rows import Fault
from winnow.sampling.token_table import TokenTable
from winnow.sampling.turns import Turns
from winnow.values.logprob import LogprobDict

_log = logging.getLogger("winnow")

FinishReason = tuple[str, int | str | None]
"""Finish reason, and the stop string or stop token id if there is one."""


class OutputState:
    """State of one sequence's output, from its sampled or forced tokens; without their texts it has none."""

    def __init__(self, sequence: Sequence, tokens: TokenTable | None, eos_token_ids: frozenset[int]) -> None:
        self._sequence = sequence
        self._tokens = tokens
        self._eos_token_ids = eos_token_ids
        params = sequence.request.params
        # Number of the first output token that may end it.
        self._may_stop_at = max(params.min_tokens, len(params.forced_for(sequence.index)) + 1)
        self._cumulative_logprob: float | None = None
        self._text = TextStream(tokens, params, sequence.request.prompt_token_ids)
        self._num_given = 0  # tokens of earlier outputs, where outputs are deltas

    def resume(self, parent: "OutputState") -> None:
        """Begin with the tokens that the sequence has from `parent`'s, a fork of which it is. None of them ends it."""
        sequence = self._sequence
        for token in sequence.output_token_ids:
            self._text.push(token, check_stop=False)
        if sequence.request.params.logprobs is not None:
            sequence.logprobs = list(parent._sequence.logprobs)
            found = zip(
                sequence.logprobs, sequence.output_token_ids, strict=False
            )  # the last token may differ
            own = [each[token].logprob for each, token in found if each is not None]
            self._cumulative_logprob = sum(own) if own else None

    def append_token(self, token: int, logprobs: LogprobDict | None) -> FinishReason | None:
        """Append a token. Returns why the output ends with it; None: it continues. If decoding raises, tokens and
        logprobs are unchanged."""
        sequence, params = self._sequence, self._sequence.request.params
        num_tokens = sequence.num_output_tokens + 1
        may_stop = num_tokens >= self._may_stop_at
        stop_id = token in params.stop_token_ids
        ends = may_stop and (stop_id or (token in self._eos_token_ids and not params.ignore_eos))
        has_text = not ends or params.include_stop_str_in_output
        decoded = None if logprobs is None else self._decode(logprobs, token, has_text)
        if has_text:
            self._text.push(token, check_stop=may_stop)
        sequence.token_ids.append(token)
        if logprobs is not None:
            sequence.logprobs.append(decoded)
            self._cumulative_logprob = (self._cumulative_logprob or 0.0) + logprobs[token].logprob
        if ends:
            return "stop", token if stop_id else None
        if self._text.matched_stop is not None:
            return "stop", self._text.matched_stop
        if may_stop and self._text.is_complete:
            return "stop", None
        if num_tokens >= sequence.request.max_tokens:
            return "length", None
        return None

    def _decode(self, logprobs: LogprobDict, token: int, has_text: bool) -> LogprobDict:
        """Add texts and bytes to logprobs; without `has_text` those of `token` are empty, as it adds no text."""
        if self._tokens is None:
            return logprobs
        skip = self._sequence.request.params.skip_special_tokens
        decoded = decode_logprobs(self._tokens, logprobs, skip_special_tokens=skip, first=self._text.at_start)
        if not has_text:
            decoded[token] = replace(decoded[token], token_bytes=b"")
        return decoded

    def finish(self) -> None:
        self._text.finish()

    def output(self, eviction: EvictionReport | None) -> CompletionOutput:
        sequence, first = self._sequence, 0
        if sequence.request.deltas:
            first, self._num_given = self._num_given, sequence.num_output_tokens
        return CompletionOutput(  # by position: by name takes twice as long, and one is made with every token
            sequence.index,
            self._text.take_delta() if sequence.request.deltas else self._text.text,
            sequence.token_ids[sequence.prompt_len + first :],
            self._cumulative_logprob,
            sequence.logprobs[first:] if sequence.request.params.logprobs is not None else None,
            sequence.finish_reason,
            sequence.stop_reason,
            eviction,
            sequence.error,
            self._text.reasoning_tokens,
        )


class RequestTable(dict[str, Request]):
    """Table of requests by id, each with its output state and times. When they are computed is the engine's business.

    An exception raised over one request, such as in a tokenizer's own code, fails that request alone. `tokens` are None
    without a tokenizer; `prompt_tokens` and `generated_tokens` count computed and sampled ones, over all requests.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, eos_token_ids: frozenset[int], clock: Callable[[], float]
    ) -> None:
        super().__init__()
        self.tokens = None if tokenizer is None else TokenTable(tokenizer)
        self.turns = Turns(self.tokens)
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._states: dict[Sequence, OutputState] = {}
        self._warned_of_length = False
        self.prompt_tokens = self.generated_tokens = 0

    @property
    def unfinished(self) -> list[Sequence]:
        """All sequences without a finish reason, waiting or running."""
        return [s for request in self.values() for s in request.sequences if not s.finished]

    @property
    def begun(self) -> frozenset[str]:
        """Ids of the requests whose computation has begun."""
        return frozenset(name for name, each in self.items() if each.metrics.first_scheduled_time is not None)

    def unfinished_sample(self, request_id: str, index: int) -> Sequence:
        """Return a sample of an unfinished request. Raises InvalidRequestError: there is none, or it is finished."""
        if request_id not in self:
            raise InvalidRequestError(f"request_id must be that of an unfinished request, got {request_id!r}")
        samples = self[request_id].sequences
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
        if request_id in self:
            raise InvalidRequestError(f"request_id {request_id!r} is in use by an unfinished request")

    def add(self, request: Request, parent: Sequence | None = None) -> None:
        states = {s: OutputState(s, self.tokens, self._eos_token_ids) for s in request.sequences}
        if parent is not None:
            for state in states.values():
                state.resume(self._states[parent])
        self[request.request_id] = request
        self._states |= states

    def holds(self, request: Request) -> bool:
        """Return whether this very request is in the table: unfinished, or its last output not yet taken."""
        return self.get(request.request_id) is request

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
        unlimited = sequence.request.params.max_tokens is None
        if sequence.finish_reason == "length" and unlimited and not self._warned_of_length:
            self._warned_of_length = True
            _log.warning(
                "winnow: an answer without max_tokens reached the end of the context, or of the KV memory, after %d "
                "tokens: its finish_reason is length; later ones are not reported",
                sequence.num_output_tokens,
            )
        try:
            self._states[sequence].finish()
            request, answer = sequence.request, sequence.output_token_ids
            tail = request.params.template_tail  # of a chat template
            if request.prompt is not None and tail and answer and not request.images:
                self.turns.add(request.tenant, request.prompt, request.prompt_token_ids, tail, answer)
        except Exception as error:
            sequence.error = sequence.error or describe_error(error)
            sequence.finish_reason, sequence.stop_reason = "error", None

    def output(
        self, request: Request, report: Callable[[Sequence], EvictionReport | None] = lambda _: None
    ) -> RequestOutput:
        """Return a request's output so far; a finished request leaves the table with it. `report` says what eviction
        did to a sequence; None where nothing was evicted."""
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
            request.num_reused_tokens,
            request.num_repaired_tokens,
            request.images,
            outgrown=request.outgrown,
        )
        if finished:
            del self[request.request_id]
            for sequence in request.sequences:
                del self._states[sequence]
        return output
