"""Request that eviction gets with a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from winnow.errors import ConfigError, WinnowError
from winnow.values.checks import Limits, check_integer, check_number, parameter

AUTO = "auto"
"""The `compression` that the engine decides on, request by request."""
MAX_COMPRESSION = 1e6
MAX_PROTECT = 1024  # spans


def check_one_amount(compression: Any, kv_budget: Any, error: type[WinnowError] = ConfigError) -> None:
    if compression is not None and kv_budget is not None:
        raise error(f"compression and kv_budget mean the same, give one; got {compression} and {kv_budget}")


@dataclass(frozen=True)
class Amount:
    """Number of KVs that stay of a context: by one of both fields, or by neither, which leaves it to the policy.

    Attributes:
        compression: tokens of the context per KV kept in each row on average, at least 1.
        kv_budget: KVs kept in each row on average, at least 1.
    """

    compression: float | None = None
    kv_budget: int | None = None

    def __post_init__(self) -> None:
        if self.compression is not None:
            check_number("compression", self.compression, 1)
        if self.kv_budget is not None:
            check_integer("kv_budget", self.kv_budget, 1)
        check_one_amount(self.compression, self.kv_budget)

    def over(self, codec_factor: float) -> "Amount":
        """Return the amount of KVs with these bytes, where a codec makes each KV `codec_factor` times smaller."""
        return self if self.compression is None else Amount(max(self.compression / codec_factor, 1.0))

    @property
    def label(self) -> str:
        if self.kv_budget is not None:
            return f"{self.kv_budget} KVs"
        return "" if self.compression is None else f"{self.compression:g}x"

    @property
    def order(self) -> tuple[bool, bool, float]:
        """Key that sorts compressions up, then budgets down, so that what keeps least stands last; neither: behind."""
        amount = self.compression or -(self.kv_budget or 0)
        return self == OWN_AMOUNT, self.kv_budget is not None, amount


OWN_AMOUNT = Amount()


@dataclass(frozen=True)
class Protected:
    """Tokens of a prompt by what they are: those of the words `text`, or of pictures where it is None."""

    text: str | None


@dataclass(frozen=True, kw_only=True)
class EvictionRequest:
    """Choice of the KVs of a request that stay, and what is known of its prompt.

    Attributes:
        eviction: what decides which KVs of this request stay: a preset's name or an `EvictionPolicy`; None: what the
            engine was opened with.
        compression: tokens of the prompt per KV kept in each row on average, or a list of n such numbers, one for
            each sample, to compare them after computing the prompt once; "auto": every KV while memory suffices, and
            fewer where that pays; None: as the engine's. Where the engine's own counts bytes and no `eviction` is
            named, so does a number, less what the engine's format of KVs saves.
        kv_budget: KVs kept in each row on average, in place of `compression`; also a list of n.
        context_tokens: tokens at the front of the prompt that are judged without the rest, which is kept whole:
            the KVs that stay then do not depend on the question that follows. None: all of the prompt.
        template_tail: tokens at the prompt's end that follow the question: what a chat template ends with, and a
            prefix of the answer. Scores without a window keep them; a window may end before them
            (`Window.skip_template`). None: what `LLM.chat` finds; 0 for prompts without a template.
        answer_prefix: of `template_tail`, tokens at the prompt's end that begin the answer. Their queries look for the
            rest of it, so windows end with them and not before the tail. None: 0.
        protect: what of the prompt is never evicted: positions as pairs (start, end), end excluded; {"images": True},
            its pictures; {"text": words}, all places where these words stand, letter by letter.
    """

    eviction: Any = None
    compression: float | str | Sequence[float] | None = parameter(None, Limits(1, MAX_COMPRESSION))
    kv_budget: int | Sequence[int] | None = parameter(None, Limits(1))
    context_tokens: int | None = parameter(None, Limits(1))
    template_tail: int | None = parameter(None, Limits(0))
    answer_prefix: int | None = parameter(None, Limits(0))
    protect: Sequence[Any] = parameter((), most=MAX_PROTECT)


EVICTION_FIELDS = tuple(each.name for each in fields(EvictionRequest))
