"""Bodies of /api/chat and /api/generate, read as those of chats and completions."""

import json
from collections.abc import Mapping
from typing import Any

from winnow.openai.errors import invalid, unsupported
from winnow.values.json_values import json_kind

Record = dict[str, Any]

CHAT, GENERATE = "/api/chat", "/api/generate"
# What says nothing about the answer: how long a model stays, and what it runs on.
_IGNORED = ("keep_alive",)
_OF_THE_MACHINE = (
    *("num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "low_vram", "numa", "f16_kv"),
    *("use_mmap", "use_mlock"),
)
_OPTIONS = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "repeat_penalty": "repetition_penalty",
}
# What is not served, and the values that ask for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "mirostat": (0,), "typical_p": (1,), "tfs_z": (1,),
    "repeat_last_n": (-1, 64), "penalize_newline": (True, False),
}  # fmt: skip
_UNSERVED: Mapping[str, tuple[Any, ...]] = {
    "suffix": ("",), "template": ("",), "context": ([],), "logprobs": (False,), "top_logprobs": (0,),
}  # fmt: skip


def is_empty(body: Mapping[str, Any], path: str) -> bool:
    """Return whether a body only asks that the model be there."""
    return not body.get("messages" if path == CHAT else "prompt")


def openai_body(body: Mapping[str, Any], path: str, max_model_len: int) -> tuple[Record, bool]:
    """Return the body that asks the same, and whether it is a chat's: a completion's if `raw`. Raises ApiError: names
    the field, the value and what is allowed."""
    values = {name: each for name, each in body.items() if each is not None and name not in _IGNORED}
    for name, harmless in _UNSERVED.items():
        if name in values and values.pop(name) not in harmless:
            raise unsupported(name, f"is not served for {path}")
    found: Record = {"model": values.pop("model", None), "stream": values.pop("stream", True)}
    found |= _sampling(_object(values, "options"), max_model_len) | _form(values.pop("format", ""))
    thinking, raw = values.pop("think", None), path == GENERATE and values.pop("raw", False)
    if raw:
        found["prompt"] = values.pop("prompt")
    elif path == CHAT:
        found["messages"] = _messages(values.pop("messages"))
    else:
        user = {"role": "user", "content": values.pop("prompt"), "images": values.pop("images", None)}
        system = values.pop("system", "")
        found["messages"] = _messages([*([{"role": "system", "content": system}] if system else []), user])
    if not raw:
        found |= _thinking(thinking)
        found["continue_final_message"] = found["messages"][-1].get("role") == "assistant"
    if path == CHAT and "tools" in values:
        found["tools"] = values.pop("tools")
    for name in values:
        raise invalid(f"{name!r:.80}", f"is not a field of {path}", name[:80])
    return found, not raw


def _sampling(options: Record, max_model_len: int) -> Record:
    options = {
        name: each for name, each in options.items() if each is not None and name not in _OF_THE_MACHINE
    }
    found = {ours: options.pop(theirs) for theirs, ours in _OPTIONS.items() if theirs in options}
    limit, context = options.pop("num_predict", -1), options.pop("num_ctx", 1)
    if type(limit) is not int or limit < -2 or limit == 0:
        raise invalid("options.num_predict", f"must be -2, -1 or above 0, got {limit!r:.80}", "options")
    if type(context) is not int or not 0 < context <= max_model_len:
        fault = f"must be between 1 and {max_model_len}, which the server has for every answer, got {context!r:.80}"
        raise invalid("options.num_ctx", fault, "options")
    for name in options.keys() & _NEUTRAL.keys():
        if (value := options.pop(name)) not in _NEUTRAL[name]:
            raise unsupported(f"options.{name}", f"= {value!r:.80} is not served", "options")
    # Parameters that Ollama does not have are checked where a chat's are.
    return found | options | ({"max_tokens": limit} if limit > 0 else {})


def _form(form: Any) -> Record:
    if isinstance(form, dict):
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "format", "schema": form}}}
    if form not in ("", "json"):
        raise invalid("format", f"must be json or a schema, got {form!r:.80}")
    return {"response_format": {"type": "json_object"}} if form else {}


def _thinking(wanted: Any) -> Record:
    if wanted is None:
        return {}
    if isinstance(wanted, bool):
        return {"chat_template_kwargs": {"enable_thinking": wanted}}
    if wanted not in ("low", "medium", "high"):
        raise invalid("think", f"must be true, false, low, medium or high, got {wanted!r:.80}")
    return {"reasoning_effort": wanted}


def _messages(given: Any) -> list[Record]:
    """Return a chat's messages: images become parts, calls get ids that their results name."""
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise invalid("messages", f"must be a list of objects, got {json_kind(given)}")
    found, waiting, count = [], list[str](), 0
    for index, message in enumerate(given):
        one = {name: value for name, value in message.items() if value is not None}
        name, images = f"messages[{index}]", one.pop("images", None) or []
        if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
            raise invalid(f"{name}.images", "must be a list of images in Base64", "messages")
        one.setdefault("content", "")
        if images:
            parts = [{"type": "image_url", "image_url": {"url": f"data:;base64,{image}"}} for image in images]
            one["content"] = [*parts, {"type": "text", "text": one["content"]}]
        if "thinking" in one:
            one["reasoning_content"] = one.pop("thinking")
        if calls := one.get("tool_calls"):
            one["tool_calls"] = [_call(each, f"call_{count + n}", name) for n, each in enumerate(calls)]
            waiting, count = [each["id"] for each in one["tool_calls"]], count + len(calls)
        if one.get("role") == "tool":
            one["tool_call_id"] = waiting.pop(0) if waiting else f"call_{count}"
            if "tool_name" in one:
                one["name"] = one.pop("tool_name")
        found.append(one)
    return found


def _call(call: Any, number: str, name: str) -> Record:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments", {}), dict):
        raise invalid(
            f"{name}.tool_calls", "must have functions with a name and an object of arguments", "messages"
        )
    arguments = json.dumps(function.get("arguments", {}), ensure_ascii=False)
    return {
        "id": number,
        "type": "function",
        "function": {"name": function.get("name"), "arguments": arguments},
    }


def _object(values: Record, name: str) -> Record:
    value = values.pop(name, {})
    if not isinstance(value, dict):
        raise invalid(name, f"must be an object, got {json_kind(value)}")
    return dict(value)
