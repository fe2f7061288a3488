"""Forms of reasoning and tool calls, as transformers' `response_template` says them.

A tokenizer may bring its own. Most published ones do not: then the chat template shows the form.
"""

from collections.abc import Mapping
from typing import Any

Template = dict[str, Any]

# What stands before an assistant's turn in the templates of the models that use these forms.
_START = (
    r"<\|im_start\|>assistant\n|<\|start_header_id\|>assistant<\|end_header_id\|>\n\n|<\|assistant\|>\n?|"
    "<\uff5cAssistant\uff5c>"
)
_REASONING = {"open": "<think>", "close": "</think>", "content": "text"}


def _template(**fields: Mapping[str, Any]) -> Template:
    return {
        "defaults": {"role": "assistant"},
        "start_anchor_pattern": _START,
        "fields": {"reasoning_content": _REASONING, **fields, "content": {"content": "text"}},
    }


TEMPLATES: Mapping[str, Template] = {
    # Hermes 2 Pro, Qwen 2.5, Qwen 3, SmolLM 3: JSON between tags.
    "hermes": _template(
        tool_calls={
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        }
    ),
    # Qwen 3 Coder, Qwen 3.5: a tag per parameter.
    "qwen3-coder": _template(
        tool_calls={
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        }
    ),
    # DeepSeek R1 and its distillations, QwQ: reasoning alone.
    "think": _template(),
}
"""Forms by name."""

CALL_LIST: Mapping[str, Any] = {
    "open_pattern": r"(?=\[)",
    "content": "json",
    "transform_each": True,
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
}
"""The field of an answer that is a JSON list of calls."""


def recognise(chat_template: Any) -> Template | None:
    """Return the form that a tokenizer's chat template (text, or several by name) shows; None: none that is known."""
    texts = chat_template.values() if isinstance(chat_template, Mapping) else [chat_template]
    text = "\n".join(each for each in texts if isinstance(each, str))
    if "<tool_call>" not in text:
        return TEMPLATES["think"] if "</think>" in text else None
    template = TEMPLATES["qwen3-coder" if "<function=" in text else "hermes"]
    if "</think>" in text:
        return template
    return {**template, "fields": {k: v for k, v in template["fields"].items() if v is not _REASONING}}
