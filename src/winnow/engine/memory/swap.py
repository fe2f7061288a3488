"""Private copies of running sequences in host memory, or their tokens computed again, whichever is cheaper."""

from collections import Counter
from collections.abc import Callable, Sequence as SequenceType
from dataclasses import replace

from winnow.cache import HostTierError, Ledger
from winnow.engine.executor import Executor
from winnow.engine.memory.swap_costs import SwapCosts
from winnow.engine.plan import StepPlan
from winnow.engine.requests.request import KVState, Sequence
from winnow.values.tenants import TenantName, TenantTable

# Assumed until prompts have been computed: victims are compared by tokens then.
_SECONDS_PER_TOKEN = 1e-3


class Swap:
    """Ways of running sequences out of the cache, and of swapped ones back.

    A swapped sequence has a private copy of all its rows in the host tier, also of blocks that others hold, and comes
    back into blocks of its own. One without a copy computes its tokens again. The cheaper way is taken, by what copies
    and steps have cost so far. Of a compressed sequence a copy is made wherever there is room: to recompute its kept
    set, its rounds and replays would have to be repeated. `total` counts by fields of `RequestMetrics`, `host_bytes` by
    tenant.
    """

    def __init__(
        self, executor: Executor, ledger: Ledger, clock: Callable[[], float], tenants: TenantTable
    ) -> None:
        self.costs, self.total = SwapCosts(), Counter[str]()
        self.host_bytes: Counter[TenantName] = Counter()
        self._executor, self._ledger, self._clock, self._tenants = executor, ledger, clock, tenants
        self._any_dropped = False

    def loss(self, sequence: Sequence) -> float:
        """Return seconds that preempting a running sequence costs per byte that this frees."""
        slot = sequence.kv.running_slot
        freed = self._ledger.num_freed_by(slot) * self._ledger.layout.block_bytes
        if not freed:
            return float("inf")
        seconds = self._recompute_seconds(sequence)
        nbytes = self._room_for_copy(sequence)
        swap = None if nbytes is None else self.costs.swap_seconds(nbytes)
        if swap is not None:
            seconds = swap if _is_compressed(sequence) else min(swap, seconds)
        return seconds / freed

    def copy_bytes(self, slot: int) -> int:
        return self._ledger.host.nbytes(self._ledger.lengths[slot], self._executor.state_bytes(slot))

    def drop(self, sequence: Sequence) -> None:
        """Drop the KVs of a running sequence, or the copy of a waiting one, if it has any. It keeps its tokens and
        computes them again when there is room."""
        self._any_dropped = True
        sequence.num_tokens_computed = max(sequence.num_tokens_computed, sequence.kv.num_computed)
        if sequence.kv.slot is not None:
            self._ledger.close(sequence.kv.slot)
        elif sequence.kv.host_id is not None:
            self._discard_copy(sequence)
        sequence.kv = KVState()

    def fits(self, sequence: Sequence) -> bool:
        """Return whether there are a slot, blocks and pages for a swapped sequence and its next token."""
        demand = self._ledger.demand_of(_host_id(sequence), 1)
        return self._ledger.num_free_slots > 0 and self._ledger.has_room_for(demand)

    def resume(self, sequence: Sequence) -> None:
        """Restore a swapped sequence that fits to a slot; without one it must compute its tokens again."""
        host_id, start, ledger = _host_id(sequence), self._clock(), self._ledger
        try:
            self._executor.apply(ledger.take_update())
            slot = ledger.open()
            try:
                ledger.load(host_id, slot)
                nbytes = self._copy(host_id, back=True)
            except BaseException:
                ledger.close(slot)
                raise
        except BaseException as error:
            self.drop(sequence)
            if isinstance(error, HostTierError):
                return
            raise
        self._discard_copy(sequence)
        sequence.kv = replace(sequence.kv, slot=slot, host_id=None)
        self._count(sequence, swap_bytes_in=nbytes, swap_seconds=self._clock() - start)

    def record_step(self, plan: StepPlan, sequences: SequenceType[Sequence], seconds: float) -> None:
        self.costs.record_step(plan, seconds)
        if not self._any_dropped:
            return
        for entry, sequence in zip(plan.entries, sequences, strict=True):
            if entry.replay is None and entry.start < sequence.num_tokens_computed:
                tokens = min(entry.end, sequence.num_tokens_computed) - entry.start
                share = seconds * tokens / plan.num_tokens
                self._count(sequence, recomputed_tokens=tokens, recompute_seconds=share)

    def _discard_copy(self, sequence: Sequence) -> None:
        host_id = _host_id(sequence)
        self.host_bytes[sequence.request.tenant] -= self._ledger.host.copies[host_id].nbytes
        self._ledger.discard(host_id)

    def _room_for_copy(self, sequence: Sequence) -> int | None:
        """Return bytes of a running sequence's copy in the host tier; None: it may not have one, or has no room."""
        request, host = sequence.request, self._ledger.host
        # A copy comes back without what was reserved.
        if not host.limit or request.reserved_tokens is not None:
            return None
        nbytes = self.copy_bytes(sequence.kv.running_slot)
        limit = int(self._tenants.of(request.tenant).host_limit * host.limit)
        allowed = self.host_bytes[request.tenant] + nbytes <= limit
        return nbytes if allowed and host.has_room_for(nbytes) else None

    def _prefers_swap(self, sequence: Sequence) -> bool:
        nbytes = self._room_for_copy(sequence)
        if nbytes is None or _is_compressed(sequence):
            return nbytes is not None
        swap = self.costs.swap_seconds(nbytes)
        recompute = self.costs.recompute_seconds(sequence.kv.num_computed)
        return swap is None or recompute is None or swap <= recompute

    def _recompute_seconds(self, sequence: Sequence) -> float:
        num_tokens = sequence.kv.num_computed
        seconds = self.costs.recompute_seconds(num_tokens)
        if seconds is None:
            seconds = num_tokens * _SECONDS_PER_TOKEN
        return seconds + sequence.rounds.seconds + sequence.replay.seconds

    def save(self, sequence: Sequence) -> bool:
        """Copy a sequence to the host and close its slot. Returns False, with nothing changed, if memory lacks, or it
        is cheaper to compute its tokens again."""
        if not self._prefers_swap(sequence):
            return False
        start, slot, ledger = self._clock(), sequence.kv.running_slot, self._ledger
        self._executor.apply(ledger.take_update())
        host_id = ledger.save(slot, self._executor.state_bytes(slot))
        try:
            nbytes = self._copy(host_id, back=False)
        except BaseException as error:
            ledger.discard(host_id)
            if isinstance(error, HostTierError):
                return False
            raise
        ledger.close(slot)
        sequence.kv = replace(sequence.kv, slot=None, host_id=host_id, last_served=-1)
        self.host_bytes[sequence.request.tenant] += nbytes
        self._count(sequence, num_swaps=1, swap_bytes_out=nbytes, swap_seconds=self._clock() - start)
        return True

    def _copy(self, host_id: int, *, back: bool) -> int:
        """Make the copy that the ledger has planned. Returns its bytes."""
        start, nbytes = self._clock(), self._ledger.host.copies[host_id].nbytes
        self._executor.apply(self._ledger.take_update())
        self.costs.record_copy(nbytes, self._clock() - start, back=back)
        return nbytes

    def _count(self, sequence: Sequence, **more: float) -> None:
        request = sequence.request
        request.update_metrics(**{name: getattr(request.metrics, name) + n for name, n in more.items()})
        self.total.update(more)


def _host_id(sequence: Sequence) -> int:
    assert sequence.kv.host_id is not None, "only a swapped sequence has a copy"
    return sequence.kv.host_id


def _is_compressed(sequence: Sequence) -> bool:
    """Return whether a round or a part of a replay would have to be repeated."""
    kv = sequence.kv
    return bool(kv.last_round or kv.passes_done or kv.replayed)
