"""Preemption when blocks run out: of which sequence, and how."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceType
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from winnow.cache import Ledger
from winnow.engine.executor import Executor
from winnow.engine.plan import StepPlan
from winnow.engine.requests.beam_groups import group
from winnow.engine.requests.kv_state import KVState
from winnow.engine.requests.request import Sequence
from winnow.engine.residency.host_copies import HostCopies
from winnow.engine.residency.preemption_costs import MeasuredCosts, PreemptionCosts
from winnow.engine.scheduling.accounts import TenantAccounts
from winnow.engine.scheduling.orders import Order

# Assumed until prompts have been computed: victims are compared by tokens then.
_SECONDS_PER_TOKEN = 1e-3


@dataclass
class PreemptionTally:
    """Tally of preemptions; see `RequestMetrics`, which has the same fields of one request."""

    num_swaps: int = 0
    swap_bytes_out: int = 0
    swap_bytes_in: int = 0
    swap_seconds: float = 0.0
    recomputed_tokens: int = 0
    recompute_seconds: float = 0.0


class VictimPolicy(Protocol):
    def choose(self, running: SequenceType[Sequence]) -> Sequence:
        """Return the sequence to preempt, out of at least one, in the order in which they were admitted."""


class LeastLoss:
    """Choice of the sequence of the lowest priority, where the order minds priorities.

    Ties go, in this order, to those that have advanced since they were last preempted, to the least time lost per byte
    that comes free, and to the one served last.

    The sequence first in the serving order is never preempted for another. Where no tenant has a quota they are all
    that run, so that one continues to its end: whatever the others do, requests end. Else the scheduler offers the
    sequences of tenants that borrow blocks, if there are any (`TenantAccounts.borrowers`), before all others and
    whatever their priority.

    Args:
        loss: seconds that preempting a sequence costs per byte.
        progressed: whether a sequence has computed enough since it was last preempted.
        order: who is served first.
    """

    def __init__(
        self,
        loss: Callable[[Sequence], float],
        progressed: Callable[[Sequence], bool],
        order: Order,
    ) -> None:
        self._loss = loss
        self._progressed = progressed
        self._order = order

    def choose(self, running: SequenceType[Sequence]) -> Sequence:
        rank, level = self._order.rank, self._order.level
        first = min(running, key=rank)
        safe = group(first)  # beams go together
        others = [sequence for sequence in running if sequence not in safe] or [first]
        lowest = min(map(level, others))
        equals = [sequence for sequence in others if level(sequence) == lowest]
        equals = [sequence for sequence in equals if self._progressed(sequence)] or equals
        losses = {sequence: self._loss(sequence) for sequence in equals} if len(equals) > 1 else {}
        least = min(losses.values(), default=0.0)
        return max((s for s in equals if losses.get(s, 0.0) <= least), key=rank)


class Preemption:
    """Preemption of running sequences, and resumption of swapped ones.

    A swapped sequence has a private copy of all its rows in the host tier, also of blocks that others hold, and comes
    back into blocks of its own. One without a copy computes its tokens again. The cheaper way is taken, by what copies
    and steps have cost so far. Of a compressed sequence a copy is made wherever there is room: to recompute its kept
    set, its rounds and replays would have to be repeated.

    Attributes:
        costs: what copies and steps cost.
        total: what all preemptions so far came to.
    """

    def __init__(
        self,
        executor: Executor,
        ledger: Ledger,
        clock: Callable[[], float],
        costs: PreemptionCosts | None = None,
        accounts: TenantAccounts | None = None,
    ) -> None:
        self._accounts = accounts or TenantAccounts((), ledger)
        self.costs = costs or MeasuredCosts()
        self.total = PreemptionTally()
        self._ledger = ledger
        self._clock = clock
        self._any_dropped = False
        self._copies = HostCopies(executor, ledger, clock, self.costs)

    # -- who -----------------------------------------------------------------------------------------------------

    def loss(self, sequence: Sequence) -> float:
        """Return seconds that preempting a running sequence costs per byte that this frees."""
        slot = sequence.kv.running_slot
        freed = self._ledger.num_freed_by(slot) * self._ledger.layout.block_bytes
        if not freed:
            return float("inf")
        seconds = self._recompute_seconds(sequence)
        nbytes = self._copy_bytes(sequence)
        swap = None if nbytes is None else self.costs.swap_seconds(nbytes)
        if swap is not None:
            seconds = swap if _is_compressed(sequence) else min(swap, seconds)
        return seconds / freed

    def has_progressed(self, sequence: Sequence) -> bool:
        """Return whether a sequence got a block of tokens since its last preemption; else it would go to and fro."""
        before = sequence.num_tokens_preempted
        return before is None or sequence.num_tokens - before >= self._ledger.layout.block_size

    # -- how -----------------------------------------------------------------------------------------------------

    def preempt(self, sequence: Sequence, *, alone: bool) -> None:
        """Take the slot and the blocks of a running sequence, so that it can go on later.

        Args:
            alone: nothing else runs, so a copy would find no more room than there is now.
        """
        sequence.num_tokens_preempted = sequence.num_tokens
        metrics = sequence.request.metrics
        sequence.request.update_metrics(num_preemptions=metrics.num_preemptions + 1)
        if alone or not self._prefers_swap(sequence) or not self._swap_out(sequence):
            self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Drop the KVs of a running sequence. It keeps its tokens and computes them again when there is room."""
        self._any_dropped = True
        sequence.num_tokens_computed = max(sequence.num_tokens_computed, sequence.kv.num_computed)
        self._ledger.close(sequence.kv.running_slot)
        sequence.kv = KVState()

    # -- swapped sequences ---------------------------------------------------------------------------------------

    def fits(self, sequence: Sequence) -> bool:
        """Return whether there are a slot, blocks and pages for a swapped sequence and its next token."""
        demand = self._ledger.demand_of(_host_id(sequence), 1)
        return self._ledger.num_free_slots > 0 and self._ledger.has_room_for(demand)

    def resume(self, sequence: Sequence) -> bool:
        """Restore a swapped sequence that fits to a slot. Returns False if it must compute its tokens again."""
        host_id, start = _host_id(sequence), self._clock()
        nbytes = self._ledger.host.copies[host_id].nbytes
        try:
            slot = self._copies.load(host_id)
        except BaseException:
            self.discard(sequence)
            raise
        if slot is None:
            self.discard(sequence)
            return False
        self._discard_copy(sequence)
        sequence.kv = replace(sequence.kv, slot=slot, host_id=None)
        self._count(sequence, swap_bytes_in=nbytes, swap_seconds=self._clock() - start)
        return True

    def discard(self, sequence: Sequence) -> None:
        """Give back the host memory of a waiting sequence, if it has any: it computes its tokens again."""
        self._any_dropped = True
        if sequence.kv.host_id is not None:
            sequence.num_tokens_computed = max(sequence.num_tokens_computed, sequence.kv.num_computed)
            self._discard_copy(sequence)
            sequence.kv = KVState()

    # -- what it costs -------------------------------------------------------------------------------------------

    def record_copies(self, nbytes: int, out: float, back: float) -> None:
        """Record the seconds that copies of `nbytes` to the host and back took."""
        self.costs.record_copy(nbytes, out, back=False)
        self.costs.record_copy(nbytes, back, back=True)

    def record_step(self, plan: StepPlan, sequences: SequenceType[Sequence], seconds: float) -> None:
        """Count the tokens that a step recomputed, and record its time."""
        self.costs.record_step(plan, seconds)
        if not self._any_dropped:
            return
        for entry, sequence in zip(plan.entries, sequences, strict=True):
            if entry.replay is None and entry.start < sequence.num_tokens_computed:
                tokens = min(entry.end, sequence.num_tokens_computed) - entry.start
                share = seconds * tokens / plan.num_tokens
                self._count(sequence, recomputed_tokens=tokens, recompute_seconds=share)

    # -- inside --------------------------------------------------------------------------------------------------

    def _discard_copy(self, sequence: Sequence) -> None:
        host_id = _host_id(sequence)
        self._accounts.host_bytes[sequence.request.tenant] -= self._ledger.host.copies[host_id].nbytes
        self._ledger.discard(host_id)

    def _copy_bytes(self, sequence: Sequence) -> int | None:
        """Return bytes of a running sequence's copy in the host tier; None: it may not have one, or has no room."""
        request, host = sequence.request, self._ledger.host
        # Beams share what they have in common, and a copy comes back without what was reserved.
        if not host.limit or request.beams is not None or request.reserved_tokens is not None:
            return None
        nbytes = self._copies.nbytes(sequence.kv.running_slot)
        held = self._accounts.host_bytes[request.tenant]
        allowed = held + nbytes <= self._accounts.host_limit(request.tenant, host.limit)
        return nbytes if allowed and host.has_room_for(nbytes) else None

    def _prefers_swap(self, sequence: Sequence) -> bool:
        nbytes = self._copy_bytes(sequence)
        if nbytes is None:
            return False
        if _is_compressed(sequence):
            return True
        swap = self.costs.swap_seconds(nbytes)
        recompute = self.costs.recompute_seconds(sequence.kv.num_computed)
        return swap is None or recompute is None or swap <= recompute

    def _recompute_seconds(self, sequence: Sequence) -> float:
        num_tokens = sequence.kv.num_computed
        seconds = self.costs.recompute_seconds(num_tokens)
        if seconds is None:
            seconds = num_tokens * _SECONDS_PER_TOKEN
        return seconds + sequence.rounds.seconds + sequence.replay.seconds

    def _swap_out(self, sequence: Sequence) -> bool:
        """Copy a sequence to the host and close its slot. Returns False, with nothing changed, if copying failed."""
        start, slot = self._clock(), sequence.kv.running_slot
        host_id = self._copies.save(slot)
        if host_id is None:
            return False
        self._ledger.close(slot)
        sequence.kv = replace(sequence.kv, slot=None, host_id=host_id, last_served=-1)
        nbytes = self._ledger.host.copies[host_id].nbytes
        self._accounts.host_bytes[sequence.request.tenant] += nbytes
        self._count(sequence, num_swaps=1, swap_bytes_out=nbytes, swap_seconds=self._clock() - start)
        return True

    def _count(self, sequence: Sequence, **more: float) -> None:
        """Add to the tallies of a request and of all."""
        request = sequence.request
        request.update_metrics(**{name: getattr(request.metrics, name) + n for name, n in more.items()})
        for name, amount in more.items():
            setattr(self.total, name, getattr(self.total, name) + amount)


def kept_on_host(sequence: Sequence, ledger: Ledger) -> Any:
    """Return KVs of the rows of a swapped sequence, int32 [layers, heads], less those of a replay."""
    lengths = ledger.host.copies[_host_id(sequence)].lengths
    return np.minimum(lengths, sequence.kv.num_computed).astype(lengths.dtype)


def _host_id(sequence: Sequence) -> int:
    assert sequence.kv.host_id is not None, "only a swapped sequence has a copy"
    return sequence.kv.host_id


def _is_compressed(sequence: Sequence) -> bool:
    """Return whether a round or a part of a replay would have to be repeated."""
    kv = sequence.kv
    return bool(kv.last_round or kv.passes_done or kv.replayed)
