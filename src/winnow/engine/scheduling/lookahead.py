"""The next step, planned before the tokens of the one in progress are known, so that a device need not wait."""

from winnow.cache import Ledger
from winnow.engine.plan import LAST_SAMPLED, PlannedSequence, StepPlan
from winnow.engine.requests.request import Sequence
from winnow.engine.scheduling.accounts import TenantAccounts
from winnow.engine.scheduling.eviction_scheduler import EvictionScheduler
from winnow.engine.scheduling.plan_builder import ScheduledStep
from winnow.engine.scheduling.queue import WaitingQueue
from winnow.engine.scheduling.running import Running


class Lookahead:
    """Planner of steps in which all that runs decodes, as after the step before, and nothing else can happen.

    A sequence may end with a token that is not known yet: then the step computes one more of it, which is dropped.
    """

    def __init__(
        self,
        ledger: Ledger,
        running: Running,
        waiting: WaitingQueue,
        accounts: TenantAccounts,
        rounds: EvictionScheduler,
    ) -> None:
        layout = ledger.layout
        # Blocks leave, or values move, in every step.
        self._is_regular = not layout.has_windows and layout.value_tier is None and not accounts.has_quotas
        self._ledger = ledger
        self._running = running
        self._waiting = waiting
        self._rounds = rounds

    def plan(self, step: ScheduledStep) -> ScheduledStep | None:
        """Plan the step after `step`, and take the blocks that it needs. None: it has to wait for results."""
        update = step.plan.update
        # Should `step` fail, only the update after it is said again: it has lost nothing if all it did was to grow.
        if not self._is_regular or self._waiting or update.closed or update.copies:
            return None
        continuing = [
            (entry, sequence)
            for entry, sequence in zip(step.plan.entries, step.sequences, strict=True)
            if not sequence.finished
        ]
        if len(continuing) < max(len(self._running), 1) or not all(
            _decodes_next(*each) for each in continuing
        ):
            return None
        if self._rounds.may_follow([(sequence, entry.end) for entry, sequence in continuing]):
            return None
        slots, counts = [entry.slot for entry, _ in continuing], [1] * len(continuing)
        if not self._ledger.has_room_for(self._ledger.demand(slots, counts)):
            return None
        self._ledger.append(slots, counts)
        entries = tuple(
            PlannedSequence(entry.slot, entry.end, [LAST_SAMPLED], (entry.slot,)) for entry, _ in continuing
        )
        sequences = tuple(sequence for _, sequence in continuing)
        following = ScheduledStep(StepPlan(entries, self._ledger.take_update()), sequences, sequences)
        return self._rounds.foresee(following)


def _decodes_next(entry: PlannedSequence, sequence: Sequence) -> bool:
    """Return whether a sequence computes the token that it samples in this step, whichever that is."""
    request = sequence.request
    return (
        entry.samplers == (entry.slot,)
        # Not where it continues from what rounds of a session left.
        and not (sequence.eviction is None and sequence.kv.last_round)
        and request.observer is None
        and request.params.structured_outputs is None  # the form leads the next token by this one
        and not request.params.bad_words  # and so may a word's beginning
        and sequence.num_output_tokens + 1 < request.max_tokens
    )
