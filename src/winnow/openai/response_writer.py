"""Responses of /v1/responses, written from a chat's chunks."""

import json
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from winnow.openai.errors import ApiError
from winnow.openai.responses import ENCRYPTED, ID_PREFIXES, SEALED, conversation_id, is_hollow, new_id

Record = dict[str, Any]

_REPEATED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key"),
    *("safety_identifier", "user"),
)
"""Fields of a body that its response shows as they are."""
_NO_TOOL: Record = {"description": None, "parameters": None, "strict": None}


@dataclass
class ResponseWriter:
    """Writer of a response from a chat's chunks, as events or as one object.

    Attributes:
        body: as the client wrote it: a response repeats some of its fields.
        created: Unix seconds.
    """

    body: Mapping[str, Any]
    model: str
    created: int
    stored: bool = False
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    output: list[Record] = field(default_factory=list)
    _open: Record | None = None
    _number: int = 0
    _reason: str | None = None
    _logprobs: list[Record] = field(default_factory=list)
    """Logprobs of tokens of the message whose text is yet to come."""

    def begin(self) -> Iterator[Record]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self.object("in_progress"))

    def push(self, chunk: Mapping[str, Any]) -> Iterator[Record]:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if delta.get("content") or ("content" in delta and not self._is_open("reasoning")):
                self._logprobs += (choice.get("logprobs") or {"content": []})["content"]
            if delta.get("reasoning_content"):
                self._logprobs = []  # of the mark before it
                yield from self._text("reasoning", delta["reasoning_content"])
            if delta.get("content"):
                yield from self._text("message", delta["content"])
            for call in delta.get("tool_calls", ()):
                yield from self._call(call)
            self._reason = choice["finish_reason"] or self._reason

    def end(self, usage: Mapping[str, Any]) -> Iterator[Record]:
        if self._open is None and not self.output:  # an empty answer is an answer
            yield from self._begin_item("message")
        if self._logprobs and self._is_open("message"):
            yield from self._text("message", "")
        yield from self._end_item()
        status = "incomplete" if self._reason == "length" else "completed"
        yield self._event(f"response.{status}", response=self.object(status, usage))

    def fail(self, error: ApiError) -> Record:
        """Return the event of a response that broke off."""
        described = {"code": error.code, "message": str(error)}
        return self._event("response.failed", response=self.object("failed") | {"error": described})

    def object(self, status: str, usage: Mapping[str, Any] | None = None) -> Record:
        body = self.body
        text = body.get("text") or {}
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            **{name: body.get(name) for name in _REPEATED},
            "conversation": None if conversation_id(body) is None else {"id": conversation_id(body)},
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": incomplete,
            "metadata": body.get("metadata") or {},
            "model": self.model,
            "output": list(self.output),
            "parallel_tool_calls": body.get("parallel_tool_calls", True) is not False,
            "presence_penalty": body.get("presence_penalty") or 0.0,
            "frequency_penalty": body.get("frequency_penalty") or 0.0,
            "reasoning": {"effort": (body.get("reasoning") or {}).get("effort"), "summary": None},
            "service_tier": "default",
            "store": self.stored,
            "temperature": 1.0 if body.get("temperature") is None else body["temperature"],
            "text": {"format": text.get("format") or {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": [
                _NO_TOOL | tool if tool["type"] == "function" else tool
                for tool in body.get("tools") or []
                if not is_hollow(tool)
            ],
            "top_logprobs": body.get("top_logprobs") or 0,
            "top_p": 1.0 if body.get("top_p") is None else body["top_p"],
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }

    def _event(self, kind: str, **fields: Any) -> Record:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open["type"] == kind

    def _text(self, kind: str, text: str) -> Iterator[Record]:
        if not self._is_open(kind):
            yield from self._end_item()
            yield from self._begin_item(kind)
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        extra: dict[str, list[Record]] = {}
        if kind == "message":
            extra, self._logprobs = {"logprobs": self._logprobs}, []
            part["logprobs"] += extra["logprobs"]
        kind = f"response.{part['type']}.delta"
        yield self._event(kind, **self._place(), content_index=0, delta=text, **extra)

    def _begin_item(self, kind: str) -> Iterator[Record]:
        """Open an item that grows: the message, or the reasoning before it."""
        part: Record = {"type": "reasoning_text", "text": ""}
        item: Record = {"type": kind, "id": new_id("rs"), "status": "in_progress", "summary": []}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"type": kind, "id": new_id("msg"), "status": "in_progress", "role": "assistant"}
        yield self._event(
            "response.output_item.added", output_index=len(self.output), item={**item, "content": []}
        )
        self._open = {**item, "content": [part]}
        yield self._event("response.content_part.added", **self._place(), content_index=0, part=dict(part))

    def _end_item(self) -> Iterator[Record]:
        item = self._open
        if item is None:
            return
        part = item["content"][0]
        said = {name: part[name] for name in ("text", "logprobs") if name in part}
        yield self._event(f"response.{part['type']}.done", **self._place(), content_index=0, **said)
        yield self._event("response.content_part.done", **self._place(), content_index=0, part=part)
        item["status"] = "incomplete" if self._reason == "length" else "completed"
        if item["type"] == "reasoning" and ENCRYPTED in (self.body.get("include") or ()):
            item["encrypted_content"] = SEALED + urlsafe_b64encode(part["text"].encode()).decode()
        yield self._event("response.output_item.done", output_index=len(self.output), item=item)
        self.output.append(item)
        self._open = None

    def _call(self, call: Mapping[str, Any]) -> Iterator[Record]:
        yield from self._end_item()
        name, value = call["function"]["name"], call["function"]["arguments"]
        kind, field_name, event = "function_call", "arguments", "function_call_arguments"
        namespace, tool = self._tool(name)
        if tool.get("type") == "custom":
            kind, field_name, event = "custom_tool_call", "input", "custom_tool_call_input"
            value = _custom_input(value)
        item = {"type": kind, "id": new_id(ID_PREFIXES[kind]), "call_id": call["id"], "name": name}
        item |= {field_name: "", "status": "in_progress"} | namespace
        index = len(self.output)
        yield self._event("response.output_item.added", output_index=index, item=dict(item))
        place = {"item_id": item["id"], "output_index": index}
        yield self._event(f"response.{event}.delta", **place, delta=value)
        yield self._event(f"response.{event}.done", **place, **{field_name: value}, name=name)
        item |= {field_name: value, "status": "completed"}
        yield self._event("response.output_item.done", output_index=index, item=item)
        self.output.append(item)

    def _tool(self, name: str) -> tuple[Record, Record]:
        """Return the namespace of a tool, as a field of its calls, and the tool; both empty where it is not known."""
        for tool in self.body.get("tools") or ():
            inner = tool.get("tools") or () if tool["type"] == "namespace" else (tool,)
            for each in inner:
                if each.get("name") == name:
                    return ({} if each is tool else {"namespace": tool.get("name")}), each
        return {}, {}

    def _place(self) -> Record:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.output)}


def _custom_input(arguments: str) -> str:
    """Return the text that a custom tool's call holds; all of it where the model wrote it in no object."""
    try:
        value = json.loads(arguments)["input"]
    except (ValueError, KeyError, TypeError):
        return arguments
    return value if isinstance(value, str) else arguments


def _usage(usage: Mapping[str, Any]) -> Record:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
        "total_tokens": usage["total_tokens"],
    }
