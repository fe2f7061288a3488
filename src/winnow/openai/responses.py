"""/v1/responses, read as a chat and written from one."""

import json
import time
import uuid
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from winnow.openai.errors import ApiError
from winnow.openai.request import append_turn
from winnow.values.json_values import json_kind

Record = dict[str, Any]

PATH = "/v1/responses"
MAX_ITEMS = 4096

# Fields that mean the same under the same name in a chat.
_SHARED = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
)
# `max_tool_calls` counts calls of tools that the server runs, of which there are none.
_IGNORED = ("max_tool_calls", "client_metadata")
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "prompt": (),
    "truncation": ("disabled",),
    "context_management": ([],),
    "prompt_logprobs": (),
}
_FIELDS = {
    "text": ("format", "verbosity"),
    "reasoning": ("effort", "summary", "generate_summary"),
    "stream_options": ("include_obfuscation",),
}
ENCRYPTED, LOGPROBS = _INCLUDED = ("reasoning.encrypted_content", "message.output_text.logprobs")
_INPUT: Record = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""Parameters of a custom tool, whose calls hold one text."""
_SEALED = "winnow-reasoning-1."
"""Beginning of `encrypted_content`, before the reasoning in Base64: it needs no secret, for the item shows it too."""
_NO_TOOL: Record = {"description": None, "parameters": None, "strict": None}
# Prefixes of the ids of items that come without one.
_ID_PREFIXES = {
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


def input_items(body: Mapping[str, Any], find: Callable[[str], Any]) -> list[Any]:
    """Return the items of a body's `input` as they are kept: with ids, text as parts of a message.

    Args:
        find: returns the item that an `item_reference` names, or raises ApiError.

    Raises:
        ApiError: it is missing, empty or too long, or refers to what is not kept.
    """
    given = body.get("input")
    if given is None:
        raise ApiError("invalid_request", f"body needs input for {PATH}", "input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given or len(given) > MAX_ITEMS:
        raise ApiError("invalid_request", f"input must be text, or a list of 1 to {MAX_ITEMS} items", "input")
    return [find(item["id"]) if _is_reference(item) else _kept_item(item) for item in given]


def _is_reference(item: Any) -> bool:
    if not isinstance(item, dict) or item.get("type") not in (None, "item_reference") or "role" in item:
        return False
    if not isinstance(item.get("id"), str):
        raise ApiError("invalid_request", "an item_reference needs the id of an item", "input")
    return True


def chat_body(body: Mapping[str, Any], items: Sequence[Any]) -> Record:
    """Return the body of a chat that asks the same.

    Args:
        items: the whole conversation, which ends with the body's own `input_items`.

    Raises:
        ApiError: names the field, the value and what is allowed.
    """
    values = {name: value for name, value in body.items() if value is not None and name not in _IGNORED}
    for name, harmless in _REFUSED.items():
        if name in values and values.pop(name) not in harmless:
            raise ApiError("unsupported_parameter", f"{name} is not supported", name)
    for name in ("input", "previous_response_id", "conversation", "store"):
        values.pop(name, None)
    chat: Record = {name: values.pop(name) for name in _SHARED if name in values}
    chat["messages"] = _messages(values.pop("instructions", None), items)
    if "max_output_tokens" in values:
        chat["max_completion_tokens"] = values.pop("max_output_tokens")
    if "top_logprobs" in values or LOGPROBS in _included(values.pop("include", [])):
        chat |= {"logprobs": True, "top_logprobs": values.pop("top_logprobs", 0)}
    text, reasoning, _ = (_described(values, name, known) for name, known in _FIELDS.items())
    if text.get("format") is not None:
        chat["response_format"] = text["format"]
    if reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    if "tools" in values:
        chat["tools"] = _tools(values.pop("tools"))
    choice = values.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "custom":
        values["tool_choice"] = {**choice, "type": "function"}
    for name in ("tool_choice", "parallel_tool_calls"):
        if name in values:
            chat[name] = values.pop(name)
    for name in ("n", "messages", "max_tokens", "max_completion_tokens", "stream_options"):
        if name in values:
            raise ApiError("invalid_request", f"{name} is not a field of {PATH}", name)
    return chat | values  # parameters that OpenAI does not have are checked where a chat's are


def _included(include: Any) -> Sequence[str]:
    for index, name in enumerate(include if isinstance(include, list) else [include]):
        if name not in _INCLUDED:
            raise ApiError(
                "unsupported_parameter",
                f"include[{index}] must be {' or '.join(_INCLUDED)}, got {name!r:.80}",
                "include",
            )
    return include if isinstance(include, list) else []


def _described(values: Record, name: str, known: Sequence[str]) -> Record:
    """Take an object with known fields out of a body's `values`; empty where it is missing."""
    value = values.pop(name, {})
    if not isinstance(value, dict):
        raise ApiError("invalid_request", f"{name} must be an object, got {json_kind(value)}", name)
    for field_name, each in value.items():
        if field_name not in known and each is not None:
            raise ApiError("invalid_request", f"{name} has no field {field_name!r:.80}", name)
    return value


def conversation_id(body: Mapping[str, Any]) -> str | None:
    """Return the conversation that a body names.

    Raises:
        ApiError: it is no id, or stands beside previous_response_id.
    """
    given = body.get("conversation")
    name = given.get("id") if isinstance(given, dict) else given
    if given is not None and not (isinstance(name, str) and name):
        raise ApiError("invalid_request", "conversation must be an id, or an object with one", "conversation")
    if name is not None and body.get("previous_response_id") is not None:
        raise ApiError(
            "invalid_request", "conversation and previous_response_id cannot both be given", "conversation"
        )
    return name


def _kept_item(item: Any) -> Any:
    """Return an item with an id, and a message's text as a part; one that is no object is refused later."""
    if not isinstance(item, dict):
        return item
    item = {name: value for name, value in item.items() if name not in ("id", "status") or value is not None}
    kind, content = item.get("type", "message"), item.get("content")
    if kind == "message" and isinstance(content, str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        item = {**item, "content": [{"type": part, "text": content}]}
    return {"type": kind, "id": new_id(_ID_PREFIXES.get(str(kind), "msg")), "status": "completed", **item}


def _messages(instructions: Any, items: Sequence[Any]) -> list[Record]:
    messages: list[Record] = []
    if instructions is not None:
        if not isinstance(instructions, str):
            raise ApiError(
                "invalid_request", f"instructions must be text, got {json_kind(instructions)}", "instructions"
            )
        messages.append({"role": "system", "content": instructions})
    for index, item in enumerate(items):
        message = _message(item, f"input[{index}]")
        if message is not None:
            append_turn(messages, message)
    return messages


def _message(item: Any, name: str) -> Record | None:
    """Return the message that an item stands for, or its part of one; None: it is reasoning that cannot be read."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        return {"role": item.get("role"), "content": item.get("content")}
    if kind in ("function_call", "custom_tool_call"):
        arguments = item.get("arguments")
        if kind == "custom_tool_call":
            arguments = json.dumps({"input": item.get("input")}, ensure_ascii=False)
        function = {"name": item.get("name"), "arguments": arguments}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind in ("function_call_output", "custom_tool_call_output"):
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
    if kind == "reasoning":
        thoughts = _thoughts(item)
        return {"role": "assistant", "content": "", "reasoning_content": thoughts} if thoughts else None
    raise ApiError("unsupported_parameter", f"{name} of type {kind!r:.80} is not supported", name)


def _thoughts(item: Mapping[str, Any]) -> str:
    """Return the text of a reasoning item: as it shows it, as we sealed it, or its summary; empty: another's seal."""
    sealed = item.get("encrypted_content")
    if not item.get("content") and isinstance(sealed, str) and sealed.startswith(_SEALED):
        try:
            return urlsafe_b64decode(sealed.removeprefix(_SEALED)).decode()
        except ValueError:
            raise ApiError("invalid_request", "encrypted_content is damaged", "input") from None
    parts = item.get("content") or item.get("summary") or []
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ApiError("invalid_request", "content of a reasoning item must be reasoning_text", "input")
    return "\n".join(map(str, texts))


def _tools(tools: Any) -> Any:
    """Return tools in a chat's form, where the function's fields stand one level deeper."""
    if not isinstance(tools, list):
        return tools
    found = []
    for index, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "function" and "function" not in tool:
            function = {name: value for name, value in tool.items() if name != "type"}
        elif kind == "custom":
            function = {"name": tool.get("name"), "description": _custom_text(tool), "parameters": _INPUT}
        elif kind == "namespace" and isinstance(tool.get("tools"), list):
            found += _tools(tool["tools"])
            continue
        elif _is_hollow(tool):
            continue
        else:
            raise ApiError(
                "unsupported_parameter",
                f"tools[{index}] must be a function or custom, got type {kind!r:.80}",
                f"tools[{index}]",
            )
        found.append({"type": "function", "function": function})
    return found


def _is_hollow(tool: Any) -> bool:
    """Return whether a tool is Codex's search without access to the web, which it lists in each request."""
    return (
        isinstance(tool, dict)
        and tool.get("type") == "web_search"
        and tool.get("external_web_access") is False
    )


def _custom_text(tool: Mapping[str, Any]) -> str:
    """Return a custom tool's description, with the form of its input where that is a grammar."""
    form = tool.get("format")
    grammar = form.get("definition") if isinstance(form, dict) else None
    return f"{tool.get('description') or ''}" + (f"\nThe input follows:\n{grammar}" if grammar else "")


@dataclass
class ResponseWriter:
    """Writer of a response from a chat's chunks, as events or as one object.

    Attributes:
        body: as the client wrote it: a response repeats some of its fields.
        created: Unix seconds.
        stored: a later response may continue this one.
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
        """Yield the first events."""
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self.object("in_progress"))

    def push(self, chunk: Mapping[str, Any]) -> Iterator[Record]:
        """Yield the events of a chat's chunk."""
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
        """Yield the last events."""
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
        """Return the response as it stands."""
        body = self.body
        text = body.get("text") or {}
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "conversation": None if conversation_id(body) is None else {"id": conversation_id(body)},
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": incomplete,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {},
            "model": self.model,
            "output": list(self.output),
            "max_tool_calls": body.get("max_tool_calls"),
            "parallel_tool_calls": body.get("parallel_tool_calls", True) is not False,
            "presence_penalty": body.get("presence_penalty") or 0.0,
            "frequency_penalty": body.get("frequency_penalty") or 0.0,
            "previous_response_id": body.get("previous_response_id"),
            "prompt_cache_key": body.get("prompt_cache_key"),
            "reasoning": {"effort": (body.get("reasoning") or {}).get("effort"), "summary": None},
            "safety_identifier": body.get("safety_identifier"),
            "service_tier": "default",
            "store": self.stored,
            "temperature": _or(body.get("temperature"), 1.0),
            "text": {"format": text.get("format") or {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": [
                _NO_TOOL | tool if tool["type"] == "function" else tool
                for tool in body.get("tools") or []
                if not _is_hollow(tool)
            ],
            "top_logprobs": body.get("top_logprobs") or 0,
            "top_p": _or(body.get("top_p"), 1.0),
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": body.get("user"),
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
        found: list[Record] = []
        if kind == "message":
            found, self._logprobs = self._logprobs, []
            part["logprobs"] += found
        name = "output_text" if kind == "message" else "reasoning_text"
        extra = {"logprobs": found} if kind == "message" else {}
        yield self._event(f"response.{name}.delta", **self._place(), content_index=0, delta=text, **extra)

    def _begin_item(self, kind: str) -> Iterator[Record]:
        """Open an item that grows: the message, or the reasoning before it."""
        part: Record
        item: Record
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"type": kind, "id": new_id("msg"), "status": "in_progress", "role": "assistant"}
        else:
            part = {"type": "reasoning_text", "text": ""}
            item = {"type": kind, "id": new_id("rs"), "status": "in_progress", "summary": []}
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
        name = "output_text" if item["type"] == "message" else "reasoning_text"
        extra = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
        yield self._event(
            f"response.{name}.done", **self._place(), content_index=0, text=part["text"], **extra
        )
        yield self._event("response.content_part.done", **self._place(), content_index=0, part=part)
        item["status"] = "incomplete" if self._reason == "length" else "completed"
        if item["type"] == "reasoning" and ENCRYPTED in (self.body.get("include") or ()):
            item["encrypted_content"] = _SEALED + urlsafe_b64encode(part["text"].encode()).decode()
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
        item = {"type": kind, "id": new_id(_ID_PREFIXES[kind]), "call_id": call["id"], "name": name}
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


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _usage(usage: Mapping[str, Any]) -> Record:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
        "total_tokens": usage["total_tokens"],
    }


def new_id(prefix: str) -> str:
    """Return a new id of a response or an item."""
    return f"{prefix}_{uuid.uuid4().hex}"
