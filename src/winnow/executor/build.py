"""Construction of a paged engine from a configuration."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch

from winnow.cache import CacheSize
from winnow.config import EngineConfig
from winnow.engine.assemble import assemble
from winnow.engine.engine import Engine
from winnow.engine.executor import Executor
from winnow.engine.served_model import ServedModel
from winnow.eviction import EvictionPolicy, ModelTraits
from winnow.executor.draft_sources import needs_hidden_states, open_drafts
from winnow.executor.rank_executor import build_rank, load_rank, on_gpus
from winnow.executor.rank_team import RankTeam
from winnow.executor.tensor_parallel import TensorParallelExecutor
from winnow.models import LoadedModel, load_model
from winnow.models.load.hub import locate_model
from winnow.models.load.tokens import text_pool
from winnow.report.fingerprint import model_digest
from winnow.storage.prefix_format import PrefixFormat
from winnow.values.checks import require
from winnow.values.json_values import dump_json


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
    layout = loaded.kv_layout(
        config.cache, num_accumulators, config.scheduler.chunk, bias=policy.compact is not None
    )
    own, open_source = open_drafts(config, loaded, layout)
    size = CacheSize.fit(
        layout,
        own.cache.kv_memory,
        config.scheduler.max_num_seqs,
        loaded.max_model_len,
        config.cache.shares_prefixes,
    )
    executor: Executor
    draft_source = None
    if team is None:
        executor = build_rank(loaded, own, layout, size)
        draft_source = None if open_source is None else open_source(executor)
    else:
        executor = TensorParallelExecutor(team, loaded, config, layout, size)

    model = ServedModel(
        loaded.vocab_size,
        loaded.max_model_len,
        loaded.tokenizer,
        loaded.eos_token_ids,
        ModelTraits(
            text_pool(loaded.tokenizer),
            team is not None or loaded.rotation is not None,  # ranks find it together, when a policy asks
            executor.layout.evictable_part.rows_per_seq,
        ),
        lambda: PrefixFormat(_identity(loaded, config), layout),
    )
    return assemble(executor, model, config, clock, draft_source=draft_source)


def _identity(loaded: LoadedModel, config: EngineConfig) -> str:
    """Return what identifies a model whose KVs are the same: its files, and the format in which it computes."""
    weights = config.model.load_format, config.model.seed if config.model.load_format == "dummy" else None
    narrow = [asdict(each) for each in (loaded.blocks, loaded.library) if each is not None]
    return dump_json([model_digest(locate_model(config.model)), str(loaded.dtype), weights, *narrow])
