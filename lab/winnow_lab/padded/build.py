"""Building a padded engine from a configuration."""

from collections.abc import Callable
from typing import Any

from winnow.cache.memory import require_memory
from winnow.config import EngineConfig, PaddedConfig
from winnow.engine.scheduling.orders import build_order
from winnow.engine.served_model import ServedModel
from winnow.errors import UnsupportedModelError
from winnow.models import PlainModel
from winnow.sampling import Sampler
from winnow_lab.padded.admission import PaddedAdmission
from winnow_lab.padded.background import Background, StreamFetch
from winnow_lab.padded.batch import Batch
from winnow_lab.padded.batch_state import BatchState
from winnow_lab.padded.engine import PaddedEngine
from winnow_lab.padded.executor import PaddedExecutor
from winnow_lab.padded.groups import Grouping
from winnow_lab.padded.memory_budget import MemoryBudget
from winnow_lab.padded.model import PaddedModel
from winnow_lab.padded.modes import Embedding, Mode
from winnow_lab.padded.queue import Queue
from winnow_lab.padded.sampler_slots import SamplerSlots
from winnow_lab.padded.shape import probe_shape
from winnow_lab.padded.stats import Counters
from winnow_lab.padded.trial import check_padding

# Waiting queries that are considered for a group, per query that it may have.
_LOOKAHEAD = 8


def build_padded_engine(loaded: PlainModel, config: EngineConfig, clock: Callable[[], float]) -> PaddedEngine:
    """Build the padded engine around a model.

    Raises:
        UnsupportedModelError: the model's cache is not keys and values by token, padding changes what the model
            computes, or `overlap_prefill` is on and the model's passes cannot run in parallel.
    """
    padded, scheduler = config.padded, config.scheduler
    require_memory(config.cache.kv_memory, config.cache.kv_memory, loaded.device)
    model = PaddedModel(loaded.model)
    kv_shape = probe_shape(loaded.model)
    if config.model.verify_model:
        check_padding(model, kv_shape, loaded.vocab_size)
    budget = MemoryBudget(
        kv_shape,
        config.cache.kv_memory,
        scheduler.max_num_seqs,
        padded.park_above,
        padded.admit_below,
    )
    sampler = Sampler(
        scheduler.max_num_seqs,
        loaded.vocab_size,
        loaded.device,
        loaded.eos_token_ids,
        seed=config.model.seed,
        grammars=loaded.grammars,
    )
    counters, mode = Counters(), _mode_named(padded.padded_mode)
    if mode.keeps_gaps and not model.takes_positions:
        raise UnsupportedModelError(
            f"{type(loaded.model).__name__} takes positions from columns, so padded_mode={padded.padded_mode} would "
            "change them"
        )
    fetch = StreamFetch(model.device) if model.device.type == "cuda" else None
    state = BatchState(
        Queue(padded.park_memory or config.cache.kv_memory, counters, build_order(scheduler), fetch),
        Batch(model, budget, counters, keeps_gaps=mode.keeps_gaps),
        budget,
        SamplerSlots(sampler, scheduler.max_num_seqs),
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
    admission: Any = PaddedAdmission(budget, loaded.vocab_size, loaded.max_model_len)
    return PaddedEngine(
        executor,
        executor,
        admission,
        ServedModel(loaded.vocab_size, loaded.max_model_len, loaded.tokenizer, loaded.eos_token_ids),
        config,
        clock,
    )


def _overlaps(config: PaddedConfig, model: PaddedModel) -> bool:
    if config.overlap_prefill is None:
        return config.padded_mode == "embedding" and model.device.type == "cuda" and model.is_pure
    if config.overlap_prefill and not model.is_pure:
        raise UnsupportedModelError(
            f"overlap_prefill cannot be on for {type(model.model).__name__}: its rotary embeddings change with what "
            "they see, so that two passes cannot run side by side"
        )
    return config.overlap_prefill


def _mode_named(name: str) -> Mode:
    if name == "embedding":
        return Embedding()
    from winnow_lab.padded.comparison import MODES

    return MODES[name]
