"""Log-probabilities in the three shapes that output records know."""

import codecs
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
    pairs = _predicted(answer)
    chosen = [candidates[token] for token, candidates in pairs]
    return {
        "tokens": [_name(entry, "bytes:") for entry in chosen],
        "token_logprobs": [_value(entry) for entry in chosen],
        "top_logprobs": [_top_by_name(token, candidates) for token, candidates in pairs],
        "text_offset": _offsets(answer.text, [_bytes(entry) for entry in chosen]),
    }


def cumulative_logprob(answer: CompletionOutput) -> float | None:
    """The sum of the tokens' logprobs, finite also where a token was ruled out: each counts as it is reported."""
    if answer.cumulative_logprob is None or math.isfinite(answer.cumulative_logprob):
        return answer.cumulative_logprob
    return sum(_value(candidates[token]) for token, candidates in _predicted(answer))


def _top_by_name(token: int, candidates: LogprobDict) -> dict[str, float]:
    """Logprobs by the candidates' names. Of several with one name the first keeps it, the answer's own before all."""
    names = {_name(candidates[token], "bytes:"): token}
    for other, entry in _ranked(candidates):
        name = _name(entry, "bytes:")
        names[name if names.setdefault(name, other) == other else f"token_id:{other}"] = other
    by_token = {other: name for name, other in names.items()}
    return {by_token[other]: _value(entry) for other, entry in _ranked(candidates)}


def _offsets(text: str, pieces: Sequence[bytes]) -> list[int]:
    """Where in `text` the character stands that each token begins or goes on with, if `pieces` are their bytes.

    Ascending, and at most the text's length: a stop string may have cut it before the tokens end.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, offset = [], 0
    for piece in pieces:
        offsets.append(min(offset, len(text)))
        offset += len(decoder.decode(piece))
    return offsets


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


def _bytes(entry: Logprob) -> bytes:
    return (entry.decoded_token or "").encode() if entry.token_bytes is None else entry.token_bytes


def _name(entry: Logprob, prefix: str = "") -> str:
    """A token's text, or its bytes in hexadecimal where it is no text by itself, as OpenAI writes it."""
    try:
        _bytes(entry).decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in _bytes(entry))
    return entry.decoded_token or ""


def _flat(token: int, entry: Logprob) -> Record:
    return {"token_id": token, "token": entry.decoded_token, "logprob": _value(entry)}


def _flat_top(candidates: LogprobDict) -> list[Record]:
    return [_flat(token, entry) for token, entry in _ranked(candidates)]


def _chat(entry: Logprob) -> Record:
    return {"token": _name(entry), "logprob": _value(entry), "bytes": list(_bytes(entry))}
