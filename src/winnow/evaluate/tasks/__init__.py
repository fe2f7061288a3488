"""The tasks of `winnow eval`, by name."""

from winnow.evaluate.tasks.task import CountTokens, Task, TaskSettings

__all__ = ["CountTokens", "Task", "TaskSettings"]
