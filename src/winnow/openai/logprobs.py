"""Log-probabilities in the shapes of text and chat completions."""

import codecs
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from winnow.outputs import CompletionOutput, RequestOutput
from winnow.sampling import Logprob
from winnow.values.logprob import LogprobDict

Record = dict[str, Any]

_LOWEST = -9999.0
"""Value in JSON for the logprob of a token that was ruled out: it has no spelling for minus infinity."""


def chat_logprobs(answer: CompletionOutput, most: int | None = None) -> Record | None:
    """Return `choices[].logprobs` of a chat completion: `most` alternatives for each token, None: all known ones."""
    if answer.logprobs is None:
        return None
    content = [
        {**_chat(candidates[token]), "top_logprobs": [_chat(entry) for _, entry in ranked(candidates)[:most]]}
        for token, candidates in _predicted(answer)
    ]
    return {"content": content}


@dataclass
class TextOffsets:
    """Places in a text at which its tokens begin."""

    end: int = 0
    """Characters of the tokens so far."""
    shown: int = 0
    """Characters of the text so far: a stop string may cut it before the tokens end."""
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def skip(self, characters: int) -> None:
        self.end += characters
        self.shown += characters

    def add(self, piece: bytes) -> int:
        """Return where the character stands that a token begins or continues."""
        begin = self.end
        self.end += len(self._decoder.decode(piece))
        return begin


def completion_logprobs(answer: CompletionOutput, offsets: TextOffsets) -> Record | None:
    """Return `choices[].logprobs` of a text completion, or of a delta behind the tokens before `offsets.end`."""
    if answer.logprobs is None:
        return None
    pairs = _predicted(answer)
    chosen = [candidates[token] for token, candidates in pairs]
    begins = [offsets.add(logprob_bytes(entry)) for entry in chosen]
    offsets.shown += len(answer.text)
    if answer.finish_reason is not None:
        begins = [min(begin, offsets.shown) for begin in begins]
    return {
        "tokens": [_name(entry, "bytes:") for entry in chosen],
        "token_logprobs": [finite_logprob(entry) for entry in chosen],
        "top_logprobs": [_top_by_name(token, candidates) for token, candidates in pairs],
        "text_offset": begins,
    }


def prompt_logprobs(output: RequestOutput) -> list[Record | None]:
    """Return `prompt_logprobs` as vLLM writes them: for each token of a prompt candidates by id, None for the first."""
    rows = output.prompt_logprobs or ()
    return [None if row is None else {str(token): _ranked(row[token]) for token in row} for row in rows]


def _ranked(entry: Logprob) -> Record:
    return {"logprob": finite_logprob(entry), "rank": entry.rank, "decoded_token": entry.decoded_token}


def echo_logprobs(
    output: RequestOutput,
    prompt: str,
    name_of: Callable[[int], str],
    special: Mapping[int, str],
    answer: Record | None,
) -> Record:
    """Return `choices[].logprobs` of a prompt that is repeated, and of the answer behind it, if any.

    Args:
        name_of: the text of a token that nothing predicts, as the first.
        special: special tokens with their texts, which stand in the prompt only where they were written.
    """
    found: Record = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
    pieces = []
    for token, candidates in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True):
        entry = None if candidates is None else candidates[token]
        found["tokens"].append(name_of(token) if entry is None else _name(entry, "bytes:"))
        found["token_logprobs"].append(None if entry is None else finite_logprob(entry))
        found["top_logprobs"].append(None if candidates is None else _top_by_name(token, candidates))
        written = special.get(token) or (name_of(token) if entry is None else None)
        pieces.append(logprob_bytes(entry) if entry and written is None else (written or "").encode())
    found["text_offset"] = _offsets(prompt, pieces, [token in special for token in output.prompt_token_ids])
    if answer is not None:
        for name in ("tokens", "token_logprobs", "top_logprobs"):
            found[name] += answer[name]
        found["text_offset"] += [len(prompt) + offset for offset in answer["text_offset"]]
    return found


def cumulative_logprob(answer: CompletionOutput) -> float | None:
    """Return the sum of the tokens' logprobs as each is reported: finite also where a token was ruled out."""
    if answer.cumulative_logprob is None or math.isfinite(answer.cumulative_logprob):
        return answer.cumulative_logprob
    return sum(finite_logprob(candidates[token]) for token, candidates in _predicted(answer))


def _top_by_name(token: int, candidates: LogprobDict) -> dict[str, float]:
    """Return logprobs by the candidates' names; of several with one name the answer's own, then the first."""
    names = {_name(candidates[token], "bytes:"): token}
    for other, entry in ranked(candidates):
        name = _name(entry, "bytes:")
        names[name if names.setdefault(name, other) == other else f"token_id:{other}"] = other
    by_token = {other: name for name, other in names.items()}
    return {by_token[other]: finite_logprob(entry) for other, entry in ranked(candidates)}


def _offsets(text: str, pieces: Sequence[bytes], special: Sequence[bool]) -> list[int]:
    """Return where in `text` the character stands that each token begins or continues, if `pieces` are their bytes.

    A `special` token has a length only where the text has it, as has the space that some tokenizers put before the
    first word.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, offset = [], 0
    for piece, is_special in zip(pieces, special, strict=True):
        offsets.append(min(offset, len(text)))
        own = decoder.decode(piece)
        if not text.startswith(own, offset):
            own = "" if is_special else own[own.startswith(" ") and text.startswith(own[1:], offset) :]
        offset += len(own)
    return offsets


def _predicted(answer: CompletionOutput) -> list[tuple[int, LogprobDict]]:
    assert answer.logprobs is not None
    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
    return [(token, candidates) for token, candidates in pairs if candidates is not None]


def ranked(candidates: LogprobDict) -> list[tuple[int, Logprob]]:
    """Return candidates with their token ids, most probable first."""
    return sorted(candidates.items(), key=lambda item: -item[1].logprob)


def finite_logprob(entry: Logprob) -> float:
    """Return the logprob as JSON can hold it: NaN and minus infinity become -9999."""
    return max(entry.logprob, _LOWEST) if entry.logprob < math.inf else _LOWEST


def logprob_bytes(entry: Logprob) -> bytes:
    return (entry.decoded_token or "").encode() if entry.token_bytes is None else entry.token_bytes


def _name(entry: Logprob, prefix: str = "") -> str:
    """Return a token's text, or its bytes in hexadecimal where it is no text by itself, as OpenAI writes it."""
    try:
        logprob_bytes(entry).decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in logprob_bytes(entry))
    return entry.decoded_token or ""


def _chat(entry: Logprob) -> Record:
    return {"token": _name(entry), "logprob": finite_logprob(entry), "bytes": list(logprob_bytes(entry))}
