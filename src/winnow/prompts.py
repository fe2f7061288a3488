"""Prompts as callers write them, and as the engine takes them."""

from collections.abc import Mapping, Sequence
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, cast

from winnow.chat import (
    PLAIN,
    Message,
    TemplateOptions,
    TokenizedPrompt,
    apply_template,
    require_characters,
)
from winnow.errors import InvalidRequestError
from winnow.sampling.turns import Turns
from winnow.values.foreign_names import translate
from winnow.vllm import names as vllm_names

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextPrompt(TypedDict):
    """A prompt as text. As in vLLM."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids; `prompt` is its text, which is not read. As in vLLM."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]
PromptType = Prompt
"""vLLM's name of the same."""
_KEYS = tuple(TokensPrompt.__annotations__)


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several, as a list."""
    single = isinstance(prompts, str | Mapping) or (bool(prompts) and _is_token_ids(prompts))
    return cast("list[Prompt]", [prompts] if single else list(prompts))


def list_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    """Return one conversation or several, as a list."""
    single = bool(messages) and isinstance(messages[0], Mapping)
    return cast("list[Sequence[Message]]", [messages] if single else list(messages))


class PromptTokenizer:
    """Tokenizer of prompts, on any thread: a tokenizer is used by one at a time.

    Args:
        tokenizer: the model's; None: prompts are token ids.
        turns: of conversations that were answered.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None", turns: Turns) -> None:
        self._tokenizer = tokenizer
        self._turns = turns
        self._using = Lock()
        if tokenizer is not None:
            # The first use of a tokenizer may change its settings, which must not happen while a step decodes.
            tokenizer.encode("")

    def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> TokenizedPrompt:
        """See `LLM.tokenize`."""
        content: Any = prompt
        if isinstance(prompt, Mapping):
            keys = translate(prompt, vllm_names.PROMPT, _KEYS, InvalidRequestError, "key of a prompt")
            content = keys.get("prompt_token_ids", keys.get("prompt", ()))
        if not isinstance(content, str):
            if not _is_token_ids(content):
                raise InvalidRequestError("prompt must be text or a list of token ids")
            return TokenizedPrompt(None, list(content))
        if self._tokenizer is None:
            raise InvalidRequestError(
                "prompt must be a list of token ids: the model's directory has no tokenizer"
            )
        if not content:
            raise InvalidRequestError("prompt must hold at least 1 token, got an empty text")
        require_characters("prompt", content)
        with self._using:
            return TokenizedPrompt(
                content, self._tokenizer.encode(content, add_special_tokens=add_special_tokens)
            )

    def tokenize_chat(
        self, messages: Sequence[Message], template: TemplateOptions = PLAIN, tenant: str | None = None
    ) -> TokenizedPrompt:
        """See `LLM.tokenize_chat`."""
        with self._using:
            return apply_template(self._tokenizer, messages, template, partial(self._turns.encode, tenant))


def _is_token_ids(value: Any) -> bool:
    """Return whether a value is a sequence of ints; bools are not ints here."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(type(token) is int for token in value)
    )
