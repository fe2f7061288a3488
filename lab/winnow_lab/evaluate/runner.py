"""Runner of all cells of an evaluation through one engine, as many requests at once as it takes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean

from winnow.errors import ContextLengthError, EvaluationError, InvalidRequestError
from winnow.llm import LLM
from winnow.outputs import EngineStats, RequestOutput
from winnow_lab.evaluate.cell import Cell
from winnow_lab.evaluate.metrics import require_metric
from winnow_lab.evaluate.plan import EvaluationPlan
from winnow_lab.evaluate.prompt import Prompt, PromptMaker
from winnow_lab.evaluate.requests import EvalRequest, make_requests, outcome_of, shared_cells
from winnow_lab.evaluate.result import MIN_FULL_SCORE, CellResult, Evaluation, Outcome, Refusal
from winnow_lab.evaluate.sample import Sample
from winnow_lab.study.journal import ResultJournal

OnStep = Callable[[int, int, EngineStats, str], None]
"""Called with the answers that are there, of how many over all cells, the engine's counters, and the earliest cell that
is not finished."""


def evaluate(
    llm: LLM,
    plan: EvaluationPlan,
    *,
    journal: Path | None = None,
    overwrite: bool = False,
    on_step: OnStep | None = None,
) -> Evaluation:
    """Run a task in all cells of a plan.

    Args:
        journal: file that outcomes are added to as they come. What it holds already is not computed again.
        on_step: called after every step of the engine. What it raises ends the evaluation; the journal keeps what is
            done.
    """
    samples = plan.make_samples()
    for metric in {question.metric for sample in samples for question in sample.questions}:
        require_metric(metric)
    maker = PromptMaker(llm.tokenizer, plan.chat)
    prompts = {s.name: [maker.make(s, question) for question in s.questions] for s in samples}
    with ExitStack() as stack:
        book = None
        if journal is not None:
            identity = plan.identity(llm, samples)
            book = stack.enter_context(
                ResultJournal(journal, identity, Outcome.from_json, overwrite=overwrite, answers_alone=True)
            )
        run = _Run(llm, plan.cells, samples, prompts, book, on_step)
        stack.callback(run.abandon)
        run.answer_all()
    return Evaluation(
        task=plan.name,
        categories=plan.categories_of(samples),
        lengths=tuple(sorted({sample.length for sample in samples if sample.length is not None})),
        prompts=sum(len(sample.questions) for sample in samples),
        controls=plan.controls,
        results=tuple(run.result(cell) for cell in plan.cells),
    )


class _Run:
    def __init__(
        self,
        llm: LLM,
        cells: Sequence[Cell],
        samples: Sequence[Sample],
        prompts: dict[str, list[Prompt]],
        journal: ResultJournal[Outcome] | None,
        on_step: OnStep | None,
    ) -> None:
        self._llm = llm
        self._samples = samples
        self._prompts = prompts
        self._journal = journal
        self._on_step = on_step
        self._in_flight: dict[str, EvalRequest] = {}
        self.outcomes = {outcome.key: outcome for outcome in (journal.found if journal else ())}
        self._refusals = {cell: refusal for cell in cells if (refusal := self._refusal(cell)) is not None}
        self._cells = [cell for cell in cells if cell not in self._refusals]
        if not self._cells:
            first = next(iter(self._refusals.items()))
            raise EvaluationError(f"no cell can be run; {first[0].name}: {first[1].reason}")
        self._total = len(self._cells) * sum(len(sample.questions) for sample in samples)
        # The journal may hold outcomes of cells that this evaluation does not have.
        names = {cell.name for cell in self._cells}
        self._done = sum(outcome.cell in names for outcome in self.outcomes.values())

    def answer_all(self) -> None:
        """Submit what is missing and step the engine until nothing is left, the full cache first."""
        full = [cell for cell in self._cells if cell.is_full]
        self._answer(full)
        others = [cell for cell in self._cells if not cell.is_full]
        if full and others:
            best = max(map(fmean, self.result(full[0]).scores.values()))
            if best < MIN_FULL_SCORE:
                raise EvaluationError(
                    f"the full cache scores at most {best:.2f} in any category, so that nothing can be learnt of "
                    f"policies on this model: another task (`winnow eval --help`), or --chat on"
                )
        self._answer(others)

    def _answer(self, cells: Sequence[Cell]) -> None:
        requests = self._requests(cells)
        self._fill(requests)
        self._report_progress()
        while self._in_flight:
            for output in self._llm.step():
                if output.finished and output.request_id in self._in_flight:
                    self._score(self._in_flight.pop(output.request_id), output)
            self._fill(requests)
            self._report_progress()

    def abandon(self) -> None:
        for request_id in self._in_flight:
            self._llm.abort(request_id)
        self._in_flight.clear()

    def result(self, cell: Cell) -> CellResult:
        if cell in self._refusals:
            return CellResult(cell, (), self._refusals[cell])
        keys = [(cell.name, s.name, place) for s in self._samples for place in range(len(s.questions))]
        return CellResult(cell, tuple(self.outcomes[key] for key in keys))

    def _requests(self, cells: Sequence[Cell]) -> Iterator[EvalRequest]:
        def is_missing(cell: Cell, sample: Sample, question: int) -> bool:
            return (cell.name, sample.name, question) not in self.outcomes

        for group in shared_cells(cells):
            for sample in self._samples:
                yield from make_requests(group, sample, self._prompts[sample.name], is_missing)

    def _refusal(self, cell: Cell) -> Refusal | None:
        """Why the engine would not run a cell, found by asking it."""
        reasons = []
        for request in self._requests([cell]):
            try:
                self._llm.abort(self._llm.submit(request.token_ids, request.params))
            except ContextLengthError as error:
                raise EvaluationError(f"sample {request.sample.name!r} is too long: {error}") from None
            except InvalidRequestError as error:
                reasons.append(str(error))
        return Refusal(reasons[0], len(reasons)) if reasons else None

    def _fill(self, requests: Iterator[EvalRequest]) -> None:
        """Submit until the engine has twice what can run, so that whatever ends is replaced at once."""
        most = 2 * self._llm.config.scheduler.max_num_seqs
        while sum(len(request.sub_answers) for request in self._in_flight.values()) < most:
            request = next(requests, None)
            if request is None:
                return
            self._in_flight[self._llm.submit(request.token_ids, request.params, final_only=True)] = request

    def _score(self, request: EvalRequest, output: RequestOutput) -> None:
        output.raise_for_error()  # an answer that the model failed to give is none to be scored
        found = [
            outcome_of(self._llm, request, sub_answer, output_part)
            for sub_answer, output_part in zip(request.sub_answers, output.outputs, strict=True)
        ]
        if self._journal is not None:
            self._journal.append(found)
        self.outcomes |= {outcome.key: outcome for outcome in found}
        self._done += len(found)

    def _report_progress(self) -> None:
        if self._on_step is not None:
            oldest = next(iter(self._in_flight.values()), None)
            cell = "" if oldest is None else oldest.sub_answers[0].cell.name
            self._on_step(self._done, self._total, self._llm.stats(), cell)
