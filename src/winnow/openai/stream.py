"""The chunks of a streamed answer, and the object of a whole one: its chunks put together."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring as encode_text
from typing import Any

from winnow.openai.logprobs import TextOffsets, chat_logprobs, completion_logprobs, prompt_logprobs
from winnow.openai.parser import AnswerParser
from winnow.openai.regions import Kind
from winnow.openai.response import ResponseForm, event, extras, finish_reason, prompt_extras, usage_object
from winnow.outputs import CompletionOutput, EvictionReport, RequestOutput

Record = dict[str, Any]

# A text for another's place: of the private characters, which no model's name has.
_MARK = "\ue000"


@dataclass
class _Choice:
    """One answer on its way."""

    started: bool = False
    ended: bool = False
    num_tokens: int = 0
    reasoning_tokens: int = 0
    parser: AnswerParser | None = None
    num_calls: int = 0
    offsets: TextOffsets = field(default_factory=TextOffsets)
    frame: tuple[str, str] | None = None
    """Parts before and behind the text in an event that brings nothing else."""


class ChunkStream:
    """Stream of chunks, from the deltas of a body's requests; `form` is what they have in common."""

    def __init__(self, form: ResponseForm) -> None:
        self.form, self._asked = form, form.asked
        self._head = form.head(chunk=True)
        self._choices: dict[int, _Choice] = {}
        self._prompt_tokens: dict[int, int] = {}
        self._cached_tokens: dict[int, int] = {}
        self._reports: list[EvictionReport] = []

    def push(self, place: int, output: RequestOutput) -> Iterator[Record]:
        """Yield the chunks of a delta of prompt number `place`."""
        self._prompt_tokens[place] = len(output.prompt_token_ids)
        self._cached_tokens[place] = output.num_cached_tokens
        for answer in output.outputs:
            index = place * self._asked.params.n + answer.index
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
            make = self._chat_chunks if self.form.is_chat else self._text_chunks
            yield from make(index, choice, output, answer, first)

    def events(self, place: int, output: RequestOutput) -> str:
        """Return what `push` does, written as server-sent events; empty where there is nothing to say."""
        plain = self._plain_event(place, output)
        return plain if plain is not None else "".join(map(event, self.push(place, output)))

    def _plain_event(self, place: int, output: RequestOutput) -> str | None:
        """Return the event of a delta that is text alone, without the chunk; None: it is more, or the first."""
        if len(output.outputs) != 1 or self._asked.continuous_usage:
            return None
        [answer] = output.outputs
        choice = self._choices.get(place * self._asked.params.n + answer.index)
        if (
            choice is None
            or not choice.started
            or choice.ended
            or (choice.parser is not None and not choice.parser.is_plain)
            or not answer.text
            or self._asked.return_token_ids
            or self._asked.only_echo
            or answer.finish_reason is not None
            or answer.stop_reason is not None
            or answer.logprobs is not None
            or answer.eviction is not None
        ):
            return None
        if choice.frame is None:
            choice.frame = self._frame(place * self._asked.params.n + answer.index)
        choice.num_tokens += len(answer.token_ids)
        before, behind = choice.frame
        return f"{before}{encode_text(answer.text)}{behind}"

    def _frame(self, index: int) -> tuple[str, str]:
        if self.form.is_chat:
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
        answers = 0 if self._asked.only_echo else sum(each.num_tokens for each in self._choices.values())
        cached = sum(self._cached_tokens.values())
        thoughts = sum(each.reasoning_tokens for each in self._choices.values())
        return usage_object(sum(self._prompt_tokens.values()), answers, cached, self._reports, thoughts)

    def _chunk(self, choice: Record) -> Record:
        chunk = {**self._head, "choices": [choice]}
        if self._asked.include_usage:
            chunk["usage"] = self.usage() if self._asked.continuous_usage else None
        return chunk

    def _text_chunks(
        self, index: int, choice: _Choice, output: RequestOutput, answer: CompletionOutput, first: bool
    ) -> Iterator[Record]:
        asked, logprobs = self._asked, completion_logprobs(answer, choice.offsets)
        text = answer.text
        if asked.echo and first:
            prompt = self.form.prompt_text(output)
            choice.offsets.skip(len(prompt))
            if logprobs is not None:
                logprobs = self.form.echo_logprobs(output, logprobs)
            text = prompt if asked.only_echo else prompt + text
        elif asked.only_echo:
            text, logprobs = "", None
        if text or logprobs is not None or answer.finish_reason is not None or self._asked.return_token_ids:
            reason = finish_reason(answer)
            if self._asked.only_echo and reason:
                reason = "length"
            found = _text_choice(index, text, logprobs, reason)
            found |= extras(self.form, answer)
            yield self._chunk(found | (prompt_extras(self.form, output) if first else {}))

    def _chat_chunks(
        self, index: int, choice: _Choice, output: RequestOutput, answer: CompletionOutput, first: bool
    ) -> Iterator[Record]:
        if first:
            begin = _chat_choice(index, {"role": "assistant", "content": ""})
            yield self._chunk(begin | prompt_extras(self.form, output))
            choice.parser = self.form.parser(output)
        deltas = self._deltas(choice, answer)
        logprobs, reason = chat_logprobs(answer, self._asked.params.logprobs), finish_reason(answer)
        if reason == "stop" and choice.num_calls:
            reason = "tool_calls"
        if not deltas and (logprobs is not None or self._asked.return_token_ids):
            deltas = [{"content": ""}]
        for place, delta in enumerate(deltas):
            record = _chat_choice(index, delta, logprobs if place == 0 else None)
            if place == 0 and self._asked.return_token_ids:
                record |= {"token_ids": list(answer.token_ids)}
            yield self._chunk(record)
        if reason is not None:
            ends = {key: value for key, value in extras(self.form, answer).items() if key != "token_ids"}
            yield self._chunk(_chat_choice(index, {}, None, reason) | ends)

    def _deltas(self, choice: _Choice, answer: CompletionOutput) -> list[Record]:
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


def completion_object(form: ResponseForm, outputs: Sequence[RequestOutput]) -> Record:
    """Return the object for finished requests: one for each prompt of the body, in order."""
    chunks = ChunkStream(form)
    choices = fold(chunk for place, output in enumerate(outputs) for chunk in chunks.push(place, output))
    found = form.head() | {"choices": choices, "usage": chunks.usage()}
    if form.asked.prompt_logprobs and form.is_chat:
        found["prompt_logprobs"] = prompt_logprobs(outputs[0])
    return found


def fold(chunks: Iterable[Mapping[str, Any]]) -> list[Record]:
    """Return the choices that chunks come to."""
    found: dict[int, Record] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            _append(found.setdefault(choice["index"], {}), choice)
    for choice in found.values():
        logprobs = choice["logprobs"]
        if "delta" in choice:
            choice["message"] = message = choice.pop("delta") | {"refusal": None, "annotations": []}
            for call in message.get("tool_calls", ()):
                del call["index"]
            if "tool_calls" in message:
                message["content"] = message["content"] or None
        elif logprobs is not None:  # a stop string may have cut the text before the tokens end
            logprobs["text_offset"] = [min(each, len(choice["text"])) for each in logprobs["text_offset"]]
    return list(found.values())


def _append(whole: Record, piece: Mapping[str, Any]) -> None:
    """Add a piece to a whole: texts and lists grow, and what comes once is set."""
    for name, value in piece.items():
        known = whole.get(name)
        if isinstance(known, dict) and isinstance(value, dict):
            _append(known, value)
        elif isinstance(known, str | list) and value is not None:
            whole[name] = known + value
        elif known is None or value is not None:
            whole[name] = value
