"""The tasks of `winnow eval`, by name."""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from winnow.errors import EvaluationError, known_names
from winnow_lab.evaluate.tasks.task import CountTokens, Task, TaskSettings

__all__ = ["TASKS", "CountTokens", "Task", "TaskSettings", "load_task"]

TASKS: Mapping[str, str] = MappingProxyType(
    {
        "demo": "winnow_lab.evaluate.tasks.in_prose:DEMO",
        "ruler": "winnow_lab.evaluate.tasks.ruler:RULER",
        "kv-retrieval": "winnow_lab.evaluate.tasks.kv_retrieval:KV_RETRIEVAL",
        "needle": "winnow_lab.evaluate.tasks.in_prose:NEEDLE",
        "needle-chat": "winnow_lab.evaluate.tasks.in_prose:NEEDLE_CHAT",
        "documents": "winnow_lab.evaluate.tasks.in_prose:DOCUMENTS",
        "code": "winnow_lab.evaluate.tasks.code:CODE",
        "longbench": "winnow_lab.evaluate.tasks.longbench:LONGBENCH",
        "longbench-kv-compress": "winnow_lab.evaluate.tasks.longbench:LONGBENCH_KV_COMPRESS",
        "longbench-kv-compress-70b": "winnow_lab.evaluate.tasks.longbench:LONGBENCH_KV_COMPRESS_70B",
    }
)
"""Name -> "module:attribute" of a `Task`; the module is imported when the task is asked for."""


def load_task(name: str, tasks: Mapping[str, str] = TASKS) -> Task:
    """The task of that name; raises EvaluationError where there is none, which names the nearest, and all."""
    if name not in tasks:
        raise EvaluationError(f"no task {name!r}; {known_names(name, tasks)}")
    module, _, attribute = tasks[name].partition(":")
    task: Task = getattr(import_module(module), attribute)
    return task
