"""No round of a sequence reads what queries of another prompt have shaped, and no KV comes from other tokens."""

from collections import defaultdict
from dataclasses import replace

from hypothesis import HealthCheck, given, settings, strategies as st
from simulated import BLOCK, RecordingExecutor

from winnow.cache import BlockCopies, CacheUpdate
from winnow.cache.layout import IntArray
from winnow.cache.update import StateDiscarded, StateRestored, StateSaved
from winnow.config import CacheConfig, EvictionConfig, SchedulerConfig
from winnow.engine.memory.memory import Memory
from winnow.engine.plan import PlannedEviction, PlannedSequence, StepPlan, StepResult
from winnow.engine.requests.request import Request, Sequence
from winnow.engine.scheduling.scheduler import Scheduler
from winnow.eviction import PRESETS, Instruction, replay_passes, resolve_policy
from winnow.outputs import RequestMetrics
from winnow.sampling import SamplingParams
from winnow.values.eviction_request import EvictionRequest
from winnow_lab.plan.simulated_executor import VirtualClock

Shape = tuple[str, tuple[int, ...], int]
"""Tokens up to the last that shaped a KV, and the first of those that did, with the tenant whose they are."""

_WITHIN = {"prefill_every": 16}
POLICIES = {
    name: replace(PRESETS[base].policy, when=replace(PRESETS[base].policy.when, **changes))
    for name, base, changes in (
        ("once, all queries", "h2o", {"decode_every": None}),
        ("each token, all queries", "h2o", {}),
        ("within, all queries", "h2o", {"decode_every": None, **_WITHIN}),
        ("within and decoding, all queries", "batch-max", _WITHIN),
        ("keys alone", "leverage", {}),
        ("within, keys alone", "leverage-pd", _WITHIN),
        ("replay", "kvzip", {}),
        ("no queries", "streaming", _WITHIN),
    )
}
POLICIES["windows"] = replace(
    PRESETS["kv-compress-pd"].policy, when=replace(PRESETS["kv-compress-pd"].policy.when, **_WITHIN)
)


class ShapedExecutor(RecordingExecutor):
    """Notes for each block by which queries its accumulators and by which tokens its KVs came to be.

    Rounds leave the first KVs of each row, and so move none.
    """

    def __init__(self, num_blocks: int, max_num_seqs: int, clock: VirtualClock) -> None:
        super().__init__(num_blocks, max_num_seqs, clock)
        self.written: dict[int, dict[int, Shape]] = defaultdict(dict)
        self.observed: dict[int, list[Shape]] = defaultdict(list)
        self.scheduler: Scheduler

    def apply(self, update: CacheUpdate) -> None:
        super().apply(update)
        for copies in update.copies:
            if isinstance(copies, StateSaved | StateRestored | StateDiscarded):
                continue
            assert isinstance(copies, BlockCopies), "there is no host tier"
            for source, target in zip(copies.source.tolist(), copies.target.tolist(), strict=True):
                self.written[target] = dict(self.written[source])
                self.observed[target] = list(self.observed[source])

    def submit(self, plan: StepPlan) -> StepResult:
        owners = {s.kv.slot: s for s in self.scheduler.running}
        self.apply(plan.update)
        for new in plan.new_sequences:
            self.evictions[new.slot] = new.eviction
        for entry in plan.entries:
            self._compute(entry, owners[entry.slot])
        self.plans.append(plan)
        samplers = plan.samplers
        return StepResult([5] * len(samplers), [None] * len(samplers), {})

    def _compute(self, entry: PlannedSequence, sequence: Sequence) -> None:
        """Write an entry's tokens, then let its queries add to what the rows hold."""
        tenant, eviction = sequence.request.tenant or "", sequence.eviction
        own = tenant, tuple(sequence.token_ids[: entry.end]), entry.start
        for row, length in self._blocks_by_row(entry.slot):
            for place in range(length - entry.count, length):
                block = row[place // BLOCK]
                self._may_change(block, entry, sequence)
                if place % BLOCK == 0:
                    self.written[block], self.observed[block] = {}, []
                if entry.replay is None:
                    end = entry.end - (length - 1 - place)
                    self.written[block][place % BLOCK] = (tenant, own[1][:end], 0)
        if eviction is None:
            return
        observe = eviction.observe(entry.start, entry.end)[0]
        if entry.replay is not None:
            # Its queries are the context's own; they begin at other places than these.
            own = tenant, tuple(sequence.token_ids[: sequence.kv.num_computed]), -1 - entry.start
        elif observe is None:
            return
        # These write every accumulator of the row anew, so that what was there before is never read.
        anew = (
            entry.start == eviction.context_len
            if entry.replay == 0
            else observe is not None and observe.replace
        )
        for row, _ in self._blocks_by_row(entry.slot):
            for block in row:
                if not anew or entry.replay is not None:
                    self._may_change(block, entry, sequence)
                self.observed[block] = [*([] if anew else self.observed[block]), own]

    def _blocks_by_row(self, slot: int) -> list[tuple[list[int], int]]:
        """The blocks and the length of each row."""
        ledger = self.scheduler.ledger
        blocks = iter(ledger.blocks_of(slot).tolist())
        return [
            ([next(blocks) for _ in range(-(-length // BLOCK))], length)
            for length in ledger.lengths[slot].ravel().tolist()
        ]

    def _may_change(self, block: int, entry: PlannedSequence, sequence: Sequence) -> None:
        """Only samples of one prompt hold it too: those that fork now, and those for which a replay runs."""
        ledger = self.scheduler.ledger
        assert not ledger.allocator.indexed[block], "the index holds a block that changes"
        if ledger.allocator.holders[block] > 1:
            assert entry.forks or entry.replay is not None
            for other in self.scheduler.running:
                if other.request is not sequence.request:
                    assert block not in ledger.blocks_of(other.kv.running_slot)

    def check_shapes(self) -> None:
        """Assert that the KVs that running sequences hold come from tokens that they share."""
        for sequence in self.scheduler.running:
            for row, length in self._blocks_by_row(sequence.kv.running_slot):
                written = [self.written[row[place // BLOCK]].get(place % BLOCK) for place in range(length)]
                self._check(sequence, list(filter(None, written)))

    def plan_evictions(self, planned: list[PlannedEviction]) -> IntArray:
        """Assert that what the rounds read was shaped by tokens of the sequence, each once."""
        owners = {s.kv.slot: s for s in self.scheduler.running}
        for each in planned:
            sequence = owners[each.slot]
            if sequence.eviction is not None and sequence.eviction.policy.score.num_accumulators:
                for row, _ in self._blocks_by_row(each.slot):
                    for block in row:
                        self._check(sequence, self.observed[block])
                        assert len(set(self.observed[block])) == len(self.observed[block]), "added twice"
        return super().plan_evictions(planned)

    def _check(self, sequence: Sequence, shapes: list[Shape]) -> None:
        for shape in shapes:
            assert shape[0] == (sequence.request.tenant or ""), "another tenant's"
            assert list(shape[1]) == sequence.token_ids[: len(shape[1])], "another prompt's"


def request_of(
    number: int, prompt: list[int], name: str | None, context: bool, tenant: str, n: int
) -> Request:
    policy = None if name is None else POLICIES[name]
    max_tokens, eviction = 6, None
    context_len = max(len(prompt) - 7, 1) if context else None
    if policy is not None:
        asked = resolve_policy(EvictionConfig(eviction=policy, kv_budget=24))
        eviction = asked.for_prompt(
            len(prompt), len(prompt) + max_tokens - 1, EvictionRequest(context_tokens=context_len)
        )
        replay = policy.score.replay
        if eviction is not None and replay is not None and eviction.context_len > eviction.target:
            passes = replay_passes(replay, prompt[: eviction.context_len], Instruction(), 0, 400)
            eviction = replace(eviction, passes=passes)
    params = SamplingParams(n=n, max_tokens=max_tokens)
    return Request(
        str(number), None, prompt, params, max_tokens, RequestMetrics(0.0), (eviction,), tenant=tenant or None
    )


arrivals = st.lists(
    st.tuples(
        st.integers(0, 1),  # which document
        st.integers(20, 90),  # how much of it
        st.integers(0, 2),  # which question
        st.sampled_from([None, *POLICIES]),
        st.booleans(),
        st.sampled_from(["", "other"]),
        st.sampled_from([1, 1, 2]),
        st.integers(0, 4),  # steps before the next arrives
    ),
    min_size=1,
    max_size=10,
)
DOCUMENTS = [[10 + i % 3 for i in range(90)], [20 + i % 2 for i in range(90)]]


@given(arrivals, st.integers(30, 120), st.sampled_from([8, 16, 32]))
@settings(suppress_health_check=list(HealthCheck))
def test_nothing_that_other_queries_shaped_is_read(
    arriving: list[tuple[int, int, int, str | None, bool, str, int, int]], columns: int, chunk: int
) -> None:
    clock = VirtualClock()
    executor = ShapedExecutor(4 * columns, 6, clock)
    config = SchedulerConfig(6, 64, chunk)
    scheduler = Scheduler(config, executor, clock, Memory(executor, clock, config, CacheConfig()))
    executor.scheduler = scheduler
    finished = 0

    def step() -> int:
        plan = scheduler.schedule()
        ended = len(scheduler.running.take_failed())
        result = executor.collect(executor.submit(plan.plan))
        scheduler.advance(plan)
        executor.check_shapes()
        for sequence, token in zip(plan.samplers, result.token_ids, strict=True):
            sequence.token_ids.append(token)
            if sequence.num_output_tokens >= sequence.request.max_tokens:
                scheduler.running.finish(sequence, "length")
                ended += 1
        scheduler.ledger.check_integrity()
        executor.apply(scheduler.ledger.take_update())
        return ended

    samples = 0
    for number, (document, length, question, name, context, tenant, n, steps) in enumerate(arriving):
        prompt = DOCUMENTS[document][:length] + [30 + question] * 7
        scheduler.add(request_of(number, prompt, name, context, tenant, n))
        samples += n
        for _ in range(steps):
            if scheduler.has_unfinished:
                finished += step()
    for _ in range(3000):
        if not scheduler.has_unfinished:
            break
        finished += step()
    assert finished == samples
    assert scheduler.ledger.allocator.num_used == 0
