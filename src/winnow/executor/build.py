"""Construction of a paged engine from a configuration, and its KV memory where the size was left out."""

import logging
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any, cast

import torch

from winnow.attention.backends import backend_name
from winnow.cache import CacheSize
from winnow.config import AUTO, EngineConfig
from winnow.config.engine import GPU_PART
from winnow.engine.assemble import assemble
from winnow.engine.engine import Engine
from winnow.engine.executor import Executor, ServedModel
from winnow.errors import ConfigError
from winnow.eviction import EvictionPolicy, ModelTraits, resolve_policy
from winnow.executor.draft_sources import needs_hidden_states, open_drafts
from winnow.executor.rank_team import RankTeam
from winnow.executor.step_graphs import MOST_CHUNK_TOKENS
from winnow.executor.tensor_parallel import TensorParallelExecutor, build_executor, load_rank, on_gpus
from winnow.models import LoadedModel, PlainModel, load_model
from winnow.models.load.gguf.vision import find_tower
from winnow.models.load.hub import locate_adapter, locate_model
from winnow.models.model.memory import release_cached
from winnow.models.model.tokens import text_pool
from winnow.process.digest import model_digest
from winnow.storage.prefix_format import PrefixFormat
from winnow.values.checks import require
from winnow.values.json_values import dump_json
from winnow.values.units import format_bytes


def open_team(config: EngineConfig) -> RankTeam | None:
    """Start the processes that compute the model together with this one; None: it computes alone.

    Raises:
        ConfigError: there are fewer GPUs than processes.
        RankLostError: a process does not start.
    """
    size = config.model.tensor_parallel_size
    if size > 1 and on_gpus(config.model):
        count = torch.cuda.device_count()
        require(size <= count, "tensor_parallel_size", f"at most {count}, a GPU for each process", size)
    return None if size == 1 else RankTeam(size)


def load_ranks(config: EngineConfig, team: RankTeam | None) -> LoadedModel:
    """Load a model as `load_model` does, each rank its part at the same time."""
    if team is None:
        return load_model(config.model, hidden=needs_hidden_states(config))
    own = partial(load_rank, config.model, 0, team.size, team.directory)
    return team.call(own, "load", config.model, team.size, team.directory)


def build_engine(
    loaded: LoadedModel,
    config: EngineConfig,
    policy: EvictionPolicy,
    clock: Callable[[], float],
    team: RankTeam | None = None,
) -> Engine:
    """Set up cache and engine around a model.

    Args:
        policy: the engine's own, which decides how many accumulators there are if the configuration does not say it.
        team: of the ranks that hold the other parts of the model; None: there are none.
    """
    num_accumulators = config.eviction.num_accumulators
    if num_accumulators is None:
        num_accumulators = max(policy.score.num_accumulators, 1)
    scheduler, biased = config.scheduler, policy.compact is not None
    layout = loaded.kv_layout(config.cache, num_accumulators, scheduler.chunk, bias=biased)
    own, open_source = open_drafts(config, loaded, layout)
    limits = own.cache.kv_memory, scheduler.max_num_seqs, loaded.max_model_len
    size = CacheSize.fit(layout, *limits, config.cache.shares_prefixes)
    executor: Executor
    draft_source = None
    if team is None:
        executor = build_executor(loaded, own, layout, size)
        draft_source = None if open_source is None else open_source(executor)
    else:
        executor = TensorParallelExecutor(team, loaded, config, layout, size)
    rotates = team is not None or loaded.rotation is not None  # ranks find it together, when a policy asks
    rows = executor.layout.evictable_part.rows_per_seq
    traits = ModelTraits(text_pool(loaded.tokenizer), rotates, rows, loaded.sparse_top_k)
    resolve_policy(config.eviction, traits)
    model = ServedModel(
        loaded.vocab_size,
        loaded.max_model_len,
        loaded.tokenizer,
        loaded.eos_token_ids,
        traits,
        lambda: PrefixFormat(_identity(loaded, config), layout),
    )
    return assemble(executor, model, config, clock, draft_source=draft_source)


def _identity(loaded: LoadedModel, config: EngineConfig) -> str:
    """Return what identifies a model whose KVs are the same: its files, and the format in which it computes."""
    weights = config.model.load_format, config.model.seed if config.model.load_format == "dummy" else None
    narrow = [asdict(each) for each in (loaded.blocks, loaded.library) if each is not None]
    path = locate_model(config.model)
    tower = find_tower(path)  # KVs of pictures follow from it
    beside = locate_adapter(config.model), None if tower is None else tower.path
    digest = model_digest(path, *beside)
    return dump_json([digest, str(loaded.dtype), weights, *narrow])


_log = logging.getLogger("winnow")
# Of activations that live at the same time within a layer, and float32 copies of logits while they are sampled from.
_LIVE_ACTIVATIONS = 4
_LOGITS_COPIES = 3


def with_device_memory(config: EngineConfig, loaded: PlainModel) -> EngineConfig:
    """Return the configuration with the KV memory that `gpu_memory_utilization` leaves on the model's GPU.

    What is in use now counts, by this process and others, and a step's activations as far as they are foreseen. Raises
    ConfigError: nothing is left.
    """
    part = config.cache.gpu_memory_utilization
    if loaded.device.type != "cuda" or part is None:
        if part is not None and part is not GPU_PART:  # typed, also as the same number
            memory = format_bytes(config.cache.kv_memory)
            _log.warning(
                f"winnow: gpu_memory_utilization={part:g} has no effect on a CPU, where kv_memory is {memory}"
            )
        return config
    release_cached(loaded.device)
    free, total = torch.cuda.mem_get_info(loaded.device)
    step = _step_bytes(config, loaded)
    room = int(total * part) - (total - free) - step
    if room <= 0:
        raise ConfigError(
            f"gpu_memory_utilization {part:g} of {format_bytes(total)} leaves no memory for KVs: "
            f"{format_bytes(total - free)} are in use with the model, and a step of max_num_batched_tokens="
            f"{config.scheduler.max_num_batched_tokens} may need {format_bytes(step)}"
        )
    ranks = config.model.tensor_parallel_size  # one on each GPU
    return replace(config, cache=replace(config.cache, kv_memory=room * ranks))


# Formats by the most times fewer bytes for which they are taken (docs/results/equal_bytes.md): half of a compression by
# int8 keeps more answers than all of it by eviction, and far beyond what int8 alone reaches values bear 4 bits.
_FEWER_BYTES = ((16.0, "int8"), (math.inf, "k=int8,v=int4"))
# A compression by eviction that is not worth its rounds.
_NEARLY_ALL = 1.1


def with_fewer_bytes(config: EngineConfig, loaded: LoadedModel) -> EngineConfig:
    """Return the configuration with the format and number of KVs that take `compression` times fewer bytes, where it
    counts bytes; with auto, int8 KVs for a model of 16 bits. KVs keep the model's format where head size or backend
    refuse another, or where that has 8 bits itself."""
    wanted: Any = config.eviction.compression
    auto = wanted == AUTO
    if not config.counts_bytes:
        return config

    def opened(kv_format: str) -> tuple[EngineConfig, int, str]:
        cache, chunk = replace(config.cache, kv_cache_dtype=kv_format), config.scheduler.chunk
        layout = loaded.kv_layout(cache, config.eviction.num_accumulators or 1, chunk)
        backend = backend_name(config.model.attention_backend, loaded.device, layout)
        return replace(config, cache=cache), layout.block_bytes, backend

    plain, whole, backend = opened("auto")
    try:
        kv_format = "int8" if auto else next(name for most, name in _FEWER_BYTES if wanted <= most)
        narrow, fewer, same = opened(kv_format)
    except ConfigError:
        return plain
    width = loaded.dtype.itemsize
    if same != backend or width < 2 or (auto and width > 2):
        return plain
    if not auto:
        left = wanted * fewer / whole
        amount = left if left >= _NEARLY_ALL else None
        narrow = replace(narrow, eviction=replace(config.eviction, compression=amount))
    return replace(narrow, codec_factor=whole / fewer)


def _step_bytes(config: EngineConfig, loaded: PlainModel) -> int:
    scheduler, sizes = config.scheduler, cast(Any, loaded.model).config.get_text_config()
    widest = max(getattr(sizes, name, None) or 0 for name in ("hidden_size", "intermediate_size"))
    activations = scheduler.max_num_batched_tokens * widest * _LIVE_ACTIVATIONS * loaded.dtype.itemsize
    # CUDA graphs share a pool of activations, and one buffer of logits.
    tokens = scheduler.max_num_seqs + MOST_CHUNK_TOKENS
    logits = scheduler.max_num_seqs * loaded.vocab_size
    graphs = tokens * widest * _LIVE_ACTIVATIONS + logits
    return activations + graphs * loaded.dtype.itemsize + logits * _LOGITS_COPIES * 4
