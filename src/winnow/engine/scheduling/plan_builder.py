"""What a step computes of each sequence: what its plan says, and what is known once its tokens are."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence as SequenceType
from dataclasses import dataclass

import numpy as np

from winnow.engine.memory.memory import Memory
from winnow.engine.plan import NewSequence, PlannedSequence, StepPlan
from winnow.engine.requests.request import Sequence
from winnow.engine.scheduling.accounts import TenantAccounts
from winnow.engine.scheduling.drafts import Drafts
from winnow.engine.scheduling.queue import WaitingQueue
from winnow.engine.scheduling.running import Running


@dataclass(frozen=True)
class ScheduledStep:
    """Plan with the sequences of its entries, samplers and evictions; the executor sees their slots only."""

    plan: StepPlan
    sequences: tuple[Sequence, ...] = ()
    samplers: tuple[Sequence, ...] = ()
    evicting: tuple[Sequence, ...] = ()


def build_plan(
    memory: Memory,
    running: Running,
    waiting: WaitingQueue,
    planned: SequenceType[tuple[Sequence, int]],
    drafts: Mapping[Sequence, list[int]],
) -> ScheduledStep:
    """Return the plan of a step that computes the given number of tokens of each sequence, drafts among them. The
    sequences have room for their tokens. Samples that fork off a prompt join `running` or `waiting`."""
    # Fork last: a forked tail block is shared, and appending to it would need copy-on-write.
    samplers: list[Sequence] = []

    def forked(parent: Sequence, num_computed: int) -> list[Sequence]:
        """Let samples hold what their prompt has after this step. Those without a slot compute it later."""
        forks, parent.forks, started = parent.forks, [], list[Sequence]()
        for fork in forks:
            if memory.fork(parent, fork, num_computed):
                running.enter(fork)
                started.append(fork)
            else:
                waiting.requeue(fork)
        return started

    entries = tuple(
        _entry(sequence, count, samplers, drafts.get(sequence, ()), forked) for sequence, count in planned
    )
    for entry, (sequence, _) in zip(entries, planned, strict=True):
        if sequence.runs and entry.replay is None:
            memory.spans.place(sequence, entry)
    if not entries:
        return ScheduledStep(StepPlan(()))
    new = tuple(map(new_sequence, running.take_entered()))
    plan = StepPlan(entries, memory.take_update(), new)
    return ScheduledStep(plan, tuple(sequence for sequence, _ in planned), tuple(samplers))


def _entry(
    sequence: Sequence,
    count: int,
    sampling: list[Sequence],
    draft: SequenceType[int],
    forked: Callable[[Sequence, int], list[Sequence]],
) -> PlannedSequence:
    """Plan the next `count` tokens of a sequence. Who samples from the last joins `sampling`, forks too."""
    kv, token_ids = sequence.kv, sequence.token_ids
    slot, start = kv.running_slot, kv.num_computed
    if (replay := sequence.next_pass) is not None:
        again = replay.token_ids[kv.replayed : kv.replayed + count]
        return PlannedSequence(slot, start + kv.replayed, list(again), replay=kv.passes_done)
    planned = PlannedSequence(slot, start, token_ids[start : start + count])
    if draft:
        planned.token_ids += draft
        planned.num_drafts = len(draft)
    samples = start + count == len(token_ids) + len(draft)
    if samples:
        planned.samplers = (slot,)
        sampling.append(sequence)
    if sequence.request.params.prompt_logprobs is not None:
        planned.logprobs = _wanted_logprobs(sequence, start, count)
    if sequence.forks and start + count >= sequence.request.fork_at:
        started = forked(sequence, start + count)
        planned.forks = tuple(fork.kv.running_slot for fork in started)
        if samples:
            planned.samplers += planned.forks
            sampling += started
    return planned


def _wanted_logprobs(sequence: Sequence, start: int, count: int) -> tuple[int, int] | None:
    """Return which of a sequence's next tokens predict prompt tokens whose logprobs are asked for and not yet known."""
    request = sequence.request
    if not request.wants_prompt_logprobs or sequence is not request.sequences[0]:
        return None
    # The logits at position p predict token p + 1.
    known = max(start, len(request.prompt_logprobs) - 1)
    last = min(start + count, len(request.prompt_token_ids) - 1)
    return (known, last) if known < last else None


def new_sequence(sequence: Sequence) -> NewSequence:
    return NewSequence(
        sequence.kv.running_slot,
        list(sequence.token_ids),
        sequence.prompt_len - sequence.request.answered,
        sequence.request.params,
        sequence.index,
        sequence.eviction,
        sequence.request.images,
    )


def advance(
    step: ScheduledStep,
    offsets: SequenceType[int] | None,
    memory: Memory,
    drafts: Drafts,
    accounts: TenantAccounts,
) -> None:
    """Count the tokens of a step as computed, and take those back that were proposed and not sampled."""
    lengths = {} if offsets is None else dict(zip(step.samplers, np.diff(offsets).tolist(), strict=True))
    rejected: dict[int, int] = {}
    computed = []
    for entry, sequence in zip(step.plan.entries, step.sequences, strict=True):
        if sequence.finished:  # since the step was submitted
            continue
        if entry.replay is not None:
            sequence.kv.replayed += entry.count
            continue
        accepted = lengths.get(sequence, 1) - 1
        if entry.num_drafts:
            drafts.count(sequence, entry.num_drafts, accepted)
            if accepted < entry.num_drafts:
                rejected[entry.slot] = entry.num_drafts - accepted
                if memory.layout.state_bytes:  # a state has no tokens: all are computed again
                    rejected[entry.slot] = entry.count
                    drafts.again += accepted + 1
        known = entry.count - entry.num_drafts
        sequence.kv.num_computed = end = entry.end - rejected.get(entry.slot, 0)
        computed.append((sequence, entry, end, entry.token_ids[known : end - entry.start]))
    memory.record(computed, rejected)
    counts = Counter[str | None]()
    for sequence in step.samplers:
        if not sequence.finished:
            counts[sequence.request.tenant] += lengths.get(sequence, 1)
    for tenant, count in counts.items():
        accounts.charge(tenant, 0, count)
