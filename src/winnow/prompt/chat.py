"""The text that a model's chat template makes of a conversation."""

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from winnow.errors import InvalidRequestError
from winnow.prompt.messages import MarkedText, Message, call_arguments, normalise_messages, require_characters
from winnow.values.images import PromptImage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer
else:  # transformers takes seconds to import
    Tokenizer = Any

_log = logging.getLogger("winnow")
_SYSTEM_ROLES = ("system", "developer")

# In a template that knows OpenAI's newer name for "system"; others leave such messages out, or refuse them.
_DEVELOPER = re.compile(r"""\\?['"]developer\\?['"]""")
# Of a function: what it tells the server alone.
_FOR_DECODING = ("strict", "cache_control", "defer_loading", "allowed_callers", "output_schema")
# Stands in for a message to find what a template writes around it: letters alone, which no template changes.
_SENTINEL = "winnowquestionstandshere"


@dataclass(frozen=True)
class TemplateOptions:
    """Variables of a chat template beside the messages.

    Attributes:
        tools: functions that the model may call, as OpenAI describes them.
        add_generation_prompt: end with the beginning of an answer.
        continue_final_message: the answer continues the last message, which stays open.
        variables: further variables of the template, such as enable_thinking.
        template: Jinja text in place of the model's own template; None: the model's.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None


PLAIN = TemplateOptions()


class TokenizedPrompt(NamedTuple):
    """A prompt as the engine takes it.

    Attributes:
        text: None where token ids were given.
        template_tail: tokens at its end that a chat template wrote behind the last message; 0 without a template.
        system_tokens: tokens at its beginning before the first message that is no system prompt.
        documents: tokens, half-open, of texts that may stand elsewhere in other prompts; see `mark_documents`.
        context_tokens: those that a mark calls the context; 0: there is no mark.
    """

    text: str | None
    token_ids: list[int]
    template_tail: int = 0
    system_tokens: int = 0
    images: tuple[PromptImage, ...] = ()
    documents: tuple[tuple[int, int], ...] = ()
    context_tokens: int = 0


def apply_template(
    tokenizer: Tokenizer | None,
    messages: Sequence[Message],
    options: TemplateOptions = PLAIN,
    encode: Callable[[str, str, Callable[[str], list[int]]], list[int]] | None = None,
) -> TokenizedPrompt:
    """Return the prompt that the model's chat template makes of a conversation.

    `encode` returns the tokens of a text and its template's tail, which it may know; None: by the tokenizer's function.

    Raises:
        InvalidRequestError: the model has no template, a message is unusable, or the template refuses the conversation.
    """
    if tokenizer is None or not (options.template or tokenizer.chat_template):
        raise InvalidRequestError("messages need a tokenizer with a chat template, which the model lacks")
    conversation = [_with_arguments(message) for message in normalise_messages(messages)]
    if not _DEVELOPER.search(str(options.template or tokenizer.chat_template)):
        conversation = [
            {**message, "role": "system"} if message["role"] == "developer" else message
            for message in conversation
        ]
    texts = enumerate(each["content"] for each in conversation)
    marks = [(index, text) for index, text in texts if isinstance(text, MarkedText)]
    marked = next((each for each in reversed(marks) if each[1].context_end), None)
    try:
        conversation, prompt = _rendered(tokenizer, conversation, options)
    # Templates raise what they like: jinja2's errors, or their own by raise_exception.
    except Exception as error:
        raise InvalidRequestError(f"messages do not suit the model's chat template: {error}") from None
    require_characters("messages", prompt)
    # The template writes its own special tokens.
    plain = partial(tokenizer.encode, add_special_tokens=False)
    tail = _text_behind(tokenizer, conversation, prompt, options)
    token_ids = plain(prompt) if encode is None else encode(prompt, tail, plain)
    given = options.variables.get("documents") or ()
    shown = [each.get("text") if isinstance(each, Mapping) else each for each in given]
    if given and not any(isinstance(text, str) and text and text in prompt for text in shown):
        raise InvalidRequestError("documents must be texts that the model's chat template shows, got none")
    documents = mark_documents(
        prompt, [*shown, *(text for _, mark in marks for text in mark.documents)], plain
    )
    context = 0
    if marked is not None:
        known = plain if encode is None else lambda text: encode(text, tail, plain)
        end = _context_end(tokenizer, conversation, prompt, options, *marked)
        context = MarkedText(prompt, end).context_tokens(token_ids, known)
    return TokenizedPrompt(
        prompt,
        token_ids,
        tail_tokens(tokenizer, token_ids, tail),
        len(plain(_system_text(conversation, prompt))),
        documents=documents,
        context_tokens=context,
    )


def _context_end(
    tokenizer: Tokenizer,
    conversation: Sequence[dict[str, Any]],
    prompt: str,
    options: TemplateOptions,
    index: int,
    text: MarkedText,
) -> int:
    """Return how many characters of a prompt end with the document of its message number `index`."""
    marked: Any = text[: text.context_end] + _SENTINEL + text[text.context_end :]
    if isinstance(conversation[index]["content"], list):
        marked = [{"type": "text", "text": marked}]
    messages = [*conversation[:index], {**conversation[index], "content": marked}, *conversation[index + 1 :]]
    before, found, _ = _render(tokenizer, messages, options).partition(_SENTINEL)
    if not found or not prompt.startswith(before):
        mark = f"winnow.context of messages[{index}]"
        raise InvalidRequestError(f"{mark} is a mark that the model's chat template hides")
    return len(before)


def mark_documents(
    prompt: str, texts: Iterable[Any], encode: Callable[[str], list[int]], before: int = 0
) -> tuple[tuple[int, int], ...]:
    """Return about which tokens of a prompt each of some texts are that stand in it, in order: a tokenizer may join the
    letters at their ends to others. `before` are tokens that no text stands for."""
    found: list[tuple[int, int]] = []
    at, tokens = 0, before
    for text in texts:
        start = prompt.find(text, at) if isinstance(text, str) and text else -1
        if start >= 0:
            first = tokens + len(encode(prompt[at:start]))
            at, tokens = start + len(text), first + len(encode(text))
            found.append((first, tokens))
    return tuple(found)


def document_tokens(tokenizer: Tokenizer, text: str, *, chat: bool = False) -> list[int]:
    """Return the tokens that all prompts begin with which have this text first; none that it would share with the rest.
    With `chat` the prompts are a user's messages in the model's chat template; raises as `apply_template`."""
    prompts = []
    for behind in ("\n\nWhat", " 1", "."):
        if chat:
            message = {"role": "user", "content": text + behind}
            prompts.append(apply_template(tokenizer, [message]).token_ids)
        else:
            prompts.append(tokenizer.encode(text + behind))
    alike = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*prompts, strict=False))
    return [tokens[0] for tokens in alike]


def turn_end(tokenizer: Tokenizer) -> int | None:
    """Return the special token that the chat template writes behind an assistant's message; None: there is none."""
    if not tokenizer.chat_template:
        return None
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SENTINEL}]
    try:
        rendered = _render(tokenizer, messages, TemplateOptions(add_generation_prompt=False))
    except Exception:  # a template that wants other messages says nothing about its ends
        return None
    ids = tokenizer.encode(rendered.rpartition(_SENTINEL)[2], add_special_tokens=False)
    return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None


def warn_about_ends(tokenizer: Tokenizer | None, end_tokens: Collection[int]) -> None:
    if tokenizer is None:
        return
    turn = turn_end(tokenizer)
    limits = "answers end at max_tokens, at the context's end or by stop and stop_token_ids"
    if not end_tokens:
        _log.warning("winnow: neither model nor tokenizer names an end-of-text token: %s", limits)
    elif turn is not None and turn not in end_tokens:
        _log.warning(
            "winnow: the chat template ends a turn with %r (token %d), which is no end token of the model (%s): %s",
            tokenizer.convert_ids_to_tokens(turn),
            turn,
            ", ".join(map(str, sorted(end_tokens))),
            limits,
        )


def tail_tokens(tokenizer: Any, token_ids: Sequence[int], tail: str) -> int:
    """Return how many tokens at the end of a prompt hold nothing but `tail`, the text that it ends with."""
    own = tokenizer.encode(tail, add_special_tokens=False) if tail else []
    pairs = zip(reversed(token_ids), reversed(own), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _text_behind(
    tokenizer: Tokenizer, conversation: Sequence[dict[str, Any]], prompt: str, options: TemplateOptions
) -> str:
    """Return what the template writes behind the last message; empty where that is the assistant's, or unknown."""
    last = conversation[-1]
    if last["role"] == "assistant":
        return ""
    content = last["content"]
    sentinel = [{"type": "text", "text": _SENTINEL}] if isinstance(content, list) else _SENTINEL
    try:
        rendered = _render(tokenizer, [*conversation[:-1], {**last, "content": sentinel}], options)
    except Exception:  # the prompt itself was rendered: without a tail it is served as it is
        return ""
    _, found, behind = rendered.rpartition(_SENTINEL)
    return behind if found and prompt.endswith(behind) else ""


def _system_text(conversation: Sequence[dict[str, Any]], prompt: str) -> str:
    """Return what a prompt begins with before its first message that is no system prompt; empty without one."""
    begin = next((i for i, each in enumerate(conversation) if each["role"] not in _SYSTEM_ROLES), 0)
    content = conversation[begin]["content"]
    content = str(content[0].get("text", "") if isinstance(content, list) else content).strip()
    return prompt[: max(prompt.find(content), 0)] if begin and content else ""


def _rendered(
    tokenizer: Tokenizer, conversation: list[dict[str, Any]], options: TemplateOptions
) -> tuple[list[dict[str, Any]], str]:
    """Return messages in the form that the template reads, and the prompt; some read lists of parts alone."""
    texts = [
        each["content"].strip()
        for each in (*conversation[:2], conversation[-1])
        if isinstance(each["content"], str) and each["role"] in ("user", *_SYSTEM_ROLES)
    ]
    parts = [
        {**each, "content": [{"type": "text", "text": each["content"]}]}
        if isinstance(each["content"], str) and each["role"] != "tool"
        else each
        for each in conversation
    ]
    prompts: list[str | Exception] = []
    for form in (conversation, parts):
        try:
            prompts.append(prompt := _render(tokenizer, form, options))
        except Exception as error:
            prompts.append(error)
        else:
            if all(text in prompt for text in texts) and (prompt or form is conversation):
                return form, prompt
    if isinstance(prompts[0], Exception):
        raise prompts[0]
    return conversation, prompts[0]


def _render(tokenizer: Tokenizer, conversation: Sequence[dict[str, Any]], options: TemplateOptions) -> str:
    text: Any = tokenizer.apply_chat_template(
        list(conversation),
        chat_template=options.template,
        tools=[_shown_tool(tool) for tool in options.tools] or None,
        tokenize=False,
        add_generation_prompt=options.add_generation_prompt and not options.continue_final_message,
        continue_final_message=options.continue_final_message,
        **options.variables,
    )
    return str(text)


def _shown_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as the model reads it: no nulls, and no fields that say how a call is decoded."""
    shown = {name: value for name, value in tool.items() if value is not None and name not in _FOR_DECODING}
    function = shown.get("function")
    return shown | {"function": _shown_tool(function)} if isinstance(function, Mapping) else shown


def _with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its tool calls' arguments as objects: OpenAI writes them as JSON, templates walk them."""
    if not isinstance(calls := message.get("tool_calls"), list):
        return message
    return {**message, "tool_calls": list(map(_call_with_arguments, calls))}


def _call_with_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    values = call_arguments(function.get("arguments"))
    return {**call, "function": {**function, "arguments": values}}
