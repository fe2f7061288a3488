"""Running what was asked for, or reading it from the journals."""

import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from winnow import LLM
from winnow_lab.evaluate.cell import AGNOSTIC, FULL_CELL, Cell, amounts_of, plan_cells
from winnow_lab.evaluate.likelihood import Keeping
from winnow_lab.evaluate.perplexity import Perplexity, resumed_perplexity
from winnow_lab.evaluate.plan import EvaluationPlan
from winnow_lab.evaluate.prompt import PromptMaker
from winnow_lab.evaluate.requests import make_requests
from winnow_lab.evaluate.runner import EvaluationProgress, evaluate
from winnow_lab.evaluate.settings import settings_for
from winnow_lab.evaluate.wikitext import cut_windows, wikitext
from winnow_lab.papers.kvpress.run import PACKAGE, PRESSES, SOURCES, KvpressRun, PressCell
from winnow_lab.peers.environment import Environment
from winnow_lab.real.rows import GIVEN, LABELS, WINDOW, Row, Work, complete_cells, counts, row_of, works
from winnow_lab.tasks import load_task

if TYPE_CHECKING:
    from winnow_lab.real.command import RealOptions


def has_chat_template(llm: LLM) -> bool:
    """Whether prompts go through one; else they are the plain text."""
    return llm.tokenizer is not None and bool(llm.tokenizer.chat_template)


class RealEvaluation:
    """Fills `rows` and `perplexities`.

    Args:
        arguments: see `winnow_lab.real.command`.
    """

    def __init__(self, arguments: "RealOptions", llm: LLM) -> None:
        self._arguments = arguments
        self._llm = llm
        self.rows: list[Row] = []
        self.perplexities: list[Perplexity] = []

    def run(self) -> Iterator[tuple[list[Row], list[Perplexity]]]:
        """Run everything that was asked for; yield all rows and perplexities after each work."""
        arguments = self._arguments
        for work in works(arguments.tasks, arguments.tokens, arguments.samples, arguments.categories):
            self._run(work)
            yield self.rows, self.perplexities
        if "perplexity" in arguments.tasks:
            self.perplexities = self._perplexity()
            yield self.rows, self.perplexities

    def _plan(self, work: Work, cells: Sequence[Cell]) -> EvaluationPlan:
        settings = settings_for(
            self._llm,
            samples=work.samples,
            tokens=(work.tokens,),
            categories=work.categories,
            questions=work.questions,
            seed=self._arguments.seed,
        )
        return EvaluationPlan(work.task, load_task(work.task), settings, tuple(cells), chat=self._chat(work))

    def _chat(self, work: Work) -> str:
        return work.chat if has_chat_template(self._llm) else "off"

    def _run(self, work: Work) -> None:
        journal = self._arguments.work / f"{work.name.replace(' ', '-')}-{work.samples}.jsonl"
        if self._arguments.report and not complete_cells(journal, self._plan(work, [FULL_CELL])):
            return
        on_step = partial(_show_progress, work.name)
        [full] = evaluate(self._llm, self._plan(work, [FULL_CELL]), journal=journal, on_step=on_step).results
        reference = row_of(work, full, self._seconds(work, FULL_CELL))
        self.rows.append(reference)
        counted = counts(reference, self._arguments.counts_from)
        score = "refused" if reference.score is None else f"{reference.score:.2f}"
        print(f"{work.name}: full cache {score}{'' if counted else ', does not count'}")
        if not counted:
            return
        queries = [query for query in work.queries if query in self._arguments.query]
        cells: Sequence[Cell] = plan_cells(
            self._arguments.policies, amounts_of(self._arguments.compressions), queries
        )[1:]
        if self._arguments.report:
            cells = complete_cells(journal, self._plan(work, cells))
        if cells:
            plan = self._plan(work, cells)
            for result in evaluate(self._llm, plan, journal=journal, on_step=on_step).results:
                seconds = None if result.refusal else self._seconds(work, result.cell)
                self.rows.append(row_of(work, result, seconds))
        if self._arguments.kvpress is not None:
            self._run_kvpress(work, queries, Environment(self._arguments.kvpress))

    def _run_kvpress(self, work: Work, queries: Sequence[str], environment: Environment) -> None:
        arguments = self._arguments
        samples = self._plan(work, [FULL_CELL]).make_samples()
        maker = PromptMaker(self._llm.tokenizer, self._chat(work))
        cells = [
            PressCell(PRESSES[name], amount)
            for name in arguments.presses
            for amount in arguments.compressions
            if amount > 1.0
        ]
        for query in queries:
            print(f"{work.name}: kvpress, question {LABELS[query]}", file=sys.stderr)
            run = KvpressRun(
                arguments.peer_model, samples, maker, arguments.work, dtype=arguments.dtype, query=query
            )
            shown = cells
            if arguments.report:
                shown = [cell for cell in cells if run.has_answered(cell)]
            else:
                if not environment.python.exists():
                    environment.prepare([PACKAGE], sources=SOURCES)
                run.answer(environment, cells, arguments.threads)
            for cell, result in zip(shown, run.results(shown, query, self._llm.tokenizer), strict=True):
                reported = run.seconds(cell) if work.questions > 1 else None
                self.rows.append(row_of(work, result, None if reported is None else reported[1]))

    def _seconds(self, work: Work, cell: Cell) -> float | None:
        if work.questions == 1:
            return None
        path = self._arguments.work / "seconds.json"
        known: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
        key = f"{work.name} {cell.name}"
        if key not in known:
            sample = self._plan(work, [cell]).make_samples()[0]
            maker = PromptMaker(self._llm.tokenizer, self._chat(work))
            prompts = [maker.make(sample, question) for question in sample.questions]
            known[key] = 0.0
            for request in make_requests([cell], sample, prompts, lambda *_: True):
                [output] = self._llm.generate([list(request.token_ids)], request.params)
                known[key] += output.metrics.latency or 0.0
            path.write_text(json.dumps(known))
        return known[key]

    def _perplexity(self) -> list[Perplexity]:
        arguments, llm = self._arguments, self._llm
        cells = plan_cells(arguments.policies, amounts_of(arguments.compressions), (AGNOSTIC,))
        windows = cut_windows(llm.tokenizer, wikitext(None), WINDOW, GIVEN, arguments.windows)
        keepings = {cell.label: Keeping.of(cell) for cell in cells}
        path = arguments.work / f"perplexity-{arguments.windows}.jsonl"
        return resumed_perplexity(llm, windows, keepings, path)


def _show_progress(name: str, progress: EvaluationProgress) -> None:
    print(f"\r{name}: {progress.done} of {progress.total}, {progress.cell:50.50}", end="", file=sys.stderr)
