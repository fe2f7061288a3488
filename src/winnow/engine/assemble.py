"""Assembly of a paged engine around an executor, real or simulated."""

from collections.abc import Callable
from pathlib import Path

from winnow.config import EngineConfig
from winnow.engine.admission import Admission
from winnow.engine.engine import Engine
from winnow.engine.executor import Executor
from winnow.engine.memory.memory import Memory
from winnow.engine.requests.instructor import Instructor
from winnow.engine.scheduling.drafts import DraftSource
from winnow.engine.scheduling.scheduler import Scheduler
from winnow.engine.served_model import ServedModel
from winnow.storage.folders import SavedDirectory, open_folder
from winnow.storage.prefix_files import PrefixFiles


def assemble(
    executor: Executor,
    model: ServedModel,
    config: EngineConfig,
    clock: Callable[[], float],
    rows: int = 1,
    draft_source: DraftSource | None = None,
) -> Engine:
    """Set up memory, scheduler and admission.

    Args:
        rows: rows of the model that one row of the executor's cache stands for.
        draft_source: where drafts come from, if not from the prompt.
    """
    cache, most = config.cache, config.eviction.max_round_kvs
    saved = cached = None
    if cache.prefix_store is not None:
        saved = PrefixFiles(SavedDirectory(Path(cache.prefix_store)), None, model.prefix_format())
    if cache.prefix_cache_dir is not None:
        folder = open_folder(cache.prefix_cache_dir)
        cached = PrefixFiles(folder, cache.prefix_cache_disk, model.prefix_format())
    memory = Memory(
        executor,
        clock,
        config.scheduler,
        prefix_caching=cache.shares_prefixes,
        host_bytes=(cache.kv_offloading_size or 0) // rows,
        saved=saved,
        cached=cached,
        session_memory=cache.session_memory,
    )
    if cache.kv_offloading_size is not None:
        memory.swap.record_copies(*executor.time_copies(clock))
    scheduler = Scheduler(
        config.scheduler,
        executor,
        clock,
        memory,
        max_round_kvs=None if most is None else max(most // rows, 1),
        draft_source=draft_source,
    )
    admission = Admission(
        memory.ledger,
        config,
        model.vocab_size,
        model.max_model_len,
        None if model.tokenizer is None else Instructor(model.tokenizer),
        scheduler.accounts,
        model.traits,
        memory.files.documents,
    )
    return Engine(executor, scheduler, admission, model, config, clock)
