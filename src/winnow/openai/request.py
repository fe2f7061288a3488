"""Bodies of /v1/completions and /v1/chat/completions, understood."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from winnow.chat import normalise_messages
from winnow.errors import InvalidRequestError
from winnow.json_values import json_kind
from winnow.openai.errors import ApiError
from winnow.openai.parameters import sampling_from_body
from winnow.sampling import SamplingParams

Message = dict[str, Any]


class Endpoint(enum.Enum):
    """What a body is sent to, by its path."""

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"


@dataclass(frozen=True)
class CompletionRequest:
    """A body that can be handed to the engine: either `prompt` or `messages` is set.

    Attributes:
        model: what the body calls the model.
    """

    prompt: str | Sequence[int] | None
    messages: list[Message] | None
    params: SamplingParams
    model: str | None


def read_body(endpoint: Endpoint, body: Any, defaults: Mapping[str, Any]) -> CompletionRequest:
    """Read a body; `defaults` are the sampling parameters of bodies that do not set them.

    Raises:
        ApiError: names the field, the value and what is allowed.
    """
    if not isinstance(body, dict):
        raise ApiError("invalid_request", f"body must be an object, got {json_kind(body)}")
    chat = endpoint is Endpoint.CHAT
    question = "messages" if chat else "prompt"
    if question not in body:
        raise ApiError("invalid_request", f"body needs {question} for {endpoint.value}")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise ApiError("invalid_request", f"model must be a text, got {json_kind(model)}")
    others = {key: value for key, value in body.items() if key not in (question, "model")}
    params = sampling_from_body(others, defaults, chat=chat)
    prompt = None if chat else read_prompt(_single(body["prompt"]))
    messages = read_messages(body["messages"]) if chat else None
    return CompletionRequest(prompt, messages, params, model)


def read_prompt(prompt: Any) -> str | list[int]:
    """Check a prompt: text, or a list of token ids.

    Raises:
        ApiError: it is neither, or empty.
    """
    if isinstance(prompt, list):
        if not all(type(token) is int and token >= 0 for token in prompt):
            raise ApiError("invalid_request", "prompt must be text or a list of token ids from 0 on")
    elif not isinstance(prompt, str):
        raise ApiError(
            "invalid_request", f"prompt must be text or a list of token ids, got {json_kind(prompt)}"
        )
    if not prompt:
        raise ApiError("invalid_request", "prompt must not be empty")
    return prompt


def read_messages(messages: Any) -> list[Message]:
    """Check the messages of a conversation, and join their parts of text.

    Raises:
        ApiError: names the message that cannot be used.
    """
    try:
        return normalise_messages(messages)
    except InvalidRequestError as error:
        raise ApiError("invalid_request", str(error)) from error


def _single(prompt: Any) -> Any:
    """The prompt of a body, which may be wrapped in a list of prompts."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise ApiError("invalid_request", f"a request must hold one prompt, got {len(prompt)}")
        return prompt[0]
    return prompt
