"""The chunks of a streamed answer."""

import codecs
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from json.encoder import encode_basestring as encode_text
from typing import Any

from winnow.openai.events import event
from winnow.openai.logprobs import chat_logprobs, completion_logprobs, logprob_bytes
from winnow.openai.parser import AnswerParser
from winnow.openai.regions import Kind
from winnow.openai.response import ResponseForm, echo_alone, extras, finish_reason, usage_object
from winnow.outputs import CompletionOutput, EvictionReport, RequestOutput

Record = dict[str, Any]

# A text for another's place: of the private characters, which no model's name has.
_MARK = "\ue000"

ParserFactory = Callable[[RequestOutput], AnswerParser]


@dataclass
class _Choice:
    """One answer on its way."""

    started: bool = False
    ended: bool = False
    num_tokens: int = 0
    reasoning_tokens: int = 0
    parser: AnswerParser | None = None
    num_calls: int = 0
    offset: int = 0
    """Characters of the tokens so far."""
    frame: tuple[str, str] | None = None
    """Parts before and behind the text in an event that brings nothing else."""
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )


class ChunkStream:
    """Stream of chunks, from the deltas of a body's requests.

    Args:
        form: what the chunks have in common.
        include_usage: every chunk has a `usage`, null but in the last, which counts tokens.
        continuous: count tokens in every chunk.
        new_parser: makes the parser of an answer; None: its text is the content.
    """

    def __init__(
        self,
        form: ResponseForm,
        *,
        include_usage: bool = False,
        continuous: bool = False,
        new_parser: ParserFactory | None = None,
    ) -> None:
        self._form = form
        self._head = form.head(chunk=True)
        self._include_usage = include_usage
        self._continuous = continuous
        self._new_parser = new_parser
        self._choices: dict[int, _Choice] = {}
        self._prompt_tokens: dict[int, int] = {}
        self._cached_tokens: dict[int, int] = {}
        self._reports: list[EvictionReport] = []

    def push(self, place: int, output: RequestOutput) -> Iterator[Record]:
        """Yield the chunks of a delta of prompt number `place`."""
        self._prompt_tokens[place] = len(output.prompt_token_ids)
        self._cached_tokens[place] = output.num_cached_tokens
        for answer in output.outputs:
            index = place * self._form.n + answer.index
            choice = self._choices.setdefault(index, _Choice())
            if choice.ended:  # it is in every output until its siblings have ended too
                continue
            choice.ended = answer.finish_reason is not None
            if answer.eviction is not None:
                self._reports.append(answer.eviction)
            if choice.started and not answer.token_ids and not answer.text and answer.finish_reason is None:
                continue
            first, choice.started = not choice.started, True
            choice.num_tokens += len(answer.token_ids)
            choice.reasoning_tokens = answer.reasoning_tokens
            make = self._chat_chunks if self._form.is_chat else self._text_chunks
            yield from make(index, choice, output, answer, first)

    def events(self, place: int, output: RequestOutput) -> str:
        """Return what `push` does, written as server-sent events; empty where there is nothing to say."""
        plain = self._plain_event(place, output)
        return plain if plain is not None else "".join(map(event, self.push(place, output)))

    def _plain_event(self, place: int, output: RequestOutput) -> str | None:
        """Return the event of a delta that is text alone, without the chunk; None: it is more, or the first."""
        if len(output.outputs) != 1 or self._continuous:
            return None
        [answer] = output.outputs
        choice = self._choices.get(place * self._form.n + answer.index)
        if (
            choice is None
            or not choice.started
            or choice.ended
            or (choice.parser is not None and not choice.parser.is_plain)
            or not answer.text
            or self._form.token_ids
            or echo_alone(self._form)
            or answer.finish_reason is not None
            or answer.stop_reason is not None
            or answer.logprobs is not None
            or answer.eviction is not None
        ):
            return None
        if choice.frame is None:
            choice.frame = self._frame(place * self._form.n + answer.index)
        choice.num_tokens += len(answer.token_ids)
        before, behind = choice.frame
        return f"{before}{encode_text(answer.text)}{behind}"

    def _frame(self, index: int) -> tuple[str, str]:
        if self._form.is_chat:
            chunk = self._chunk(_chat_choice(index, {"content": _MARK}))
        else:
            chunk = self._chunk(_text_choice(index, _MARK))
        before, _, behind = event(chunk).rpartition(encode_text(_MARK))
        return before, behind

    def usage_chunk(self) -> Record:
        """Return the chunk that counts tokens, after all others."""
        return {**self._head, "choices": [], "usage": self.usage()}

    def usage(self) -> Record:
        """Return the tokens so far."""
        answers = 0 if echo_alone(self._form) else sum(each.num_tokens for each in self._choices.values())
        cached = sum(self._cached_tokens.values())
        thoughts = sum(each.reasoning_tokens for each in self._choices.values())
        return usage_object(sum(self._prompt_tokens.values()), answers, cached, self._reports, thoughts)

    def _chunk(self, choice: Record) -> Record:
        chunk = {**self._head, "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = self.usage() if self._continuous else None
        return chunk

    def _text_chunks(
        self, index: int, choice: _Choice, output: RequestOutput, answer: CompletionOutput, first: bool
    ) -> Iterator[Record]:
        echo, logprobs = self._form.echo, completion_logprobs(answer)
        text = answer.text
        if logprobs is not None:
            logprobs["text_offset"] = self._offsets(choice, answer)
        if echo is not None and first:
            prompt = echo.text_of(output)
            choice.offset += len(prompt)
            if logprobs is not None:
                logprobs = echo.logprobs(output, prompt, logprobs)
            text = prompt if echo.alone else prompt + text
        elif echo is not None and echo.alone:
            text, logprobs = "", None
        if text or logprobs is not None or answer.finish_reason is not None or self._form.token_ids:
            reason = finish_reason(answer)
            if echo_alone(self._form) and reason:
                reason = "length"
            found = _text_choice(index, text, logprobs, reason)
            yield self._chunk(found | extras(self._form, answer, output if first else None))

    def _offsets(self, choice: _Choice, answer: CompletionOutput) -> list[int]:
        """Return where each token of a delta begins in the whole text."""
        offsets = []
        for token, candidates in zip(answer.token_ids, answer.logprobs or (), strict=True):
            entry = None if candidates is None else candidates[token]
            own = b"" if entry is None else logprob_bytes(entry)
            offsets.append(choice.offset)
            choice.offset += len(choice.decoder.decode(own))
        return offsets

    def _chat_chunks(
        self, index: int, choice: _Choice, output: RequestOutput, answer: CompletionOutput, first: bool
    ) -> Iterator[Record]:
        if first:
            yield self._chunk(_chat_choice(index, {"role": "assistant", "content": ""}))
            if self._new_parser is not None:
                choice.parser = self._new_parser(output)
        deltas = self._deltas(choice, answer)
        logprobs, reason = chat_logprobs(answer, self._form.top_logprobs), finish_reason(answer)
        if reason == "stop" and choice.num_calls:
            reason = "tool_calls"
        if not deltas and (logprobs is not None or self._form.token_ids):
            deltas = [{"content": ""}]
        for place, delta in enumerate(deltas):
            record = _chat_choice(index, delta, logprobs if place == 0 else None)
            if place == 0 and self._form.token_ids:
                record |= {"token_ids": list(answer.token_ids)}
            yield self._chunk(record)
        if reason is not None:
            ends = {key: value for key, value in extras(self._form, answer).items() if key != "token_ids"}
            yield self._chunk(_chat_choice(index, {}, None, reason) | ends)

    def _deltas(self, choice: _Choice, answer: CompletionOutput) -> list[Record]:
        """Return what a piece of an answer adds to its message."""
        if choice.parser is None:
            return [{"content": answer.text}] if answer.text else []
        found: list[Record] = []
        for kind, value in choice.parser.read(answer):
            if kind is Kind.CALLS:
                found.append({"tool_calls": [{"index": choice.num_calls, **value}]})
                choice.num_calls += 1
            else:
                found.append({kind.value: value})
        return found


def _text_choice(index: int, text: str, logprobs: Record | None = None, reason: str | None = None) -> Record:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _chat_choice(
    index: int, delta: Record, logprobs: Record | None = None, reason: str | None = None
) -> Record:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
