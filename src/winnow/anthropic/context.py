"""Edits of a conversation that `context_management` asks for."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from winnow.openai.errors import invalid, unsupported
from winnow.values.json_values import json_kind

Record = dict[str, Any]

THINKING, TOOL_USES, COMPACT = _EDITS = (
    "clear_thinking_20251015",
    "clear_tool_uses_20250919",
    "compact_20260112",
)
_TRIGGERS = {TOOL_USES: 100_000, COMPACT: 150_000}
"""Tokens of a prompt at which an edit acts that does not say."""
CLEARED = "[cleared: an old result of a tool]"
_FIELDS = {
    THINKING: ("keep",),
    TOOL_USES: ("trigger", "keep", "clear_at_least", "clear_tool_inputs", "exclude_tools"),
    COMPACT: ("trigger", "instructions", "pause_after_compaction"),
}


def read_edits(given: Any) -> list[Record]:
    """Return the edits of a body's `context_management`."""
    edits = given.get("edits") or [] if isinstance(given, dict) and set(given) <= {"edits"} else None
    if not isinstance(edits, list):
        _refuse("context_management", "an object with a list of edits", given)
    for index, edit in enumerate(edits):
        name = f"context_management.edits[{index}]"
        kind = edit.get("type") if isinstance(edit, dict) else None
        if kind not in _EDITS:
            fault = f"must be one of {', '.join(_EDITS)}, got {kind!r:.80}"
            raise unsupported(f"{name}.type", fault, "context_management")
        for field, value in edit.items():
            if field not in ("type", *_FIELDS[kind]) and value is not None:
                raise unsupported(name, f"has no field {field!r:.80}", "context_management")
        for field in ("trigger", "clear_at_least", "keep"):
            amount = edit.get(field)
            if amount is None or (kind == THINKING and amount in ("all", {"type": "all"})):
                continue
            value = amount.get("value") if isinstance(amount, dict) else None
            if type(value) is not int or value < 0:
                _refuse(f"{name}.{field}", "an object with type and value", amount)
    return edits


def is_due(edit: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], tokens: int) -> bool:
    """Return whether an edit acts on a conversation of `tokens` tokens. Raises ApiError: it does, and is not served."""
    if edit["type"] == THINKING:
        return True
    trigger = edit.get("trigger") or {"type": "input_tokens", "value": _TRIGGERS[edit["type"]]}
    due: bool = (len(_calls(messages)) if trigger.get("type") == "tool_uses" else tokens) > trigger["value"]
    if due and edit["type"] == COMPACT:
        fault = f"is not served, and the prompt has {tokens} tokens, above its trigger"
        raise unsupported(COMPACT, fault, "context_management")
    return due


def edited(edit: Mapping[str, Any], messages: Sequence[Record]) -> tuple[list[Record], Record]:
    """Return a chat's messages after an edit, and how much it has cleared, as the API reports it."""
    if edit["type"] == THINKING:
        keep = edit.get("keep", {"value": 1})
        thinking = [index for index, each in enumerate(messages) if each.get("reasoning_content")]
        most = len(thinking) if keep in ("all", {"type": "all"}) else keep["value"]
        old = set(thinking[: max(0, len(thinking) - most)])
        shown = [
            {name: value for name, value in each.items() if name != "reasoning_content" or index not in old}
            for index, each in enumerate(messages)
        ]
        return shown, {"cleared_thinking_turns": len(old)}
    calls, keep = _calls(messages), (edit.get("keep") or {"value": 3})["value"]
    excluded = edit.get("exclude_tools") or ()
    cleared = {
        call["id"] for call in calls[: max(0, len(calls) - keep)] if call["function"]["name"] not in excluded
    }
    inputs = edit.get("clear_tool_inputs") or ()
    shown = []
    for message in messages:
        if message.get("tool_call_id") in cleared:
            message = {**message, "content": CLEARED}
        elif message.get("tool_calls") and inputs:
            emptied = [_emptied(each, cleared, inputs) for each in message["tool_calls"]]
            message = {**message, "tool_calls": emptied}
        shown.append(message)
    return shown, {"cleared_tool_uses": len(cleared)}


def _emptied(call: Record, cleared: set[Any], inputs: Any) -> Record:
    function = call["function"]
    if call["id"] not in cleared or not (inputs is True or function["name"] in inputs):
        return call
    return {**call, "function": {**function, "arguments": "{}"}}


def _calls(messages: Sequence[Mapping[str, Any]]) -> list[Record]:
    return [call for message in messages for call in message.get("tool_calls") or ()]


def _refuse(name: str, wanted: str, value: Any) -> NoReturn:
    raise invalid(name, f"must be {wanted}, got {json_kind(value)}", "context_management")
