"""Objects that answer a body: `text_completion` and `chat.completion`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from winnow.openai.answers import AnswerReader
from winnow.openai.logprobs import chat_logprobs, completion_logprobs, echo_logprobs, prompt_logprobs
from winnow.openai.request import CompletionRequest, Endpoint
from winnow.outputs import CompletionOutput, EvictionReport, RequestOutput
from winnow.sampling.token_table import TokenTable

ParseAnswer = Callable[[RequestOutput, CompletionOutput], Mapping[str, Any]]
"""Turns an answer into the message of a chat: text, reasoning, tool calls."""


@dataclass(frozen=True)
class Echo:
    """Repetition of a prompt before its answers.

    Attributes:
        text_of: the prompt's text.
        name_of: the text of one token.
        special: special tokens with their texts.
        alone: the answers themselves are left out.
    """

    text_of: Callable[[RequestOutput], str]
    name_of: Callable[[int], str]
    special: Mapping[int, str] = field(default_factory=dict)
    alone: bool = False

    @classmethod
    def of(cls, tokenizer: Any, alone: bool) -> "Echo":
        """Return the echo of prompts of one model; without a tokenizer tokens have no texts."""
        if tokenizer is None:
            return cls(lambda output: output.prompt or "", lambda token: "", alone=alone)

        def decode(token_ids: Sequence[int]) -> str:
            return str(tokenizer.decode(token_ids, skip_special_tokens=False))

        return cls(
            lambda output: decode(output.prompt_token_ids) if output.prompt is None else output.prompt,
            lambda token: decode([token]),
            TokenTable(tokenizer).special,
            alone,
        )

    def logprobs(self, output: RequestOutput, prompt: str, answer: dict[str, Any]) -> dict[str, Any]:
        """Return those of the prompt and the answer behind it, whose own are `answer`."""
        return echo_logprobs(output, prompt, self.name_of, self.special, None if self.alone else answer)


@dataclass(frozen=True)
class ResponseForm:
    """Common part of the objects that answer one body.

    Attributes:
        name: what follows the prefix of their id.
        model: the name that they give the model.
        created: Unix seconds.
        n: answers per prompt.
        echo: None: prompts are not repeated.
        parse: None: the answer's text is the message.
        token_ids: report token ids beside texts.
        kept: report KVs kept by layer and head in `eviction`.
        top_logprobs: alternatives for each token of a chat; None: all that are known.
        prompt_logprobs: report those of prompts.
    """

    endpoint: Endpoint
    name: str
    model: str
    created: int
    n: int = 1
    echo: Echo | None = None
    parse: ParseAnswer | None = None
    token_ids: bool = False
    kept: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: bool = False

    @classmethod
    def of(
        cls, asked: CompletionRequest, reader: AnswerReader, name: str, model: str, created: int
    ) -> "ResponseForm":
        """Return what the objects that answer a body have in common; `reader` is the model's."""
        tools, calls = asked.template.tools, asked.calls

        def parse(output: RequestOutput, answer: CompletionOutput) -> Mapping[str, Any]:
            return reader.message(output.prompt, answer, tools, calls)

        return cls(
            Endpoint.COMPLETION if asked.messages is None else Endpoint.CHAT,
            name,
            model,
            created,
            asked.params.n,
            Echo.of(reader.tokenizer, asked.only_echo) if asked.echo else None,
            parse if asked.messages is not None and reader.reads(tools, calls) else None,
            asked.return_token_ids,
            asked.return_kept,
            asked.params.logprobs,
            asked.prompt_logprobs,
        )

    @property
    def is_chat(self) -> bool:
        return self.endpoint is Endpoint.CHAT

    def head(self, *, chunk: bool = False) -> dict[str, Any]:
        """Return what every object starts with."""
        kind = "text_completion" if not self.is_chat else f"chat.completion{'.chunk' * chunk}"
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.name}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }


def completion_object(form: ResponseForm, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return the object for finished requests: one for each prompt of the body, in order."""
    choice = _chat_choice if form.is_chat else _completion_choice
    choices = [
        choice(form, output, answer, place * form.n + answer.index)
        for place, output in enumerate(outputs)
        for answer in output.outputs
    ]
    found = form.head() | {"choices": choices, "usage": usage(outputs, echo_alone(form))}
    if form.prompt_logprobs and form.is_chat:
        found["prompt_logprobs"] = prompt_logprobs(outputs[0])
    return found


def echo_alone(form: ResponseForm) -> bool:
    """Return whether the body asks for its prompts alone."""
    return form.echo is not None and form.echo.alone


def usage(outputs: Sequence[RequestOutput], prompts_alone: bool = False) -> dict[str, Any]:
    """Return tokens of the prompts and of all answers."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    answers = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    reports = [answer.eviction for output in outputs for answer in output.outputs]
    thoughts = sum(answer.reasoning_tokens for output in outputs for answer in output.outputs)
    return usage_object(prompt, 0 if prompts_alone else answers, cached, reports, thoughts)


def usage_object(
    prompt: int, answers: int, cached: int, reports: Sequence[EvictionReport | None] = (), thoughts: int = 0
) -> dict[str, Any]:
    """Return the object that counts tokens.

    Args:
        cached: those of the prompts that were not computed.
        reports: of the answers whose KVs are not all kept: they say how many tokens' are, on average over rows.
        thoughts: those of the answers that are reasoning.
    """
    reasoned = {"completion_tokens_details": {"reasoning_tokens": thoughts}} if thoughts else {}
    known = [report for report in reports if report is not None]
    kept = {
        "kept": round(sum(each.mean_kept for each in known)),
        "total": sum(each.num_tokens for each in known),
    }
    return ({"kv": kept} if known else {}) | {
        "prompt_tokens": prompt,
        "completion_tokens": answers,
        "total_tokens": prompt + answers,
        "prompt_tokens_details": {"cached_tokens": cached},
        **reasoned,
    }


def finish_reason(answer: CompletionOutput) -> str | None:
    """Return why an answer ended, in OpenAI's words."""
    return "stop" if answer.finish_reason == "abort" else answer.finish_reason


def _chat_choice(
    form: ResponseForm, output: RequestOutput, answer: CompletionOutput, index: int
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if form.parse is not None:
        message = dict(form.parse(output, answer))
    message |= {"refusal": None, "annotations": []}
    reason = "tool_calls" if message.get("tool_calls") and answer.finish_reason == "stop" else None
    return {
        "index": index,
        "message": message,
        "logprobs": chat_logprobs(answer, form.top_logprobs),
        "finish_reason": reason or finish_reason(answer),
        **extras(form, answer, output),
    }


def _completion_choice(
    form: ResponseForm, output: RequestOutput, answer: CompletionOutput, index: int
) -> dict[str, Any]:
    text, logprobs = answer.text, completion_logprobs(answer)
    if form.echo is not None:
        prompt = form.echo.text_of(output)
        if logprobs is not None:
            logprobs = form.echo.logprobs(output, prompt, logprobs)
        text = prompt if form.echo.alone else prompt + text
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": "length" if echo_alone(form) else finish_reason(answer),
        **extras(form, answer, output),
    }


def extras(
    form: ResponseForm, answer: CompletionOutput, output: RequestOutput | None = None
) -> dict[str, Any]:
    """Return fields that OpenAI does not have: only where there is something to say."""
    found: dict[str, Any] = {}
    if answer.stop_reason is not None:
        found["stop_reason"] = answer.stop_reason
    if answer.eviction is not None:
        found["eviction"] = answer.eviction.to_json(kept=form.kept)
    if form.token_ids:
        found["token_ids"] = list(answer.token_ids)
        if output is not None:
            found["prompt_token_ids"] = list(output.prompt_token_ids)
    if form.prompt_logprobs and not form.is_chat and output is not None:
        found["prompt_logprobs"] = prompt_logprobs(output)
    return found
