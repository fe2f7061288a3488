"""Assembly of a paged engine around an executor, real or simulated."""

from collections.abc import Callable
from pathlib import Path

from winnow.config import EngineConfig
from winnow.engine.admission import Admission
from winnow.engine.engine import Engine
from winnow.engine.executor import Executor
from winnow.engine.requests.instructor import Instructor
from winnow.engine.scheduling.scheduler import Scheduler
from winnow.engine.served_model import ServedModel


def assemble(
    executor: Executor, model: ServedModel, config: EngineConfig, clock: Callable[[], float], rows: int = 1
) -> Engine:
    """Set up queue, scheduler, residency and admission.

    Args:
        rows: rows of the model that one row of the executor's cache stands for.
    """
    cache, most = config.cache, config.eviction.max_round_kvs
    store = None if cache.prefix_store is None else model.open_store(Path(cache.prefix_store))
    scheduler = Scheduler(
        config.scheduler,
        executor,
        clock,
        max_round_kvs=None if most is None else max(most // rows, 1),
        prefix_caching=cache.shares_prefixes,
        host_bytes=(cache.kv_offloading_size or 0) // rows,
        prefix_store=store,
    )
    if cache.kv_offloading_size is not None:
        scheduler.record_copies(*executor.time_copies(clock))
    admission = Admission(
        scheduler.ledger,
        config,
        model.vocab_size,
        model.max_model_len,
        model.trained_len,
        None if model.tokenizer is None else Instructor(model.tokenizer),
        scheduler.accounts,
        model.traits,
        scheduler.saved_prefixes,
    )
    return Engine(executor, scheduler, admission, model, config, clock)
