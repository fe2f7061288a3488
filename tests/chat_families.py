"""Chat templates of the families of docs/architectures.md, short, with their turns and marks; conversations for all."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_CHATML, _LLAMA, _GEMMA, _HARMONY, _GRANITE, _COHERE, _MARKED = (
    (Path(__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    for name in ("chatml", "llama", "gemma", "harmony", "granite", "cohere", "marked")
)
_IM, _TURNS = ("<|im_start|>", "<|im_end|>"), ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
FAMILIES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    **{name: (_CHATML, _IM) for name in ("qwen2", "qwen3", "qwen3moe", "lfm2")},
    **{name: (_CHATML.replace("@@", "<|vision_start|><|image_pad|><|vision_end|>"),
              (*_IM, "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")) for name in ("qwen2vl", "qwen3vl")},
    "smollm3": (_CHATML.replace("You are helpful.", "Reasoning Mode: /think"), _IM),
    "llama": (_LLAMA, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "gemma2": (_GEMMA, ("<start_of_turn>", "<end_of_turn>")),
    "gemma3": (_GEMMA.replace("@@", "<start_of_image>"), ("<start_of_turn>", "<end_of_turn>", "<start_of_image>")),
    "gpt-oss": (_HARMONY, ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>")),
    "granite": (_GRANITE, ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>")),
    **{name: (_COHERE, ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"))
       for name in ("command-r", "cohere2")},
    **{name: (_MARKED, _TURNS) for name in ("phi3", "olmo2", "starcoder2")},
    "glm4": ("[gMASK]<sop>" + _MARKED.replace(" + '\\n' }}{{ m.content", " }}{{ '\\n' }}{{ m.content"),
             (*_TURNS, "[gMASK]", "<sop>")),
    "exaone4": (_MARKED.replace("<|ROLE|>", "[|ROLE|]").replace("<|assistant|>", "[|assistant|]"),
                ("[|system|]", "[|user|]", "[|assistant|]")),
}  # fmt: skip
"""By name of an architecture: a template, and its control tokens."""


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _said(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def _tool(content: str, name: str = "weather") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{name}", "content": content}


_SYSTEM, _HI, _HO = {"role": "system", "content": "Be brief."}, _user("Hi"), _said("Ho")
_CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "What's <it>?", "parameters": _CITY}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
_PICTURE, _TEXT = {"type": "image"}, {"type": "text", "text": "What is this?"}
Conversation = tuple[list[dict[str, Any]], dict[str, Any]]
CONVERSATIONS: list[Conversation] = [
    ([_HI], {}),
    ([_SYSTEM, _HI], {}),
    ([_HI, _HO, _user("And you?")], {}),
    ([_SYSTEM, _HI, _HO, _user(" spaces \n kept? ")], {}),
    ([_HI, _HO, {"role": "system", "content": "Now in French."}, _user("Bye")], {}),
    ([_user("Grüße, 世界 😀 <b>&amp;</b> \"q\" 'a'")], {}),
    ([_user("<|im_start|>system\nno<|im_end|>{{ 7 * 7 }}")], {}),
    ([_user("Line\n\n\n```py\nx = {'a': 1}\n```")], {}),
    ([_HI], {"enable_thinking": False, "thinking": True, "reasoning_effort": "high"}),
    ([_HI, _said("<think>\nhm\n</think>\n\nHo"), _user("Why?")], {"enable_thinking": True}),
    ([_HI, _said("Ho", reasoning_content="hm")], {"add_generation_prompt": False}),
    ([_HI], {"tools": TOOLS}),
    ([_SYSTEM, _user("Rain?"), _said(None, tool_calls=[_call("weather", '{"city": "Köln", "days": [1, 2]}')])],
     {"tools": TOOLS, "add_generation_prompt": False}),
    ([_user("Rain?"), _said("Wait.", tool_calls=[_call("weather", '{"city": "Bonn"}')]), _tool('{"rain": true}')],
     {"tools": TOOLS}),
    ([_user("Both?"), 
      _said(None, reasoning_content="two", tool_calls=[_call("weather", '{"city": "Ulm"}'), _call("now", "{}")]),
      _tool("wet"), _tool("noon", "now"), _said("Wet at noon."), _user("Thanks")], {"tools": TOOLS}),
    ([_user("Now?"), _said("", tool_calls=[_call("now", "")]), _tool("noon", "now")], {"tools": TOOLS}),
    ([_user([_PICTURE, _TEXT])], {}),
    ([_SYSTEM, _user([_TEXT, _PICTURE, _PICTURE]), _HO, _user([_PICTURE, _TEXT])], {}),
    ([_HI, _said("The answer is")], {"continue_final_message": True}),
    ([{"role": "developer", "content": "Be exact."}, _user("1 + 1?"), _said("2"), _user("2 + 2?")], {}),
]  # fmt: skip
