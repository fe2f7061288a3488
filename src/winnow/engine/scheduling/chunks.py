"""HOW MANY tokens of a prompt the next step computes."""

from winnow.config import SchedulerConfig
from winnow.engine.memory.memory import Memory
from winnow.engine.requests.request import Sequence
from winnow.engine.scheduling.eviction_scheduler import EvictionScheduler


def next_chunk(
    sequence: Sequence, budget: int, config: SchedulerConfig, memory: Memory, rounds: EvictionScheduler
) -> int:
    """Return tokens of a prompt that a step computes whose budget is `budget`; 0: it must wait for more room."""
    chunk = config.prefill_chunk
    if (replay := sequence.next_pass) is not None:  # what it begins with is compressed once more
        return max(min(replay.length, budget, chunk or budget), 0)
    most, wanted = max(budget, 0), sequence.num_to_compute  # a whole prompt may have overdrawn the budget
    if chunk is not None:
        most = min(budget, chunk)
    elif budget == config.max_num_batched_tokens:
        most = wanted  # whole prompts: one that is larger than any budget goes alone
    wanted = min(wanted, memory.prefixes.until_state(sequence))
    if sequence.forks:
        wanted = min(wanted, sequence.request.fork_at - sequence.kv.num_computed)
    eviction = sequence.eviction
    if eviction is not None:
        kvs = 0.0 if sequence.kv.slot is None else rounds.mean_kvs(sequence)
        wanted = eviction.chunk(sequence.kv.num_computed, sequence.kv.last_round, kvs, wanted, most)
    if chunk is None and wanted > most:
        return 0
    start = sequence.kv.num_computed
    return sequence.request.uncut(start, start + min(wanted, most)) - start
