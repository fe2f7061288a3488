"""Answers of chats, read by transformers' own parser: reasoning, content and tool calls."""

import json
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from winnow.errors import ConfigError
from winnow.openai.calls import CallForm, Reasoning, forced_form
from winnow.openai.response_templates import calls_template, recognise
from winnow.openai.tools import ForcedCalls
from winnow.outputs import CompletionOutput
from winnow.sampling import SamplingParams

THINKING = ("reasoning_content", "thinking", "reasoning")
"""What response templates call the model's reasoning."""


class AnswerParser(Protocol):
    """Sorts an answer into reasoning, content and tool calls as it grows: transformers' `ResponseParser`."""

    initial_events: list[dict[str, Any]]

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Take the next piece of text; return what it means."""
        ...

    def finalize(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Take the end of the answer; return the message, and what the end means."""
        ...


@dataclass(frozen=True)
class AnswerReader:
    """Reads the answers of one model.

    Attributes:
        tokenizer: of transformers; None: the model has none, and answers are not read.
        template: how the model writes reasoning and tool calls, as transformers' `response_template`; None: it is not
            known, and answers are text but for calls that were demanded.
    """

    tokenizer: Any = None
    template: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, tokenizer: Any, template: Mapping[str, Any] | None = None) -> "AnswerReader":
        """The reader of a model; without a template by the tokenizer's own, or by what its chat template shows.

        Raises:
            ConfigError: the template cannot be used.
        """
        if tokenizer is None:
            if template is not None:
                raise ConfigError("response_template needs a model with a tokenizer")
            return cls()
        if template is None:
            found = getattr(tokenizer, "response_template", None)
            return cls(tokenizer, found or recognise(getattr(tokenizer, "chat_template", None)))
        try:
            tokenizer.get_response_parser(template, prefix="")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"response_template cannot be used: {error}") from None
        return cls(tokenizer, template)

    def reads(self, forced: ForcedCalls | None) -> bool:
        """Whether answers are more than text."""
        return self.tokenizer is not None and (self.template is not None or forced is not None)

    def bind(self, params: SamplingParams, forced: ForcedCalls | None, prompt: str | None) -> SamplingParams:
        """Parameters under which an answer can be read, and is the calls that were demanded.

        Args:
            prompt: its text, which may end within the model's reasoning.

        Raises:
            InvalidRequestError: the functions' schemas cannot be used.
        """
        if not self.reads(forced):
            return params
        params = replace(params, skip_special_tokens=False)  # templates look for them
        if forced is None:
            return params
        form = forced_form(forced, self._call_form, self._reasoning(prompt or ""), self._special_tokens)
        return replace(params, structured_outputs=form)

    def parser(
        self, prompt: str | None, tools: Collection[Mapping[str, Any]], forced: ForcedCalls | None
    ) -> AnswerParser:
        """A parser of one answer."""
        template = self.template
        if forced is not None and self._call_form is None:
            template = calls_template(template)
        parser: AnswerParser = self.tokenizer.get_response_parser(
            template, prefix=prompt or "", tools=[dict(tool) for tool in tools] or None
        )
        return parser

    def message(
        self,
        prompt: str | None,
        answer: CompletionOutput,
        tools: Collection[Mapping[str, Any]],
        forced: ForcedCalls | None,
    ) -> dict[str, Any]:
        """OpenAI's message of a whole answer: its text as it is where the model broke its own rules."""
        try:
            parser = self.parser(prompt, tools, forced)
            parser.feed(answer.text)
            return assistant_message(parser.finalize()[0])
        except Exception:
            return {"role": "assistant", "content": answer.text}

    @cached_property
    def _call_form(self) -> CallForm | None:
        return CallForm.of(self.template)

    @cached_property
    def _special_tokens(self) -> frozenset[str]:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return frozenset(token.content for token in added.values() if token.special)

    def _reasoning(self, prompt: str) -> Reasoning | None:
        """What the model's reasoning stands between, if it has such, and whether a prompt ends within it."""
        fields = {} if self.template is None else self.template["fields"]
        name = next((each for each in THINKING if each in fields), None)
        if name is None:
            return None
        marks = [fields[name].get(side) for side in ("open", "close")]
        opening, closing = (mark[0] if isinstance(mark, list) else mark for mark in marks)
        if not isinstance(opening, str) or not isinstance(closing, str):
            return None
        begun = False
        for event in self.tokenizer.get_response_parser(self.template, prefix=prompt).initial_events:
            if event["field"] == name and event["type"] != "region_chunk":
                begun = event["type"] == "region_open"
        return Reasoning(opening, closing, begun)


def assistant_message(parsed: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's message from what transformers' response parser made of an answer."""
    content = parsed.get("content")
    message: dict[str, Any] = {"role": "assistant", "content": content if content else None}
    thinking = next((parsed[name] for name in THINKING if parsed.get(name)), None)
    if thinking is not None:
        message["reasoning_content"] = thinking
    calls = parsed.get("tool_calls")
    calls = [calls] if isinstance(calls, Mapping) else calls  # of a form that has one call at most
    if isinstance(calls, list) and calls:
        message["tool_calls"] = [tool_call(call) for call in calls]
    elif message["content"] is None:
        message["content"] = content if isinstance(content, str) else ""
    return message


def tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """One call, its arguments as JSON text, under an id of its own."""
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": str(function.get("name", "")), "arguments": arguments},
    }
