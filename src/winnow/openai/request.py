"""Bodies of /v1/completions and /v1/chat/completions, understood."""

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from winnow.errors import InvalidRequestError, WinnowError
from winnow.openai.errors import ApiError, invalid, unsupported
from winnow.openai.parameters import sampling_from_body
from winnow.openai.tools import CallRule, read_template_options, read_tools
from winnow.prompt.chat import PLAIN, TemplateOptions
from winnow.prompt.messages import normalise_messages
from winnow.prompt.prompts import Prompt
from winnow.sampling import SamplingParams
from winnow.values.json_values import json_kind
from winnow.values.session_request import MAX_SESSION_NAME, SessionRequest
from winnow.values.units import parse_bytes

Message = dict[str, Any]

MAX_SEQUENCES = 1024
"""Most prompts of a request, and most prompts times answers."""
MAX_MESSAGES = 4096
MAX_PRIORITY = 2**31 - 1


class Endpoint(enum.Enum):
    """Endpoint of a body, by its path."""

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"


@dataclass(frozen=True)
class CompletionRequest:
    """A body that can be handed to the engine: either `prompts` or `messages` is set.

    Attributes:
        echo: the prompt stands before the answer, with its logprobs if some are asked for.
        only_echo: there is no answer behind it.
        include_usage: end the chunks with one that counts tokens.
        continuous_usage: count tokens in every chunk.
        return_kept: report KVs kept by layer and head beside what else eviction did.
        priority: greater is served first, as in `NewRequest`; bodies say it the other way round, as vLLM does.
        calls: the rule for calls; None: they are the model's to make.
        session: the conversation that the one prompt continues.
    """

    prompts: tuple[Prompt, ...]
    messages: list[Message] | None
    params: SamplingParams
    model: str | None
    echo: bool = False
    only_echo: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    return_kept: bool = False
    prompt_logprobs: bool = False
    priority: int = 0
    template: TemplateOptions = field(default=PLAIN)
    calls: CallRule | None = None
    session: SessionRequest | None = None

    @property
    def prompt(self) -> Prompt | None:
        """The one prompt; None: there are messages."""
        return self.prompts[0] if self.prompts else None


def read_body(
    endpoint: Endpoint, body: Any, defaults: Mapping[str, Any], *, served: bool = False
) -> CompletionRequest:
    """Read a body; over HTTP (`served`) it may hold several prompts and ask for a stream. `defaults` are the sampling
    parameters of bodies that do not set them. Raises ApiError: names the field, the value and what is allowed."""
    if not isinstance(body, dict):
        raise ApiError("invalid_request", f"body must be an object, got {json_kind(body)}")
    chat = endpoint is Endpoint.CHAT
    question = "messages" if chat else "prompt"
    if body.get(question) is None:
        raise invalid("body", f"needs {question} for {endpoint.value}", question)
    values = {key: value for key, value in body.items() if key != question and value is not None}
    model = take_text(values, "model")
    stream, include_usage, continuous = _read_stream(values)
    if stream and not served:
        raise unsupported("stream", "is not supported in a batch")
    template, calls = PLAIN, None
    if chat:
        tools, calls = read_tools(values)
        template = read_template_options(values, tools)
    echo = _switch(values, "echo")
    if echo and chat:
        raise unsupported("echo", f"is not supported for {endpoint.value}")
    return_token_ids, return_kept = (_switch(values, f"return_{name}") for name in ("token_ids", "kept"))
    prompt_logprobs = values.get("prompt_logprobs") is not None
    if prompt_logprobs and stream:
        raise unsupported("prompt_logprobs", "are not supported in a stream")
    priority = read_priority(values.pop("priority", 0))
    session = _read_session(values)
    only_echo = echo and values.get("max_tokens") == 0
    if only_echo:
        values["max_tokens"] = 1
    if echo and values.get("logprobs") is not None:
        values.setdefault("prompt_logprobs", values["logprobs"])
    params = sampling_from_body(values, defaults, chat=chat)
    if calls is not None and calls.demanded and params.structured_outputs is not None:
        raise invalid("tool_choice", "demands calls, so the answer can have no other form")
    prompts = () if chat else _read_prompts(body["prompt"], several=served)
    messages = read_messages(body["messages"]) if chat else None
    if len(prompts) * params.n > MAX_SEQUENCES:
        got = f"{len(prompts)} times {params.n}"
        raise invalid("prompts times n", f"must be at most {MAX_SEQUENCES}, got {got}", "n")
    return CompletionRequest(
        prompts,
        messages,
        params,
        model,
        echo,
        only_echo,
        stream,
        include_usage,
        continuous,
        return_token_ids,
        return_kept,
        prompt_logprobs,
        -priority,
        template,
        calls,
        session if len(prompts) < 2 else None,
    )


def _read_session(values: dict[str, Any]) -> SessionRequest | None:
    """Take what a body says of its conversation out of `values`; OpenAI's name for it counts where ours is missing."""
    key, _ = (take_text(values, f"prompt_cache_{name}") for name in ("key", "retention"))
    name, memory, release = (values.pop(name, None) for name in ("session_id", "session_memory", "release"))
    try:
        if name is None and not key and (memory, release) != (None, None):
            raise InvalidRequestError("session_memory and release need a session_id")
        name = name if name is not None or not key else key[:MAX_SESSION_NAME]
        memory = None if memory is None else parse_bytes(memory, "session_memory")
        if name is None:
            return None
        return SessionRequest(name, memory, release=False if release is None else release)
    except WinnowError as error:
        raise ApiError("invalid_request", str(error)) from None


def take_text(values: dict[str, Any], name: str) -> str | None:
    """Take a text out of a body's `values`; None: it is missing. Raises ApiError: it is no text."""
    value = values.pop(name, None)
    if value is not None and not isinstance(value, str):
        raise invalid(name, f"must be a text, got {json_kind(value)}")
    return value


def read_priority(priority: Any) -> int:
    if type(priority) is not int or abs(priority) > MAX_PRIORITY:
        what = f"an integer between -{MAX_PRIORITY} and {MAX_PRIORITY}"
        raise invalid("priority", f"must be {what}, got {priority!r:.80}")
    return priority


def read_prompt(prompt: Any) -> str | list[int]:
    """Check a prompt: text, or a list of token ids."""
    if isinstance(prompt, list):
        if not all(type(token) is int and token >= 0 for token in prompt):
            raise invalid("prompt", "must be text or a list of token ids from 0 on")
    elif not isinstance(prompt, str):
        raise invalid("prompt", f"must be text or a list of token ids, got {json_kind(prompt)}")
    if not prompt:
        raise invalid("prompt", "must not be empty")
    return prompt


def read_messages(messages: Any) -> list[Message]:
    """Check the messages of a conversation, and join their parts of text. Raises ApiError: names the wrong one."""
    if isinstance(messages, list) and len(messages) > MAX_MESSAGES:
        raise invalid("messages", f"must be at most {MAX_MESSAGES}, got {len(messages)}")
    try:
        return normalise_messages(messages)
    except InvalidRequestError as error:
        raise ApiError("invalid_request", str(error), "messages") from error


def append_turn(messages: list[Message], message: Message, roles: Collection[str] = ("assistant",)) -> None:
    """Append a message; one of `roles` continues the last of its role: one turn in several messages."""
    last = messages[-1] if messages else None
    if last is None or message["role"] not in roles or last["role"] != message["role"]:
        messages.append(message)
        return
    for name, value in message.items():
        before = last.get(name)
        if name == "content" and before and value:
            last[name] = [*_parts(before), *_parts(value)]
        elif name in ("tool_calls", "reasoning_content") and before:
            last[name] = before + value
        elif name != "role" and value:
            last[name] = value


def _parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _read_prompts(prompt: Any, *, several: bool) -> tuple[Prompt, ...]:
    if not (isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)):
        return (read_prompt(prompt),)
    if len(prompt) > 1 and not several:
        raise invalid("a request", f"must hold one prompt, got {len(prompt)}", "prompt")
    if len(prompt) > MAX_SEQUENCES:
        raise invalid("prompt", f"must hold at most {MAX_SEQUENCES} prompts, got {len(prompt)}")
    return tuple(read_prompt(each) for each in prompt)


def _read_stream(values: dict[str, Any]) -> tuple[bool, bool, bool]:
    """Return whether a body asks for a stream, for its usage at the end, and in every chunk; taken out of `values`."""
    stream = _switch(values, "stream")
    options = values.pop("stream_options", None)
    if options is None:
        return stream, False, False
    if not stream:
        raise invalid("stream_options", "needs stream to be true")
    if not isinstance(options, dict):
        raise invalid("stream_options", f"must be an object, got {json_kind(options)}")
    options = dict(options)
    include_usage = _switch(options, "include_usage", "stream_options.include_usage")
    continuous = _switch(options, "continuous_usage_stats", "stream_options.continuous_usage_stats")
    _switch(options, "include_obfuscation", "stream_options.include_obfuscation")
    if options:
        raise invalid("stream_options", f"has no field {next(iter(options))!r:.80}")
    return stream, include_usage or continuous, continuous


def _switch(values: dict[str, Any], name: str, path: str | None = None) -> bool:
    """Take a field that is true or false out of `values`; False where it is missing or null."""
    value = values.pop(name, None)
    if value is not None and not isinstance(value, bool):
        raise invalid(path or name, f"must be true or false, got {value!r:.80}")
    return bool(value)
