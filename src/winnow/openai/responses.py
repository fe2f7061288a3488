"""Bodies of /v1/responses, read as a chat."""

import json
import uuid
from base64 import urlsafe_b64decode
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from winnow.openai.errors import invalid, unsupported
from winnow.openai.parameters import VERBOSITIES
from winnow.openai.request import append_turn
from winnow.values.json_values import json_kind

Record = dict[str, Any]

PATH = "/v1/responses"
MAX_ITEMS = 4096

# Fields that mean the same under the same name in a chat.
_SHARED = (
    *("model", "temperature", "top_p", "stream"),
    *("user", "metadata", "safety_identifier", "prompt_cache_key"),
)
# `max_tool_calls` counts calls of tools that the server runs, of which there are none.
_IGNORED = ("max_tool_calls", "client_metadata")
_SUMMARIES = ("auto", "concise", "detailed")
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "prompt": (),
    "truncation": ("disabled",),
    "context_management": ([],),
    "prompt_logprobs": (),
}
_FIELDS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "text": {"format": (), "verbosity": VERBOSITIES},
    "reasoning": {"effort": (), "summary": _SUMMARIES, "generate_summary": _SUMMARIES},
    "stream_options": {"include_obfuscation": (True, False)},
}
"""Objects of a body: their fields, and the values of those that say nothing about the answer's tokens."""
ENCRYPTED, LOGPROBS = _INCLUDED = ("reasoning.encrypted_content", "message.output_text.logprobs")
_INPUT: Record = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""Parameters of a custom tool, whose calls hold one text."""
SEALED = "winnow-reasoning-1."
"""Beginning of `encrypted_content`, before the reasoning in Base64: it needs no secret, for the item shows it too."""
# Prefixes of the ids of items that come without one.
ID_PREFIXES = {
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


def input_items(body: Mapping[str, Any], find: Callable[[str], Any]) -> list[Any]:
    """Return the items of a body's `input` as they are kept: with ids, text as parts of a message. Raises ApiError: it
    is missing, empty or too long, or refers to what `find` does not know."""
    given = body.get("input")
    if given is None:
        raise invalid("body", f"needs input for {PATH}", "input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given or len(given) > MAX_ITEMS:
        raise invalid("input", f"must be text, or a list of 1 to {MAX_ITEMS} items")
    return [find(item["id"]) if _is_reference(item) else _kept_item(item) for item in given]


def _is_reference(item: Any) -> bool:
    if not isinstance(item, dict) or item.get("type") not in (None, "item_reference") or "role" in item:
        return False
    if not isinstance(item.get("id"), str):
        raise invalid("an item_reference", "needs the id of an item", "input")
    return True


def chat_body(body: Mapping[str, Any], items: Sequence[Any]) -> Record:
    """Return the body of a chat that asks the same; `items` are the whole conversation, the body's own at the end."""
    values = {name: value for name, value in body.items() if value is not None and name not in _IGNORED}
    most = body.get("max_tool_calls")
    if most is not None and (type(most) is not int or most < 1):
        raise invalid("max_tool_calls", f"must be an integer of at least 1, got {most!r:.80}")
    for name, harmless in _REFUSED.items():
        if name in values and values.pop(name) not in harmless:
            raise unsupported(name)
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
            raise invalid(name, f"is not a field of {PATH}")
    return chat | values  # parameters that OpenAI does not have are checked where a chat's are


def _included(include: Any) -> Sequence[str]:
    for index, name in enumerate(include if isinstance(include, list) else [include]):
        if name not in _INCLUDED:
            fault = f"must be {' or '.join(_INCLUDED)}, got {name!r:.80}"
            raise unsupported(f"include[{index}]", fault, "include")
    return include if isinstance(include, list) else []


def _described(values: Record, name: str, known: Mapping[str, Sequence[Any]]) -> Record:
    """Take an object with known fields out of a body's `values`; empty where it is missing."""
    value = values.pop(name, {})
    if not isinstance(value, dict):
        raise invalid(name, f"must be an object, got {json_kind(value)}")
    for field_name, each in value.items():
        if field_name not in known and each is not None:
            raise invalid(name, f"has no field {field_name!r:.80}")
        if each is not None and known.get(field_name) and each not in known[field_name]:
            fault = f"must be one of {', '.join(map(str, known[field_name]))}, got {each!r:.80}"
            raise invalid(f"{name}.{field_name}", fault, name)
    return value


def conversation_id(body: Mapping[str, Any]) -> str | None:
    """Return the conversation that a body names. Raises ApiError: no id, or beside previous_response_id."""
    given = body.get("conversation")
    name = given.get("id") if isinstance(given, dict) else given
    if given is not None and not (isinstance(name, str) and name):
        raise invalid("conversation", "must be an id, or an object with one")
    if name is not None and body.get("previous_response_id") is not None:
        raise invalid("conversation", "and previous_response_id cannot both be given")
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
    return {"type": kind, "id": new_id(ID_PREFIXES.get(str(kind), "msg")), "status": "completed", **item}


def _messages(instructions: Any, items: Sequence[Any]) -> list[Record]:
    messages: list[Record] = []
    if instructions is not None:
        if not isinstance(instructions, str):
            raise invalid("instructions", f"must be text, got {json_kind(instructions)}")
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
    raise unsupported(name, f"of type {kind!r:.80} is not supported")


def _thoughts(item: Mapping[str, Any]) -> str:
    """Return the text of a reasoning item: as it shows it, as we sealed it, or its summary; empty: another's seal."""
    sealed = item.get("encrypted_content")
    if not item.get("content") and isinstance(sealed, str) and sealed.startswith(SEALED):
        try:
            return urlsafe_b64decode(sealed.removeprefix(SEALED)).decode()
        except ValueError:
            raise invalid("encrypted_content", "is damaged", "input") from None
    parts = item.get("content") or item.get("summary") or []
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise invalid("content of a reasoning item", "must be reasoning_text", "input")
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
        elif is_hollow(tool):
            continue
        else:
            raise unsupported(f"tools[{index}]", f"must be a function or custom, got type {kind!r:.80}")
        found.append({"type": "function", "function": function})
    return found


def is_hollow(tool: Any) -> bool:
    """Return whether a tool is Codex's search without access to the web, which it lists in each request."""
    found = (tool.get("type"), tool.get("external_web_access")) if isinstance(tool, dict) else None
    return found == ("web_search", False)


def _custom_text(tool: Mapping[str, Any]) -> str:
    form = tool.get("format")
    grammar = form.get("definition") if isinstance(form, dict) else None
    return f"{tool.get('description') or ''}" + (f"\nThe input follows:\n{grammar}" if grammar else "")


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
