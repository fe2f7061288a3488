"""Parts of a chat body that go to the model's template: tools, the prompt's end, and the tools it must call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from winnow.openai.errors import invalid, unsupported
from winnow.prompt.chat import TemplateOptions
from winnow.values.json_values import json_kind

MAX_TOOLS = 128

# Variables of templates that a request may set: switches of published models, nothing that a template would run.
_VARIABLES = ("enable_thinking", "thinking", "reasoning_effort", "preserve_thinking", "documents")
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


@dataclass(frozen=True)
class CallRule:
    """Rule of `tool_choice` and `parallel_tool_calls` for an answer's calls.

    Attributes:
        functions: that may be called, as OpenAI describes them; at least one.
        several: more than one call is allowed.
        demanded: the answer is calls, and nothing else but reasoning before them.
    """

    functions: Sequence[Mapping[str, Any]]
    several: bool
    demanded: bool = True


def read_tools(values: dict[str, Any]) -> tuple[Sequence[Mapping[str, Any]], CallRule | None]:
    """Take `tools`, `tool_choice` and `parallel_tool_calls` out of a body's `values`.

    Returns the tools that the template shows, and the rule for calls; None: they are the model's to make.
    """
    tools: Sequence[Mapping[str, Any]] = _read_tools(values.pop("tools", None))
    choice = values.pop("tool_choice", None)
    parallel = values.pop("parallel_tool_calls", None)
    if not isinstance(parallel, bool | None):
        raise invalid("parallel_tool_calls", f"must be true or false, got {parallel!r:.80}")
    if choice is None or choice == "auto":
        return tools, _rule(tools, parallel, False)
    if choice == "none":
        return (), None
    if choice == "required":
        return tools, _rule(tools, parallel, True)
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return tools, _rule(_named(tools, [choice]), False, True)
    if kind == "allowed_tools":
        described = choice.get("allowed_tools", choice)  # the Responses API writes its fields beside the type
        named = described.get("tools") if isinstance(described, dict) else None
        mode = described.get("mode", "auto") if isinstance(described, dict) else None
        if isinstance(named, list) and mode in ("auto", "required"):
            tools = _named(tools, named)
            return tools, _rule(tools, parallel, mode == "required")
    form = '{"type": "function", "function": {"name": ...}}'
    what = f"none, auto, required, a function such as {form}, or allowed_tools"
    raise invalid("tool_choice", f"must be {what}, got {choice!r:.80}")


def _rule(tools: Sequence[Mapping[str, Any]], parallel: bool | None, demanded: bool) -> CallRule | None:
    if demanded and not tools:
        raise invalid("tool_choice", "demands a call, but tools are none")
    several = parallel is not False
    if several and not demanded:
        return None
    return CallRule([tool["function"] for tool in tools], several, demanded)


def _named(tools: Sequence[Mapping[str, Any]], choices: Sequence[Any]) -> Sequence[Mapping[str, Any]]:
    """Return the tools that choices name, as chats or the Responses API write them."""
    found = []
    for choice in choices:
        described = choice.get("function", choice) if isinstance(choice, dict) else None
        name = described.get("name") if isinstance(described, dict) else None
        tool = next((each for each in tools if each["function"]["name"] == name), None)
        if tool is None:
            raise invalid("tool_choice", f"names {name!r:.80}, which is none of tools")
        found.append(tool)
    return tuple(found)


def read_template_options(values: dict[str, Any], tools: Sequence[Mapping[str, Any]] = ()) -> TemplateOptions:
    """Take what else is the template's out of a body's `values`."""
    if values.get("add_special_tokens") is False:  # templates write their own
        del values["add_special_tokens"]
    variables = values.pop("chat_template_kwargs", None) or {}
    if not isinstance(variables, dict):
        raise invalid("chat_template_kwargs", f"must be an object, got {json_kind(variables)}")
    variables = {name: value for name, value in variables.items() if value is not None}
    for name, value in variables.items():
        if name not in _VARIABLES:
            raise unsupported("chat_template_kwargs", f"may set {', '.join(_VARIABLES)}, got {name!r:.80}")
        if not isinstance(value, str | bool | int) and name != "documents":
            where, kind = f"chat_template_kwargs.{name}", json_kind(value)
            raise invalid(where, f"must be a text or a switch, got {kind}", "chat_template_kwargs")
    if (documents := values.pop("documents", None)) is not None:
        if not isinstance(documents, list) or not all(isinstance(each, dict) for each in documents):
            raise invalid("documents", "must be a list of objects with text")
        variables = {"documents": documents, **variables}
    effort = values.pop("reasoning_effort", None)
    if effort is not None:
        if effort not in _EFFORTS:
            raise invalid("reasoning_effort", f"must be one of {', '.join(_EFFORTS)}, got {effort!r:.80}")
        variables = {"reasoning_effort": effort, **variables}
    generation = values.pop("add_generation_prompt", True)
    continued = values.pop("continue_final_message", False)
    for name, value in (("add_generation_prompt", generation), ("continue_final_message", continued)):
        if not isinstance(value, bool):
            raise invalid(name, f"must be true or false, got {value!r:.80}")
    return TemplateOptions(tools, generation, continued, variables)


def _read_tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        got = f"{len(tools)}" if isinstance(tools, list) else json_kind(tools)
        raise invalid("tools", f"must be a list of at most {MAX_TOOLS}, got {got}")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name or not isinstance(function, dict):
            form = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
            raise invalid(f"tools[{index}]", f"must be a function with a name: {form}")
        where, strict, schema = f"tools[{index}].function", function.get("strict"), function.get("parameters")
        if not isinstance(strict, bool | None):
            fault = f"must be true or false, got {strict!r:.80}"
            raise invalid(f"{where}.strict", fault, f"tools[{index}]")
        if not isinstance(schema, dict | None):
            fault = f"must be a JSON schema, got {json_kind(schema)}"
            raise invalid(f"{where}.parameters", fault, f"tools[{index}]")
    return tuple(tools)
