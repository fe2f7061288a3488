"""What a chat body tells the model's template: tools, and how the prompt ends."""

import json
import uuid
from collections.abc import Mapping
from typing import Any

from winnow.chat import TemplateOptions
from winnow.json_values import json_kind
from winnow.openai.errors import ApiError

MAX_TOOLS = 128

# Variables of templates that a request may set: switches of published models, nothing that a template would run.
_VARIABLES = ("enable_thinking", "thinking", "reasoning_effort", "preserve_thinking", "documents")
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


def read_template_options(values: dict[str, Any]) -> TemplateOptions:
    """Take what is the template's out of a body's `values`.

    Raises:
        ApiError: names the field, the value and what is allowed.
    """
    tools, choice = values.pop("tools", None), values.pop("tool_choice", None)
    values.pop("parallel_tool_calls", None)
    if values.get("add_special_tokens") is False:  # templates write their own
        del values["add_special_tokens"]
    found = _read_tools(tools)
    if choice not in (None, "none", "auto"):
        raise ApiError(
            "unsupported_parameter",
            "tool_choice must be none or auto: how a call is written is the model's own, and cannot be forced",
            "tool_choice",
        )
    variables = values.pop("chat_template_kwargs", None) or {}
    if not isinstance(variables, dict):
        raise ApiError(
            "invalid_request",
            f"chat_template_kwargs must be an object, got {json_kind(variables)}",
            "chat_template_kwargs",
        )
    for name, value in variables.items():
        if name not in _VARIABLES:
            raise ApiError(
                "unsupported_parameter",
                f"chat_template_kwargs may set {', '.join(_VARIABLES)}, got {name!r:.80}",
                "chat_template_kwargs",
            )
        if not isinstance(value, str | bool | int) and name != "documents":
            raise ApiError(
                "invalid_request",
                f"chat_template_kwargs.{name} must be a text or a switch, got {json_kind(value)}",
                "chat_template_kwargs",
            )
    effort = values.pop("reasoning_effort", None)
    if effort is not None:
        if effort not in _EFFORTS:
            raise ApiError(
                "invalid_request",
                f"reasoning_effort must be one of {', '.join(_EFFORTS)}, got {effort!r:.80}",
                "reasoning_effort",
            )
        variables = {"reasoning_effort": effort, **variables}
    generation = values.pop("add_generation_prompt", True)
    continued = values.pop("continue_final_message", False)
    for name, value in (("add_generation_prompt", generation), ("continue_final_message", continued)):
        if not isinstance(value, bool):
            raise ApiError("invalid_request", f"{name} must be true or false, got {value!r:.80}", name)
    return TemplateOptions(() if choice == "none" else found, generation, continued, variables)


def _read_tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        got = f"{len(tools)}" if isinstance(tools, list) else json_kind(tools)
        raise ApiError("invalid_request", f"tools must be a list of at most {MAX_TOOLS}, got {got}", "tools")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or not function["name"]
        ):
            raise ApiError(
                "invalid_request",
                f"tools[{index}] must be a function with a name: "
                '{"type": "function", "function": {"name": ..., "parameters": ...}}',
                f"tools[{index}]",
            )
        if not isinstance(function.get("parameters", {}), dict | None):
            raise ApiError(
                "invalid_request",
                f"tools[{index}].function.parameters must be a JSON schema, "
                f"got {json_kind(function['parameters'])}",
                f"tools[{index}]",
            )
    return tuple(tools)


def assistant_message(parsed: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's message from what transformers' response parser made of an answer."""
    content = parsed.get("content")
    message: dict[str, Any] = {"role": "assistant", "content": content if content else None}
    thinking = next((parsed[name] for name in THINKING if parsed.get(name)), None)
    if thinking is not None:
        message["reasoning_content"] = thinking
    calls = parsed.get("tool_calls")
    if isinstance(calls, list) and calls:
        message["tool_calls"] = [tool_call(call) for call in calls]
    elif message["content"] is None:
        message["content"] = content if isinstance(content, str) else ""
    return message


THINKING = ("reasoning_content", "thinking", "reasoning")
"""What response templates call the model's reasoning."""


def tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """One call, its arguments as JSON text, under an id of its own."""
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": str(function.get("name", "")), "arguments": arguments},
    }
