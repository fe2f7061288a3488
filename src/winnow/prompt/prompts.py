"""Prompts as callers write them, and as the engine takes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NotRequired, Protocol, TypeAlias, TypedDict, cast

from winnow.errors import InvalidRequestError
from winnow.media import MediaLoader
from winnow.prompt.chat import (
    PLAIN,
    TemplateOptions,
    TokenizedPrompt,
    Tokenizer,
    apply_template,
    mark_documents,
)
from winnow.prompt.messages import MarkedText, Message, put_images, require_characters, take_images
from winnow.sampling.turns import Turns
from winnow.values.checks import require
from winnow.values.foreign_names import translate
from winnow.values.images import PromptImage
from winnow.vllm import names as vllm_names

if TYPE_CHECKING:
    from PIL.Image import Image


ImageSource: TypeAlias = "str | Path | bytes | Image"
"""A data: URI, an http(s) or file:// URL, a path, the bytes of a file, or an image; see `MediaLoader`."""


class MultiModalData(TypedDict, total=False):
    """Pictures of a prompt: one, or as many as it has places for, in their order. As in vLLM."""

    image: "ImageSource | Sequence[ImageSource]"


class TextPrompt(TypedDict):
    """A prompt as text, with the model's own mark where a picture stands. As in vLLM."""

    prompt: str
    multi_modal_data: NotRequired[MultiModalData]


class TokensPrompt(TypedDict):
    """A prompt as token ids, one for each picture; `prompt` is its text, which is not read. As in vLLM."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    multi_modal_data: NotRequired[MultiModalData]


class ImageProcessor(Protocol):
    """The model's processor: makes tokens and inputs of the vision tower of text and pictures."""

    chat_template: str | None
    """Of conversations with pictures, where the tokenizer has none or another."""
    longest_run: int
    """Most tokens of a picture that one step must compute; 0: any part."""

    def process(
        self, prompt: str | Sequence[int], images: "Sequence[Image]", *, add_special_tokens: bool
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Return a prompt's tokens, those of its pictures in place of the model's marks, and the pictures. Raises
        InvalidRequestError: marks and pictures are not as many, or the model cannot read one."""


@dataclass(frozen=True)
class Document:
    """A text within a prompt, [text, Document(...), text], that may stand elsewhere in others; see the option reuse."""

    text: str

    def __post_init__(self) -> None:
        is_text = isinstance(self.text, str) and bool(self.text)
        require(is_text, "text of a document", "text", self.text, InvalidRequestError)


Prompt = str | Sequence[int] | Sequence[str | Document] | TextPrompt | TokensPrompt | Mapping[str, Any]
PromptType = Prompt  # vLLM's name
TEXT_ALONE = "the model reads text alone"
_KEYS = tuple(TokensPrompt.__annotations__)


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    single = isinstance(prompts, str | Mapping) or (
        bool(prompts) and (_is_token_ids(prompts) or _has_documents(prompts))
    )
    return cast("list[Prompt]", [prompts] if single else list(prompts))


def list_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    single = bool(messages) and isinstance(messages[0], Mapping)
    return cast("list[Sequence[Message]]", [messages] if single else list(messages))


def is_conversation(prompt: Any) -> bool:
    return not isinstance(prompt, str | Mapping) and bool(prompt) and isinstance(prompt[0], Mapping)


@dataclass
class PromptTokenizer:
    """Tokenizer of prompts, on any thread: a `tokenizer` is used by one at a time; without it prompts are token ids.

    `processor` is the model's, for pictures; text: why there is none. What stands in prompts that are no chats between
    two `separator`s is a document.
    """

    _tokenizer: Tokenizer | None
    _turns: Turns
    _processor: ImageProcessor | str
    _media: MediaLoader
    _separator: str | None = None

    def __post_init__(self) -> None:
        self._using = Lock()
        if self._tokenizer is not None:
            # The first use of a tokenizer may change its settings, which must not happen while a step decodes.
            self._tokenizer.encode("")

    def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> TokenizedPrompt:
        content: Any = prompt
        images: list[Any] = []
        if isinstance(prompt, Mapping):
            keys = translate(prompt, vllm_names.PROMPT, _KEYS, InvalidRequestError, "key of a prompt")
            content = keys.get("prompt_token_ids", keys.get("prompt", ()))
            images = _images(keys.get("multi_modal_data"))
        if _has_documents(content):
            parts = [each.text if isinstance(each, Document) else each for each in content]
            require(all(isinstance(each, str) for each in parts), *_PARTS, content, InvalidRequestError)
            documents = [each.text for each in content if isinstance(each, Document)]
            content = MarkedText("".join(parts), documents=documents)
        if not isinstance(content, str):
            if not _is_token_ids(content):
                raise InvalidRequestError("prompt must be text or a list of token ids")
            if not images:
                return TokenizedPrompt(None, list(content), documents=self._between_separators(content))
            return self._with_images(None, content, images)
        if self._tokenizer is None:
            why = "the model's directory has no tokenizer"
            raise InvalidRequestError(f"prompt must be a list of token ids: {why}")
        if not content:
            raise InvalidRequestError("prompt must hold at least 1 token, got an empty text")
        require_characters("prompt", content)
        if images:
            return self._with_images(content, content, images, add_special_tokens=add_special_tokens)
        with self._using:
            token_ids = self._tokenizer.encode(content, add_special_tokens=add_special_tokens)
            plain = partial(self._tokenizer.encode, add_special_tokens=False)
            if self._separator and not getattr(content, "documents", ()):
                between = content.split(self._separator)[1:-1]
                content = MarkedText(content, getattr(content, "context_end", 0), between)
            if not isinstance(content, MarkedText):
                return TokenizedPrompt(content, token_ids)
            encode = partial(self._tokenizer.encode, add_special_tokens=add_special_tokens)
            context = content.context_tokens(token_ids, encode) if content.context_end else 0
            found = mark_documents(content, content.documents, plain)
            return TokenizedPrompt(content, token_ids, documents=found, context_tokens=context)

    def tokenize_chat(
        self, messages: Sequence[Message], template: TemplateOptions = PLAIN, tenant: str | None = None
    ) -> TokenizedPrompt:
        messages, sources = take_images(messages)
        if not sources:
            encode = partial(self._turns.encode, tenant)
            with self._using:
                return apply_template(self._tokenizer, messages, template, encode)
        processor, images = self._require_processor(), self._media.load(sources)
        found: list[tuple[PromptImage, ...]] = []

        def expand(text: str, _: str, __: Any) -> list[int]:
            token_ids, processed = processor.process(text, images, add_special_tokens=False)
            found.append(processed)
            return token_ids

        if template.template is None and processor.chat_template:
            template = replace(template, template=processor.chat_template)
        with self._using:
            prompt = apply_template(self._tokenizer, messages, template, expand)
        return prompt._replace(images=found[-1])

    async def fetch_images(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        found, sources = take_images(messages)
        if not sources:
            return found
        self._require_processor()
        return put_images(found, await self._media.fetch(sources))

    def open_images(self, prompt: Any) -> "tuple[Any, list[Image]]":
        """Return a prompt or a conversation with opened images in place of their sources, and these images."""
        if isinstance(prompt, Mapping):
            if not (sources := _images(prompt.get("multi_modal_data"))):
                return prompt, []
            self._require_processor()
            images = self._media.load(sources)
            return {**prompt, "multi_modal_data": {"image": images}}, images
        if not is_conversation(prompt):
            return prompt, []
        found, sources = take_images(prompt)
        if sources:
            self._require_processor()
        images = self._media.load(sources)
        return put_images(found, images), images

    def _between_separators(self, token_ids: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Return tokens, half-open, that stand between two separators' of a prompt."""
        if self._separator is None or self._tokenizer is None:
            return ()
        with self._using:
            own = self._tokenizer.encode(self._separator, add_special_tokens=False)
        size = len(own)
        at = [start for start in range(len(token_ids)) if list(token_ids[start : start + size]) == own]
        return tuple((first + size, second) for first, second in pairwise(at) if first + size < second)

    def _require_processor(self) -> ImageProcessor:
        if isinstance(self._processor, str):
            raise InvalidRequestError(f"images cannot be read: {self._processor}")
        return self._processor

    def _with_images(
        self,
        text: str | None,
        content: str | Sequence[int],
        sources: Sequence[Any],
        *,
        add_special_tokens: bool = False,
    ) -> TokenizedPrompt:
        processor, images = self._require_processor(), self._media.load(sources)
        with self._using:
            token_ids, found = processor.process(content, images, add_special_tokens=add_special_tokens)
        return TokenizedPrompt(text, token_ids, images=found)


_PARTS = "prompt", "texts and documents"


def _has_documents(value: Any) -> bool:
    return isinstance(value, Sequence) and any(isinstance(each, Document) for each in value)


def _images(data: Any) -> list[Any]:
    if data is None:
        return []
    got = [type(data).__name__]
    if isinstance(data, Mapping):
        got = [repr(key) for key, value in data.items() if key != "image" and value]
    if got:
        raise InvalidRequestError(f'multi_modal_data must be {{"image": pictures}}, got {", ".join(got)}')
    images = data.get("image") or []
    return list(images) if isinstance(images, list | tuple) else [images]


def _is_token_ids(value: Any) -> bool:
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    return listed and all(type(token) is int for token in value)  # a bool is none
