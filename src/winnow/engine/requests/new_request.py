"""Request as the caller hands it to an engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from winnow.errors import InvalidRequestError
from winnow.sampling import SamplingParams
from winnow.values.checks import require
from winnow.values.images import PromptImage
from winnow.values.session_request import SessionRequest


class KeptKVs(NamedTuple):
    """KVs that a sequence holds, by layer and head: positions of their tokens, ascending, and weights.

    A row's weight is its sum of e^bias: KVs that it stands for, as many as it holds where none is fitted.
    """

    positions: Sequence[Sequence[Sequence[int]]]
    weights: Sequence[Sequence[float]]


class RequestObserver(Protocol):
    """Observer of KVs that a request's first sample keeps, between steps; what it raises fails the request."""

    def first_token(self, kept: KeptKVs) -> None:
        """Handle the first output token, once it has been computed, after the prompt's last eviction round. Not called
        if the answer ends with its first token, which is never computed."""

    def finished(self, kept: KeptKVs) -> None:
        """Handle the end of the answer by its own, before its KVs are freed; not after an abort."""


@dataclass(frozen=True)
class NewRequest:
    """A request on its way to an engine.

    Attributes:
        request_id: unique among unfinished requests.
        prompt: the text that outputs repeat; None: there is none.
        token_ids: the prompt, at least one token.
        priority: greater is served first; ties go to the earlier request.
        tenant: on whose account the request runs; None: no tenant.
        observer: paged engine only.
        final_only: return one output, when the request is finished, instead of one per step.
        deltas: each output holds the text, tokens and logprobs that are new since the one before it, so that a long
            answer is not copied whole at every token.
        expected: tokens of an answer that this one is compared with: proposed as drafts are, as long as they are right.
        answered: tokens at the prompt's end that are the answer's first: penalties, forms and draws continue there.
        cut_to_memory: a `max_tokens` above what the KV memory holds is cut, not refused.
        session: the conversation that it is a turn of; None: prefixes alone are found.
        documents: tokens of the prompt that are units of their own, which may stand elsewhere in others: half-open, in
            order.
    """

    request_id: str
    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    tenant: str | None = None
    observer: RequestObserver | None = None
    final_only: bool = False
    deltas: bool = False
    session: SessionRequest | None = None
    cut_to_memory: bool = False
    images: tuple[PromptImage, ...] = ()
    documents: tuple[tuple[int, int], ...] = ()
    expected: tuple[int, ...] = ()
    answered: int = 0

    def __post_init__(self) -> None:
        error = InvalidRequestError
        require(type(self.priority) is int, "priority", "an integer", self.priority, error)
        named = self.tenant is None or (isinstance(self.tenant, str) and bool(self.tenant))
        require(named, "tenant", "a name or None", self.tenant, error)
