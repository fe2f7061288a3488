"""Bodies of /v1/messages, read as chats."""

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, NoReturn

from winnow.anthropic.messages import PATH
from winnow.openai.errors import invalid, unsupported
from winnow.openai.request import append_turn
from winnow.prompt.messages import call_arguments
from winnow.values.json_values import json_kind

Record = dict[str, Any]

# Fields that mean the same under the same name in a chat.
_SHARED = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
# What says nothing about the answer; see `cache_session` for marks.
_IGNORED = (
    *("cache_control", "service_tier", "inference_geo"),
    *("diagnostics", "user_profile_id", "workspace_id"),
)
# What is not served, and the values that ask for nothing.
_UNSERVED: Mapping[str, tuple[Any, ...]] = {
    "mcp_servers": ([],),
    "container": (),
    "speed": ("standard",),
    "fallbacks": ([],),
    "compaction": (),
    "thread": (),
}
# Claude Code begins the system prompt with it, another one in each request: behind it no prefix would be found again.
_BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n*")
_FOREIGN = (
    "n", "max_completion_tokens", "stream_options", "stop", "response_format", "logprobs", "top_logprobs",
    "prompt_logprobs", "parallel_tool_calls", "reasoning_effort", "continue_final_message",
)  # fmt: skip
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS = {"max": "xhigh"}
_ALONE = "disable_parallel_tool_use"
# Blocks that a user's messages and the results of tools may have.
_SHOWN = ("text", "image", "document", "search_result")


def chat_body(body: Mapping[str, Any], *, counted: bool = False) -> Record:
    """Return the body of a chat that asks the same; one that is only `counted` need not say how long answers may be."""
    ignored = (*_IGNORED, "context_management")  # which edits what is read here
    values = {name: value for name, value in body.items() if value is not None and name not in ignored}
    for name in _FOREIGN:
        if name in values:
            raise invalid(name, f"is not a field of {PATH}")
    for name, harmless in _UNSERVED.items():
        if name in values and values.pop(name) not in harmless:
            raise unsupported(name)
    for name in ("model", "messages", *(() if counted else ("max_tokens",))):
        if name not in values:
            raise invalid("body", f"needs {name} for {PATH}", name)
    chat: Record = {name: values.pop(name) for name in _SHARED if name in values}
    system = values.pop("system", None)
    chat["messages"] = _messages(values.pop("messages"), _system(system))
    if chat["messages"] and chat["messages"][-1]["role"] == "assistant":
        chat["continue_final_message"] = True
    if "stop_sequences" in values:
        chat["stop"] = values.pop("stop_sequences")
        if not isinstance(chat["stop"], list):
            _refuse("stop_sequences", "a list of texts", chat["stop"])
    metadata = _object(values, "metadata")
    if metadata.get("user_id") is not None:
        chat["user"] = metadata["user_id"]
    chat |= _thinking(values) | _tools(values)
    return chat | values  # parameters that Anthropic does not have are checked where a chat's are


def cache_session(body: Mapping[str, Any]) -> Record:
    """Return the session that a body with cache marks asks for, named by its system prompt and first message."""
    messages = body.get("messages")
    parts = [_system(body.get("system")), messages[:1] if isinstance(messages, list) else None]
    text = json.dumps(body)
    if '"cache_control": {' not in text or body.get("session_id") is not None:
        return {}
    first = sha256(json.dumps(_unmarked(parts), sort_keys=True).encode()).hexdigest()
    return {"session_id": f"cache-{first[:32]}"}


def _unmarked(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _unmarked(each) for name, each in value.items() if name != "cache_control"}
    return [_unmarked(each) for each in value] if isinstance(value, list) else value


def _system(given: Any) -> list[Record]:
    """Return the parts of the system prompt, without the line that bills Claude Code's requests."""
    parts = [] if given is None else _parts(given, "system")
    for part in parts:
        if bill := _BILLING.match(part["text"]):
            part["text"] = part["text"][bill.end() :]
    return [part for part in parts if part["text"]]


def _messages(given: Any, system: list[Record]) -> list[Record]:
    """Return a chat's messages.

    Those of role `system` at the beginning are of the system prompt. Later ones are the user's, marked as Claude Code
    marks its own reminders: many templates take a system message in the first place alone, and a prompt that changed
    there would be computed again.
    """
    if not isinstance(given, list) or not given:
        _refuse("messages", "a list with at least one message", given)
    messages: list[Record] = [{"role": "system", "content": system}] if system else []
    for index, message in enumerate(given):
        name = f"messages[{index}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant", "system"):
            raise invalid(f"{name}.role", f"must be user, assistant or system, got {role!r:.80}", name)
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list):
            _refuse(f"{name}.content", "text or a list of blocks", content)
        if role == "system":
            first = all(each["role"] == "system" for each in messages)
            found = [_reminder(_parts(blocks, f"{name}.content"), first)]
        else:
            found = _user(blocks, name) if role == "user" else [_assistant(blocks, name)]
        for each in found:
            append_turn(messages, each, ("user", "assistant", "system"))
    if messages[-1].get("tool_calls"):
        raise invalid("messages", "must not end with tool_use: tool_result is missing")
    return messages


def _reminder(parts: list[Record], first: bool) -> Record:
    if first:
        return {"role": "system", "content": parts}
    text = "\n".join(part["text"] for part in parts)
    marked = f"<system-reminder>\n{text}\n</system-reminder>"
    return {"role": "user", "content": [{"type": "text", "text": marked}]}


def _user(blocks: list[Any], name: str) -> list[Record]:
    """Return the results of tools, each a message, and the text behind them; also images, which may be of results."""
    messages: list[Record] = []
    texts: list[Record] = []
    marked = 0
    for index, block in enumerate(blocks):
        place = f"{name}.content[{index}]"
        if _kind(block) == "tool_result":
            content = block.get("content")
            parts = [] if content is None else _parts(content, f"{place}.content", _SHOWN)
            texts += [part for part in parts if part["type"] != "text"]  # templates have no place for them
            parts = [part for part in parts if part["type"] == "text"] or [{"type": "text", "text": ""}]
            if _switch(block, "is_error", place) and not parts[0]["text"].lower().startswith(("error", "<")):
                parts[0]["text"] = f"Error: {parts[0]['text']}"
            name_of_call = _text(block, "tool_use_id", place)
            messages.append({"role": "tool", "tool_call_id": name_of_call, "content": parts})
        else:
            texts += _part(block, place, _SHOWN)
            if block.get("cache_control") is not None:
                marked = len(texts)
    # What is marked with a question behind it is a document; an end of a turn is there to be cached alone.
    if 0 < marked < len(texts) and all(part["type"] == "text" for part in texts):
        texts[marked - 1].setdefault("winnow", {})["context"] = True
    if texts or not messages:
        messages.append({"role": "user", "content": texts})
    return messages


def _assistant(blocks: list[Any], name: str) -> Record:
    texts: list[Record] = []
    calls: list[Record] = []
    thoughts = ""
    for index, block in enumerate(blocks):
        place, kind = f"{name}.content[{index}]", _kind(block)
        if kind == "tool_use":
            arguments = call_arguments(block.get("input"))
            if not isinstance(arguments, dict):
                _refuse(f"{place}.input", "an object", arguments)
            function = {"name": _text(block, "name", place)}
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
            calls.append({"id": _text(block, "id", place), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts += _text(block, "thinking", place)
        elif kind != "redacted_thinking":
            texts += _part(block, place)
    message: Record = {"role": "assistant", "content": texts}
    if calls:
        message["tool_calls"] = calls
    return message | {"reasoning_content": thoughts} if thoughts else message


def _parts(given: Any, name: str, kinds: Sequence[str] = ("text",)) -> list[Record]:
    if isinstance(given, str):
        return [{"type": "text", "text": given}]
    if not isinstance(given, list):
        _refuse(name, f"text or a list of {' or '.join(kinds)} blocks", given)
    return [part for index, block in enumerate(given) for part in _part(block, f"{name}[{index}]", kinds)]


def _part(block: Any, name: str, kinds: Sequence[str] = ("text",)) -> list[Record]:
    kind = _kind(block)
    if kind not in kinds:
        raise invalid(name, f"must be a {' or '.join(kinds)} block, got type {kind!r:.80}")
    if kind == "image":
        url = _image_url(block.get("source"), f"{name}.source")
        return [{"type": "image_url", "image_url": {"url": url}}]
    if kind == "text":
        return [{"type": "text", "text": _text(block, "text", name)}]
    return _document(block, name)


def _document(block: Record, name: str) -> list[Record]:
    """Return the parts of a document or a search result: what is said about it, and its text, which is marked."""
    citations = _object({field: value for field, value in block.items() if value is not None}, "citations")
    if _switch(citations, "enabled", f"{name}.citations"):
        raise unsupported(f"{name}.citations", "are not written", "messages")
    if block["type"] == "search_result":
        about, parts = ("title", "source"), _parts(block.get("content"), f"{name}.content")
    else:
        about, place = ("title", "context"), f"{name}.source"
        source: Any = block.get("source")
        kind = source.get("media_type") if _kind(source) == "text" else _kind(source)
        if kind not in ("text/plain", "content"):
            fault = f"must be content or text of media_type text/plain, got {kind!r:.80}"
            raise unsupported(place, fault, "messages")
        given = source.get("content") if kind == "content" else _text(source, "data", place)
        parts = _parts(given, f"{place}.content")
    head = [{"type": "text", "text": _text(block, each, name)} for each in about if block.get(each)]
    text = "\n".join(part["text"] for part in parts)
    return [*head, {"type": "text", "text": text, "winnow": {"document": True}}]


def _image_url(source: Any, name: str) -> str:
    kind = _kind(source)
    if kind == "base64":
        return f"data:{_text(source, 'media_type', name)};base64,{_text(source, 'data', name)}"
    if kind != "url":
        raise invalid(f"{name}.type", f"must be base64 or url, got {kind!r:.80}", name)
    return _text(source, "url", name)


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else None


def _text(block: Mapping[str, Any], field: str, name: str) -> str:
    value = block.get(field)
    if not isinstance(value, str):
        _refuse(f"{name}.{field}", "text", value)
    return value


def _switch(given: Mapping[str, Any], field: str, name: str) -> bool:
    value = given.get(field)
    if not isinstance(value, bool | None):
        _refuse(f"{name}.{field}", "true or false", value)
    return bool(value)


def _thinking(values: Record) -> Record:
    thinking, output = _object(values, "thinking"), _object(values, "output_config")
    found: Record = {}
    if thinking:
        kind = thinking.get("type")
        if kind not in ("enabled", "adaptive", "disabled"):
            fault = f"must be enabled, adaptive or disabled, got {kind!r:.80}"
            raise invalid("thinking.type", fault, "thinking")
        switch = {"enable_thinking": kind != "disabled"}
        found["chat_template_kwargs"] = _object(values, "chat_template_kwargs") | switch
    unknown = next((name for name in output if name not in ("effort", "format")), None)
    if unknown is not None:
        raise unsupported("output_config", f"has no field {unknown!r:.80}")
    if output.get("effort") is not None:
        found["reasoning_effort"] = _EFFORTS.get(str(output["effort"]), output["effort"])
    form = values.pop("output_format", None) or output.get("format")  # an earlier name of the API's
    if form is not None:
        found["response_format"] = form
    return found


def _tools(values: Record) -> Record:
    found: Record = {}
    tools = values.pop("tools", None)
    if tools is not None and not isinstance(tools, list):
        _refuse("tools", "a list", tools)
    if tools:
        found["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    choice = _object(values, "tool_choice")
    if choice:
        kind = choice.get("type")
        if kind == "tool":
            found["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
        elif kind in _CHOICES:
            found["tool_choice"] = _CHOICES[kind]
        else:
            fault = f"must be auto, any, tool or none, got {kind!r:.80}"
            raise invalid("tool_choice.type", fault, "tool_choice")
        unknown = next((name for name in choice if name not in ("type", "name", _ALONE)), None)
        if unknown is not None:
            raise unsupported("tool_choice", f"has no field {unknown!r:.80}")
        if _switch(choice, _ALONE, "tool_choice"):
            found["parallel_tool_calls"] = False
    return found


def _tool(tool: Any, name: str) -> Record:
    kind = tool.get("type") or "custom" if isinstance(tool, dict) else None
    if kind != "custom":
        raise invalid(name, f"must be a custom tool, got type {kind!r:.80}")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _object(values: Record, name: str) -> Record:
    """Take an object out of a body's `values`; empty where it is missing."""
    value = values.pop(name, {})
    if not isinstance(value, dict):
        _refuse(name, "an object", value)
    return dict(value)


def _refuse(name: str, wanted: str, value: Any) -> NoReturn:
    raise invalid(name, f"must be {wanted}, got {json_kind(value)}")
