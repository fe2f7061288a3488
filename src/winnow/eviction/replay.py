"""Replays: prompts behind the context's own KVs that repeat it, so that attention shows which KVs that needs."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from winnow.attention import AttentionSpec, BackendStep, JudgedKVs, PagedCache, ReplayQueries
from winnow.attention.replay import judged_slots, replay_shortened_rows
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
    starting = replay.starting if instruction.later else 0
    asked = max(len(instruction.first), len(instruction.later) + starting)
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


@dataclass(frozen=True)
class ReplaySpan:
    """Tokens of a pass within a packed batch; their KVs are written before they are observed."""

    slot: int  # whose rows hold the context and the pass so far, in the order of positions
    replay: ReplayPass
    tokens: slice
    done: int  # tokens of the pass before them


def observe_replay(step: BackendStep, span: ReplaySpan, layer: int, q: Tensor, spec: AttentionSpec) -> None:
    """Raise accumulator 0 of the context's KVs to the largest attention that they receive from these queries.

    The softmax of a query goes over the context's first KVs (`ReplayPass.head`), those of the chunk that the pass
    repeats, and those of the pass up to the query: as in KVzip, so that the other chunks receive nothing. The
    accumulators of the first two change. Keys are read in place, and only a part of the attention matrix exists at a
    time.

    Args:
        q: [n, Hq, d], the queries of `span.tokens`, rotated at their positions.
    """
    replay, cache = span.replay, step.cache
    held = cache.tables.host_lengths[span.slot, layer, : cache.pool.layout.heads[layer]]
    is_whole = held.min() >= replay.context_len + span.done + len(q)
    if span.done == 0 and is_whole:
        _clear(cache, span, layer)
    first = replay.context_len + span.done
    every = slice(-first % replay.every, None, replay.every)
    counted = range(first, first + len(q))[every]
    if not counted:
        return
    judged = JudgedKVs(replay.head, replay.start, replay.end, replay.context_len)
    found = ReplayQueries(q[every], judged, counted.start, replay.every)
    if is_whole:
        step.replay(layer, span.slot, found, spec)
    else:  # an earlier round has taken some
        replay_shortened_rows(cache, layer, span.slot, found, spec, again=span.done == 0)


def _clear(cache: PagedCache, span: ReplaySpan, layer: int) -> None:
    """Let the KVs that a pass is the first to judge start from 0: they may come from a prefix that others watched."""
    replay = span.replay
    start = 0 if replay.start == replay.head else replay.start
    context = JudgedKVs(0, start, replay.end, replay.context_len)
    slot, _ = judged_slots(cache, layer, span.slot, context, replay.context_len)
    cache.pool.numbers.clear_accumulators(slot, 1)
