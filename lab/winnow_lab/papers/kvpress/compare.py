"""The comparison: Winnow's presets and kvpress's presses in the cells of one evaluation."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from winnow.llm import LLM
from winnow.models.load.loader import DEMO_MODEL
from winnow_lab.evaluate.cell import AGNOSTIC, AWARE, FULL, amounts_of, plan_cells
from winnow_lab.evaluate.plan import EvaluationPlan
from winnow_lab.evaluate.prompt import PromptMaker
from winnow_lab.evaluate.result import CellResult, Evaluation
from winnow_lab.evaluate.runner import OnStep, evaluate
from winnow_lab.evaluate.sample import Question, Sample
from winnow_lab.evaluate.tasks import Task, TaskSettings, load_task
from winnow_lab.papers.evaluations import CONTROLS, TASK
from winnow_lab.papers.kvpress.presses import Press
from winnow_lab.papers.kvpress.run import KvpressRun, PressCell
from winnow_lab.peers.environment import Environment


@dataclass(frozen=True)
class QuestionJudged:
    """A task whose questions belong to what is judged, but for their last line, which asks for the answer.

    A press acts on all it is given, and needs something behind it to answer to; Winnow is given the same.
    """

    task: Task

    @property
    def summary(self) -> str:
        """Of the task."""
        return self.task.summary

    @property
    def categories(self) -> tuple[str, ...]:
        """Of the task."""
        return self.task.categories

    def samples(self, settings: TaskSettings) -> list[Sample]:
        """The task's samples, each question moved into its context."""
        return [
            _with_question(sample, question)
            for sample in self.task.samples(settings)
            for question in sample.questions
        ]


def _with_question(sample: Sample, question: Question) -> Sample:
    judged, newline, last = question.text.rpartition("\n")
    return replace(
        sample,
        context=sample.context + judged,
        questions=(replace(question, text=newline + last),),
    )


@dataclass(frozen=True)
class Comparison:
    """What stands side by side: presets, presses, at compressions, in query modes."""

    presets: tuple[str, ...]
    presses: tuple[Press, ...]
    compressions: tuple[float, ...]
    queries: tuple[str, ...]

    def run(
        self,
        llm: LLM,
        settings: TaskSettings,
        environment: Environment,
        folder: Path,
        threads: int,
        on_step: OnStep | None = None,
        on_peer: Callable[[str], None] | None = None,
    ) -> Evaluation:
        """Answer everything that `folder` does not hold already.

        Args:
            environment: kvpress's.
            folder: for journals and kvpress's answers.
            threads: of kvpress.
            on_step: see `evaluate`.
            on_peer: called with the query mode before kvpress begins.

        Raises:
            PeerError: kvpress failed.
        """
        parts = []
        for query in self.queries:
            ours = self._ours(llm, settings, query, folder, on_step)
            if on_peer is not None:
                on_peer(query)
            theirs = self._theirs(llm, settings, query, environment, folder, threads)
            results = tuple(_relabelled(result, query) for result in ours.results)
            parts.append(replace(ours, results=(*results, *theirs)))
        full, *_ = parts[0].results
        rest = (result for part in parts for result in part.results if not result.cell.is_full)
        return replace(parts[0], results=(full, *rest))

    def _task(self, query: str) -> Task:
        task = load_task(TASK)
        return QuestionJudged(task) if query == AWARE else task

    def _ours(
        self, llm: LLM, settings: TaskSettings, query: str, folder: Path, on_step: OnStep | None
    ) -> Evaluation:
        # What is judged ends before the question's last line in either mode, so for the engine both are agnostic.
        cells = plan_cells(self.presets, amounts_of(self.compressions), (AGNOSTIC,), CONTROLS)
        plan = EvaluationPlan(TASK, self._task(query), settings, cells, CONTROLS)
        identity = plan.identity(llm, plan.make_samples())
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
        return evaluate(llm, plan, journal=folder / f"winnow-{digest}.jsonl", on_step=on_step)

    def _theirs(
        self,
        llm: LLM,
        settings: TaskSettings,
        query: str,
        environment: Environment,
        folder: Path,
        threads: int,
    ) -> list[CellResult]:
        model = Path(llm.config.model.model or DEMO_MODEL)
        cells = [
            PressCell(press, amount) for press in self.presses for amount in self.compressions if amount > 1.0
        ]
        run = KvpressRun(model, self._task(query).samples(settings), PromptMaker(llm.tokenizer), folder)
        run.answer(environment, cells, threads)
        return run.results(cells, query, llm.tokenizer)


def _relabelled(result: CellResult, query: str) -> CellResult:
    """The same result under the query mode that the samples, not the engine, made it."""
    if result.cell.preset == FULL:
        return result
    return replace(result, cell=replace(result.cell, query=query))
