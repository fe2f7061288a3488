"""Messages of conversations: what one may be, its images, and the mark at which its context ends."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from winnow.errors import InvalidRequestError
from winnow.values.json_values import json_kind

Message = Mapping[str, Any]
# Parts of messages that are images, and the fields that may hold where one comes from: OpenAI's forms, vLLM's and
# transformers'.
_IMAGES = {
    "image_url": ("image_url",),
    "input_image": ("image_url",),
    "image_pil": ("image_pil",),
    "image": ("image", "url", "path"),
}
_DETAILS = (None, "auto", "low", "high", "original")
_IN_PLACE_OF_CONTENT = ("tool_calls", "function_call", "refusal")


class MarkedText(str):
    """Text with marks: its first `context_end` characters are the context, which is judged without what follows and
    asks of it; `documents` are texts in it, in order, that may stand elsewhere in other prompts."""

    context_end: int
    documents: Sequence[str]

    def __new__(cls, text: str, context_end: int = 0, documents: Sequence[str] = ()) -> "MarkedText":
        made = super().__new__(cls, text)
        made.context_end, made.documents = context_end, documents
        return made

    def context_tokens(self, token_ids: Sequence[int], encode: Callable[[str], list[int]]) -> int:
        """Return how many of the text's tokens the document has for itself."""
        pairs = zip(token_ids, encode(self[: self.context_end]), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def require_characters(name: str, text: str) -> None:
    """Raise InvalidRequestError, which names the place, for half a surrogate pair: no tokenizer reads it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{name} must be whole characters, got half a surrogate pair, {text[error.start]!a}, "
            f"at character {error.start}"
        ) from None


def normalise_message(message: Any, name: str = "a message") -> dict[str, Any]:
    """Return a message as templates take it: its content one text, lists of text parts joined. Where images stand
    among them it stays a list of parts, {"type": "image", "image": source} for each; see `take_images`.

    A part of text with {"winnow": {"context": true}} is the end of the context, with "document" a document, which
    counts beside text alone; see `MarkedText`.
    Content that is null or missing is empty text beside tool calls, reasoning or a refusal, as clients write it.
    Reasoning stands under one name. Raises InvalidRequestError, which calls the message `name`, where there is no role,
    or content that is no text.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"{name} must be an object with role and content, got {message!r:.80}")
    if message.get("reasoning") is not None and message.get("reasoning_content") is None:
        message = {**message, "reasoning_content": message["reasoning"]}
    content = message.get("content")
    if isinstance(content, list | tuple):
        parts = [_part(part, name) for part in content]
        images = any(part["type"] == "image" for part in parts)
        marks = [_marks(part, name) for part in content]
        context = max((number for number, mark in enumerate(marks, 1) if mark.get("context")), default=0)
        if context and images:
            raise InvalidRequestError(f"winnow.context of {name} needs parts of text alone, got images")
        texts = [part.get("text", "") for part in parts]
        content = parts if images else "\n".join(texts)
        if any(marks) and not images:
            pairs = zip(texts, marks, strict=True)
            documents = [text.strip() for text, mark in pairs if mark.get("document")]
            content = MarkedText("\n".join(texts), len("\n".join(texts[:context])), documents)
    thinks = message.get("reasoning_content") is not None
    if content is None and (thinks or any(message.get(key) for key in _IN_PLACE_OF_CONTENT)):
        content = message.get("refusal") or ""
    if not isinstance(content, str | list):
        got = "none" if "content" not in message else json_kind(content)
        raise InvalidRequestError(f"content of {name} must be text, or stand beside tool_calls, got {got}")
    message = {**message, "content": content}
    # OpenAI's earlier form: the function's name stands for the call's id.
    call = message.pop("function_call", None)
    if call and not message.get("tool_calls"):
        called = call.get("name") if isinstance(call, Mapping) else None
        message["tool_calls"] = [{"id": called, "type": "function", "function": call}]
    if message["role"] == "function":
        message |= {"role": "tool", "tool_call_id": message.get("name")}
    return message


def normalise_messages(messages: Any) -> list[dict[str, Any]]:
    """Return every message by `normalise_message`. Raises InvalidRequestError: no list, or which is unusable."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        got = "none" if isinstance(messages, Sequence) and not messages else json_kind(messages)
        raise InvalidRequestError(f"messages must be a list with at least one message, got {got}")
    return [normalise_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def take_images(messages: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return messages with {"type": "image"} in the place of each image, and the images' sources in their order. Raises
    InvalidRequestError as `normalise_messages`, or where a place has no source."""
    sources: list[Any] = []

    def without_source(part: dict[str, Any], name: str) -> dict[str, Any]:
        if part["type"] != "image":
            return part
        if "image" not in part:
            raise InvalidRequestError(f"an image of {name} must have a URL, a path or an image")
        sources.append(part["image"])
        return {"type": "image"}

    found = normalise_messages(messages)
    for index, message in enumerate(found):
        if isinstance(message["content"], list):
            message["content"] = [without_source(part, f"messages[{index}]") for part in message["content"]]
    return found, sources


def put_images(messages: Sequence[Message], sources: Sequence[Any]) -> list[dict[str, Any]]:
    """Undo `take_images`, with these sources."""
    left = iter(sources)

    def with_source(part: dict[str, Any]) -> dict[str, Any]:
        return {"type": "image", "image": next(left)} if part["type"] == "image" else part

    return [
        {**each, "content": list(map(with_source, each["content"]))}
        if isinstance(each["content"], list)
        else {**each}
        for each in messages
    ]


def text_length(message: Message) -> int:
    content = message["content"]
    return len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content)


def call_arguments(given: Any) -> Any:
    """Return a call's arguments, which may be JSON text, as an object: empty where they are nothing, as models and
    clients write null or an empty text for functions without any; what makes none is returned as it came."""
    values = given
    if isinstance(given, str):
        try:
            values = json.loads(given) if given.strip() else None
        except ValueError:
            return given  # as the model wrote them
    return {} if values in (None, "", []) else values if isinstance(values, dict) else given


def _part(part: Any, name: str) -> dict[str, Any]:
    kind = None
    if isinstance(part, Mapping):
        kind = part.get("type") or next((each for each in ("text", *_IMAGES) if each in part), "text")
        if isinstance(kind, str) and kind in _IMAGES:
            return _image_part(part, kind, name)
    text = part.get("text") if kind in ("text", "input_text", "output_text") else None
    if kind == "refusal":
        text = part.get("refusal")
    if not isinstance(text, str):
        shown = repr(kind) if kind is not None else json_kind(part)
        what = f"text and images; parts of other kinds are not supported, got {shown}"
        raise InvalidRequestError(f"content of {name} must be {what}")
    return {"type": "text", "text": text}


def _marks(part: Any, name: str) -> Mapping[str, bool]:
    marks = part.get("winnow") if isinstance(part, Mapping) else None
    if marks is None:
        return {}
    known = isinstance(marks, Mapping) and marks and marks.keys() <= {"context", "document"}
    if not known or not all(type(value) is bool for value in marks.values()):
        what = '{"context": true}, {"document": true} or both'
        raise InvalidRequestError(f"winnow of a part of {name} must be {what}, got {marks!r:.80}")
    return {**marks}


def _image_part(part: Mapping[str, Any], kind: str, name: str) -> dict[str, Any]:
    if part.get("file_id") is not None:
        raise InvalidRequestError(f"file_id of an image of {name} is not served: give a URL")
    source = next((part[field] for field in _IMAGES[kind] if part.get(field) is not None), None)
    details = [part.get("detail")]
    if kind in ("image_url", "input_image"):
        if isinstance(source, Mapping):
            details.append(source.get("detail"))
            source = source.get("url")
        if not isinstance(source, str):
            raise InvalidRequestError(f"image_url of {name} must be a URL, got {json_kind(source)}")
    # The model's processor decides the size.
    if unknown := [each for each in details if each not in _DETAILS]:
        what = "auto, low, high or original"
        raise InvalidRequestError(f"detail of {name} must be {what}, got {unknown[0]!r:.80}")
    return {"type": "image"} if source is None else {"type": "image", "image": source}
