"""Computes a step: packs the planned tokens, runs the model over the paged cache, samples."""

from dataclasses import dataclass

import torch
from torch import Tensor

from winnow.attention import AttentionBackend, AttentionSpec, Observe, PagedCache, Spans
from winnow.cache import CacheLayout, CacheManager, CacheSize, KVPool
from winnow.config import EngineConfig
from winnow.engine.plan import StepPlan, StepResult
from winnow.engine.request import Sequence
from winnow.models import LoadedModel
from winnow.outputs import LogprobDict
from winnow.sampling import Sampler, SamplingParams, prompt_logprobs


@dataclass(frozen=True)
class _AttentionStep:
    """What attention layers of one forward pass share; see `winnow.models.AttentionStep`."""

    backend: AttentionBackend
    cache: PagedCache
    spans: Spans
    observe: Observe | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        self.backend.write(self.cache, self.spans, layer, k, v)
        return self.backend.attend(self.cache, self.spans, layer, q, spec, self.observe)


class TorchExecutor:
    """Owns the model, the pool of KVs and the sampler."""

    def __init__(self, model: LoadedModel, config: EngineConfig, backend: AttentionBackend) -> None:
        geometry = model.geometry
        layout = CacheLayout(
            geometry.num_layers,
            geometry.num_kv_heads,
            geometry.head_dim,
            config.cache.block_size,
            model.dtype,
        )
        size = CacheSize.fit(
            layout, config.cache.kv_memory, config.scheduler.max_num_seqs, model.max_model_len
        )
        self.cache = CacheManager(layout, size, model.device)
        self.pool = KVPool(layout, size.num_blocks, model.device)
        self._model = model
        self._backend = backend
        self._sampler = Sampler(
            size.max_num_seqs, model.vocab_size, model.device, model.eos_token_ids, seed=config.model.seed
        )
        self._sampling: set[int] = set()

    def settle(self, params: SamplingParams) -> SamplingParams:
        return self._sampler.with_seed(params)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        for copy in plan.copies:
            self.pool.copy_blocks(copy.source, copy.target)
        slots = [entry.slot for entry in plan.entries]
        spans = Spans.build(
            slots,
            starts=[entry.start for entry in plan.entries],
            counts=[entry.count for entry in plan.entries],
            lengths=self.cache.host_lengths[slots].max(axis=(1, 2)).astype("int64"),
            device=self._model.device,
        )
        step = _AttentionStep(self._backend, PagedCache(self.pool, self.cache), spans)
        logits = _Logits.collect(plan)
        rows = self._forward(plan, spans, step, logits.tokens)
        scored = {
            index: self._prompt_logprobs(plan, index, rows[part]) for index, part in logits.prompts.items()
        }
        samplers = plan.samplers
        if not samplers:
            return StepResult([], [], scored)
        sampled = self._sampler.sample(
            rows[torch.tensor(logits.samples, device=rows.device)], self._enter(samplers)
        )
        return StepResult(sampled.token_ids, sampled.logprobs, scored)

    def release(self, slot: int) -> None:
        if slot in self._sampling:
            self._sampling.remove(slot)
            self._sampler.remove(slot)

    def _forward(self, plan: StepPlan, spans: Spans, step: _AttentionStep, wanted: list[int]) -> Tensor:
        """Run the model over the packed batch. Returns the logits of the `wanted` tokens, [len(wanted), V]."""
        tokens = [token for e in plan.entries for token in e.sequence.token_ids[e.start : e.end]]
        device = self._model.device
        output = self._model.model(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=spans.position[None],
            use_cache=False,
            logits_to_keep=torch.tensor(wanted, dtype=torch.int64, device=device),
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
                self._sampling.add(slot)
                self._sampler.add(
                    slot,
                    sequence.request.params,
                    sequence.request.prompt_token_ids,
                    sequence.output_token_ids,
                    sequence.index,
                )
            slots.append(slot)
        return slots

    def _prompt_logprobs(self, plan: StepPlan, index: int, logits: Tensor) -> list[LogprobDict]:
        entry = plan.entries[index]
        request = entry.sequence.request
        done = len(request.prompt_logprobs)
        top = request.params.prompt_logprobs
        assert top is not None, "prompt logprobs are collected only where asked for"
        return prompt_logprobs(logits, request.prompt_token_ids[done : done + len(logits)], top)


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
            request = entry.sequence.request
            if request.wants_prompt_logprobs and entry.sequence is request.sequences[0]:
                # The logits at position p predict token p + 1.
                known = max(entry.start, len(request.prompt_logprobs) - 1)
                last = min(entry.end, len(request.prompt_token_ids) - 1)
                if known < last:
                    prompts[index] = slice(len(tokens), len(tokens) + last - known)
                    tokens += range(first + known - entry.start, first + last - entry.start)
            if entry.samplers:
                samples += [len(tokens)] * len(entry.samplers)
                tokens.append(first + entry.count - 1)
            first += entry.count
        return cls(tokens, samples, prompts)
