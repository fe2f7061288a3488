"""Tasks of lm_eval through one engine, once for each way of keeping KVs."""

import difflib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from winnow.errors import EvaluationError, InvalidRequestError
from winnow.llm import LLM
from winnow_lab.evaluate.likelihood import Keeping
from winnow_lab.evaluate.lm_eval.model import WinnowLM
from winnow_lab.report.tables import Footnotes, TextTable

NOTE = """\
Prompts, answers and metrics are those of lm-evaluation-harness; what stands behind the sign is its standard error. A
continuation is scored by forced decoding after its context was computed and cut: policies judge the context, question
and few-shot examples in it, and never the continuation."""
_TASK_FILES = (".yaml", ".yml", ".py", ".json", ".jsonl")
# Of what lm_eval returns: what is data, not its own configuration.
_PARTS = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")


@dataclass(frozen=True)
class LmEvalPlan:
    """Request to lm_eval: arguments of its `simple_evaluate`; `limit`: documents of each task, None: all."""

    tasks: tuple[str, ...]
    num_fewshot: int | None = None
    limit: int | None = None
    include_path: Path | None = None
    apply_chat_template: bool = False

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        del values["include_path"]
        return values | {"tasks": list(self.tasks)}

    def digest(self) -> str:
        """SHA-256 of the names and contents of the task files in `include_path`."""
        digest = hashlib.sha256()
        paths = [] if self.include_path is None else sorted(self.include_path.rglob("*"))
        for path in paths:
            if path.is_file() and path.suffix in _TASK_FILES:
                digest.update(f"{path.name}\0".encode() + path.read_bytes())
        return digest.hexdigest()

    def task_manager(self) -> TaskManager:
        """The manager that finds the tasks' files; where there is no such task, EvaluationError names the nearest."""
        if self.include_path is not None:
            # Its own tasks are thousands of files, and reading them takes seconds.
            manager = TaskManager(include_path=str(self.include_path), include_defaults=False)
            if set(self.tasks) <= set(manager.all_tasks):
                return manager
        manager = TaskManager(include_path=None if self.include_path is None else str(self.include_path))
        for name in self.tasks:
            if name not in manager.all_tasks:
                near = difflib.get_close_matches(name, manager.all_tasks, n=3)
                hint = f"; did you mean {', '.join(near)}?" if near else ""
                raise EvaluationError(f"lm_eval has no task {name!r}{hint}")
        return manager


@dataclass(frozen=True)
class LmEvalResult:
    """Result of lm_eval in one cell: the data in its results; none where the engine refused the cell."""

    cell: str
    found: dict[str, Any]
    refusal: str | None = None

    def metrics(self) -> dict[tuple[str, str], tuple[float, float | None]]:
        """(task, metric) -> value and standard error, where lm_eval gives one."""
        metrics: dict[tuple[str, str], tuple[float, float | None]] = {}
        for task, values in self.found.get("results", {}).items():
            for key, value in values.items():
                metric, _, kind = key.partition(",")
                if isinstance(value, float | int) and not metric.endswith("_stderr") and kind:
                    error = values.get(f"{metric}_stderr,{kind}")
                    shown = metric if kind == "none" else f"{metric} ({kind})"
                    metrics[task, shown] = float(value), error if isinstance(error, float) else None
        return metrics

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        return cls(**values)


def run_cell(
    llm: LLM,
    plan: LmEvalPlan,
    manager: TaskManager,
    name: str,
    keeping: Keeping,
    on_step: Callable[[], None] = lambda: None,
) -> LmEvalResult:
    """Run the plan's tasks under one way of keeping KVs, called `name`.

    Where the engine refuses a request the cell is refused: a mean over the others would be one of other documents.
    """
    try:
        found = simple_evaluate(
            WinnowLM(llm, keeping, on_step=on_step),
            tasks=list(plan.tasks),
            num_fewshot=plan.num_fewshot,
            limit=plan.limit,
            apply_chat_template=plan.apply_chat_template,
            task_manager=manager,
            log_samples=False,
        )
    except InvalidRequestError as error:
        return LmEvalResult(name, {}, str(error))
    assert found is not None, "there is one process"
    parts = {part: found[part] for part in _PARTS if part in found}
    return LmEvalResult(name, parts)


def lm_eval_table(results: Sequence[LmEvalResult]) -> TextTable:
    """Tasks and metrics down, cells across."""
    found = [result.metrics() for result in results]
    names = dict.fromkeys(key for metrics in found for key in metrics)

    def entry(metrics: Mapping[tuple[str, str], tuple[float, float | None]], key: tuple[str, str]) -> str:
        if key not in metrics:
            return ""
        value, error = metrics[key]
        return f"{value:.4g}" if error is None else f"{value:.4g} ± {error:.2g}"

    rows = tuple((" ".join(key), tuple(entry(metrics, key) for metrics in found)) for key in names)
    notes = Footnotes()
    columns = tuple(
        result.cell if result.refusal is None else f"{result.cell} {notes.mark(result.refusal)}"
        for result in results
    )
    return TextTable("lm_eval", "task and metric", columns, rows, notes.lines())
