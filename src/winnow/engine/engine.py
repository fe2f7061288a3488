"""The paged engine: a scheduler plans steps over the blocks of a KV cache, an executor computes them."""

import warnings
from collections.abc import Callable
from collections.abc import Sequence as SequenceType
from dataclasses import replace
from pathlib import Path
from typing import Any

from winnow.cache.tiers.tier_traffic import TierTraffic
from winnow.config import EngineConfig
from winnow.engine.admission import Admission
from winnow.engine.executor import Executor
from winnow.engine.loop import RequestLoop, Sampled
from winnow.engine.memory.memory import Memory
from winnow.engine.memory.occupancy import Occupancy, measure_occupancy
from winnow.engine.requests.beams import BeamSearch, Continuation
from winnow.engine.requests.eviction_report import eviction_report, kept_parts
from winnow.engine.requests.forked_request import forked_params, inherit, source_of
from winnow.engine.requests.new_request import KeptKVs, NewRequest
from winnow.engine.requests.request import ReplayTally, Request, Sequence
from winnow.engine.scheduling.plan_builder import ScheduledStep
from winnow.engine.scheduling.queue import WaitingQueue
from winnow.engine.scheduling.scheduler import Scheduler
from winnow.engine.served_model import ServedModel
from winnow.errors import InvalidRequestError
from winnow.outputs import EngineStats, EvictionReport, ValueTierStats
from winnow.sampling import SamplingParams


class Engine(RequestLoop):
    """Engine that serves requests from a paged KV cache that may be compressed; see `RequestLoop`."""

    memory: Memory

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        admission: Admission,
        model: ServedModel,
        config: EngineConfig,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(model.tokenizer, model.eos_token_ids, clock, config.scheduler)
        self.scheduler, self.memory = scheduler, scheduler.memory
        self._executor = executor
        self._admission = admission
        self._model = model
        self._kv_memory = config.cache.kv_memory
        self._replay = ReplayTally()
        self._seconds = {"schedule": 0.0, "execute": 0.0, "prefill": 0.0, "decode": 0.0}
        self._num_replays_replaced = 0
        self._kv_bytes_kept = self._kv_bytes_whole = 0
        self._traffic, self._last_traffic = TierTraffic(), TierTraffic()
        self._looks_ahead = self._overlaps = executor.overlaps
        self._last_end: float | None = None
        # A step that was submitted before the results of the one before it were known.
        self._ahead: tuple[ScheduledStep, Any] | None = None

    def stats(self) -> EngineStats:
        memory, rounds = self.memory, self.scheduler.rounds.total
        ledger, sessions, decisions = memory.ledger, memory.sessions, self.scheduler.decisions
        swaps, host = memory.swap.total, ledger.host
        # Rounds run, and sequences are copied, while a step is scheduled.
        schedule = self._seconds["schedule"] - rounds.seconds - swaps.swap_seconds
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_queued_tokens=self.scheduler.waiting.num_tokens,
            kv_bytes_used=ledger.used_bytes + self.scheduler.drafts.used_bytes,
            kv_bytes_peak=ledger.peak_bytes + self.scheduler.drafts.used_bytes,
            kv_bytes_held=ledger.held_bytes,
            kv_bytes_budget=self._kv_memory,
            prompt_tokens=self._requests.prompt_tokens,
            cached_tokens=ledger.prefixes.num_hit_tokens,
            cached_bytes=ledger.cached_bytes,
            generated_tokens=self._requests.generated_tokens,
            num_preemptions=self.scheduler.running.num_preemptions,
            num_swaps=swaps.num_swaps,
            swap_bytes_out=swaps.swap_bytes_out,
            swap_bytes_in=swaps.swap_bytes_in,
            recomputed_tokens=swaps.recomputed_tokens,
            recompute_seconds=swaps.recompute_seconds,
            host_bytes_used=host.used_bytes,
            host_bytes_peak=host.peak_bytes,
            host_bytes_budget=host.limit,
            image_bytes=self._executor.image_bytes,
            value_tier=self._tier_stats(),
            disk_tier=None if memory.files.cached is None else memory.files.cached.stats(),
            sessions=sessions.count_tiers(),
            session_tokens=sessions.reused_tokens,
            session_seconds=sessions.reused_tokens
            * self._seconds["prefill"]
            / max(self._requests.prompt_tokens, 1),
            session_compressions=sessions.num_compressions,
            sessions_dropped=sessions.num_dropped,
            sessions_released=sessions.num_released,
            num_steps=self._num_steps,
            num_draft_tokens=self.scheduler.drafts.num_proposed,
            num_accepted_tokens=self.scheduler.drafts.num_accepted,
            draft_rates=self.scheduler.drafts.rates(),
            num_rounds=rounds.rounds,
            replay_tokens=self._replay.tokens,
            kv_bytes_freed=rounds.freed_blocks * ledger.layout.block_bytes,
            kv_bytes_kept=self._kv_bytes_kept,
            kv_bytes_whole=self._kv_bytes_whole,
            num_starts=decisions.num_starts,
            num_short_starts=decisions.num_short_starts,
            outlook=decisions.outlook,
            num_replays_replaced=self._num_replays_replaced,
            replay_seconds=self._replay.seconds,
            prefill_seconds=self._seconds["prefill"],
            decode_seconds=self._seconds["decode"],
            elapsed={
                "schedule": schedule,
                "execute": self._seconds["execute"],
                "output": self._output_seconds,
                "evict": rounds.seconds,
                "swap": swaps.swap_seconds,
            },
            tenants=self.scheduler.accounts.stats(self.scheduler.running, self.scheduler.waiting),
        )

    def _tier_stats(self) -> ValueTierStats | None:
        layout, ledger = self._executor.layout, self.scheduler.ledger
        if layout.value_tier is None:
            return None
        return ValueTierStats(
            ledger.tier_bytes,
            layout.tier_bytes(ledger.size.by_kind),
            replace(self._traffic),
            replace(self._last_traffic),
        )

    def implementation(self) -> dict[str, str]:
        """Return the attention backend, and how KVs are stored."""
        return {"attention": self._executor.attention, "KVs": self._executor.layout.codec_names}

    def occupancy(self) -> Occupancy:
        return measure_occupancy(self.scheduler.running, self.scheduler.ledger, self._executor.layout)

    def kv_bytes(self, num_kvs: int) -> int:
        """Return bytes of the blocks of a sequence that sees `num_kvs` tokens, the last one decoded, and keeps them."""
        layout = replace(self._executor.layout, chunk=1)
        return layout.device_bytes(layout.by_kind(layout.row_blocks_seen(num_kvs)))

    def reset_prefix_cache(self, running: bool, disk: bool) -> None:
        self._settle()
        super().reset_prefix_cache(running, disk)
        self.memory.clear(disk)

    def save_prefix(self, new: NewRequest, directory: Path) -> Path:
        """Write the compressed context of a request that was answered to a directory. Returns the file's path.

        Raises:
            PrefixStoreError: it is not in the cache, or the disk refuses it.
        """
        self._settle()
        [sequence] = self._admit(new).sequences
        return self.memory.save_prefix(sequence, directory, self._model.prefix_format(None))

    def close(self) -> None:
        files = self.memory.files
        why = files.documents.why_unused()
        if why is not None:
            warnings.warn(f"no request used the prefix_store: {why}", stacklevel=2)
        files.close()
        self._executor.close()

    def check_integrity(self) -> None:
        """Assert the invariants of cache and scheduler. Slow: reads tables back from the device."""
        self._settle()
        memory = self.memory
        self._executor.apply(memory.ledger.take_update())
        self._executor.check_integrity(memory.ledger.holdings())
        memory.check_integrity(self.scheduler.running, list(self.scheduler.waiting))
        for sequence in self.scheduler.running:
            self._check_rows(sequence)

    def fork(
        self, request_id: str, new_id: str, params: SamplingParams | None, index: int, final_only: bool
    ) -> None:
        self._settle()
        parent = self._requests.unfinished_sample(request_id, index)
        self._requests.require_new(new_id)
        request = parent.request
        new = NewRequest(
            new_id,
            request.prompt,
            list(request.prompt_token_ids),
            forked_params(parent, params),
            request.priority,
            request.tenant,
            final_only=final_only,
            images=request.images,
        )
        child = self._admit(new)
        inherit(child, parent)
        self._requests.add(child, parent)
        self.scheduler.forks.start(source_of(parent), child)

    # -- hooks of the loop -----------------------------------------------------------------------------------------

    @property
    def _waiting(self) -> WaitingQueue:
        return self.scheduler.waiting

    def _admit(self, new: NewRequest) -> Request:
        granted = self._admission.admit(
            new.token_ids,
            new.params,
            new.tenant,
            cut_to_memory=new.cut_to_memory,
            images=new.images,
        )
        self._num_replays_replaced += granted.replay_replaced
        for eviction in granted.evictions:
            if eviction is not None:
                self._executor.prepare(eviction.policy)
        params, beams = self._executor.with_seed(new.params), None
        if granted.context_tokens is not None:  # a fork inherits it
            params = replace(params, context_tokens=granted.context_tokens)
        if params.use_beam_search:
            if new.observer is not None:
                raise InvalidRequestError("use_beam_search must be false for inspect, got True")
            beams = BeamSearch.of(params, granted.max_tokens, self._model.eos_token_ids)
        request = Request.of(
            new,
            params,
            granted.max_tokens,
            self._clock(),
            granted.evictions,
            granted.policy_name,
            beams,
            granted.reserved_tokens,
        )
        self.memory.sessions.check(request)
        return request

    def _enqueue(self, request: Request) -> None:
        self.scheduler.add(request)

    def _compute(self) -> Sampled | None:
        start = self._clock()
        if not self.scheduler.running:
            self._last_end = None  # nothing was computed since
        try:
            ahead = self._take_ahead()
            step = self.scheduler.schedule() if ahead is None else ahead[0]
            if not step.plan.entries:
                return None
            scheduled = self._clock()
            handle = self._executor.submit(step.plan) if ahead is None else ahead[1]
            following = self.scheduler.lookahead.plan(step) if self._may_look_ahead(step) else None
            if following is not None:
                self._ahead = following, self._executor.submit(following.plan)
            result = self._executor.collect(handle)
        except BaseException:  # also on KeyboardInterrupt
            self._restart()
            raise
        executed = self._clock()
        if result.traffic is not None:
            self._last_traffic = result.traffic
            self._traffic.add(result.traffic)
        self.scheduler.advance(step, result.offsets, result.kept)
        self._count_shares(step, executed - scheduled)
        period = None if self._last_end is None else executed - self._last_end
        self.scheduler.record_step(step, executed - scheduled, len(result.token_ids), period)
        self._last_end = executed
        self._seconds["schedule"] += scheduled - start
        self._seconds["execute"] += executed - scheduled
        return Sampled(
            step.samplers,
            result.token_ids,
            result.logprobs,
            result.errors,
            _count_prompt_tokens(step),
            {step.sequences[index]: found for index, found in result.prompt_logprobs.items()},
            executed,
            result.offsets,
        )

    def _may_look_ahead(self, step: ScheduledStep) -> bool:
        """Return whether the next step may be planned now; what is proposed follows from this one's tokens."""
        if not self._looks_ahead or step.plan.drafts:
            return False
        return not self.scheduler.drafts.wanted(len(step.samplers))

    def _take_ahead(self) -> tuple[ScheduledStep, Any] | None:
        """Return the step that was submitted ahead, if any of its tokens are still wanted."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or all(sequence.finished for sequence in ahead[0].sequences):
            return None
        return ahead

    def _settle(self) -> None:
        """Append the tokens of a step in progress: nothing is half done afterwards. The next call returns them."""
        if self._ahead is not None:
            self._looks_ahead = False
            try:
                self._take_step()
            finally:
                self._looks_ahead = self._overlaps

    def _restart(self) -> None:
        self._ahead = None
        self.scheduler.running.recompute_all()

    def _continue_beams(self, request: Request, chosen: SequenceType[Continuation]) -> None:
        self.scheduler.forks.continue_beams(request, list(chosen))

    def _release(self, sequence: Sequence, reason: str, stop_reason: int | str | None) -> None:
        request = sequence.request
        if request.images and sequence.kv.slot is not None and request.policy_name is not None:
            sequence.kept_parts = kept_parts(sequence, self._executor.kept_positions(sequence.kv.slot))
        self.scheduler.running.finish(sequence, reason, stop_reason)
        if sequence.kept is not None and sequence.asked_eviction is not None:
            layout = self._executor.layout
            self._kv_bytes_kept += layout.device_bytes(layout.by_kind(layout.row_blocks(sequence.kept)))
            self._kv_bytes_whole += self.kv_bytes(sequence.kv.num_computed)

    def _take_failed(self) -> list[Sequence]:
        return self.scheduler.running.take_failed()

    def _kept(self, sequence: Sequence) -> KeptKVs:
        slot = sequence.kv.running_slot
        return KeptKVs(self._executor.kept_positions(slot), self._executor.kept_weights(slot))

    def _report(self, sequence: Sequence) -> EvictionReport | None:
        if sequence.request.beams is not None:  # an answer's KVs may have gone with its beam
            return None
        return eviction_report(sequence, self._executor.layout)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _check_rows(self, sequence: Sequence) -> None:
        """Assert that each row holds a token once, and all that is protected unless a window has passed it."""
        eviction, evicted = sequence.eviction, tuple[int, ...]()
        protected: set[int] = set()
        if eviction is not None and sequence.kv.last_round:
            evicted = self._executor.layout.evictable
            for start, end in ((0, eviction.policy.keep.sinks), *eviction.spans):
                protected.update(range(start, min(end, sequence.kv.last_round)))
        for layer, rows in enumerate(self._executor.kept_positions(sequence.kv.running_slot)):
            for row in rows:
                assert len(set(row)) == len(row), "a row holds a token twice"
                assert layer not in evicted or protected.issubset(row), "a row lost a protected KV"

    def _count_shares(self, step: ScheduledStep, seconds: float) -> None:
        """Divide a step's seconds by tokens: among replays, prompts and decoding."""
        of_token = seconds / step.plan.num_tokens
        for entry, sequence in zip(step.plan.entries, step.sequences, strict=True):
            share = of_token * len(entry.token_ids)
            if entry.replay is not None:
                for tally in (sequence.replay, self._replay):
                    tally.add(entry.count, share)
            else:
                self._seconds["prefill" if entry.start < sequence.prompt_len else "decode"] += share


def _count_prompt_tokens(step: ScheduledStep) -> int:
    """Return the prompt tokens that a step computes; recomputed ones count again."""
    computed = 0
    for entry, sequence in zip(step.plan.entries, step.sequences, strict=True):
        prompt_len = sequence.prompt_len
        if entry.replay is None and entry.start < prompt_len:
            computed += min(entry.end, prompt_len) - entry.start
    return computed
