"""Executor of a step in torch: packs the planned tokens, runs the model over the paged cache, samples."""

from collections.abc import Callable, Iterable, Mapping, Sequence as SequenceType
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from winnow.attention import AttentionBackend, AttentionObserver, BackendStep, PagedCache, Spans
from winnow.attention.spans import NEVER
from winnow.cache import CacheLayout, CacheSize, CacheUpdate
from winnow.cache.accounting.ledger import Holdings
from winnow.cache.accounting.prefix_chain import PrefixKey
from winnow.cache.layout import IntArray, ceil_div
from winnow.cache.memory import require_host_memory, require_memory
from winnow.cache.recurrent import Computed
from winnow.cache.slot_states import SlotState
from winnow.config import EngineConfig
from winnow.engine.plan import (
    LAST_SAMPLED,
    NewSequence,
    PlannedEviction,
    PlannedSequence,
    StepPlan,
    StepResult,
)
from winnow.errors import InvalidRequestError, UnsupportedModelError
from winnow.eviction import (
    EvictionPolicy,
    EvictionTarget,
    PlannedRound,
    SequenceEviction,
    compact_round,
    plan_round,
)
from winnow.eviction.probes import probes_of
from winnow.executor.attention_step import LogitsRows, PagedAttentionStep, replay_spans, with_own_parts
from winnow.executor.image_features import ImageFeatures
from winnow.executor.occupants import Occupants
from winnow.executor.placement import PlacedTokens, Repair, place_spans, reuse_refusal
from winnow.executor.signals import EngineSignals
from winnow.executor.step_graphs import Forward, StepGraphs, computes_apart, graph_capture
from winnow.models import LoadedModel
from winnow.sampling import Sampler, SamplingParams, prompt_logprobs
from winnow.sampling.sampler import PendingSample
from winnow.values.logprob import LogprobDict
from winnow.values.tier_traffic import TierTraffic

_Hidden = TypeVar("_Hidden", bound=SlotState)


@dataclass(frozen=True)
class SubmittedStep:
    """A step that is computed, or will be without any further call."""

    sampled: PendingSample | None
    prompt_logprobs: dict[int, list[LogprobDict]]
    traffic: TierTraffic | None
    evicts: bool
    """True: its sizes of rounds come with it."""
    drafts: tuple[tuple[int, int], ...] = ()
    """Slots of the samplers and their drafts, where a rejected one leads states back."""


class TorchExecutor:
    """Executor that owns the model, the memory of KVs and the sampler; layout and size of the cache are this rank's."""

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        backend: AttentionBackend,
        layout: CacheLayout,
        size: CacheSize,
    ) -> None:
        geometry = model.geometry
        require_memory(config.cache.kv_memory // model.ranks.size, size.nbytes(layout), model.device)
        host_bytes = config.cache.kv_offloading_size or 0
        require_host_memory(host_bytes, model.device, config.cache.kv_memory)
        self.layout, self.size = layout, size
        cache = PagedCache.allocate(layout, size, model.device, host_bytes)
        self.cache = replace(cache, rotation=model.rotation)
        self._planned_rounds: list[PlannedRound] = []
        self._planned: tuple[PlannedEviction, ...] = ()
        self._model = model
        self._backend = backend
        self.attention = type(backend).__name__
        sizes = size.max_num_seqs, model.vocab_size
        ends, seed, grammars = model.eos_token_ids, config.model.seed, model.grammars
        self._sampler = Sampler(*sizes, model.device, ends, seed=seed, grammars=grammars)
        self._occupants = Occupants(self._sampler)
        self._signals = EngineSignals(model, self._occupants)
        self.cache.states.add(self._occupants, self._signals.directions)
        self.overlaps = computes_apart(model.device) and model.ranks.size == 1
        self._last_sampled = torch.zeros(size.max_num_seqs, dtype=torch.int64, device=model.device)
        self.tower = ImageFeatures(model, config.cache.image_memory)
        self._recurrent = model.open_states(size.max_num_seqs)
        if self._recurrent is not None:
            self.cache.states.add(self._recurrent)
        self._hidden: Any = None
        self._graphs: StepGraphs | None = None
        # Values on a tier are chosen on the host; states are split on it.
        capture = graph_capture(model.device)
        alone = layout.value_tier is None and self._recurrent is None and model.ranks.size == 1
        if capture is not None and alone:
            self._graphs = StepGraphs(
                _graph_forward(model, backend, self.cache),
                lambda spans: backend.capturable(spans, geometry.num_query_heads),
                size.max_num_seqs,
                model.device,
                capture,
            )

    def keep_hidden(self, hidden: _Hidden) -> _Hidden:
        """Keep the last hidden states of the steps to come, which leave graphs."""
        self._hidden = hidden
        self.cache.states.add(hidden)
        self.leave_graphs()
        return hidden

    def leave_graphs(self) -> None:
        self._graphs = None

    def with_seed(self, params: SamplingParams) -> SamplingParams:
        return self._sampler.with_seed(params)

    def read_step(self, slots: list[int], positions: list[int]) -> tuple[BackendStep, Tensor]:
        """Return what attends with one query of each slot, at these positions, over what is stored; and the positions.
        The ledger's update has been applied."""
        lengths, ones = self.cache.tables.longest(slots), [1] * len(slots)
        spans = Spans.build(slots, positions, ones, lengths, device=self._model.device)
        return self._backend.prepare(self.cache, spans), spans.position

    @torch.inference_mode()
    def apply(self, update: CacheUpdate) -> None:
        self.cache.apply(update)

    @torch.inference_mode()
    def time_copies(self, clock: Callable[[], float]) -> tuple[int, float, float]:
        assert self.cache.host is not None, "the cache was allocated with one"
        return self.cache.host.time_copies(clock)

    def grant(self, kind: int, blocks: range) -> tuple[int, str | None]:
        store = self.cache.pool.kinds[kind].tier
        assert store is not None, "only memory of a tier is asked for"
        return store.grant(blocks)

    def state_bytes(self, slot: int) -> int:
        return self.cache.states.nbytes(slot)

    def fork(self, slot: int, child: NewSequence) -> None:
        self._occupants.add(child)
        self.cache.states.fork(slot, child.slot)

    def restate(self, states: Iterable[NewSequence]) -> None:
        """Replace what is known of sequences in slots, whose answers went another way; their KVs stay."""
        for each in states:
            self._occupants.close(each.slot)
            self._occupants.add(each)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> SubmittedStep:
        self.apply(plan.update)
        evicts = self._occupants.note(plan)
        spans = self._spans(plan)
        if self._recurrent is not None:
            self._recurrent.begin(
                Computed(e.slot, e.start, e.end, e.replay is None, e.num_drafts > 0) for e in plan.entries
            )
        logits = LogitsRows.of(plan.entries)
        wanted = self._to_device(logits.tokens)
        replays = replay_spans(plan, self._occupants) if evicts else ()
        two_way, windowed = self.tower.last_visible(plan, self._occupants), self.tower.windowed
        step = PagedAttentionStep(
            with_own_parts(self._backend, self.cache, spans, replays, two_way, windowed=windowed),
            None if len(wanted) == len(spans.position) else wanted,
            self._signals.watch(plan) if evicts else (),
            replays,
        )
        if placed := self._place(plan):
            step = replace(step, repair=Repair(self._backend, self.cache, plan, spans, placed, step))
        rows = self._forward(plan, spans, step, logits.tokens, wanted)
        if self._hidden is not None:
            self._hidden.record(plan)
        traffic = self._take_traffic(plan)
        for entry in plan.entries:
            for slot in entry.forks:
                self.cache.states.fork(entry.slot, slot)
        scored = {
            index: self._prompt_logprobs(plan.entries[index], rows[part])
            for index, part in logits.prompts.items()
            if self._model.ranks.leads
        }
        samplers = plan.samplers if self._model.ranks.leads else []
        evicts = bool(plan.evictions)
        if not samplers:
            self._begin_rounds(plan.evictions)
            return SubmittedStep(None, scored, traffic, evicts)
        if logits.samples != list(range(len(rows))):  # in most steps each row is sampled from once
            rows = rows[torch.tensor(logits.samples, device=rows.device)]
        self._occupants.enter(samplers)
        sampled = self._sampler.begin(rows, samplers, plan.drafts)
        if self.overlaps and not plan.drafts:
            self._last_sampled[self._to_device(sampled.slots)] = sampled.on_device()
        self._begin_rounds(plan.evictions)
        drafts: tuple[tuple[int, int], ...] = ()
        if self._recurrent and plan.drafts:
            drafts = tuple((e.slot, e.num_drafts) for e in plan.entries for _ in e.samplers)
        return SubmittedStep(sampled, scored, traffic, evicts, drafts)

    @cached_property
    def reuse_refusal(self) -> str | None:
        return reuse_refusal(self._model, self.layout, hidden=self._hidden is not None)

    def _place(self, plan: StepPlan) -> list[PlacedTokens]:
        if not any(entry.placed for entry in plan.entries):
            return []
        assert self._model.rotation is not None, "spans are placed only where `reuse_refusal` allows it"
        return place_spans(self.cache, self._model.rotation, plan)

    @torch.inference_mode()
    def collect(self, handle: SubmittedStep) -> StepResult:
        if self._graphs is not None:
            self._graphs.capture_repeated()
        kept = self._round_lengths() if handle.evicts else None
        scored, traffic = handle.prompt_logprobs, handle.traffic
        if handle.sampled is None:
            return StepResult([], [], scored, traffic=traffic, kept=kept)
        sampled = handle.sampled.read()
        for index, (slot, count) in enumerate(handle.drafts):
            assert self._recurrent is not None and sampled.offsets is not None, "drafts make it ragged"
            if sampled.offsets[index + 1] - sampled.offsets[index] <= count:
                self._recurrent.take_back(slot)
        errors = {row: fault.explain(self._model.dtype) for row, fault in sampled.faults.items()}
        return StepResult(sampled.token_ids, sampled.logprobs, scored, errors, sampled.offsets, traffic, kept)

    def _take_traffic(self, plan: StepPlan) -> TierTraffic | None:
        """Return the traffic of tiers since the last step, with that of the rounds before this one."""
        stores = [kind.tier for kind in self.cache.pool.kinds if kind.tier is not None]
        if not stores:
            return None
        total, rows = TierTraffic(), self.layout.by_kind(self.layout.even_rows(plan.num_tokens))
        for count, kind in zip(rows, self.cache.pool.kinds, strict=True):
            if kind.tier is not None:
                nbytes = count * kind.kind.tier_slot_bytes
                kind.traffic.add(TierTraffic(rows_written=count, bytes_written=nbytes))
                total.add(kind.tier.take_traffic())
        return total

    def plan_evictions(self, planned: SequenceType[PlannedEviction]) -> IntArray:
        self._begin_rounds(planned)
        return self._round_lengths()

    def _begin_rounds(self, planned: SequenceType[PlannedEviction]) -> None:
        """Rank the KVs of sequences; their numbers are on their way."""
        groups: dict[EvictionPolicy, list[EvictionTarget]] = {}
        for each in planned:
            eviction = self._eviction(each.slot)
            if each.budget is not None:
                eviction = replace(eviction, budget=each.budget)
            target = EvictionTarget(each.slot, eviction, each.computed)
            groups.setdefault(eviction.policy, []).append(target)
        self._planned_rounds = [plan_round(self.cache, *group, self._signals) for group in groups.items()]
        self._planned = tuple(planned)

    def _round_lengths(self) -> IntArray:
        lengths: dict[int, IntArray] = {}
        for each in self._planned_rounds:
            lengths |= zip(each.slots, each.lengths, strict=True)
        return np.stack([lengths[each.slot] for each in self._planned])

    def compact(self) -> None:
        planned, self._planned_rounds = self._planned_rounds, []
        for each in planned:
            compact_round(self.cache, self._backend, each, self._signals)
            for probe in map(self._signals.probe, probes_of(each.policy)):
                for slot in each.slots:
                    probe.end_round(slot)
        for evicted in self._planned:
            for sibling in evicted.siblings:
                self._signals.directions.fork(evicted.slot, sibling)
        self._planned = ()

    @torch.inference_mode()
    def read_blocks(self, blocks: IntArray) -> NDArray[np.uint8]:
        assert self.cache.host is not None, "allocated with the cache"
        return self.cache.host.read(blocks).numpy()

    @torch.inference_mode()
    def write_blocks(self, blocks: IntArray, data: NDArray[np.uint8]) -> None:
        assert self.cache.host is not None, "allocated with the cache"
        self.cache.host.write(blocks, torch.from_numpy(data))

    @torch.inference_mode()
    def read_states(self, key: PrefixKey) -> dict[str, NDArray[Any]]:
        return self.cache.states.read(key)

    @torch.inference_mode()
    def write_states(self, key: PrefixKey, states: Mapping[str, NDArray[Any]]) -> None:
        self.cache.states.write(key, states)

    def kept_positions(self, slot: int) -> list[list[list[int]]]:
        blocks, lengths = self._held_blocks(slot)
        held = self.cache.pool.numbers.positions_of(blocks).cpu().numpy()  # [L, H, N]
        return [
            [sorted(row[:length].tolist()) for row, length in zip(rows, layer.tolist(), strict=True)]
            for rows, layer in zip(held, lengths, strict=True)
        ]

    def kept_weights(self, slot: int) -> list[list[float]]:
        blocks, lengths = self._held_blocks(slot)
        if not self.layout.has_bias:
            return lengths.astype(float).tolist()
        pools = map(self.cache.pool.of_layer, range(len(blocks)))
        bias = torch.stack([pool.biases_of(row) for pool, row in zip(pools, blocks, strict=True)])
        ends = torch.from_numpy(lengths).to(bias.device)[..., None]
        within = torch.arange(bias.shape[-1], device=bias.device) < ends
        return bias.exp().masked_fill(~within, 0.0).sum(dim=-1).tolist()

    def _held_blocks(self, slot: int) -> tuple[Tensor, IntArray]:
        """Return the blocks of a slot's rows, int64 [L, H, n], and their lengths, [L, H]."""
        tables, lengths = self.cache.tables, self.cache.tables.host_lengths[slot]
        most = ceil_div(int(lengths.max()), self.layout.block_size)
        slots = torch.tensor([slot], device=tables.pages.device)
        return tables.lookup_layers(slots, most)[:, 0].long(), lengths

    def prepare(self, policy: EvictionPolicy) -> None:
        if policy.compact is not None and not self.layout.has_bias:
            raise InvalidRequestError(
                "a policy that fits what it keeps (compact) needs KVs with a bias: open the engine with kv_bias=True"
            )
        try:
            self.cache.states.add(*self._signals.prepare(policy))
        except UnsupportedModelError as error:
            raise InvalidRequestError(str(error)) from None

    def check_integrity(self, held: Holdings) -> None:
        tables, host = self.cache.tables, self.cache.host
        same = host is not None and host.host_ids == held.host_ids == self.cache.states.host_ids
        assert host is not None and same, "the host tier holds other copies than the ledger counts"
        assert host.nbytes <= held.host_bytes, "the host tier holds more bytes than the ledger counts"
        assert np.array_equal(tables.host_lengths, held.lengths), "lengths differ from the ledger's"
        assert np.array_equal(tables.lengths.cpu().numpy(), held.lengths), "lengths differ on the device"
        for slot, pages in held.pages.items():
            own = tables.page_table[slot, : len(pages)].cpu().numpy()
            assert np.array_equal(own, pages), "a page table differs from the ledger's"
            blocks, lengths = self._held_blocks(slot)
            filled = np.arange(blocks.shape[-1]) < self.layout.row_blocks(lengths)[..., None]
            found = blocks.cpu().numpy()[filled]
            assert np.array_equal(found, held.blocks[slot]), "a block table differs from the ledger's"

    def close(self) -> None:
        self.tower.close()

    def _eviction(self, slot: int) -> SequenceEviction:
        eviction = self._occupants[slot].eviction
        assert eviction is not None, "only sequences under a policy take part in rounds"
        return eviction

    def _spans(self, plan: StepPlan) -> Spans:
        slots = [entry.slot for entry in plan.entries]
        observed = [self._observed(entry) for entry in plan.entries]
        return Spans.build(
            slots,
            starts=[entry.start for entry in plan.entries],
            counts=[len(entry.token_ids) for entry in plan.entries],
            lengths=self.cache.tables.longest(slots),
            device=self._model.device,
            observe=[observe for observe, _ in observed],
            observe_from=[first for _, first in observed],
            select_from=self._select_from(plan),
            temporary=[entry.replay is not None for entry in plan.entries],
        )

    def _select_from(self, plan: StepPlan) -> list[int] | None:
        """Return the first position of each sequence whose query chooses among values on a tier: that of its answer. A
        token that is computed again, in a chunk, chooses as it did. Replays read all values."""
        if self.layout.value_tier is None:
            return None
        return [
            NEVER if entry.replay is not None else self._occupants[entry.slot].prompt_len
            for entry in plan.entries
        ]

    def _observed(self, entry: PlannedSequence) -> tuple[AttentionObserver | None, int]:
        eviction = self._occupants[entry.slot].eviction
        if eviction is None or entry.replay is not None:
            return None, 0
        return eviction.observe(entry.start, entry.end)

    def _to_device(self, numbers: list[int]) -> Tensor:
        """Return int64 [n] on the device; by way of numpy, which reads a list in a third of the time."""
        return torch.from_numpy(np.array(numbers, dtype=np.int64)).to(self._model.device)

    def _forward(
        self, plan: StepPlan, spans: Spans, step: PagedAttentionStep, indices: list[int], wanted: Tensor
    ) -> Tensor:
        """Return logits, [n, V], of the tokens `indices` of the packed batch, which `wanted` has on the device."""
        tokens, images = self._token_ids(plan), self.tower.pack(plan, self._occupants, spans.position)
        if self._graphs is not None and not (images or step.probes or step.replays):
            logits = self._graphs.run(tokens, spans, indices)
            if logits is not None:
                return logits
        return self._model.compute(tokens, spans, wanted, step, self._recurrent, images)

    def _token_ids(self, plan: StepPlan) -> Tensor:
        """Return the plan's tokens, int64 [T] on the device, where those sampled last may never have left it."""
        tokens: list[int] = []
        for entry in plan.entries:
            tokens += entry.token_ids
        known = self._to_device(tokens)
        if not self.overlaps or LAST_SAMPLED not in tokens:
            return known
        slots = self._to_device([entry.slot for entry in plan.entries for _ in entry.token_ids])
        return torch.where(known == LAST_SAMPLED, self._last_sampled[slots], known)

    def _prompt_logprobs(self, entry: PlannedSequence, logits: Tensor) -> list[LogprobDict]:
        state = self._occupants[entry.slot]
        top, wanted = state.params.prompt_logprobs, entry.logprobs
        assert top is not None and wanted is not None, "prompt logprobs are collected only where asked for"
        return prompt_logprobs(logits, state.token_ids[wanted[0] + 1 : wanted[1] + 1], top)


def _graph_forward(model: LoadedModel, backend: AttentionBackend, cache: PagedCache) -> Forward:
    """Return a step that adds to no score but the observers' own; holds no executor, which holds the graphs of it."""

    def logits(tokens: Tensor, spans: Spans, wanted: Tensor) -> Tensor:
        step = PagedAttentionStep(backend.prepare(cache, spans), wanted)
        return model.compute(tokens, spans, wanted, step, None)

    return logits
