"""A replay: the context is asked to be repeated behind its own cache, so that attention tells what that takes."""

from collections.abc import Sequence
from dataclasses import dataclass

from winnow.cache.layout import ceil_div
from winnow.errors import ConfigError, ContextLengthError

# A replay in chunks shorter than this, where the context is longer, would ask more than it repeats.
_LEAST_CHUNK = 64


@dataclass(frozen=True)
class Replay:
    """How the context is asked to be repeated, chunk by chunk, each behind the whole context (KVzip's code)."""

    chunk: int = 2048
    """Tokens repeated in one pass. Fewer where the model's positions behind the context do not suffice."""
    first: str = "Repeat the previous context exactly."
    """Asks for the first chunk, after an empty line."""
    later: str = "Repeat the part of the previous context exactly, starting with"
    """Asks for each later chunk, after an empty line; the last tokens of the chunk before follow."""
    starting: int = 8
    """How many of them."""
    every: int = 1
    """Of the repeated tokens' queries only each `every`-th counts: cheaper, and less exact."""

    def __post_init__(self) -> None:
        for name in ("chunk", "every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of a replay must be at least 1, got {getattr(self, name)}")
        if self.starting < 0:
            raise ConfigError(f"starting of a replay must be at least 0, got {self.starting}")


@dataclass(frozen=True)
class Instruction:
    """A replay's words as tokens of a model. All empty where the model has no tokenizer."""

    first: tuple[int, ...] = ()
    later: tuple[int, ...] = ()
    template: int = 0
    """First tokens of the context that a chat template wrote; they are not repeated."""
    answer: tuple[int, ...] = ()
    """What the template writes between a question and its answer; empty outside a template."""


@dataclass(frozen=True)
class ReplayPass:
    """One chunk of the context, asked for and repeated behind the context.

    Attributes:
        token_ids: what is computed: the instruction, then the chunk.
        head: first tokens of the context whose KVs take part in every pass (sinks, a template).
        start, end: the chunk's tokens in the context, half-open.
        context_len: tokens of the context; the pass takes the positions from there on.
        every: of the queries each so-many-th counts.
    """

    token_ids: tuple[int, ...]
    head: int
    start: int
    end: int
    context_len: int
    every: int = 1

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def num_judged(self) -> int:
        """KVs of the context whose scores the pass raises."""
        return self.head + self.end - self.start


def replay_passes(
    replay: Replay, context_ids: Sequence[int], instruction: Instruction, sinks: int, positions: int
) -> tuple[ReplayPass, ...]:
    """The passes that repeat a context.

    Args:
        sinks: first KVs that the round keeps.
        positions: tokens, context and pass together, that the model takes.

    Raises:
        ContextLengthError: the context leaves no positions for a replay.
    """
    context_len, first = len(context_ids), min(instruction.template, len(context_ids))
    asked = max(
        len(instruction.first), len(instruction.later) + (replay.starting if instruction.later else 0)
    )
    repeated = context_len - first
    least = min(_LEAST_CHUNK, replay.chunk, repeated)
    taken = context_len + asked + len(instruction.answer)
    if positions < taken + least:
        raise ContextLengthError(
            f"a replay behind a context of {context_len} tokens needs {taken + least - context_len} positions more, "
            f"and the context of the model has {positions} (max_model_len)"
        )
    room, chunk = positions - taken, replay.chunk
    if room < min(chunk, repeated):
        chunk = ceil_div(repeated, ceil_div(repeated, room))  # all alike, instead of a scrap at the end
    passes = []
    for start in range(first, context_len, chunk):
        end = min(start + chunk, context_len)
        words = instruction.first
        if start > first and instruction.later:
            words = instruction.later + tuple(context_ids[max(start - replay.starting, first) : start])
        token_ids = words + instruction.answer + tuple(context_ids[start:end])
        head = max(first, min(sinks, start))
        passes.append(ReplayPass(token_ids, head, start, end, context_len, replay.every))
    return tuple(passes)
