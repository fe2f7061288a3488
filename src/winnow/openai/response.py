"""Objects that answer a body: `text_completion` and `chat.completion`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from winnow.openai.answers import AnswerReader
from winnow.openai.logprobs import echo_logprobs, prompt_logprobs
from winnow.openai.parser import AnswerParser
from winnow.openai.request import CompletionRequest, Endpoint
from winnow.outputs import CompletionOutput, EvictionReport, RequestOutput
from winnow.sampling.token_table import TokenTable

ParserFactory = Callable[[RequestOutput], AnswerParser]


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
        new_parser: makes the parser of an answer; None: its text is the content.
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
    new_parser: ParserFactory | None = None
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
        reads = asked.messages is not None and reader.reads(tools, calls)
        return cls(
            Endpoint.COMPLETION if asked.messages is None else Endpoint.CHAT,
            name,
            model,
            created,
            asked.params.n,
            Echo.of(reader.tokenizer, asked.only_echo) if asked.echo else None,
            (lambda output: reader.parser(output.prompt, tools, calls)) if reads else None,
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


def echo_alone(form: ResponseForm) -> bool:
    """Return whether the body asks for its prompts alone."""
    return form.echo is not None and form.echo.alone


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


def extras(form: ResponseForm, answer: CompletionOutput) -> dict[str, Any]:
    """Return fields that OpenAI does not have: only where there is something to say."""
    found: dict[str, Any] = {}
    if answer.stop_reason is not None:
        found["stop_reason"] = answer.stop_reason
    if answer.eviction is not None:
        found["eviction"] = answer.eviction.to_json(kept=form.kept)
    if form.token_ids:
        found["token_ids"] = list(answer.token_ids)
    return found


def prompt_extras(form: ResponseForm, output: RequestOutput) -> dict[str, Any]:
    """Do as `extras` does, for the fields of the prompt."""
    found: dict[str, Any] = {}
    if form.token_ids:
        found["prompt_token_ids"] = list(output.prompt_token_ids)
    if form.prompt_logprobs and not form.is_chat:
        found["prompt_logprobs"] = prompt_logprobs(output)
    return found
