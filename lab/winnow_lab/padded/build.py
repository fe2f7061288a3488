"""The padded engine: a step is a pass of the running batch, or the first tokens of a group prefilled apart from it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import torch

from winnow.cache.memory import require_memory
from winnow.config import EngineConfig
from winnow.engine.counters import Occupancy
from winnow.engine.engine import Engine, Sampled
from winnow.engine.executor import ServedModel
from winnow.engine.requests.new_request import NewRequest
from winnow.engine.requests.request import Request, Sequence
from winnow.engine.requests.request_limits import answer_limit, check_tokens
from winnow.engine.scheduling.queue import build_order
from winnow.errors import CapacityError, InvalidRequestError, PrefixStoreError, UnsupportedModelError
from winnow.executor.build import with_device_memory
from winnow.models import PlainModel, load_plain_model
from winnow.outputs import RequestOutput
from winnow.sampling import Sampler
from winnow.values.eviction_request import EVICTION_FIELDS
from winnow.values.units import format_bytes
from winnow_lab.padded.background import Background, StreamFetch
from winnow_lab.padded.batch import Batch
from winnow_lab.padded.batch_state import BatchState, Grouping
from winnow_lab.padded.executor import PaddedExecutor
from winnow_lab.padded.memory_budget import MemoryBudget
from winnow_lab.padded.model import PaddedModel, probe_shape
from winnow_lab.padded.modes import MODES
from winnow_lab.padded.options import PaddedOptions
from winnow_lab.padded.prefill import check_padding
from winnow_lab.padded.queue import Queue
from winnow_lab.padded.sampler_slots import SamplerSlots
from winnow_lab.padded.stats import Counters, PaddedStats

# Waiting queries that are considered for a group, per query that it may have.
_LOOKAHEAD = 8


class PaddedEngine(Engine):
    """Engine that serves requests in one padded batch, with the model as transformers runs it.

    Its executor also chooses who takes part in a step; KVs are each query's own.
    """

    _executor: Any
    _admission: Any  # the memory budget

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        return super().step()

    @torch.inference_mode()
    def abort(self, request_id: str) -> RequestOutput | None:
        return super().abort(request_id)  # freeing a row writes to it

    def stats(self) -> PaddedStats:
        return replace(
            self._executor.stats(),
            prompt_tokens=self.requests.prompt_tokens,
            generated_tokens=self.requests.generated_tokens,
            num_steps=self._counters.num_steps,
        )

    def implementation(self) -> dict[str, str]:
        return {}

    def occupancy(self) -> Occupancy:
        return Occupancy({}, [])

    def kv_bytes(self, num_kvs: int) -> int:
        return int(self._executor.kv_bytes(num_kvs))

    def fork(self, request_id: str, *_: Any, **__: Any) -> None:
        raise InvalidRequestError(f"request_id {request_id!r} cannot be forked: that needs engine=paged")

    def save_prefix(self, *_: Any, **__: Any) -> NoReturn:
        raise PrefixStoreError("engine must be paged to save a prefix")

    def close(self) -> None:
        """Do nothing."""

    def check_integrity(self) -> None:
        self._executor.check_integrity(self.requests.unfinished)

    def _admit(self, new: NewRequest) -> Request:
        """Check a request against model and memory: one that passes can always be computed, if need be alone."""
        if new.observer is not None:
            raise InvalidRequestError("inspect needs engine=paged: a padded cache keeps all KVs of a query")
        params, count, budget = new.params, len(new.token_ids), self._admission
        check_tokens(new.token_ids, params, self._model.vocab_size)
        for name in EVICTION_FIELDS:
            # What is said of the prompt's end alone asks for nothing.
            asks = name not in ("template_tail", "answer_prefix")
            if asks and getattr(params, name) not in (None, "full", ()):
                raise InvalidRequestError(
                    f"{name} needs engine=paged: a padded cache keeps all KVs of a query"
                )
        max_tokens = answer_limit(count, params, self._model.max_model_len)
        # The last token of an answer is never computed, so it needs no KV.
        left = budget.max_columns - count + 1
        if left < max(params.num_forced, 1) or (params.max_tokens is not None and max_tokens > left):
            raise CapacityError(
                f"prompt of {count} tokens with max_tokens {max_tokens} needs room for {count + max_tokens - 1} KVs, "
                f"kv_memory {format_bytes(budget.kv_memory)} holds {budget.max_columns}"
            )
        params = self._executor.with_seed(params)
        return Request.of(new, params, min(max_tokens, left), self._clock())

    def _compute(self) -> Sampled:
        try:
            failure = self._executor.receive()
            if failure is None:
                return self._executor.step()
        except BaseException:  # also on KeyboardInterrupt
            self._executor.recompute_all(self.requests.unfinished)
            raise
        raise failure  # of a prefill in the background: the batch is as it was

    def _restart(self) -> None:
        self._executor.recompute_all(self.requests.unfinished)

    def _release(self, sequence: Sequence, reason: str, stop_reason: int | str | None) -> None:
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        self._executor.remove(sequence)

    def _take_failed(self) -> tuple[Sequence, ...]:
        return ()

    def _report(self, sequence: Sequence) -> None:
        return None


def build_padded_engine(
    config: EngineConfig, clock: Callable[[], float]
) -> tuple[PlainModel, PaddedEngine, EngineConfig]:
    """Load a model as transformers runs it and build its engine: the entry point of `engine="padded"`. Raises as
    `PaddedOptions.of`, `load_plain_model` and `padded_engine`."""
    PaddedOptions.of(config)
    return _opened(load_plain_model(config.model), config, clock)


def _opened(
    loaded: PlainModel, config: EngineConfig, clock: Callable[[], float]
) -> tuple[PlainModel, PaddedEngine, EngineConfig]:
    config = with_device_memory(config, loaded)
    return loaded, padded_engine(loaded, config, clock), config


def padded_engine(loaded: PlainModel, config: EngineConfig, clock: Callable[[], float]) -> PaddedEngine:
    """Build the padded engine around a model.

    Raises:
        UnsupportedModelError: the model's cache is not keys and values by token, padding changes what the model
            computes, or `overlap_prefill` is on and the model's passes cannot run in parallel.
    """
    padded, scheduler = PaddedOptions.of(config), config.scheduler
    require_memory(config.cache.kv_memory, config.cache.kv_memory, loaded.device)
    model = PaddedModel(loaded.model)
    kv_shape = probe_shape(loaded.model)
    if config.model.verify_model:
        check_padding(model, kv_shape, loaded.vocab_size)
    memory, most = config.cache.kv_memory, scheduler.max_num_seqs
    budget = MemoryBudget(kv_shape, memory, most, padded.park_above, padded.admit_below)
    sampler = Sampler(
        most,
        loaded.vocab_size,
        loaded.device,
        loaded.eos_token_ids,
        seed=config.model.seed,
        grammars=loaded.grammars,
    )
    counters, mode = Counters(), MODES[padded.mode]
    if mode.keeps_gaps and not model.takes_positions:
        raise UnsupportedModelError(
            f"{type(loaded.model).__name__} takes positions from columns, so mode={padded.mode} would "
            "change them"
        )
    fetch = StreamFetch(model.device) if model.device.type == "cuda" else None
    state = BatchState(
        Queue(padded.park_memory or memory, counters, build_order(scheduler), fetch),
        Batch(model, budget, counters, keeps_gaps=mode.keeps_gaps),
        budget,
        SamplerSlots(sampler, most),
        counters,
        Grouping(
            padded.prefill_group,
            padded.group_padding,
            scheduler.max_num_batched_tokens,
            padded.prefill_group * _LOOKAHEAD,
        ),
        # A model without position_ids counts columns, and may have a limited number of positions.
        None if model.takes_positions else loaded.max_model_len,
    )
    executor: Any = PaddedExecutor(
        model,
        mode,
        state,
        clock,
        scheduler.prefill_chunk,
        Background(model.device, clock) if _overlaps(padded, model) else None,
    )
    served = ServedModel(loaded.vocab_size, loaded.max_model_len, loaded.tokenizer, loaded.eos_token_ids)
    admission: Any = budget
    return PaddedEngine(executor, executor, admission, served, config, clock)


def _overlaps(config: PaddedOptions, model: PaddedModel) -> bool:
    if config.overlap_prefill is None:
        return config.mode == "embedding" and model.device.type == "cuda" and model.is_pure
    if config.overlap_prefill and not model.is_pure:
        raise UnsupportedModelError(
            f"overlap_prefill cannot be on for {type(model.model).__name__}: its rotary embeddings change with what "
            "they see, so that two passes cannot run side by side"
        )
    return config.overlap_prefill
