"""An answer as it grows: its text, its logprobs, and when it ends."""

from dataclasses import replace

from winnow.engine.request import Sequence
from winnow.outputs import CompletionOutput, EvictionReport, LogprobDict
from winnow.sampling import TextStream
from winnow.sampling.logprobs import decode_logprobs
from winnow.sampling.token_table import TokenTable

# Why an answer ends: the finish reason, and the stop string or token id where there is one.
FinishReason = tuple[str, int | str | None]


class OutputState:
    """Takes the sampled or forced tokens of one sequence."""

    def __init__(self, sequence: Sequence, tokens: TokenTable | None, eos_token_ids: frozenset[int]) -> None:
        self._sequence = sequence
        self._tokens = tokens
        self._eos_token_ids = eos_token_ids
        params = sequence.request.params
        # The first token that may end it.
        self._may_stop_at = max(params.min_tokens, len(params.forced_for(sequence.index)) + 1)
        self._cumulative_logprob: float | None = None
        self._text = TextStream(tokens, params, sequence.request.prompt_token_ids)

    def append_token(self, token: int, logprobs: LogprobDict | None) -> FinishReason | None:
        """Append a token. Returns why the answer ends with it, or None.

        If its text raises, tokens and logprobs are those from before.
        """
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
        if num_tokens >= sequence.request.max_tokens:
            return "length", None
        return None

    def _decode(self, logprobs: LogprobDict, token: int, has_text: bool) -> LogprobDict:
        """The same, with texts and bytes for where the answer is; without `has_text` its token adds nothing."""
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
        """The answer as it stands, with what eviction did to it."""
        sequence = self._sequence
        return CompletionOutput(  # by position: by name takes twice as long, and one is made with every token
            sequence.index,
            self._text.text,
            sequence.output_token_ids,
            self._cumulative_logprob,
            list(sequence.logprobs) if sequence.request.params.logprobs is not None else None,
            sequence.finish_reason,
            sequence.stop_reason,
            eviction,
            sequence.error,
        )
