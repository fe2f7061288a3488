"""The tasks of `winnow eval`, by name."""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from winnow.errors import EvaluationError, known_names
from winnow.evaluate.tasks.task import CountTokens, Task, TaskSettings

__all__ = ["TASKS", "CountTokens", "Task", "TaskSettings", "load_task"]

TASKS: Mapping[str, str] = MappingProxyType(
    {
        "demo": "winnow.evaluate.tasks.demo:DEMO",
        "ruler": "winnow.evaluate.tasks.ruler:RULER",
        "kv-retrieval": "winnow.evaluate.tasks.kv_retrieval:KV_RETRIEVAL",
        "needle": "winnow.evaluate.tasks.needle:NEEDLE",
        "needle-chat": "winnow.evaluate.tasks.needle:NEEDLE_CHAT",
        "documents": "winnow.evaluate.tasks.documents:DOCUMENTS",
        "longbench": "winnow.evaluate.tasks.longbench:LONGBENCH",
        "longbench-kv-compress": "winnow.evaluate.tasks.longbench:LONGBENCH_KV_COMPRESS",
        "longbench-kv-compress-70b": "winnow.evaluate.tasks.longbench:LONGBENCH_KV_COMPRESS_70B",
    }
)
"""Name -> "module:attribute" of a `Task`; the module is imported when the task is asked for."""


def load_task(name: str, tasks: Mapping[str, str] = TASKS) -> Task:
    """Return the task of that name.

    Raises:
        EvaluationError: there is none; names the nearest, and all.
    """
    if name not in tasks:
        raise EvaluationError(f"no task {name!r}; {known_names(name, tasks)}")
    module, _, attribute = tasks[name].partition(":")
    task: Task = getattr(import_module(module), attribute)
    return task
