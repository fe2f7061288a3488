"""How much of a real model's accuracy each policy keeps: RULER, needles, retrieval, documents, mathematics, perplexity.

    python -m winnow_lab.real --tasks ruler --samples 10 --tokens 2048 --policies kvzip,keydiff --query later

Prompts go through the model's chat template, if it has one. The full cache comes first, and a category is run under
policies, and counts, where it reaches half of the points. With --kvpress, an environment that holds kvpress, its
presses answer the same token ids. "seen": the policy judges the question too; "later": the context alone, before the
question is known.

Answers are kept below --work as they come: the same command resumes where it was killed, and more policies,
compressions or tasks are added to what is there. real.json and real.md are written anew after every category. Cells
that cost much need not be run at every compression: several commands with the same --samples fill the same journals,
and --report computes nothing and writes the tables of all cells named that are complete.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from winnow import LLM
from winnow.errors import ConfigError
from winnow.outputs import EngineStats
from winnow_lab.evaluate.cell import AGNOSTIC, FULL_CELL, QUERIES, Cell, amounts_of, engine_needs, plan_cells
from winnow_lab.evaluate.likelihood import Keeping
from winnow_lab.evaluate.perplexity import Perplexity, resumed_perplexity
from winnow_lab.evaluate.plan import EvaluationPlan
from winnow_lab.evaluate.prompt import PromptMaker
from winnow_lab.evaluate.requests import make_requests
from winnow_lab.evaluate.runner import evaluate
from winnow_lab.evaluate.tasks.task import settings_for
from winnow_lab.evaluate.wikitext import cut_windows, wikitext
from winnow_lab.papers.kvpress.run import PACKAGE, PRESSES, SOURCES, KvpressRun, PressCell
from winnow_lab.peers.environment import Environment
from winnow_lab.real.rows import (
    GIVEN,
    KNOWN_TASKS,
    LABELS,
    MIN_SCORE,
    TASK_NAMES,
    WINDOW,
    Row,
    Work,
    complete_cells,
    counts,
    row_of,
    works,
)
from winnow_lab.real.tables import tables
from winnow_lab.study import RealModelOptions, Result, flag, run_study
from winnow_lab.tasks import load_task

POLICIES = ("snapkv", "ada-snapkv", "keydiff", "kv-compress", "winnow", "kvzip")
PRESS_NAMES = ("KVzip", "ExpectedAttention", "AdaKV+ExpectedAttention", "SnapKV", "KeyDiff")


def result(
    head: Mapping[str, Any], least: float, rows: Sequence[Row], perplexities: Sequence[Perplexity]
) -> Result:
    notes = (
        f"Means ± standard errors over contexts. A category counts where the full cache scores {least:g} or "
        "more. KV memory is what the cache held at the end of an answer; kvpress masks what AdaKV and KVzip "
        "drop, and holds it. Seconds are of one document alone, for kvpress the mean of all.\n"
    )
    form = "prompts through its chat template" if head["chat_template"] else "prompts as they are"
    facts = [f"Model {head['model']}, {head['engine']['dtype']}, {form}."]
    values = {"rows": [asdict(row) for row in rows], "perplexity": [each.to_json() for each in perplexities]}
    lists = ("rows", "perplexity")
    shown = tables(rows, perplexities, least)
    return Result("Accuracy on a real model", shown, facts, notes, {**head, **values}, lists)


def _queries(text: str) -> tuple[str, ...]:
    names = {label: query for query, label in LABELS.items()}
    asked = [name for name in text.split(",") if name]
    unknown = [name for name in asked if name not in names]
    if unknown:
        raise argparse.ArgumentTypeError(f"no {unknown[0]!r}; known: {', '.join(names)}")
    return tuple(names[name] for name in asked)


@dataclass(frozen=True)
class RealOptions(RealModelOptions):
    policies: tuple[str, ...] = flag(POLICIES)
    compressions: tuple[float, ...] = flag((2.0, 4.0, 8.0, 16.0), least=1)
    samples: int = flag(50, "prompts a cell; needles take a few more", least=1)
    tokens: tuple[int, ...] = flag((2048, 4096), least=1)
    tasks: tuple[str, ...] = flag(TASK_NAMES, choices=KNOWN_TASKS)
    categories: tuple[str, ...] = flag((), "of RULER (default: all but qa_2)")
    query: tuple[str, ...] = flag(QUERIES, "seen, later or both", parse=_queries)
    report: bool = flag(False, "compute nothing; tables of what is complete")
    windows: int = flag(20, "of text for perplexity", least=1)
    counts_from: float = flag(MIN_SCORE, "what the full cache must reach for a category to count", least=0.01)
    seed: int = flag(0)
    dtype: str = flag("bfloat16")
    kv_memory: str = flag("1GiB")
    threads: int = flag(1, least=1)
    kvpress: Path | None = flag(None, "a virtual environment that holds kvpress; made where there is none")
    kvpress_model: Path | None = flag(None, "(default: --model, if a directory)")
    presses: tuple[str, ...] = flag(PRESS_NAMES, choices=tuple(PRESSES))
    work: Path = flag(Path("runs/real-eval"), "folder of journals")
    name: str = flag("real", "of the files in --output")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kvpress is not None and not self.peer_model.is_dir():
            raise ConfigError("--kvpress needs --kvpress-model DIR: kvpress reads safetensors")

    @property
    def peer_model(self) -> Path:
        return self.kvpress_model or Path(self.model)


def has_chat_template(llm: LLM) -> bool:
    return llm.tokenizer is not None and bool(llm.tokenizer.chat_template)


class RealEvaluation:
    """Fills `rows` and `perplexities`."""

    def __init__(self, arguments: RealOptions, llm: LLM) -> None:
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


def _show_progress(name: str, done: int, total: int, _: EngineStats, cell: str) -> None:
    print(f"\r{name}: {done} of {total}, {cell:50.50}", end="", file=sys.stderr)


def study(options: RealOptions) -> Iterator[Result]:
    options.work.mkdir(parents=True, exist_ok=True)
    cells = plan_cells(options.policies, amounts_of(options.compressions), QUERIES)
    with LLM(
        options.model,
        dtype=options.dtype,
        kv_memory=options.kv_memory,
        threads=options.threads,
        kv_floor=1,
        **engine_needs(cells),
    ) as llm:
        templated = has_chat_template(llm)
        facts = {
            "model": Path(options.model).name,
            "engine": llm.config.settings(),
            "chat_template": templated,
        }
        for rows, perplexities in RealEvaluation(options, llm).run():
            yield result(facts, options.counts_from, rows, perplexities)


def main(words: Sequence[str] | None = None) -> int:
    return run_study(RealOptions, study, words)
