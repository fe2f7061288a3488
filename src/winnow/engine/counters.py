"""What an engine counts over its steps, and the statistics that follow from it."""

from collections.abc import Iterable, Sequence as SequenceType
from dataclasses import dataclass, field, replace

import numpy as np

from winnow.cache import CacheLayout, Ledger
from winnow.engine.executor import Executor
from winnow.engine.requests.request import ReplayTally, Sequence
from winnow.engine.requests.request_table import RequestTable
from winnow.engine.scheduling.plan_builder import ScheduledStep
from winnow.engine.scheduling.scheduler import Scheduler
from winnow.outputs import EngineStats, EvictionReport, ValueTierStats
from winnow.values.tier_traffic import TierTraffic

_PARTS = ("schedule", "execute", "output", "prefill", "decode")


@dataclass
class Counters:
    """Counters that only grow, such as seconds by part of a step, and bytes with which answers ended."""

    num_steps: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_PARTS, 0.0))
    num_replays_replaced: int = 0
    kv_bytes_kept: int = 0
    kv_bytes_whole: int = 0
    replay: ReplayTally = field(default_factory=ReplayTally)
    _traffic: TierTraffic = field(default_factory=TierTraffic)
    _last_traffic: TierTraffic = field(default_factory=TierTraffic)

    def add_step(
        self, step: ScheduledStep, scheduling: float, executing: float, traffic: TierTraffic | None
    ) -> int:
        """Count a step by the seconds that it took. Returns the prompt tokens in it; recomputed ones count again."""
        if traffic is not None:
            self._last_traffic = traffic
            self._traffic.add(traffic)
        self.seconds["schedule"] += scheduling
        self.seconds["execute"] += executing
        of_token, prompt_tokens, prefill, decode = executing / step.plan.num_tokens, 0, 0, 0
        for entry, sequence in zip(step.plan.entries, step.sequences, strict=True):
            count, prompt_len = len(entry.token_ids), sequence.prompt_len
            if entry.replay is not None:
                for tally in (sequence.replay, self.replay):
                    tally.add(entry.count, of_token * count)
            elif entry.start < prompt_len:
                prompt_tokens += min(entry.end, prompt_len) - entry.start - entry.reused
                prefill += count
            else:
                decode += count
        self.seconds["prefill"] += of_token * prefill
        self.seconds["decode"] += of_token * decode
        return prompt_tokens

    def stats(
        self, scheduler: Scheduler, executor: Executor, requests: RequestTable, kv_memory: int
    ) -> EngineStats:
        memory, rounds, drafts = scheduler.memory, scheduler.rounds.total, scheduler.drafts
        ledger, sessions, decisions = memory.ledger, memory.sessions, scheduler.decisions
        swaps, host, seconds = memory.swap.total, ledger.host, self.seconds
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_queued_tokens=scheduler.waiting.num_tokens,
            first_token_seconds=scheduler.first_tokens.seconds(),
            kv_bytes_used=ledger.used_bytes + drafts.used_bytes,
            kv_bytes_peak=ledger.peak_bytes + drafts.used_bytes,
            kv_bytes_held=ledger.held_bytes,
            kv_bytes_budget=kv_memory,
            prompt_tokens=requests.prompt_tokens,
            cached_tokens=ledger.prefixes.num_hit_tokens,
            cached_bytes=ledger.cached_bytes,
            reused_tokens=memory.spans.num_reused,
            repaired_tokens=memory.spans.num_repaired,
            generated_tokens=requests.generated_tokens,
            num_preemptions=scheduler.running.num_preemptions,
            num_swaps=swaps["num_swaps"],
            swap_bytes_out=swaps["swap_bytes_out"],
            swap_bytes_in=swaps["swap_bytes_in"],
            recomputed_tokens=swaps["recomputed_tokens"],
            recompute_seconds=swaps["recompute_seconds"],
            host_bytes_used=host.used_bytes,
            host_bytes_peak=host.peak_bytes,
            host_bytes_budget=host.limit,
            image_bytes=executor.tower.nbytes,
            value_tier=self._tier_stats(executor.layout, ledger),
            disk_tier=None if memory.files.cached is None else memory.files.cached.stats(),
            sessions=sessions.count_tiers(),
            session_tokens=sessions.reused_tokens,
            session_seconds=sessions.reused_tokens * seconds["prefill"] / max(requests.prompt_tokens, 1),
            session_compressions=sessions.num_compressions,
            sessions_outgrown=sessions.num_outgrown,
            sessions_dropped=sessions.num_dropped,
            sessions_released=sessions.num_released,
            num_steps=self.num_steps,
            num_draft_tokens=drafts.num_proposed,
            num_accepted_tokens=drafts.num_accepted,
            draft_rates=drafts.rates(),
            num_rounds=rounds.rounds,
            replay_tokens=self.replay.tokens,
            kv_bytes_freed=rounds.freed_blocks * ledger.layout.block_bytes,
            kv_bytes_kept=self.kv_bytes_kept,
            kv_bytes_whole=self.kv_bytes_whole,
            num_starts=decisions.num_starts,
            num_short_starts=decisions.num_short_starts,
            outlook=decisions.outlook,
            num_replays_replaced=self.num_replays_replaced,
            replay_seconds=self.replay.seconds,
            prefill_seconds=seconds["prefill"],
            decode_seconds=seconds["decode"],
            elapsed={
                # Rounds run, and sequences are copied, while a step is scheduled.
                "schedule": seconds["schedule"] - rounds.seconds - swaps["swap_seconds"],
                "execute": seconds["execute"],
                "output": seconds["output"],
                "evict": rounds.seconds,
                "swap": swaps["swap_seconds"],
            },
            tenants=scheduler.accounts.stats(scheduler.running, scheduler.waiting),
        )

    def _tier_stats(self, layout: CacheLayout, ledger: Ledger) -> ValueTierStats | None:
        if layout.value_tier is None:
            return None
        most = layout.tier_bytes(ledger.size.by_kind)
        return ValueTierStats(ledger.tier_bytes, most, replace(self._traffic), replace(self._last_traffic))


Positions = SequenceType[SequenceType[SequenceType[int]]]


def eviction_report(sequence: Sequence, layout: CacheLayout) -> EvictionReport | None:
    """Return None while the sequence runs, if it never got a slot, or if all its KVs are kept."""
    # Of documents that were compressed ahead, or a conversation whose oldest turns were.
    ahead = "documents" if sequence.packed else "session"
    name = sequence.request.policy_name or (ahead if sequence.kv.last_round else None)
    if sequence.kept is None or name is None:
        return None
    held = layout.by_kind(layout.row_blocks(sequence.kept))
    eviction = sequence.eviction
    return EvictionReport(
        policy=name,
        kv_budget=None if eviction is None else eviction.budget,
        num_tokens=sequence.kv.num_computed,
        kept=tuple(tuple(row) for row in sequence.kept.tolist()),
        bytes_held=layout.device_bytes(held),
        bytes_freed=sequence.rounds.freed_blocks * layout.block_bytes,
        rounds=sequence.rounds.rounds,
        seconds=sequence.rounds.seconds,
        replay_tokens=sequence.replay.tokens,
        replay_seconds=sequence.replay.seconds,
        kept_images=None if sequence.kept_parts is None else sequence.kept_parts[0],
        kept_text=None if sequence.kept_parts is None else sequence.kept_parts[1],
    )


def kept_parts(sequence: Sequence, positions: Positions) -> tuple[float, float]:
    """Return which parts of the KVs of pictures, and of text, a sequence holds, by its KVs' positions."""
    is_image = np.zeros(sequence.kv.num_computed, dtype=bool)
    for image in sequence.request.images:
        is_image[image.tokens[image.tokens < len(is_image)]] = True
    rows = [row for layer in positions for row in layer]
    held = np.concatenate([np.asarray(row, dtype=np.int64) for row in rows])
    images = int(is_image[held].sum())
    all_images = int(is_image.sum()) * len(rows)
    all_text = len(is_image) * len(rows) - all_images
    return images / max(all_images, 1), (len(held) - images) / max(all_text, 1)


@dataclass(frozen=True)
class Occupancy:
    """The KV memory in use, between two steps. Looks at every block: for now and then, not for every step.

    Attributes:
        filled_bytes: of the slots that hold KVs; the rest of the blocks held is reserved, or the end of a row's last
            block.
        tenants: tenant -> bytes of the blocks of its running answers; shared blocks count for each.
        kept: KVs per token computed, mean over running answers, by layer and head; empty: none runs.
    """

    tenants: dict[str, int]
    kept: list[list[float]]
    filled_bytes: int = 0


def measure_occupancy(running: Iterable[Sequence], ledger: Ledger, layout: CacheLayout) -> Occupancy:
    tenants: dict[str, int] = {}
    kept = np.zeros((layout.num_layers, layout.num_kv_heads))
    count = 0
    for sequence in running:
        if sequence.kv.slot is None or not sequence.kv.num_computed:
            continue
        lengths = ledger.lengths[sequence.kv.slot]
        held = layout.device_bytes(layout.by_kind(layout.row_blocks(lengths)))
        tenant = sequence.request.tenant or ""
        tenants[tenant] = tenants.get(tenant, 0) + held
        kept += lengths / sequence.kv.num_computed
        count += 1
    return Occupancy(tenants, (kept / count).round(4).tolist() if count else [], ledger.filled_bytes)
