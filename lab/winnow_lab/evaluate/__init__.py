"""Evaluation: tasks with right answers, run under policies beside the full cache."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from winnow.eviction import EvictionPolicy
    from winnow.llm import LLM
    from winnow_lab.evaluate.result import Evaluation


def evaluate(
    llm: "LLM",
    policies: "Sequence[str | EvictionPolicy]",
    task: str = "needle-chat",
    *,
    compression: float | Sequence[float] = 4.0,
    query: str = "aware",
    controls: Sequence[str] = (),
    **settings: Any,
) -> "Evaluation":
    """Run a task under policies beside the full cache; a notebook shows its tables.

    Args:
        llm: opened with kv_floor=1, where short prompts are to reach high compressions.
        policies: presets' names, and policies of one's own.
        compression: tokens judged per KV kept; several are a cell each.
        query: aware (policies judge the question too) or agnostic (the context before it).
        settings: fields of `TaskSettings`, such as samples, tokens (a tuple) and categories.

    Raises:
        EvaluationError: no such task, preset or category, or the full cache answers nothing.
    """
    from winnow_lab.evaluate import runner
    from winnow_lab.evaluate.cell import amounts_of, plan_cells
    from winnow_lab.evaluate.plan import EvaluationPlan
    from winnow_lab.evaluate.result_tables import ShownEvaluation
    from winnow_lab.evaluate.tasks import load_task
    from winnow_lab.evaluate.tasks.task import settings_for

    rates = compression if isinstance(compression, Sequence) else [compression]
    cells = plan_cells(policies, amounts_of(rates), [query], controls)
    plan = EvaluationPlan(task, load_task(task), settings_for(llm, **settings), cells, tuple(controls))
    return ShownEvaluation(**vars(runner.evaluate(llm, plan)))
