"""The bAbI tasks (arXiv:1502.05698)."""

from winnow.evaluate.tasks.babi.task import BABI, BabiTask

__all__ = ["BABI", "BabiTask"]
