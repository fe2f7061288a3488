"""How much of a real model's accuracy each policy keeps: RULER, needles, retrieval, documents, mathematics, perplexity.

    python -m benchmarks.real_eval [--model DIR] [--policies A,...] [--compressions 2,4,8,16] [--samples 50]
        [--tokens 2048,4096] [--tasks A,...] [--categories A,...] [--query seen,later] [--kvpress DIR]
        [--report] [-o docs/results]

Prompts go through the model's chat template. The full cache comes first, and a category is run under policies, and
counts, where it reaches half of the points. With --kvpress, an environment that holds kvpress, its presses answer the
same token ids. "seen": the policy judges the question too; "later": the context alone, before the question is known.

Answers are kept below --work as they come: the same command goes on where it was killed, and more policies,
compressions or tasks are added to what is there. real.json and real.md are written anew after every category. Cells
that cost much need not be run at every compression: several commands with the same --samples fill the same journals,
and --report computes nothing and writes the tables of all cells named that are complete.
"""

import argparse
import hashlib
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.papers.kvpress.presses import PRESSES
from benchmarks.papers.kvpress.run import KvpressRun, PressCell
from benchmarks.papers.page import page, results_json
from winnow import LLM
from winnow.bench.environment import Environment
from winnow.evaluate.cell import AGNOSTIC, FULL_CELL, QUERIES, Cell, num_scores, plan_cells
from winnow.evaluate.journal import ResultJournal
from winnow.evaluate.likelihood import Keeping
from winnow.evaluate.perplexity import Perplexity, WindowScore, measure_perplexity
from winnow.evaluate.plan import EvaluationPlan, engine_identity
from winnow.evaluate.prompt import PromptMaker
from winnow.evaluate.requests import make_requests
from winnow.evaluate.result import CellResult
from winnow.evaluate.runner import EvaluationProgress, evaluate
from winnow.evaluate.settings import settings_for
from winnow.evaluate.tasks import load_task
from winnow.evaluate.wikitext import cut_windows, wikitext
from winnow.report.journal import parse_object, whole_lines
from winnow.report.provenance import Machine, report_head
from winnow.report.tables import TextTable
from winnow.units import format_bytes

COUNTS_FROM = 0.5
"""What the full cache must score for a category to say anything about policies."""
POLICIES = "snapkv,ada-snapkv,keydiff,kv-compress,winnow,kvzip"
PRESS_NAMES = "KVzip,ExpectedAttention,AdaKV+ExpectedAttention,SnapKV,KeyDiff"
TASK_NAMES = ("ruler", "needle", "kv-retrieval", "documents", "gsm8k", "perplexity")
_QUESTIONS = 20
_DOCUMENT_TOKENS = 4096
_WINDOW, _GIVEN = 2048, 1024
_LABELS = {"aware": "seen", "agnostic": "later"}


@dataclass(frozen=True)
class Work:
    """One row of the tables: prompts of a task that are scored together."""

    name: str
    task: str
    categories: tuple[str, ...]
    tokens: int
    samples: int
    questions: int = 1

    @property
    def queries(self) -> tuple[str, ...]:
        """Many questions on one context are for contexts that are compressed before them."""
        return QUERIES if self.questions == 1 else (AGNOSTIC,)


@dataclass(frozen=True)
class Row:
    """What a cell scored in a work; the standard error is over contexts."""

    work: str
    cell: str
    method: str
    query: str | None
    compression: float | None
    score: float | None
    error: float | None
    contexts: int
    answers: int
    reached: float | None
    kv_bytes: float | None
    refused: str | None = None
    seconds: float | None = None
    """Of one context with all its questions, alone, where that was measured."""


def works(
    names: Sequence[str], lengths: Sequence[int], samples: int, categories: Sequence[str] | None = None
) -> Iterator[Work]:
    """The rows, in the order in which they are run. `categories` are RULER's; None: all that need no second file."""
    ruler = categories or [name for name in load_task("ruler").categories if name != "qa_2"]
    depths = load_task("needle-chat").categories
    for tokens in lengths if "ruler" in names else ():
        for category in ruler:
            yield Work(f"ruler {category} {tokens}", "ruler", (category,), tokens, samples)
    for tokens in lengths:
        if "needle" in names:
            each = math.ceil(samples / len(depths))
            yield Work(f"needle {tokens}", "needle-chat", depths, tokens, each)
        if "kv-retrieval" in names:
            yield Work(f"kv-retrieval {tokens}", "kv-retrieval", ("grown",), tokens, samples)
    if "documents" in names:
        contexts = max(2, math.ceil(samples / 5))  # of many questions each
        yield Work(
            f"documents {_DOCUMENT_TOKENS}", "documents", ("facts",), _DOCUMENT_TOKENS, contexts, _QUESTIONS
        )
    if "gsm8k" in names:
        yield Work("gsm8k flexible", "gsm8k-flexible", ("gsm8k",), max(lengths), samples)


def row_of(work: Work, result: CellResult, seconds: float | None = None) -> Row:
    """The row of a cell."""
    by_context: dict[str, list[float]] = {}
    for outcome in result.outcomes:
        by_context.setdefault(outcome.sample, []).append(outcome.score)
    means = [fmean(scores) for scores in by_context.values()]
    cell = result.cell
    return Row(
        work=work.name,
        cell=cell.name,
        method=cell.preset,
        query=cell.query,
        compression=cell.compression,
        score=fmean(means) if means else None,
        error=stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None,
        contexts=len(means),
        answers=len(result.outcomes),
        reached=result.achieved_compression,
        kv_bytes=result.kv_bytes,
        refused=None if result.refusal is None else result.refusal.reason,
        seconds=seconds,
    )


class RealEvaluation:
    """The state of one call.

    Args:
        write: called with all rows and perplexities after each work.
    """

    def __init__(
        self, arguments: argparse.Namespace, llm: LLM, write: Callable[[list[Row], list[Perplexity]], None]
    ) -> None:
        self._arguments = arguments
        self._llm = llm
        self._write = write
        self.rows: list[Row] = []
        self.perplexities: list[Perplexity] = []

    def run(self) -> None:
        """Run everything that was asked for."""
        arguments = self._arguments
        for work in works(arguments.tasks, arguments.tokens, arguments.samples, arguments.categories):
            self._run(work)
            self._write(self.rows, self.perplexities)
        if "perplexity" in arguments.tasks:
            self.perplexities = self._perplexity()
            self._write(self.rows, self.perplexities)

    def _plan(self, work: Work, cells: Sequence[Cell]) -> EvaluationPlan:
        settings = settings_for(
            self._llm,
            samples=work.samples,
            tokens=(work.tokens,),
            categories=work.categories,
            questions=work.questions,
            seed=self._arguments.seed,
        )
        return EvaluationPlan(work.task, load_task(work.task), settings, tuple(cells), chat="on")

    def _run(self, work: Work) -> None:
        journal = self._arguments.work / f"{work.name.replace(' ', '-')}-{work.samples}.jsonl"
        if self._arguments.report and not _complete(journal, self._plan(work, [FULL_CELL])):
            return
        tell = partial(_tell, work.name)
        [full] = evaluate(self._llm, self._plan(work, [FULL_CELL]), journal=journal, on_step=tell).results
        reference = row_of(work, full, self._seconds(work, FULL_CELL))
        self.rows.append(reference)
        counts = reference.score is not None and reference.score >= COUNTS_FROM
        print(f"{work.name}: full cache {reference.score:.2f}{'' if counts else ', does not count'}")
        if not counts:
            return
        queries = [query for query in work.queries if query in self._arguments.query]
        cells = plan_cells(self._arguments.policies, self._arguments.compressions, queries)[1:]
        if self._arguments.report:
            cells = _complete(journal, self._plan(work, cells))
        if cells:
            plan = self._plan(work, cells)
            for result in evaluate(self._llm, plan, journal=journal, on_step=tell).results:
                seconds = None if result.refusal else self._seconds(work, result.cell)
                self.rows.append(row_of(work, result, seconds))
        if self._arguments.kvpress is not None:
            self._run_kvpress(work, queries)

    def _run_kvpress(self, work: Work, queries: Sequence[str]) -> None:
        arguments = self._arguments
        samples = self._plan(work, [FULL_CELL]).make_samples()
        maker = PromptMaker(self._llm.tokenizer, "on")
        cells = [
            PressCell(PRESSES[name], amount)
            for name in arguments.presses
            for amount in arguments.compressions
            if amount > 1.0
        ]
        for query in queries:
            print(f"{work.name}: kvpress, question {_LABELS[query]}", file=sys.stderr)
            run = KvpressRun(
                arguments.kvpress_model,
                samples,
                maker,
                arguments.work,
                dtype=arguments.dtype,
                query=query,
            )
            shown = cells
            if arguments.report:
                shown = [cell for cell in cells if run.has_answered(cell)]
            else:
                run.answer(Environment(arguments.kvpress), cells, arguments.threads)
            for cell, result in zip(shown, run.results(shown, query, self._llm.tokenizer), strict=True):
                reported = run.seconds(cell) if work.questions > 1 else None
                self.rows.append(row_of(work, result, None if reported is None else reported[1]))

    def _seconds(self, work: Work, cell: Cell) -> float | None:
        """Of the first context with all its questions, by itself, where a context has many."""
        if work.questions == 1:
            return None
        path = self._arguments.work / "seconds.json"
        known: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
        key = f"{work.name} {cell.name}"
        if key not in known:
            sample = self._plan(work, [cell]).make_samples()[0]
            maker = PromptMaker(self._llm.tokenizer, "on")
            prompts = [maker.make(sample, question) for question in sample.questions]
            known[key] = 0.0
            for ask in make_requests([cell], sample, prompts, lambda *_: True):
                [output] = self._llm.generate([list(ask.token_ids)], ask.params)
                known[key] += output.metrics.latency or 0.0
            path.write_text(json.dumps(known))
        return known[key]

    def _perplexity(self) -> list[Perplexity]:
        """Of the cells that judge a context before what follows it."""
        arguments, llm = self._arguments, self._llm
        cells = plan_cells(arguments.policies, arguments.compressions, (AGNOSTIC,))
        windows = cut_windows(llm.tokenizer, wikitext(None), _WINDOW, _GIVEN, arguments.windows)
        digest = hashlib.sha256(json.dumps([vars(window) for window in windows]).encode()).hexdigest()
        identity = engine_identity(llm, digest, {"task": "perplexity"})
        path = arguments.work / f"perplexity-{arguments.windows}.jsonl"
        with ResultJournal(path, identity, WindowScore.from_json, answers_alone=True) as journal:
            return measure_perplexity(
                llm,
                windows,
                {cell.label: Keeping.of(cell) for cell in cells},
                known=journal.found,
                on_score=lambda score: journal.append([score]),
            )


def _complete(journal: Path, plan: EvaluationPlan) -> list[Cell]:
    """The plan's cells that a journal holds every answer of."""
    if not journal.exists():
        return []
    with journal.open("rb") as file:
        found = [parse_object(line) or {} for line in whole_lines(file)]
    answers = Counter(each.get("cell") for each in found)
    wanted = sum(len(sample.questions) for sample in plan.make_samples())
    return [cell for cell in plan.cells if answers[cell.name] == wanted]


def _tell(name: str, progress: EvaluationProgress) -> None:
    print(f"\r{name}: {progress.done} of {progress.total}, {progress.cell:50.50}", end="", file=sys.stderr)


# -- tables --------------------------------------------------------------------------------------------------------


def tables(rows: Sequence[Row], perplexities: Sequence[Perplexity]) -> list[TextTable]:
    """The full cache, then for each way of asking the means and every category at every compression."""
    full = {row.work: row for row in rows if row.cell == FULL_CELL.name}
    counted = [name for name, row in full.items() if (row.score or 0.0) >= COUNTS_FROM]
    entries = tuple(
        (name, (_scored(row), f"{row.answers}", "" if name in counted else "no", _bytes(row)))
        for name, row in full.items()
    )
    found = [TextTable("Full cache", "category", ("score", "answers", "counts", "KV memory"), entries)]
    for query in QUERIES:
        shown = [row for row in rows if row.query == query and row.work in counted]
        if shown:
            found += _query_tables(query, shown, full)
    if perplexities:
        lines = [(each.name, _perplexity_entries(each, perplexities[0])) for each in perplexities]
        title = f"Perplexity of {_WINDOW - _GIVEN:,} tokens after {_GIVEN:,} that were judged"
        found.append(TextTable(title, "policy", ("perplexity", "of full", "KV memory"), tuple(lines)))
    return found


def _query_tables(query: str, shown: Sequence[Row], full: dict[str, Row]) -> Iterator[TextTable]:
    methods = list(dict.fromkeys(row.method for row in shown))
    amounts = sorted({row.compression or 0.0 for row in shown})
    names = [name for name in full if any(row.work == name for row in shown)]
    at = {(row.work, row.method, row.compression): row for row in shown}
    label = f"Question {_LABELS[query]}"
    lines = []
    for method in methods:
        cells = [[at.get((name, method, amount)) for name in names] for amount in amounts]
        lines.append((method, tuple(_mean_entry([c for c in each if c], full, len(names)) for each in cells)))
    yield TextTable(
        f"{label}: share of the full cache's mean over {len(names)} categories, and KV memory of an answer",
        "policy",
        tuple(f"{amount:g}x" for amount in amounts),
        tuple(lines),
    )
    for amount in amounts:
        held = [m for m in methods if any((name, m, amount) in at for name in names)]
        table = [
            (name, tuple(_scored(each) for each in (full[name], *(at.get((name, m, amount)) for m in held))))
            for name in names
        ]
        yield TextTable(f"{label}, {amount:g}x", "category", ("full cache", *held), tuple(table)).upright()
    timed = [row for row in shown if row.seconds is not None]
    if timed:
        references = {row.work: full[row.work] for row in timed}
        yield TextTable(
            f"{label}: one document and all its questions, alone",
            "cell",
            ("score", "seconds", "KV memory"),
            tuple(
                (f"{row.method} {row.compression:g}x" if row.query else "full cache", _timed(row))
                for row in (*references.values(), *timed)
            ),
        )


def _mean_entry(rows: Sequence[Row], full: dict[str, Row], wanted: int) -> str:
    """Mean over categories as a share of the full cache's, its standard error, and bytes."""
    known = [row for row in rows if row.score is not None]
    if not known:
        return "refused" if rows else ""
    reference = fmean(full[row.work].score or 0.0 for row in known)
    error = math.sqrt(sum((row.error or 0.0) ** 2 for row in known)) / len(known)
    part = "" if len(known) == wanted else f" of {len(known)}"
    mean, held = fmean(row.score or 0.0 for row in known), fmean(row.kv_bytes or 0.0 for row in known)
    return f"{mean / reference:.2f} ± {error / reference:.2f}{part}, {format_bytes(round(held))}"


def _scored(row: Row | None) -> str:
    if row is None or row.score is None:
        return "" if row is None else "refused"
    return f"{row.score:.2f}" if row.error is None else f"{row.score:.2f} ± {row.error:.2f}"


def _bytes(row: Row) -> str:
    return "" if row.kv_bytes is None else format_bytes(round(row.kv_bytes))


def _timed(row: Row) -> tuple[str, str, str]:
    return _scored(row), "" if row.seconds is None else f"{row.seconds:.1f}", _bytes(row)


def _perplexity_entries(each: Perplexity, full: Perplexity) -> tuple[str, ...]:
    if each.value is None or each.kv_bytes is None:
        return ("refused", "", "")
    change = None if each is full else each.over(full)
    ratio = "" if change is None else f"{change.ratio:.3f} ± {change.error or 0.0:.3f}"
    return (f"{each.value:.2f}", ratio, format_bytes(round(each.kv_bytes)))


# -- the command ---------------------------------------------------------------------------------------------------


def write_results(
    output: Path, head: dict[str, Any], rows: Sequence[Row], perplexities: Sequence[Perplexity]
) -> None:
    """real.json with every number, real.md with the tables."""
    output.mkdir(parents=True, exist_ok=True)
    values = {"rows": [asdict(row) for row in rows], "perplexity": [each.to_json() for each in perplexities]}
    (output / "real.json").write_text(results_json(head | values, ("rows", "perplexity")), encoding="utf-8")
    notes = (
        f"Means ± standard errors over contexts. A category counts where the full cache scores {COUNTS_FROM:g} or "
        "more. KV memory is what the cache held at the end of an answer; kvpress masks what AdaKV and KVzip "
        "drop, and holds it. Seconds are of one document alone, for kvpress the mean of all."
    )
    facts = [f"Model {head['model']}, {head['engine']['dtype']}, prompts through its chat template."]
    text = page("Accuracy on a real model", [head], facts, f"{notes}\n", tables(rows, perplexities), [])
    (output / "real.md").write_text(text, encoding="utf-8")


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _queries(text: str) -> tuple[str, ...]:
    names = {label: query for query, label in _LABELS.items()}
    unknown = [name for name in _names(text) if name not in names]
    if unknown:
        raise argparse.ArgumentTypeError(f"no {unknown[0]!r}; known: {', '.join(names)}")
    return tuple(names[name] for name in _names(text))


def _model() -> str | None:
    """The real model that `make real-model` puts here."""
    found = sorted(Path("models").glob("SmolLM2*.gguf"), key=lambda path: path.name.lower())
    return str(found[0]) if found else None


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=_model(), help="(default: models/SmolLM2*.gguf)")
    parser.add_argument("--policies", type=_names, default=_names(POLICIES), help=f"(default: {POLICIES})")
    parser.add_argument(
        "--compressions", type=lambda text: tuple(map(float, _names(text))), default=(2, 4, 8, 16)
    )
    parser.add_argument("--samples", type=int, default=50, help="prompts a cell; needles take a few more")
    parser.add_argument("--tokens", type=lambda text: tuple(map(int, _names(text))), default=(2048, 4096))
    parser.add_argument("--tasks", type=_names, default=TASK_NAMES, help=f"of {','.join(TASK_NAMES)}")
    parser.add_argument("--categories", type=_names, help="of RULER (default: all but qa_2)")
    parser.add_argument("--query", type=_queries, default=QUERIES, help="seen, later or both (default: both)")
    parser.add_argument("--report", action="store_true", help="compute nothing; tables of what is complete")
    parser.add_argument("--windows", type=int, default=20, help="of text for perplexity")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-memory", default="1GiB")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--kvpress", type=Path, metavar="DIR", help="a virtual environment that holds kvpress"
    )
    parser.add_argument(
        "--kvpress-model", type=Path, metavar="DIR", help="(default: --model, if a directory)"
    )
    parser.add_argument(
        "--presses", type=_names, default=_names(PRESS_NAMES), help=f"(default: {PRESS_NAMES})"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/real-eval"), help="(default: %(default)s)")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("docs/results"), help="(default: %(default)s)"
    )
    arguments = parser.parse_args(words)
    if arguments.model is None:
        parser.error("no models/SmolLM2*.gguf: run make real-model, or name a model with --model")
    for name, known in (("tasks", TASK_NAMES), ("presses", PRESSES)):
        for each in getattr(arguments, name):
            if each not in known:
                parser.error(f"--{name}: no {each!r}; known: {', '.join(known)}")
    if arguments.kvpress_model is None:
        arguments.kvpress_model = Path(arguments.model)
    if arguments.kvpress is not None and not arguments.kvpress_model.is_dir():
        parser.error("--kvpress needs --kvpress-model DIR: kvpress reads safetensors")
    return arguments


def main() -> None:
    """Evaluate and write."""
    arguments = parse()
    arguments.work.mkdir(parents=True, exist_ok=True)
    cells = plan_cells(arguments.policies, arguments.compressions, QUERIES)
    with LLM(
        arguments.model,
        dtype=arguments.dtype,
        kv_memory=arguments.kv_memory,
        threads=arguments.threads,
        kv_floor=1,
        num_scores=num_scores(cells),
    ) as llm:
        head = report_head(["python", "-m", "benchmarks.real_eval", *sys.argv[1:]], Machine.here("cpu")) | {
            "model": Path(arguments.model).name,
            "engine": llm.config.settings(),
        }
        write = partial(write_results, arguments.output, head)
        RealEvaluation(arguments, llm, write).run()


if __name__ == "__main__":
    main()
