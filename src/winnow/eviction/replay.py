"""Replays: prompts behind the context's own KVs that repeat it, so that attention shows which KVs that needs."""

from collections.abc import Sequence
from dataclasses import dataclass

from winnow.cache.layout import ceil_div
from winnow.errors import ConfigError, ContextLengthError

# In shorter chunks the instruction would outweigh the repeated text.
_LEAST_CHUNK = 64


@dataclass(frozen=True)
class Replay:
    """Settings of a replay, which repeats the context chunk by chunk, each behind the whole context (KVzip's code)."""

    chunk: int = 2048
    """Tokens repeated in one pass; fewer if the model has too few positions behind the context."""
    first: str = "Repeat the previous context exactly."
    """Instruction for the first chunk, after an empty line."""
    later: str = "Repeat the part of the previous context exactly, starting with"
    """Instruction for each later chunk, after an empty line; the last tokens of the previous chunk follow."""
    starting: int = 8
    """Number of these last tokens."""
    every: int = 1
    """Use the queries of every `every`-th repeated token only: cheaper and less exact."""
    own_part: bool = False
    """Let a pass attend to the chunk that it repeats, and not to the others: cheaper with chunks below the context."""

    def __post_init__(self) -> None:
        for name in ("chunk", "every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of a replay must be at least 1, got {getattr(self, name)}")
        if self.starting < 0:
            raise ConfigError(f"starting of a replay must be at least 0, got {self.starting}")


@dataclass(frozen=True)
class Instruction:
    """The token ids of a replay's instructions. All empty if the model has no tokenizer."""

    first: tuple[int, ...] = ()
    later: tuple[int, ...] = ()
    template: int = 0
    """Number of first context tokens that come from a chat template; they are not repeated."""
    answer: tuple[int, ...] = ()
    """Tokens of the template between question and answer; empty without a template."""


@dataclass(frozen=True)
class ReplayPass:
    """One chunk of the context, requested and repeated behind the context.

    Attributes:
        token_ids: the instruction, then the chunk.
        head: number of first context tokens whose KVs take part in every pass (sinks, a template).
        start, end: the chunk's tokens in the context, half-open.
        context_len: tokens of the context; the pass takes the positions from there on.
        every: use every `every`-th query.
        own_part: attend to the first `head` KVs, the chunk and the pass alone.
    """

    token_ids: tuple[int, ...]
    head: int
    start: int
    end: int
    context_len: int
    every: int = 1
    own_part: bool = False

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def num_judged(self) -> int:
        """KVs of the context whose accumulators the pass raises."""
        return self.head + self.end - self.start


def replay_passes(
    replay: Replay, context_ids: Sequence[int], instruction: Instruction, sinks: int, positions: int
) -> tuple[ReplayPass, ...]:
    """Return the passes that repeat a context.

    Args:
        sinks: number of first KVs that the round protects.
        positions: maximum length of context and pass together, in tokens.

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
        chunk = ceil_div(repeated, ceil_div(repeated, room))  # equal chunks rather than a short last one
    passes = []
    for start in range(first, context_len, chunk):
        end = min(start + chunk, context_len)
        words = instruction.first
        if start > first and instruction.later:
            words = instruction.later + tuple(context_ids[max(start - replay.starting, first) : start])
        token_ids = words + instruction.answer + tuple(context_ids[start:end])
        head = max(first, min(sinks, start))
        passes.append(ReplayPass(token_ids, head, start, end, context_len, replay.every, replay.own_part))
    return tuple(passes)
