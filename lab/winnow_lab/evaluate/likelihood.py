"""Likelihoods of texts after contexts whose KVs a policy cut, by forced decoding, as an answer would have gone.

Scoring context and continuation in one pass would never evict: every token would see all others.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from winnow.errors import EvaluationError, InvalidRequestError
from winnow.eviction import EvictionPolicy
from winnow.llm import LLM
from winnow.outputs import CompletionOutput, EvictionReport
from winnow.sampling import SamplingParams
from winnow.sampling.params import MAX_N
from winnow.values.eviction_request import OWN_AMOUNT, Amount
from winnow_lab.bench.answering import run_all
from winnow_lab.evaluate.cell import Cell


@dataclass(frozen=True)
class Keeping:
    """Choice of the KVs of a context that stay: a policy, and its amount."""

    policy: EvictionPolicy = field(default_factory=EvictionPolicy)
    amount: Amount = OWN_AMOUNT

    @classmethod
    def of(cls, cell: Cell) -> Self:
        return cls(cell.policy, cell.asked)

    def in_rounds(self, every: int | None) -> Self:
        """Return the same with rounds behind the prompt and every `every` tokens; None: with the policy's own."""
        if every is None or self.policy.when.never:
            return self
        own = self.policy.when
        when = replace(own, after_prefill=True, prefill_every=None, within=False, decode_every=every)
        return replace(self, policy=replace(self.policy, when=when))


@dataclass(frozen=True)
class Pair:
    """A context and what may follow it, as token ids; at least one each.

    The context's last token is computed after the prompt's round, against the KVs that stayed, so that this round shows
    in every token of the continuation, the first one too.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class Likelihood:
    """Likelihood of a continuation.

    Attributes:
        logprobs: natural logarithms, one for each of its tokens.
        is_greedy: whether no other token was more probable anywhere: what greedy decoding answers, but for ties.
        eviction: what was kept when the request ended, which has the longest of the continuations that share a context;
            None where nothing was to be taken.
    """

    logprobs: tuple[float, ...]
    is_greedy: bool
    eviction: EvictionReport | None

    @property
    def total(self) -> float:
        return sum(self.logprobs)


def loglikelihoods(
    llm: LLM, pairs: Sequence[Pair], keeping: Keeping | None = None, **options: Any
) -> list[Likelihood]:
    """The likelihood of each pair, in their order. Arguments and errors are those of `score_pairs`."""
    found = dict(score_pairs(llm, pairs, keeping, **options))
    return [found[index] for index in range(len(pairs))]


def score_pairs(
    llm: LLM,
    pairs: Sequence[Pair],
    keeping: Keeping | None = None,
    *,
    on_step: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, Likelihood]]:
    """Yield the index and likelihood of each pair, as they are done.

    A context is computed, and cut, once for all continuations that follow it. The engine's steps are taken here.

    Args:
        keeping: what stays of each context; None: the full cache.

    Raises:
        InvalidRequestError: the engine cannot take one of the pairs; says which, and none is computed.
    """
    for index, pair in enumerate(pairs):
        if not pair.context or not pair.continuation:
            raise EvaluationError(
                f"pairs[{index}] must have a context and a continuation of at least 1 token each, "
                f"got {len(pair.context)} and {len(pair.continuation)}"
            )

    def submitted() -> Iterator[tuple[str, list[int]]]:
        for indices in _sharing_context(pairs, min(MAX_N, llm.config.scheduler.max_num_seqs)):
            first = pairs[indices[0]]
            params = _params(first, [pairs[index].continuation for index in indices], keeping or Keeping())
            try:
                yield llm.submit(first.context, params, final_only=True), indices
            except InvalidRequestError as error:
                raise type(error)(f"pairs[{indices[0]}]: {error}") from None

    for indices, output in run_all(llm, submitted(), on_step):
        for index, answer in zip(indices, output.outputs, strict=True):
            yield index, read_likelihood(answer, len(pairs[index].continuation))


def _sharing_context(pairs: Sequence[Pair], most: int) -> Iterator[list[int]]:
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, pair in enumerate(pairs):
        groups.setdefault(pair.context, []).append(index)
    for group in groups.values():
        for start in range(0, len(group), most):
            yield group[start : start + most]


def _params(first: Pair, continuations: Sequence[tuple[int, ...]], keeping: Keeping) -> SamplingParams:
    return SamplingParams(
        n=len(continuations),
        temperature=0.0,
        # One limit for all: after a shorter continuation the model continues by itself, which is ignored.
        max_tokens=max(len(tokens) for tokens in continuations),
        forced_tokens=continuations,
        logprobs=0,
        detokenize=False,
        eviction=keeping.policy,
        **vars(keeping.amount),
        context_tokens=len(first.context) - 1 or None,
    )


def read_likelihood(answer: CompletionOutput, length: int) -> Likelihood:
    assert answer.logprobs is not None, "logprobs were asked for"
    pairs = zip(answer.token_ids[:length], answer.logprobs[:length], strict=True)
    predicted = [logprobs[token] for token, logprobs in pairs if logprobs is not None]
    return Likelihood(
        tuple(each.logprob for each in predicted), all(each.rank == 1 for each in predicted), answer.eviction
    )


def rolling_pairs(tokens: Sequence[int], prefix: int, context: int) -> list[Pair]:
    """Every token once, in order: stretches of `context` tokens, each after the `context` tokens before it.

    The first stretch follows `prefix` alone, so of a text that is no longer nothing is evicted but by rounds while
    decoding.
    """
    pairs = []
    for start in range(0, len(tokens), context):
        before = tokens[start - context : start] if start else [prefix]
        pairs.append(Pair(tuple(before), tuple(tokens[start : start + context])))
    return pairs
