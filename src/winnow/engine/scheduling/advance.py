"""WHAT a step has computed, once its tokens are known."""

from collections import Counter
from collections.abc import Sequence as SequenceType

import numpy as np

from winnow.engine.memory.memory import Memory
from winnow.engine.scheduling.accounts import TenantAccounts
from winnow.engine.scheduling.drafts import Drafts
from winnow.engine.scheduling.plan_builder import ScheduledStep
from winnow.values.tenants import TenantName


def advance(
    step: ScheduledStep,
    offsets: SequenceType[int] | None,
    memory: Memory,
    drafts: Drafts,
    accounts: TenantAccounts,
) -> None:
    """See `Scheduler.advance`."""
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
                if memory.ledger.layout.state_bytes:  # a state has no tokens: all are computed again
                    rejected[entry.slot] = entry.count
                    drafts.again += accepted + 1
        known = entry.count - entry.num_drafts
        sequence.kv.num_computed = end = entry.end - rejected.get(entry.slot, 0)
        computed.append((sequence, entry.start, end, entry.token_ids[known : end - entry.start]))
    if rejected:
        memory.ledger.take_back(list(rejected), list(rejected.values()))
    for each in computed:  # after it: where rows slide, what they hold says which tokens these are
        memory.prefixes.remember(*each)
    counts: Counter[TenantName] = Counter()
    for sequence in step.samplers:
        if not sequence.finished:
            counts[sequence.request.tenant] += lengths.get(sequence, 1)
    for tenant, count in counts.items():
        accounts.charge(tenant, 0, count)
