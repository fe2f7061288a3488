"""Forks: sequences that start from the KVs of another one, between two steps."""

from collections.abc import Callable

from winnow.engine.executor import Executor
from winnow.engine.memory.memory import Memory
from winnow.engine.plan import NewSequence
from winnow.engine.requests.request import Request, Sequence
from winnow.engine.scheduling.queue import WaitingQueue
from winnow.engine.scheduling.running import Running


class Forks:
    """Forks of running sequences, which the executor follows."""

    def __init__(
        self,
        memory: Memory,
        executor: Executor,
        clock: Callable[[], float],
        running: Running,
        waiting: WaitingQueue,
    ) -> None:
        self._memory = memory
        self._executor = executor
        self._clock = clock
        self._running = running
        self._waiting = waiting

    def start(self, parent: Sequence, request: Request) -> None:
        """Start a request of one sequence that continues from what `parent` has computed so far.

        It computes its tokens itself, later, where `parent` has no slot or there is none for it.
        """
        [child] = request.sequences
        self._waiting.add(request)
        if self.fork(parent, child):
            self._waiting.remove(child)
            parent.request.forked = request.forked = True
            request.num_cached_tokens = min(child.kv.num_computed, child.prompt_len)
            request.update_metrics(first_scheduled_time=self._clock())

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Give `child`, which begins with the computed tokens of `parent`, its KVs. False: no slot is free."""
        slot = parent.kv.slot
        if slot is None or not self._memory.fork(parent, child):
            return False
        child.prefix = None if parent.prefix is None else parent.prefix.fork()
        self._running.enter(child, announced=True)
        self._executor.apply(self._memory.ledger.take_update())
        self._executor.fork(slot, new_sequence(child))
        return True


def new_sequence(sequence: Sequence) -> NewSequence:
    """Return the description for the executor of a sequence that has just got a slot."""
    return NewSequence(
        sequence.kv.running_slot,
        list(sequence.token_ids),
        sequence.prompt_len,
        sequence.request.params,
        sequence.index,
        sequence.eviction,
        sequence.request.images,
    )
