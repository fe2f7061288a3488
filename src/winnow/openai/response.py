"""Objects that answer a body: `text_completion` and `chat.completion`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from winnow.openai.answers import AnswerReader
from winnow.openai.logprobs import echo_logprobs, prompt_logprobs
from winnow.openai.parser import AnswerParser
from winnow.openai.request import CompletionRequest
from winnow.outputs import CompletionOutput, EvictionReport, RequestOutput
from winnow.sampling.token_table import TokenTable
from winnow.values.json_values import dump_json


@dataclass(frozen=True)
class ResponseForm:
    """Common part of the objects that answer one body.

    Attributes:
        asked: the body.
        reader: of the model's answers.
        name: what follows the prefix of their id.
        model: the name that they give the model.
        created: Unix seconds.
    """

    asked: CompletionRequest
    reader: AnswerReader
    name: str
    model: str
    created: int

    @property
    def is_chat(self) -> bool:
        return self.asked.messages is not None

    def parser(self, output: RequestOutput) -> AnswerParser | None:
        """Return the parser of an answer; None: its text is the content."""
        tools, calls = self.asked.template.tools, self.asked.calls
        reads = self.is_chat and self.reader.reads(tools, calls)
        return self.reader.parser(output.prompt, tools, calls) if reads else None

    def prompt_text(self, output: RequestOutput) -> str:
        """Return a prompt's text, for bodies that want it repeated; without a tokenizer tokens have none."""
        return self._decode(output.prompt_token_ids) if output.prompt is None else output.prompt

    def echo_logprobs(self, output: RequestOutput, answer: dict[str, Any]) -> dict[str, Any]:
        """Return those of the prompt and the answer behind it, whose own are `answer`."""
        special = {} if self.reader.tokenizer is None else TokenTable(self.reader.tokenizer).special
        own = None if self.asked.only_echo else answer
        prompt = self.prompt_text(output)
        return echo_logprobs(output, prompt, lambda token: self._decode([token]), special, own)

    def _decode(self, token_ids: Sequence[int]) -> str:
        tokenizer = self.reader.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode(token_ids, skip_special_tokens=False))

    def head(self, *, chunk: bool = False) -> dict[str, Any]:
        """Return what every object starts with."""
        kind = "text_completion" if not self.is_chat else f"chat.completion{'.chunk' * chunk}"
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.name}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }


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
        found["eviction"] = answer.eviction.to_json(kept=form.asked.return_kept)
    if form.asked.return_token_ids:
        found["token_ids"] = list(answer.token_ids)
    return found


def prompt_extras(form: ResponseForm, output: RequestOutput) -> dict[str, Any]:
    """Do as `extras` does, for the fields of the prompt."""
    found: dict[str, Any] = {}
    if form.asked.return_token_ids:
        found["prompt_token_ids"] = list(output.prompt_token_ids)
    if form.asked.prompt_logprobs and not form.is_chat:
        found["prompt_logprobs"] = prompt_logprobs(output)
    return found


# Made once: json.dumps would make one for every event.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def event(data: dict[str, Any] | str, name: str | None = None) -> str:
    """Return one server-sent event."""
    text = data if isinstance(data, str) else compact_json(data)
    return f"data: {text}\n\n" if name is None else f"event: {name}\ndata: {text}\n\n"


def compact_json(value: Any) -> str:
    """Dump JSON in as few characters as it takes."""
    try:
        return _ENCODER.encode(value)
    except ValueError:
        return dump_json(value, ensure_ascii=False, separators=(",", ":"))
