"""Log-probabilities in the three shapes that output records know."""

import math
from collections.abc import Sequence
from typing import Any

from winnow.outputs import CompletionOutput, LogprobDict
from winnow.sampling import Logprob

Record = dict[str, Any]

_LOWEST = -9999.0
"""What JSON gets for the logprob of a token that was ruled out: it has no spelling for minus infinity."""


def flat_logprobs(token_ids: Sequence[int], logprobs: Sequence[LogprobDict | None]) -> list[Record | None]:
    """Per token: what it was, and the candidates by rank; None where nothing predicted the token."""
    return [
        None if candidates is None else {**_flat(token, candidates[token]), "top": _flat_top(candidates)}
        for token, candidates in zip(token_ids, logprobs, strict=True)
    ]


def chat_logprobs(answer: CompletionOutput) -> Record | None:
    """`choices[].logprobs` of a chat completion."""
    if answer.logprobs is None:
        return None
    content = [
        {**_chat(candidates[token]), "top_logprobs": [_chat(entry) for _, entry in _ranked(candidates)]}
        for token, candidates in _predicted(answer)
    ]
    return {"content": content}


def completion_logprobs(answer: CompletionOutput) -> Record | None:
    """`choices[].logprobs` of a text completion."""
    if answer.logprobs is None:
        return None
    pairs = [(candidates[token], candidates) for token, candidates in _predicted(answer)]
    texts = [_text(chosen) for chosen, _ in pairs]
    return {
        "tokens": texts,
        "token_logprobs": [_value(chosen) for chosen, _ in pairs],
        "top_logprobs": [
            {_text(entry): _value(entry) for _, entry in _ranked(candidates)} for _, candidates in pairs
        ],
        "text_offset": [sum(map(len, texts[:place])) for place in range(len(texts))],
    }


def cumulative_logprob(answer: CompletionOutput) -> float | None:
    """The sum of the tokens' logprobs, finite also where a token was ruled out: each counts as it is told."""
    if answer.cumulative_logprob is None or math.isfinite(answer.cumulative_logprob):
        return answer.cumulative_logprob
    return sum(_value(candidates[token]) for token, candidates in _predicted(answer))


def _predicted(answer: CompletionOutput) -> list[tuple[int, LogprobDict]]:
    """The answer's tokens with their candidates."""
    assert answer.logprobs is not None
    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
    return [(token, candidates) for token, candidates in pairs if candidates is not None]


def _ranked(candidates: LogprobDict) -> list[tuple[int, Logprob]]:
    return sorted(candidates.items(), key=lambda item: -item[1].logprob)


def _value(entry: Logprob) -> float:
    """The logprob as JSON can hold it; one that is no number at all says as little as a token that was ruled out."""
    return max(entry.logprob, _LOWEST) if entry.logprob < math.inf else _LOWEST


def _text(entry: Logprob) -> str:
    return entry.decoded_token or ""


def _flat(token: int, entry: Logprob) -> Record:
    return {"token_id": token, "token": entry.decoded_token, "logprob": _value(entry)}


def _flat_top(candidates: LogprobDict) -> list[Record]:
    return [_flat(token, entry) for token, entry in _ranked(candidates)]


def _chat(entry: Logprob) -> Record:
    text = _text(entry)
    return {"token": text, "logprob": _value(entry), "bytes": list(text.encode())}
