"""Whether compressing pays: throughput that a policy lets expect beside the full cache's, from steps as they were."""

from winnow.engine.memory.memory import Memory
from winnow.engine.memory.swap_costs import Fit
from winnow.engine.plan import StepPlan
from winnow.engine.requests.request import RoundTally, Sequence
from winnow.engine.scheduling.queue import WaitingQueue
from winnow.engine.scheduling.running import Running
from winnow.eviction import LATE_STEPS, SequenceEviction
from winnow.outputs import AgreementRecord, CompressionOutlook

# What an observation weighs after each later one: about the last hundred count.
_MEMORY = 0.99
# Sequences that start while memory is short, from one look at what compressing brings to the next.
_OUTLOOK_EVERY = 8
# Part of the prompts' tokens found in the prefix cache above which they are said to begin alike.
_SHARED = 0.2
_NEARLY = 0.95  # of the largest gain: for the rest no more KVs go
# Tokens of an answer for which no limit was asked, before any has ended.
_USUAL_ANSWER = 256


class CompressionDecisions:
    """Decisions whether rounds that make room for waiting requests pay, and counts of starts under a policy.

    The `outlook` is what compressing let expect when memory was last found short; None: it never was.
    """

    def __init__(self, memory: Memory, rounds: RoundTally) -> None:
        self.num_starts = self.num_short_starts = 0
        self.outlook: CompressionOutlook | None = None
        self.agreement = AgreementRecord()
        self._memory = memory
        self._rounds = rounds
        # Seconds of decoding steps, a + b n for n sequences. KVs are no term of their own: where memory binds, it is
        # full of them whether many sequences hold few or few hold many.
        self._times = Fit(_MEMORY)
        self._is_short = False
        self._compression: float | None = None

    def note_start(self, sequence: Sequence, waiting: WaitingQueue, running: Running) -> None:
        """Look at memory as a sequence may start; a late policy holds for it if others lack memory."""
        asked = sequence.asked_eviction
        if asked is None:
            return
        self._is_short = self._memory.is_short(waiting, running)
        if self._is_short and self.num_short_starts % _OUTLOOK_EVERY == 0:
            self._choose(sequence, asked, len(waiting) + len(running), running.mean_answer)
        for each in sequence.request.sequences:
            if each.kv.slot is None:
                each.decide(self._compression if self._is_short and self._pays else None)

    def allows(self, sequence: Sequence) -> bool:
        """Return whether a running sequence may shrink to admit others: under late policies if it pays."""
        late = sequence.eviction is not None and sequence.eviction.policy.when.late
        return not late or self._pays

    @property
    def _pays(self) -> bool:
        """Whether compressing pays, as far as is known. Where prompts begin alike it does not: what they share takes no
        room twice, and compressed copies share nothing. Nor where too few answers are the full cache's."""
        index = self._memory.ledger.prefixes
        shares = index.num_hit_tokens > _SHARED * index.num_asked_tokens
        return not (shares or self.agreement.backs_off) and (self.outlook is None or self.outlook.pays)

    def started(self, sequence: Sequence) -> None:
        # Once for a request: not for its other samples, nor after a preemption.
        is_first = sequence is sequence.request.sequences[0] and sequence.num_tokens_preempted is None
        if sequence.asked_eviction is not None and is_first:
            self.num_starts += 1
            self.num_short_starts += self._is_short

    def record(self, plan: StepPlan, seconds: float) -> None:
        if plan.num_tokens == len(plan.entries):  # other steps are no measure of decoding
            self._times.add(1, plan.num_tokens, seconds)

    def _choose(self, sequence: Sequence, eviction: SequenceEviction, most: int, usual: int | None) -> None:
        """Choose to what prompts are compressed: the least that all who wait, or nearly all of the gain, ask for."""
        own = eviction.context_len / eviction.target
        steps = [*(step for step in LATE_STEPS if step < own), own] if eviction.policy.when.late else [own]
        looks = [self._look(sequence, eviction.at(step), most, usual) for step in steps]
        best = max((each.gain or 0.0 for each in looks), default=0.0)
        enough = [e.num_compressed >= most if e.gain is None else e.gain >= _NEARLY * best for e in looks]
        index = enough.index(True) if True in enough else -1
        self.outlook, self._compression = looks[index], steps[index]

    def _look(
        self, sequence: Sequence, eviction: SequenceEviction, most: int, usual: int | None
    ) -> CompressionOutlook:
        """Compare the policy of a sequence with the full cache, for as many of `most` requests like it as fit. `usual`
        are tokens of an answer so far; None: nothing is known."""
        layout, size, answer = self._memory.layout, self._memory.size, sequence.request.max_tokens
        if usual is not None:
            answer = min(answer, usual)
        elif sequence.request.params.max_tokens is None:
            answer = min(answer, _USUAL_ANSWER)
        tokens = sequence.prompt_len + answer
        peak = max(eviction.decode_blocks(layout, tokens), 1)
        num_compressed = max(min(size.num_blocks // peak, size.max_num_seqs, most), 1)
        num_whole = max(min(size.num_blocks // max(layout.blocks_seen(tokens), 1), num_compressed), 1)
        prefill = self._memory.recompute_seconds(sequence.prompt_len)
        whole_step, step = self._times.predict(1, num_whole), self._times.predict(1, num_compressed)
        gain = None
        if prefill is not None and whole_step is not None and step is not None:
            a_round = self._rounds.seconds / self._rounds.sequences if self._rounds.sequences else 0.0
            whole = prefill + answer * whole_step / num_whole
            gain = whole / (prefill + a_round + answer * step / num_compressed)
        compression = eviction.context_len / eviction.target
        return CompressionOutlook(most, num_whole, num_compressed, compression, gain)
