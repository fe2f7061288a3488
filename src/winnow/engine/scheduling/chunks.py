"""HOW MANY tokens of a prompt the next step computes."""

from winnow.config import SchedulerConfig
from winnow.engine.executor import Executor
from winnow.engine.memory.memory import Memory
from winnow.engine.requests.request import Sequence
from winnow.engine.scheduling.eviction_scheduler import EvictionScheduler
from winnow.engine.scheduling.running import Running


class Chunks:
    """Chooses how many tokens of a prompt the next step computes.

    Attributes:
        failed: sequences whose pictures cannot be computed, and why.
    """

    def __init__(
        self, config: SchedulerConfig, memory: Memory, rounds: EvictionScheduler, executor: Executor
    ) -> None:
        self._config = config
        self._memory = memory
        self._rounds = rounds
        self._executor = executor
        self.failed: dict[Sequence, str] = {}

    def next(self, sequence: Sequence, budget: int) -> int:
        """Return tokens for a step whose budget is `budget`; 0: it waits, for room or for its pictures."""
        count = self._tokens(sequence, budget)
        images, start = sequence.request.images, sequence.kv.num_computed
        if not images:
            return count
        ready = sequence not in self.failed and self._executor.tower.ready(images, start, start + count)
        sequence.awaits_tower = ready is not True
        if isinstance(ready, str):
            self.failed[sequence] = f"image cannot be computed: {ready}"
        return count if ready is True else 0

    def fail(self, running: Running) -> None:
        """End the requests whose pictures cannot be computed."""
        while self.failed:
            sequence, error = self.failed.popitem()
            running.fail(sequence.request.sequences, error)

    def _tokens(self, sequence: Sequence, budget: int) -> int:
        chunk = self._config.prefill_chunk
        if (replay := sequence.next_pass) is not None:  # what it begins with is compressed once more
            return max(min(replay.length, budget, chunk or budget), 0)
        most, wanted = max(budget, 0), sequence.num_to_compute  # a whole prompt may have overdrawn the budget
        if chunk is not None:
            most = min(budget, chunk)
        elif budget == self._config.max_num_batched_tokens:
            most = wanted  # whole prompts: one that is larger than any budget goes alone
        wanted = min(wanted, self._memory.prefixes.until_state(sequence))
        if sequence.forks:
            wanted = min(wanted, sequence.request.fork_at - sequence.kv.num_computed)
        eviction = sequence.eviction
        if eviction is not None:
            kvs = 0.0 if sequence.kv.slot is None else self._rounds.mean_kvs(sequence)
            wanted = eviction.chunk(sequence.kv.num_computed, sequence.kv.last_round, kvs, wanted, most)
        if chunk is None and wanted > most:
            return 0
        start = sequence.kv.num_computed
        return sequence.request.uncut(start, start + min(wanted, most)) - start
