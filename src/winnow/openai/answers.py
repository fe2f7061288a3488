"""Answers of chats: how a model's are read, and bound where they must be calls or have a form."""

import json
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import regex

from winnow.errors import ConfigError
from winnow.openai.calls import CallForm, CallGrammar
from winnow.openai.parser import AnswerParser
from winnow.openai.regions import Kind, Region, mark_pattern, mark_text, mark_texts
from winnow.openai.response_templates import CALL_LIST, recognise
from winnow.openai.tools import CallRule
from winnow.prompt.messages import call_arguments
from winnow.sampling import SamplingParams
from winnow.sampling.params import ReasoningMarks
from winnow.sampling.token_table import TokenTable

Tools = Collection[Mapping[str, Any]]


@dataclass(frozen=True)
class AnswerReader:
    """Reader of one model's answers.

    Attributes:
        tokenizer: of transformers; None: the model has none, and answers are not read.
        template: how the model writes reasoning and tool calls, as transformers' `response_template`; None: it is not
            known, and answers are text but for calls that were demanded.
    """

    tokenizer: Any = None
    template: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, tokenizer: Any, template: Mapping[str, Any] | None = None) -> "AnswerReader":
        """Return the reader of a model; without a template by its own, or by what its chat template shows. Raises
        ConfigError: the template cannot be used."""
        if tokenizer is None:
            if template is not None:
                raise ConfigError("response_template needs a model with a tokenizer")
            return cls()
        own = template if template is not None else getattr(tokenizer, "response_template", None)
        try:
            if own is not None:
                tokenizer.get_response_parser(own, prefix="")
                return cls(tokenizer, own)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if template is not None:
                raise ConfigError(f"response_template cannot be used: {error}") from None
        # A tokenizer's own may be of a version that this transformers does not know.
        return cls(tokenizer, recognise(getattr(tokenizer, "chat_template", None)))

    def reads(self, tools: Tools, calls: CallRule | None) -> bool:
        """Return whether answers are more than text."""
        return self.tokenizer is not None and bool(self._regions_of(tools, calls))

    def bind(
        self, params: SamplingParams, prompt: str | None, tools: Tools, calls: CallRule | None
    ) -> SamplingParams:
        """Return parameters under which an answer can be read, is the calls that were demanded, or has the form asked
        for.

        Reasoning may stand before calls and forms; where the prompt ends within it, it must. Where tools are shown,
        calls may stand in a form's place. Where one call is allowed, the answer ends with it. Raises
        InvalidRequestError: the functions' schemas cannot be used.
        """
        if not self.reads(tools, calls):
            return params
        marks, form, offered = self._marks(prompt, tools, calls), params.form, None
        if calls is not None and calls.demanded:
            form = self._grammar.forced(calls)
        elif form is not None and tools and self._call_field is not None:
            offered = self._grammar.offered([each["function"] for each in tools], several=calls is None)
        if form is not None and (marks is not None or offered is not None):
            form = replace(form, before=self._grammar.around(marks, offered))
        # Special tokens are no text of the answer, but where they are marks.
        skip = params.skip_special_tokens and not self._has_special_marks
        ends = calls is not None and not calls.several
        until = partial(self.parser, prompt, tools, calls) if ends else None
        return replace(
            params, skip_special_tokens=skip, structured_outputs=form, reasoning=marks, until=until
        )

    def _marks(self, prompt: str | None, tools: Tools, calls: CallRule | None) -> ReasoningMarks | None:
        """Return the marks of the reasoning that an answer may begin with; None: there is none, or no fixed texts."""
        found = self.parser(prompt, tools, calls).reasoning
        if found is None:
            return None
        region, begun = found
        opening, closing = (mark_text(region.field, side) for side in ("open", "close"))
        if not closing or not (opening or begun):
            return None
        return ReasoningMarks("" if begun else str(opening), closing)

    def parser(self, prompt: str | None, tools: Tools, calls: CallRule | None) -> AnswerParser:
        regions, turn = self._regions_of(tools, calls), self._turn(prompt or "")
        shown = self._special_tokens if self._has_special_marks else {}
        most = None if calls is None or calls.several else 1
        return AnswerParser(regions, self._outside, partial(self._read_calls, tools), shown, turn, most)

    @cached_property
    def _call_form(self) -> CallForm | None:
        return CallForm.of(self.template)

    @cached_property
    def _grammar(self) -> CallGrammar:
        return CallGrammar(self._special_tokens.values(), self._call_field, self._call_form)

    @property
    def _call_field(self) -> Mapping[str, Any] | None:
        return next((each.field for each in self._fields if each.kind is Kind.CALLS), None)

    @cached_property
    def _special_tokens(self) -> Mapping[int, str]:
        return TokenTable(self.tokenizer).special

    @cached_property
    def _fields(self) -> Sequence[Region]:
        fields = {} if self.template is None else self.template["fields"]
        return [Region.of(name, field) for name, field in fields.items()]

    @property
    def _outside(self) -> Kind:
        """Kind of text that stands in no region; without a template all is content."""
        found = next((each.kind for each in self._fields if each.opening is None), None)
        return found or (Kind.OTHER if self._fields else Kind.CONTENT)

    @cached_property
    def _has_special_marks(self) -> bool:
        fields = [each.field for each in self._fields if each.opening is not None]
        texts = [text for each in fields for side in ("open", "close") for text in mark_texts(each, side)]
        special = self._special_tokens.values()
        return any(text is None or any(token in text for token in special) for text in texts)

    def _regions_of(self, tools: Tools, calls: CallRule | None) -> list[Region]:
        regions = [each for each in self._fields if each.opening is not None]
        as_list = calls is not None and calls.demanded and self._call_form is None
        if as_list or not tools:
            regions = [each for each in regions if each.kind is not Kind.CALLS]
        return [*regions, Region.of("tool_calls", CALL_LIST)] if as_list else regions

    def _turn(self, prompt: str) -> str:
        """Return a prompt's text behind the last beginning of a turn; if there is none, the mark that it ends with."""
        if self.template is None:
            return ""
        anchor = regex.compile(mark_pattern(self.template, "start_anchor"), regex.DOTALL)
        end = max((match.end() for match in anchor.finditer(prompt)), default=None)
        if end is not None:
            return prompt[end:]
        texts = [mark_text(each.field, "open") for each in self._fields if each.kind is Kind.REASONING]
        return next((text for text in texts if text and prompt.rstrip().endswith(text)), "")

    def _read_calls(self, tools: Tools, region: Region, text: str, closed: bool) -> list[dict[str, Any]]:
        if not closed and not region.checks_itself:
            raise ValueError("the call is incomplete")
        template = {"start_anchor": "\0", "fields": {region.name: region.closed_field()}}
        try:
            parser = self.tokenizer.get_response_parser(
                template, prefix="", tools=[dict(tool) for tool in tools] or None
            )
            parser.feed(text)
            found = parser.finalize()[0][region.name]
            return [tool_call(call) for call in (found if isinstance(found, list) else [found])]
        except Exception as error:  # the model's text, in which anything may stand
            raise ValueError(f"it is no call: {error}") from None


def tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return one call, its arguments as JSON text, under an id of its own. Raises ValueError: it is none."""
    function = call.get("function", call)
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise ValueError("a call needs the name of a function")
    if not isinstance(arguments, str) or call_arguments(arguments) == {}:
        arguments = json.dumps(call_arguments(arguments), ensure_ascii=False, allow_nan=False)
    f"{name}{arguments}".encode()  # half a surrogate pair can be spelt in JSON, but not sent
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
