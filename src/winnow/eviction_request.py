"""Request that eviction gets with a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from winnow.checks import Limits, parameter

MAX_COMPRESSION = 1e6
MAX_PROTECT = 1024  # spans


@dataclass(frozen=True, kw_only=True)
class EvictionRequest:
    """Choice of the KVs of a request that stay, and what is known of its prompt.

    Attributes:
        eviction: what decides which KVs of this request stay: a preset's name or an `EvictionPolicy`; None: what the
            engine was opened with.
        compression: tokens of the prompt per KV kept in each row on average, or a list of n such numbers, one for
            each sample, to compare them after computing the prompt once; None: as the engine's.
        kv_budget: KVs kept in each row on average, in place of `compression`; also a list of n.
        context_tokens: tokens at the front of the prompt that are judged without the rest, which is kept whole:
            the KVs that stay then do not depend on the question that follows. None: all of the prompt.
        template_tail: tokens at the prompt's end that follow the question: what a chat template ends with, and a
            prefix of the answer. Scores without a window keep them; a window may end before them
            (`Window.skip_template`).
            None: what `LLM.chat` finds; 0 for prompts without a template.
        answer_prefix: of `template_tail`, tokens at the prompt's end that begin the answer. Their queries look for the
            rest of it, so windows end with them and not before the tail. None: 0.
        protect: positions of the prompt that are never evicted, as pairs (start, end), end excluded.
        earlier_rounds: rounds that the prompt's front has been through, first to last, as pairs (tokens, KVs kept in
            each row on average). What the last of them that is known has left, in the cache or saved, is compressed
            once more, to this request's amount; where none is known, all is computed.
    """

    eviction: Any = None
    compression: float | Sequence[float] | None = parameter(None, Limits(1, MAX_COMPRESSION))
    kv_budget: int | Sequence[int] | None = parameter(None, Limits(1))
    context_tokens: int | None = parameter(None, Limits(1))
    template_tail: int | None = parameter(None, Limits(0))
    answer_prefix: int | None = parameter(None, Limits(0))
    protect: Sequence[tuple[int, int]] = parameter((), most=MAX_PROTECT)
    earlier_rounds: Sequence[tuple[int, int]] = parameter((), most=MAX_PROTECT)


EVICTION_FIELDS = tuple(each.name for each in fields(EvictionRequest))
"""Names of what a request asks of eviction."""
