"""From a configuration to a paged engine ready to run."""

from collections.abc import Callable

from winnow.attention import open_backend
from winnow.config import EngineConfig
from winnow.engine.admission import Admission
from winnow.engine.engine import Engine
from winnow.engine.instructor import Instructor
from winnow.engine.scheduler import Scheduler
from winnow.eviction import EvictionPolicy
from winnow.executor.torch_executor import TorchExecutor
from winnow.models import LoadedModel


def build_engine(
    loaded: LoadedModel, config: EngineConfig, policy: EvictionPolicy, clock: Callable[[], float]
) -> Engine:
    """Set up cache, scheduler and admission around a model.

    Args:
        policy: the engine's own, which decides how many accumulators there are if the configuration does not say it.
    """
    num_accumulators = config.eviction.num_accumulators
    if num_accumulators is None:
        num_accumulators = max(policy.score.num_accumulators, 1)
    layout = loaded.kv_layout(config.cache, num_accumulators)
    backend = open_backend(config.model.attention_backend, loaded.device, layout)
    executor = TorchExecutor(loaded, config, backend, num_accumulators)
    scheduler = Scheduler(config.scheduler, executor, clock, max_round_kvs=config.eviction.max_round_kvs)
    admission = Admission(
        scheduler.ledger,
        config,
        loaded.vocab_size,
        loaded.max_model_len,
        loaded.trained_len,
        None if loaded.tokenizer is None else Instructor(loaded.tokenizer),
    )
    return Engine(
        executor,
        scheduler,
        loaded.tokenizer,
        loaded.eos_token_ids,
        admission,
        config.cache.kv_memory,
        clock,
    )
