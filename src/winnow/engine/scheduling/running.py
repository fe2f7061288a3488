"""Sequences with a slot: who enters, who gives way, who leaves, and whose replays continue."""

from collections.abc import Iterator, Sequence as SequenceType
from typing import Any

from winnow.engine.memory.memory import Memory
from winnow.engine.requests.request import Sequence
from winnow.engine.scheduling.accounts import TenantAccounts
from winnow.engine.scheduling.queue import WaitingQueue
from winnow.engine.scheduling.victims import Victims


class Running(SequenceType[Sequence]):
    """Running sequences, in the order in which they were admitted. No other object adds or removes one."""

    def __init__(self, memory: Memory, waiting: WaitingQueue, accounts: TenantAccounts) -> None:
        self.num_preemptions = 0
        self._memory, self._waiting = memory, waiting
        self.victims = Victims(memory, waiting, accounts)
        self._sequences: list[Sequence] = []
        self._entered: dict[Sequence, None] = {}
        self._failed: list[Sequence] = []
        self._num_ended = self._ended_tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: Any) -> Any:
        return self._sequences[index]

    def __iter__(self) -> Iterator[Sequence]:  # the default one calls `__getitem__` for each
        return iter(self._sequences)

    @property
    def mean_answer(self) -> int | None:
        """Tokens of an answer that ended, on average; None: none has."""
        return max(self._ended_tokens // self._num_ended, 1) if self._num_ended else None

    def enter(self, sequence: Sequence, *, announced: bool = False) -> None:
        """Add a sequence that has got a slot. The next plan introduces it to the executor, unless it is `announced`."""
        self._sequences.append(sequence)
        if not announced:
            self._entered[sequence] = None

    def take_entered(self) -> list[Sequence]:
        """Return the sequences that entered since the last call and still have a slot."""
        entered, self._entered = [s for s in self._entered if s.kv.slot is not None], {}
        return entered

    def finish(self, sequence: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        # An aborted or refused request says nothing about the length of answers.
        if not sequence.request.expected and reason != "abort":
            self._num_ended += 1
            self._ended_tokens += sequence.num_output_tokens
        if sequence.kv.slot is not None:
            self._sequences.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._memory.release(sequence)
        if not self._sequences:
            self._memory.flush()

    def fail(self, sequences: SequenceType[Sequence], error: str) -> None:
        for each in sequences:
            if not each.finished:
                each.error = error
                self.finish(each, "error")
                self._failed.append(each)

    def take_failed(self) -> list[Sequence]:
        """Return sequences that ended since the last call without a step, with the reason set."""
        failed, self._failed = self._failed, []
        return failed

    def preempt(self, victim: Sequence | None = None) -> None:
        """Preempt `victim`, or the sequence that loses least, of a tenant that borrows blocks if there are any.

        Admission has found that each request fits alone. Should one not, it fails, and those behind it continue: who
        waits while nothing runs, and who for the second time is preempted for itself alone without progress.
        """
        if not self._sequences:
            first = self._waiting.first
            assert first is not None, "a sequence lacks room"
            if first.kv.host_id is not None:
                self._memory.drop(first)
            else:
                self._fail(first)
            return
        victim = victim or self.victims.for_blocks(self)
        alone = self._sequences == [victim]
        if alone:
            if victim.preempted_alone_at == victim.num_tokens:
                self._fail(victim)
                return
            victim.preempted_alone_at = victim.num_tokens
        self.park(victim, alone=alone)

    def park(self, victim: Sequence, *, alone: bool = False) -> None:
        self._memory.preempt(victim, alone=alone)
        self._requeue(victim)
        self.num_preemptions += 1

    def recompute_all(self) -> None:
        """Compute all running sequences again: after a step that failed half-way their KVs are not to be trusted."""
        self._memory.distrust_all()
        for sequence in self._sequences[::-1]:
            self._memory.drop(sequence)
            self._requeue(sequence)

    def own(self, sequence: Sequence) -> bool:
        """Make a running sequence the only holder of its blocks.

        While memory lacks, since others hold shared blocks, sequences give way, as where decoding finds no room: who is
        served first continues. False: the sequence itself gave way.
        """
        while not self._memory.own(sequence):
            self.preempt()
            if sequence.kv.slot is None:
                return False
        return True

    def drop_finished_passes(self) -> None:
        for sequence in self:
            replay = sequence.next_pass
            if replay is not None and sequence.kv.replayed == replay.length:
                self._memory.drop_replay(sequence)
                sequence.kv.passes_done += 1

    def replaying(self) -> tuple[set[Sequence], dict[Sequence, int]]:
        """Return sequences that must wait for the round after their replay, and of those with a pass its missing
        tokens.

        Samples of one prompt that hold the same KVs have one replay among them, and then share what its round leaves.
        """
        before = {s for s in self if s.before_replay_round}
        missing: dict[Sequence, int] = {}
        led: set[Sequence] = set()
        # Who is furthest leads: another may have taken its place while it waited for a round.
        for sequence in sorted(
            before, key=lambda s: (s.kv.passes_done, s.kv.replayed, -s.index), reverse=True
        ):
            if sequence not in led:
                led.update(self.siblings(sequence))
                if (replay := sequence.next_pass) is not None:
                    missing[sequence] = replay.length - sequence.kv.replayed
        return before, missing

    def siblings(self, leader: Sequence) -> list[Sequence]:
        """Return samples of the same prompt that still hold the very same blocks."""
        sharing = list(self._memory.sharing(leader.request.sequences))
        return [
            s
            for s in (sharing if leader in sharing else ())
            if s is not leader
            and s.kv.num_computed == leader.kv.num_computed
            and s.eviction == leader.eviction
        ]

    def _requeue(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)
        self._waiting.requeue(sequence)

    def _fail(self, sequence: Sequence) -> None:
        sequence.error = self._memory.explain_lack(sequence)
        # Other samples were to share its prompt, and may fit where it does not.
        forks, sequence.forks = sequence.forks, []
        for fork in forks:
            self._waiting.requeue(fork)
        self.fail([sequence], sequence.error)
