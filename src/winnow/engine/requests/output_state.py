"""The output of one sequence so far: text, logprobs, and why it ends."""

from dataclasses import replace

from winnow.engine.requests.request import Sequence
from winnow.outputs import CompletionOutput, EvictionReport, LogprobDict
from winnow.sampling import TextStream
from winnow.sampling.logprobs import decode_logprobs
from winnow.sampling.token_table import TokenTable

FinishReason = tuple[str, int | str | None]
"""Finish reason, and the stop string or stop token id if there is one."""


class OutputState:
    """State of one sequence's output, from its sampled or forced tokens.

    Args:
        tokens: texts of the tokenizer's tokens; None: the output has no text.
        eos_token_ids: tokens that end the output, unless the request ignores them.
    """

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
            self._cumulative_logprob = parent._cumulative_logprob

    def append_token(self, token: int, logprobs: LogprobDict | None) -> FinishReason | None:
        """Append a token. Returns why the output ends with it; None: it continues.

        If decoding raises, tokens and logprobs are unchanged.
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
        """Complete the text with the part held back for an incomplete character or stop string."""
        self._text.finish()

    def output(self, eviction: EvictionReport | None) -> CompletionOutput:
        """Return the output so far, or what is new in it; `eviction` is its report."""
        sequence = self._sequence
        if sequence.request.deltas:
            return self._delta(eviction)
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
            self._text.reasoning_tokens,
        )

    def _delta(self, eviction: EvictionReport | None) -> CompletionOutput:
        sequence, first = self._sequence, self._num_given
        self._num_given = sequence.num_output_tokens
        return CompletionOutput(
            sequence.index,
            self._text.take_delta(),
            sequence.token_ids[sequence.prompt_len + first :],
            self._cumulative_logprob,
            sequence.logprobs[first:] if sequence.request.params.logprobs is not None else None,
            sequence.finish_reason,
            sequence.stop_reason,
            eviction,
            sequence.error,
            self._text.reasoning_tokens,
        )
