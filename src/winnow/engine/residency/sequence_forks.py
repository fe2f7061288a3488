"""Sequences that go on from the KVs of another one, between two steps."""

from winnow.cache import Ledger, OutOfBlocksError
from winnow.engine.executor import Executor
from winnow.engine.plan import NewSequence
from winnow.engine.requests.beams import Continuation
from winnow.engine.requests.kv_state import KVState
from winnow.engine.requests.request import Request, Sequence
from winnow.engine.residency.running import Running
from winnow.engine.scheduling.queue import WaitingQueue


class SequenceForks:
    """Forks of the scheduler's sequences in its ledger, which the executor follows.

    Args:
        waiting: where a beam goes that finds no slot.
    """

    def __init__(self, ledger: Ledger, executor: Executor, running: Running, waiting: WaitingQueue) -> None:
        self._ledger = ledger
        self._executor = executor
        self._running = running
        self._waiting = waiting

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Give `child`, which begins with the computed tokens of `parent`, its KVs. False: no slot is free."""
        slot = parent.kv.slot
        own = None if slot is None else fork_slot(self._ledger, slot, child)
        if slot is None or own is None:
            return False
        child.kv = parent.kv.fork(own)
        child.prefix = None if parent.prefix is None else parent.prefix.fork()
        self._running.enter(child, announced=True)
        self._executor.apply(self._ledger.take_update())
        self._executor.fork(slot, new_sequence(child))
        return True

    def continue_beams(self, request: Request, chosen: list[Continuation]) -> dict[int, float]:
        """Replace the beams of the last step by those of the next. Returns the logprob of each.

        The first child of a beam continues in its slot, further ones in slots of beams that end. Where there is none, a
        beam waits, and computes its tokens itself.
        """
        sequences, logprobs = request.sequences, {}
        first = {each.parent: each for each in reversed(chosen)}
        for sequence in sequences:
            sequence.kv.last_served = -1
        ended = [s for s in sequences if s.index not in first]
        for sequence in ended:
            if sequence.kv.slot is not None:
                self._running.close(sequence)
        rest = [each for each in chosen if each is not first[each.parent]]
        for each, child in zip(rest, ended, strict=False):
            parent = sequences[each.parent]
            child.token_ids = [*parent.token_ids, each.token]
            if not self.fork(parent, child):
                child.kv, child.prefix = KVState(), None
                self._waiting.requeue(child)
            logprobs[child.index] = each.logprob
        for each in first.values():
            sequences[each.parent].token_ids.append(each.token)
            logprobs[each.parent] = each.logprob
        return logprobs


def fork_slot(ledger: Ledger, slot: int, child: Sequence) -> int | None:
    """Fork a slot for `child`, with the blocks that it reserves. None: there is no slot, or too few blocks."""
    reserved = child.request.reserved_tokens
    if not ledger.can_fork(slot):
        return None
    # What it shares at first is copied before its next token.
    if reserved is not None and ledger.layout.blocks_for(reserved) > ledger.allocator.num_free:
        return None
    own = ledger.fork(slot)
    if reserved is not None:
        try:
            ledger.reserve(own, reserved)
        except OutOfBlocksError:  # of table pages
            ledger.close(own)
            return None
    return own


def new_sequence(sequence: Sequence) -> NewSequence:
    """Return the description for the executor of a sequence that has just got a slot."""
    return NewSequence(
        sequence.kv.running_slot,
        list(sequence.token_ids),
        sequence.prompt_len,
        sequence.request.sampled_by,
        sequence.index,
        sequence.eviction,
    )
