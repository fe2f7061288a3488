"""Tokens of one request that survived eviction, by layer and head."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any, Self

from winnow.engine.admission import requested_eviction
from winnow.engine.requests.new_request import KeptKVs
from winnow.errors import InvalidRequestError
from winnow.eviction import ResolvedPolicy
from winnow.eviction.describe import brief_policy
from winnow.llm import LLM
from winnow.outputs import EvictionReport, RequestOutput
from winnow.prompt.messages import Message
from winnow.prompt.prompts import Prompt, PromptTokenizer, is_conversation
from winnow.sampling import SamplingParams, TextStream
from winnow.values.units import format_bytes
from winnow_inspect.page import Held, Picture, render

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Token:
    """A token and what it adds to the text.

    A character whose bytes are spread over tokens belongs to the last of them; the others have no text.
    """

    id: int
    text: str


@dataclass(frozen=True)
class Inspection:
    """A prompt, its answer, and which of their tokens were held in which layer and head.

    Attributes:
        policy: the policy's name, "own" for one without.
        parts: score, budget, keep and when in a few words each.
        tokens: of the prompt, then of the answer; their places here are the token indices of `Held.rows`.
        answer: its text.
        after_prompt: tokens of the prompt that were held when the first token of the answer was computed, which is
            after the round that follows the prompt; at the end if the answer has one token only.
        at_end: tokens of prompt and answer that were held when the last token of the answer had been chosen. That one
            was never computed, so no row held it.
        report: as every answer carries it; None where no eviction was asked for.
    """

    policy: str
    parts: dict[str, str]
    tokens: tuple[Token, ...]
    num_prompt_tokens: int
    answer: str
    after_prompt: Held
    at_end: Held
    report: EvictionReport | None
    pictures: tuple[Picture, ...] = ()

    @classmethod
    def of(
        cls,
        output: RequestOutput,
        kept: "KeptTokens",
        policy: ResolvedPolicy,
        tokenizer: Any,
        images: "Sequence[Image]" = (),
    ) -> Self:
        """Inspect a finished request; `kept` is its observer, `policy` what it ran under, `tokenizer` as in
        `read_tokens`."""
        prompt, answer = output.prompt_token_ids, output.outputs[0]
        return cls(
            policy=policy.name,
            parts=brief_policy(policy.policy),
            tokens=read_tokens(tokenizer, [*prompt, *answer.token_ids]),
            num_prompt_tokens=len(prompt),
            answer=answer.text,
            after_prompt=Held.of(
                kept.after_prompt if kept.after_prompt.positions else kept.at_end, len(prompt)
            ),
            # The last token of an answer is never computed, so no row holds it.
            at_end=Held.of(kept.at_end, len(prompt) + len(answer.token_ids) - 1),
            report=answer.eviction,
            pictures=tuple(map(Picture.of, output.images, images)),
        )

    @cached_property
    def _shown(self) -> frozenset[int]:
        """Tokens of images."""
        return frozenset(token for each in self.pictures for token in each.tokens)

    def to_json(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "parts": dict(self.parts),
            "num_prompt_tokens": self.num_prompt_tokens,
            "tokens": [{"id": token.id, "text": token.text} for token in self.tokens],
            "answer": self.answer,
            "after_prompt": self.after_prompt.to_json(),
            "at_end": self.at_end.to_json(),
            "report": None if self.report is None else self.report.to_json(),
            "images": [{"size": list(each.size), "tokens": list(each.tokens)} for each in self.pictures],
        }

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{escape(self.to_html())}" style="width: 100%; height: 40rem; border: 0"></iframe>'

    def to_html(self) -> str:
        """Return a page to look at: one file that needs nothing but a browser, no network."""
        return render(
            title=f"{self.policy}: {self.after_prompt.mean:,.0f} of {self.num_prompt_tokens:,} KVs per row",
            facts=self.facts(),
            texts=["\u25a6" if index in self._shown else each.text for index, each in enumerate(self.tokens)],
            num_prompt_tokens=self.num_prompt_tokens,
            moments={"after the prompt": self.after_prompt, "at the end of the answer": self.at_end},
            pictures=self.pictures,
        )

    def facts(self) -> dict[str, str]:
        """Return what there is to say in numbers, for people."""
        facts = {
            "policy": self.policy,
            **self.parts,
            "prompt": f"{self.num_prompt_tokens:,} tokens",
            "answer": f"{len(self.tokens) - self.num_prompt_tokens:,} tokens",
            "KV budget": "none: all are kept",
            "compression": f"{self.after_prompt.compression:.1f} after the prompt, "
            f"{self.at_end.compression:.1f} at the end",
        }
        if self._shown:
            shares = self.after_prompt.shares
            of_images = [share for token, share in enumerate(shares) if token in self._shown]
            of_text = [share for token, share in enumerate(shares) if token not in self._shown]
            facts["images"] = (
                f"{len(self.pictures)}, {len(of_images):,} tokens: {_mean(of_images):.0%} of their KVs stayed after "
                f"the prompt, {_mean(of_text):.0%} of the text's"
            )
        if self.report is not None:
            budget = self.report.kv_budget
            facts["KV budget"] = "above all it could need" if budget is None else f"{budget:,} per row"
            facts["KV memory"] = (
                f"{format_bytes(self.report.bytes_held)} held, {format_bytes(self.report.bytes_freed)} freed"
            )
            facts["rounds"] = f"{self.report.rounds:,} in {self.report.seconds * 1e3:.1f} ms"
        return facts


class KeptTokens:
    """A `RequestObserver` that keeps what it is called with, by layer and head; empty: it was not called."""

    def __init__(self) -> None:
        self.after_prompt = KeptKVs((), ())
        self.at_end = KeptKVs((), ())

    def first_token(self, kept: KeptKVs) -> None:
        self.after_prompt = kept

    def finished(self, kept: KeptKVs) -> None:
        self.at_end = kept


def read_tokens(tokenizer: Any, token_ids: Sequence[int]) -> tuple[Token, ...]:
    """Return what each token adds to the text, special tokens included; all together they are the text.

    Args:
        tokenizer: of transformers; None: tokens have their ids for a text.
    """
    if tokenizer is None:
        return tuple(Token(token, f"{token} ") for token in token_ids)
    stream = TextStream(tokenizer, SamplingParams(skip_special_tokens=False))
    texts = []
    for token in token_ids:
        stream.push(token)
        texts.append(stream.take_delta())
    stream.finish()
    texts[-1] += stream.take_delta()
    return tuple(map(Token, token_ids, texts))


def _mean(shares: Sequence[float]) -> float:
    return sum(shares) / max(len(shares), 1)


def inspect_prompt(
    llm: LLM, prompts: PromptTokenizer, prompt: Prompt | Sequence[Message], params: SamplingParams
) -> Inspection:
    """Answer one prompt, or a conversation, and report which tokens survived eviction, in which layer and head.

    The eviction round after the prompt comes before the answer's second token, so `max_tokens` is at least 2. An
    answer that ends with its first token has no such round and keeps all KVs.

    Raises:
        InvalidRequestError: as `LLM.generate`; a policy that re-assigns positions; n above 1.
        RequestFailedError: the request failed while it was computed.
    """
    if params.n != 1:
        raise InvalidRequestError(f"n must be 1 for inspect, got {params.n}")
    if params.max_tokens == 1:
        params = replace(params, max_tokens=2)
    observer = KeptTokens()
    opened, images = prompts.open_images(prompt)
    tokenized = llm.tokenize_chat(opened) if is_conversation(prompt) else llm.tokenize(opened)
    request = llm.new_request(tokenized, params, observer=observer, final_only=True)
    [output] = llm.driver.finish([request])
    output.raise_for_error()
    [eviction] = requested_eviction(llm.config, params)
    return Inspection.of(output, observer, eviction, llm.tokenizer, images)
