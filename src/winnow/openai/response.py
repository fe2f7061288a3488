"""Objects that answer a body, `text_completion` and `chat.completion`: chunks of a stream, and whole ones of them."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring as encode_text
from typing import Any

from winnow.openai.answers import AnswerReader
from winnow.openai.logprobs import (
    TextOffsets,
    chat_logprobs,
    completion_logprobs,
    echo_logprobs,
    prompt_logprobs,
)
from winnow.openai.parser import AnswerParser
from winnow.openai.regions import Kind
from winnow.openai.request import CompletionRequest
from winnow.outputs import CompletionOutput, EvictionReport, RequestOutput
from winnow.sampling.token_table import TokenTable
from winnow.values.json_values import dump_json


@dataclass(frozen=True)
class ResponseForm:
    """Common part of the objects that answer one body.

    Attributes:
        name: what follows the prefix of their id.
        created: Unix seconds.
    """

    asked: CompletionRequest
    reader: AnswerReader
    name: str
    model: str
    created: int

    @property
    def is_chat(self) -> bool:
        return self.asked.messages is not None

    def parser(self, output: RequestOutput) -> AnswerParser | None:
        """Return the parser of an answer; None: its text is the content."""
        tools, calls = self.asked.template.tools, self.asked.calls
        reads = self.is_chat and self.reader.reads(tools, calls)
        return self.reader.parser(output.prompt, tools, calls) if reads else None

    def prompt_text(self, output: RequestOutput) -> str:
        return self._decode(output.prompt_token_ids) if output.prompt is None else output.prompt

    def echo_logprobs(self, output: RequestOutput, answer: dict[str, Any]) -> dict[str, Any]:
        special = {} if self.reader.tokenizer is None else TokenTable(self.reader.tokenizer).special
        own = None if self.asked.only_echo else answer
        prompt = self.prompt_text(output)
        return echo_logprobs(output, prompt, lambda token: self._decode([token]), special, own)

    def _decode(self, token_ids: Sequence[int]) -> str:
        tokenizer = self.reader.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode(token_ids, skip_special_tokens=False))

    def head(self, *, chunk: bool = False) -> dict[str, Any]:
        kind = "text_completion" if not self.is_chat else f"chat.completion{'.chunk' * chunk}"
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.name}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }


def usage_object(
    prompt: int,
    answers: int,
    cached: Mapping[str, int],
    reports: Sequence[EvictionReport | None] = (),
    thoughts: int = 0,
) -> dict[str, Any]:
    """Return the object that counts tokens; `cached` are details of the prompt (`cached_tokens`), `thoughts` reasoning.

    Reports are of the answers whose KVs are not all kept: they say how many tokens' are, on average over rows, and how
    many answers, of all requests so far, were compared with the full cache's.
    """
    found: dict[str, Any] = {}
    if known := [report for report in reports if report is not None]:
        kept = round(sum(each.mean_kept for each in known))
        found["kv"] = {"kept": kept, "total": sum(each.num_tokens for each in known)}
        if known[-1].checked_answers:
            found["kv"] |= {name: getattr(known[-1], name) for name in ("checked_answers", "equal_answers")}
    details = dict(cached)
    if details.pop("outgrown", 0):  # the conversation, its session_memory
        found["kv"] = {**found.get("kv", {}), "session": "outgrown"}
    found |= {
        "prompt_tokens": prompt,
        "completion_tokens": answers,
        "total_tokens": prompt + answers,
        "prompt_tokens_details": details,
    }
    return found | ({"completion_tokens_details": {"reasoning_tokens": thoughts}} if thoughts else {})


def cached_tokens(output: RequestOutput) -> Counter[str]:
    """Return tokens of a prompt that were not computed, and of documents that stand elsewhere those that were."""
    found = Counter(cached_tokens=output.num_cached_tokens, outgrown=int(output.outgrown))
    if output.num_reused_tokens or output.num_repaired_tokens:
        found.update(reused_tokens=output.num_reused_tokens, repaired_tokens=output.num_repaired_tokens)
    return found


def finish_reason(answer: CompletionOutput) -> str | None:
    return "stop" if answer.finish_reason == "abort" else answer.finish_reason


def extras(form: ResponseForm, answer: CompletionOutput) -> dict[str, Any]:
    """Return fields that OpenAI does not have: only where there is something to say."""
    found: dict[str, Any] = {}
    if answer.stop_reason is not None:
        found["stop_reason"] = answer.stop_reason
    if answer.eviction is not None:
        found["eviction"] = answer.eviction.to_json(kept=form.asked.return_kept)
    if form.asked.return_token_ids:
        found["token_ids"] = list(answer.token_ids)
    return found


def prompt_extras(form: ResponseForm, output: RequestOutput) -> dict[str, Any]:
    """Do as `extras` does, for the fields of the prompt."""
    found: dict[str, Any] = {}
    if form.asked.return_token_ids:
        found["prompt_token_ids"] = list(output.prompt_token_ids)
    if form.asked.prompt_logprobs and not form.is_chat:
        found["prompt_logprobs"] = prompt_logprobs(output)
    return found


# Made once: json.dumps would make one for every event.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def event(data: dict[str, Any] | str, name: str | None = None) -> str:
    text = data if isinstance(data, str) else compact_json(data)
    return f"data: {text}\n\n" if name is None else f"event: {name}\ndata: {text}\n\n"


def compact_json(value: Any) -> str:
    try:
        return _ENCODER.encode(value)
    except ValueError:
        return dump_json(value, ensure_ascii=False, separators=(",", ":"))


Record = dict[str, Any]

# A text for another's place: of the private characters, which no model's name has.
_MARK = "\ue000"


@dataclass
class _Choice:
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
    """Stream of chunks, from the deltas of a body's requests."""

    def __init__(self, form: ResponseForm) -> None:
        self.form, self._asked = form, form.asked
        self._head = form.head(chunk=True)
        self._choices: dict[int, _Choice] = {}
        self._prompt_tokens: dict[int, int] = {}
        self._cached_tokens: dict[int, Counter[str]] = {}
        self._reports: list[EvictionReport] = []

    def push(self, place: int, output: RequestOutput) -> Iterator[Record]:
        """Yield the chunks of a delta of prompt number `place`."""
        self._prompt_tokens[place] = len(output.prompt_token_ids)
        self._cached_tokens[place] = cached_tokens(output)
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
        """Return what `push` yields, written as server-sent events."""
        plain = self._plain_event(place, output)
        return plain if plain is not None else "".join(map(event, self.push(place, output)))

    def _plain_event(self, place: int, output: RequestOutput) -> str | None:
        """Return the event of a delta that is text alone, without the chunk; None: it is more, or the first."""
        if len(output.outputs) != 1 or self._asked.continuous_usage:
            return None
        [answer] = output.outputs
        index = place * self._asked.params.n + answer.index
        choice = self._choices.get(index)
        if choice is None or not choice.started or choice.ended or not answer.text:
            return None
        others = (answer.finish_reason, answer.stop_reason, answer.logprobs, answer.eviction)
        if self._asked.return_token_ids or self._asked.only_echo or any(each is not None for each in others):
            return None
        if choice.parser is not None and not choice.parser.is_plain:
            return None
        if choice.frame is None:
            choice.frame = self._frame(index)
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
        return {**self._head, "choices": [], "usage": self.usage()}

    def usage(self) -> Record:
        answers = 0 if self._asked.only_echo else sum(each.num_tokens for each in self._choices.values())
        cached = Counter(cached_tokens=0)
        for each in self._cached_tokens.values():
            cached.update(each)
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
