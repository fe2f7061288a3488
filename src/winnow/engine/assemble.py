"""Assembly of a paged engine around an executor, real or simulated."""

from collections.abc import Callable
from pathlib import Path

from winnow.config import CacheConfig, EngineConfig
from winnow.engine.admission import Admission
from winnow.engine.engine import Engine
from winnow.engine.executor import Executor
from winnow.engine.requests.instructor import Instructor
from winnow.engine.residency.disk_tier import DiskTier
from winnow.engine.residency.prefix_cipher import PrefixCipher
from winnow.engine.residency.prefix_folder import open_folder
from winnow.engine.residency.prefix_store import PrefixStore
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
    store = None
    if cache.prefix_store is not None:
        store = PrefixStore(Path(cache.prefix_store), model.prefix_format(None))
    scheduler = Scheduler(
        config.scheduler,
        executor,
        clock,
        max_round_kvs=None if most is None else max(most // rows, 1),
        prefix_caching=cache.shares_prefixes,
        host_bytes=(cache.kv_offloading_size or 0) // rows,
        prefix_store=store,
        disk_tier=_open_disk_tier(model, cache),
        session_memory=cache.session_memory,
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


def _open_disk_tier(model: ServedModel, cache: CacheConfig) -> DiskTier | None:
    if cache.prefix_cache_dir is None:
        return None
    path = cache.prefix_cache_key_file
    cipher = None if path is None else PrefixCipher.from_file(Path(path))
    return DiskTier(open_folder(cache.prefix_cache_dir), cache.prefix_cache_disk, model.prefix_format(cipher))
