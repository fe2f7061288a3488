"""Computes a step: packs the planned tokens, runs the model over the paged cache, samples."""

from collections.abc import Sequence as SequenceType
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from winnow.attention import AttentionBackend, AttentionSpec, Observe, PagedCache, Spans
from winnow.attention.native import NativeBackend
from winnow.attention.native_step import NativeStep
from winnow.cache import BlockCopies, CacheLayout, CacheManager, CacheSize, KVPool
from winnow.cache.memory import require_memory
from winnow.config import EngineConfig
from winnow.engine.decode_graph import CapturableBackend, CudaCapture, DecodeGraphs
from winnow.engine.plan import PlannedSequence, StepPlan, StepResult
from winnow.engine.query_signals import WatchedQueries
from winnow.engine.request import Sequence
from winnow.engine.signals import EngineSignals
from winnow.errors import InvalidRequestError, UnsupportedModelError
from winnow.eviction import EvictionPolicy, EvictionTarget, preset_of, shrink
from winnow.eviction.reconstruction import ReplaySpan, ReplayWeights, observe_replay
from winnow.models import LoadedModel
from winnow.models.hub import locate_model
from winnow.models.residuals import watch_attention_inputs, watch_residuals
from winnow.outputs import LogprobDict
from winnow.sampling import Sampler, SamplingParams, prompt_logprobs


@dataclass(frozen=True)
class _AttentionStep:
    """What attention layers of one forward pass share; see `winnow.models.AttentionStep`."""

    backend: AttentionBackend
    cache: PagedCache
    spans: Spans
    signals: EngineSignals
    watched: Tensor | None
    """Which tokens count for the similarity of hidden states, [T]."""
    logits_indices: Tensor | None
    """Tokens whose logits are computed, int64 [n]; None: all of the batch."""
    native: NativeStep | None
    """The same for the kernels, where they may compute whole layers."""
    queries: tuple[WatchedQueries, ...] = ()
    """Whose queries are looked at."""
    replays: tuple[ReplaySpan, ...] = ()
    """Which of the tokens repeat a context."""
    hidden: list[Tensor] = field(default_factory=list)
    """What the layer in progress received."""
    inputs: list[Tensor] = field(default_factory=list)
    """What its attention is computed from, [T, hidden_size]."""

    @property
    def watching(self) -> bool:
        return self.watched is not None

    @property
    def wants_inputs(self) -> bool:
        return any(span.normalized for span in self.replays)

    def enter_attention(self, normed: Tensor) -> None:
        self.inputs[:] = [normed]

    def enter_layer(self, hidden: Tensor) -> None:
        self.hidden[:] = [hidden[0]]

    def leave_attention(self, layer: int, out: Tensor) -> None:
        assert self.watched is not None, "told only while watching"
        before = self.hidden[0]
        self.signals.add_similarity(layer, self.spans, self.watched, before, before + out[0])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        self.backend.write(self.cache, self.spans, layer, k, v)
        if self.queries:
            self.signals.queries.add(layer, self.queries, q, k, spec.scale)
        for span in self.replays:
            weights = self._weights(span, layer) if span.normalized else None
            observe_replay(self.cache, self.backend, span, layer, q[span.tokens], spec, weights)
        if self._only_scores and layer == self.cache.pool.layout.num_layers - 1:
            return q.new_zeros(q.shape)  # nobody reads it
        return self.backend.attend(self.cache, self.spans, layer, q, spec)

    @property
    def _only_scores(self) -> bool:
        """Whether no token's logits are wanted, and no token but those of replays is computed."""
        replayed = sum(span.tokens.stop - span.tokens.start for span in self.replays)
        return replayed == len(self.spans.position)

    def _weights(self, span: ReplaySpan, layer: int) -> ReplayWeights:
        return ReplayWeights(self.signals.output_products(layer), self.inputs[0][span.tokens])


class TorchExecutor:
    """Owns the model, the pool of KVs and the sampler."""

    def __init__(self, model: LoadedModel, config: EngineConfig, backend: AttentionBackend) -> None:
        geometry = model.geometry
        policy = preset_of(config.eviction.chosen).policy
        num_scores = config.eviction.num_scores
        if num_scores is None:
            num_scores = max(policy.score.num_scores, 1)
        layout = CacheLayout(
            geometry.num_layers,
            geometry.num_kv_heads,
            geometry.head_dim,
            config.cache.block_size,
            model.dtype,
            num_scores,
        )
        size = CacheSize.fit(
            layout,
            config.cache.kv_memory,
            config.scheduler.max_num_seqs,
            model.max_model_len,
        )
        require_memory(config.cache.kv_memory, size.nbytes(layout), model.device)
        self.cache = CacheManager(layout, size, model.device)
        self.pool = KVPool(layout, size.num_blocks, model.device)
        self._paged = PagedCache(self.pool, self.cache)
        self._model = model
        self._backend = backend
        self._sampler = Sampler(
            size.max_num_seqs, model.vocab_size, model.device, model.eos_token_ids, seed=config.model.seed
        )
        self._sampling: set[int] = set()
        self._signals = EngineSignals(size.max_num_seqs, model, lambda: locate_model(config.model))
        self._watches_residuals = self._watches_inputs = False
        self._graphs: DecodeGraphs | None = None
        if model.device.type == "cuda" and isinstance(backend, CapturableBackend):
            self._graphs = DecodeGraphs(
                self.decode_logits,
                lambda spans: backend.capturable(spans, geometry.num_query_heads),
                size.max_num_seqs,
                model.device,
                CudaCapture(),
            )

    def settle(self, params: SamplingParams) -> SamplingParams:
        return self._sampler.with_seed(params)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        for copy in plan.copies:
            self.copy(copy)
        spans = self._spans(plan)
        logits = _Logits.collect(plan)
        wanted = self._to_device(logits.tokens)
        queries = self._signals.queries.note(plan)
        replays = _replay_spans(plan)
        step = _AttentionStep(
            self._backend,
            self._paged,
            spans,
            self._signals,
            self._signals.note(plan),
            None if len(wanted) == len(spans.position) else wanted,
            None if queries or replays else self._native_step(spans),
            queries,
            replays,
        )
        rows = self._forward(plan, spans, step, wanted)
        self._signals.fork(plan)
        scored = {
            index: self._prompt_logprobs(plan, index, rows[part]) for index, part in logits.prompts.items()
        }
        samplers = plan.samplers
        if not samplers:
            return StepResult([], [], scored)
        if logits.samples != list(range(len(rows))):  # in most steps each row is sampled from once
            rows = rows[torch.tensor(logits.samples, device=rows.device)]
        sampled = self._sampler.sample(rows, self._enter(samplers))
        errors = {row: fault.explain(self._model.dtype) for row, fault in sampled.faults.items()}
        return StepResult(sampled.token_ids, sampled.logprobs, scored, errors)

    def copy(self, copies: BlockCopies) -> None:
        self.pool.copy_blocks(copies.source, copies.target)

    def evict(self, members: SequenceType[EvictionTarget]) -> list[int]:
        freed = [0] * len(members)
        for policy, indices in _by_policy(members).items():
            together = shrink(
                self._paged,
                self._backend,
                policy,
                [members[i] for i in indices],
                self._signals,
                self._model.rotation if policy.reassign_positions else None,
            )
            for i, blocks in zip(indices, together, strict=True):
                freed[i] = blocks
        return freed

    def kept_positions(self, slot: int) -> list[list[list[int]]]:
        """Positions of the KVs in the rows of a slot, ascending, by layer and head. Reads them from the device."""
        lengths = self.cache.host_lengths[slot]
        blocks = self.pool.position[self.cache.blocks_of(slot)].cpu().numpy()  # row by row
        rows = np.split(blocks, np.cumsum(-(-lengths.ravel() // self.cache.layout.block_size))[:-1])
        kept = [
            sorted(row.ravel()[:length].tolist())
            for row, length in zip(rows, lengths.ravel().tolist(), strict=True)
        ]
        heads = lengths.shape[1]
        return [kept[first : first + heads] for first in range(0, len(kept), heads)]

    def prepare(self, policy: EvictionPolicy) -> None:
        if policy.reassign_positions and self._model.rotation is None:
            raise InvalidRequestError(
                f"positions cannot be re-assigned: how {type(self._model.model).__name__} rotates keys is not known"
            )
        try:
            self._signals.prepare(policy.score.needs)
            if policy.budget.needs_similarity and not self._watches_residuals:
                watch_residuals(self._model.model, self._model.geometry.num_layers)
                self._watches_residuals = True
            if policy.score.needs.inputs and not self._watches_inputs:
                watch_attention_inputs(self._model.model, self._model.geometry.num_layers)
                self._watches_inputs = True
        except UnsupportedModelError as error:
            raise InvalidRequestError(str(error)) from None

    def release(self, slot: int) -> None:
        self._signals.forget(slot)
        if slot in self._sampling:
            self._sampling.remove(slot)
            self._sampler.remove(slot)

    def _spans(self, plan: StepPlan) -> Spans:
        """Where the plan's tokens stand, and what their queries tell the scores."""
        slots = [entry.slot for entry in plan.entries]
        told = [_observe(entry) for entry in plan.entries]
        return Spans.build(
            slots,
            starts=[entry.start - entry.sequence.shift for entry in plan.entries],
            counts=[entry.count for entry in plan.entries],
            lengths=self.cache.host_lengths[slots].max(axis=(1, 2)).astype("int64"),
            device=self._model.device,
            observe=[observe for observe, _ in told],
            observe_from=[first for _, first in told],
        )

    def _to_device(self, numbers: list[int]) -> Tensor:
        """As int64 [n]; by way of numpy, which reads a list in a third of the time."""
        return torch.from_numpy(np.array(numbers, dtype=np.int64)).to(self._model.device)

    def _native_step(self, spans: Spans) -> NativeStep | None:
        return self._backend.step(self._paged, spans) if isinstance(self._backend, NativeBackend) else None

    def _forward(self, plan: StepPlan, spans: Spans, step: _AttentionStep, wanted: Tensor) -> Tensor:
        """Run the model over the packed batch. Returns the logits of the `wanted` tokens, [n, V]."""
        tokens: list[int] = []
        for entry in plan.entries:
            tokens += entry.token_ids
        if self._graphs is not None and not (step.watching or step.queries or step.replays):
            decoded = self._graphs.run(tokens, spans)
            if decoded is not None:
                return decoded if step.logits_indices is None else decoded[wanted]
        output = self._model.forward_model(
            input_ids=self._to_device(tokens)[None],
            position_ids=spans.position[None],
            use_cache=False,
            logits_to_keep=wanted,
            winnow_step=step,
        )
        logits: Tensor = output.logits[0]
        return logits

    def decode_logits(self, tokens: Tensor, spans: Spans) -> Tensor:
        """The logits, [B, V], of sequences that bring one token each, int64 [1, B]; their rows have room for it."""
        step = _AttentionStep(self._backend, self._paged, spans, self._signals, None, None, None)
        output = self._model.forward_model(
            input_ids=tokens,
            position_ids=spans.position[None],
            use_cache=False,
            logits_to_keep=0,
            winnow_step=step,
        )
        logits: Tensor = output.logits[0]
        return logits

    def _enter(self, samplers: list[Sequence]) -> list[int]:
        """The slots of the sampling sequences, each known to the sampler."""
        slots = []
        for sequence in samplers:
            slot = sequence.slot
            assert slot is not None, "only a running sequence samples"
            if slot not in self._sampling:
                self._sampler.add(
                    slot,
                    sequence.request.params,
                    sequence.request.prompt_token_ids,
                    sequence.output_token_ids,
                    sequence.index,
                )
                self._sampling.add(slot)  # after it: the sampler may have refused
            slots.append(slot)
        return slots

    def _prompt_logprobs(self, plan: StepPlan, index: int, logits: Tensor) -> list[LogprobDict]:
        entry = plan.entries[index]
        request = entry.sequence.request
        done = len(request.prompt_logprobs)
        top = request.params.prompt_logprobs
        assert top is not None, "prompt logprobs are collected only where asked for"
        return prompt_logprobs(logits, request.prompt_token_ids[done : done + len(logits)], top)


def _observe(entry: PlannedSequence) -> tuple[Observe | None, int]:
    """What the entry's queries do to the scores, and the first position that counts."""
    eviction = entry.sequence.eviction
    if eviction is None or entry.replay is not None:
        return None, 0
    observe, first = eviction.observe(entry.start, entry.end)
    return observe, first - entry.sequence.shift


def _replay_spans(plan: StepPlan) -> tuple[ReplaySpan, ...]:
    """Where the plan repeats contexts."""
    spans: list[ReplaySpan] = []
    first = 0
    for entry in plan.entries:
        if entry.replay is not None:
            done = entry.start - entry.replay.context_len
            eviction = entry.sequence.eviction
            assert eviction is not None, "only policies replay"
            tokens, needs = slice(first, first + entry.count), eviction.policy.score.needs
            spans.append(ReplaySpan(entry.slot, entry.replay, tokens, done, needs.inputs))
        first += entry.count
    return tuple(spans)


def _by_policy(members: SequenceType[EvictionTarget]) -> dict[EvictionPolicy, list[int]]:
    """The indices of the members under each policy."""
    groups: dict[EvictionPolicy, list[int]] = {}
    for index, member in enumerate(members):
        groups.setdefault(member.eviction.policy, []).append(index)
    return groups


@dataclass(frozen=True)
class _Logits:
    """Which tokens of the packed batch need logits, and what for."""

    tokens: list[int]
    """Indices into the packed batch; the lists below index the logits of these."""
    samples: list[int]
    """The row of each of `StepPlan.samplers`."""
    prompts: dict[int, slice]
    """By entry: the rows that predict prompt tokens whose logprobs are asked for."""

    @classmethod
    def collect(cls, plan: StepPlan) -> "_Logits":
        tokens: list[int] = []
        samples: list[int] = []
        prompts: dict[int, slice] = {}
        first = 0
        for index, entry in enumerate(plan.entries):
            request, samplers = entry.sequence.request, entry.samplers
            if (
                entry.replay is None
                and request.wants_prompt_logprobs
                and entry.sequence is request.sequences[0]
            ):
                # The logits at position p predict token p + 1.
                known = max(entry.start, len(request.prompt_logprobs) - 1)
                last = min(entry.end, len(request.prompt_token_ids) - 1)
                if known < last:
                    prompts[index] = slice(len(tokens), len(tokens) + last - known)
                    tokens += range(first + known - entry.start, first + last - entry.start)
            first += entry.count
            if samplers:
                samples += [len(tokens)] * len(samplers)
                tokens.append(first - 1)
        return cls(tokens, samples, prompts)
