"""An answer as it grows: its text, its logprobs, and when it ends."""

from dataclasses import replace
from typing import TYPE_CHECKING

from winnow.engine.request import Sequence
from winnow.outputs import CompletionOutput, EvictionReport, LogprobDict
from winnow.sampling import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Why an answer ends: the finish reason, and the stop string or token id where there is one.
Finish = tuple[str, int | str | None]


class Answer:
    """Takes the sampled or forced tokens of one sequence."""

    def __init__(
        self, sequence: Sequence, tokenizer: "PreTrainedTokenizerBase | None", eos_token_ids: frozenset[int]
    ) -> None:
        self._sequence = sequence
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        params = sequence.request.params
        # The first token that may end it.
        self._may_stop_at = max(params.min_tokens, len(params.forced_for(sequence.index)) + 1)
        self._cumulative_logprob: float | None = None
        self._text = TextStream(tokenizer, params, sequence.request.prompt_token_ids)

    def take(self, token: int, logprobs: LogprobDict | None) -> Finish | None:
        """Append a token. Returns why the answer ends with it, or None."""
        sequence, params = self._sequence, self._sequence.request.params
        sequence.token_ids.append(token)
        num_tokens = sequence.num_output_tokens
        if logprobs is not None:
            sequence.logprobs.append(decode_logprobs(self._tokenizer, logprobs))
            self._cumulative_logprob = (self._cumulative_logprob or 0.0) + logprobs[token].logprob
        may_stop = num_tokens >= self._may_stop_at
        stop_id = token in params.stop_token_ids
        ends = may_stop and (stop_id or (token in self._eos_token_ids and not params.ignore_eos))
        if not ends or params.include_stop_str_in_output:
            self._text.push(token, check_stop=may_stop)
        if ends:
            return "stop", token if stop_id else None
        if self._text.matched_stop is not None:
            return "stop", self._text.matched_stop
        if num_tokens >= sequence.request.max_tokens:
            return "length", None
        return None

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


def decode_logprobs(tokenizer: "PreTrainedTokenizerBase | None", logprobs: LogprobDict) -> LogprobDict:
    """Add the tokens' text, where there is a tokenizer."""
    if tokenizer is None:
        return logprobs
    return {
        token: replace(entry, decoded_token=tokenizer.decode([token])) for token, entry in logprobs.items()
    }
