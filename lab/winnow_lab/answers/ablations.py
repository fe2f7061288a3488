"""Which parts of a policy matter on a model: one base per way of asking, and one part of it changed at a time.

    python -m winnow_lab.answers.ablations MODEL --parts floors,sinks --json FILE

Every row is a base with one change; "base" itself stands first. A part's rows are compared with the base on the same
prompts, whose seed is kept for choosing: reported tables use others. The journal keeps answers as they come; the same
command resumes where it was killed, also with more parts or compressions.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from math import sqrt
from pathlib import Path
from statistics import stdev

from rich.console import Console

from winnow import LLM
from winnow.attention import Group, Smoothing
from winnow.eviction import (
    AdaptiveHeads,
    AdaptiveRows,
    Average,
    Cumulative,
    EqualHeads,
    EvictionPolicy,
    Keep,
    KeyDifference,
    Leverage,
    Scorer,
    When,
    Window,
)
from winnow.values.eviction_request import Amount
from winnow_lab.evaluate.cell import AGNOSTIC, AWARE, FULL_CELL, Cell, amounts_of, engine_needs
from winnow_lab.evaluate.plan import EvaluationPlan
from winnow_lab.evaluate.result import CellResult, Evaluation
from winnow_lab.evaluate.runner import evaluate
from winnow_lab.evaluate.settings import settings_for
from winnow_lab.evaluate.tasks import TASKS, load_task
from winnow_lab.report.tables import TextTable
from winnow_lab.study import Result, StudyOptions, flag, run_study

SEED = 7000
"""Of the prompts that choices are made on."""
CATEGORIES = ("niah_single_1", "niah_single_2", "niah_multikey_1")


@dataclass(frozen=True)
class Variant(Cell):
    """A cell of a policy that has no preset; `preset` is the row's name."""

    chosen: EvictionPolicy = field(default_factory=EvictionPolicy)

    @property
    def name(self) -> str:
        """Tells the journal's entries apart by all that the policy is, since a row may be defined anew."""
        return f"{super().name} {sha256(repr(self.chosen).encode()).hexdigest()[:8]}"

    @property
    def policy(self) -> EvictionPolicy:
        return replace(self.chosen, when=self.chosen.when.alone)


_ONCE = When(after_prefill=True)
_WINDOW = Window(32, 1, Smoothing(7, "max", skip_window=True), Group.MEAN)
_KEEP = Keep(sinks=4, recent=32)
BASES = {
    AWARE: EvictionPolicy(_WINDOW, AdaptiveRows(row_floor=0.2), _KEEP, _ONCE),
    AGNOSTIC: EvictionPolicy(
        Leverage(pool=Smoothing(3, "average")), AdaptiveRows(row_floor=0.2), Keep(sinks=4, recent=16), _ONCE
    ),
}


def budgets(base: EvictionPolicy) -> Iterator[tuple[str, EvictionPolicy]]:
    """Who competes, and the floors under them."""
    for name, budget in {
        "no floor": AdaptiveRows(),
        "row floor 0.1": AdaptiveRows(row_floor=0.1),
        "row floor 0.4": AdaptiveRows(row_floor=0.4),
        "row floor 0.6": AdaptiveRows(row_floor=0.6),
        "layer floor 0.5": AdaptiveRows(row_floor=0.2, layer_floor=0.5),
        "layer floor 0.8": AdaptiveRows(row_floor=0.2, layer_floor=0.8),
        "2 layers wide": AdaptiveRows(row_floor=0.2, wide_layers=2),
        "4 layers twice as wide": AdaptiveRows(row_floor=0.2, wide_layers=4, wide_factor=2.0),
        "heads compete": AdaptiveHeads(),
        "heads compete, 2 layers wide": AdaptiveHeads(wide_layers=2),
        "equal heads": EqualHeads(),
        "equal heads, 2 layers wide": EqualHeads(wide_layers=2),
    }.items():
        yield name, replace(base, budget=budget)


def sinks(base: EvictionPolicy) -> Iterator[tuple[str, EvictionPolicy]]:
    for count in (0, 1, 16, 32):
        yield f"{count} sinks", replace(base, keep=replace(base.keep, sinks=count))


def recents(base: EvictionPolicy) -> Iterator[tuple[str, EvictionPolicy]]:
    for count in (0, 8, 16, 32, 64, 128):
        if count != base.keep.recent:
            yield f"{count} recent", replace(base, keep=replace(base.keep, recent=count))


def pooling(base: EvictionPolicy) -> Iterator[tuple[str, EvictionPolicy]]:
    score = base.score
    if not isinstance(score, Window | Leverage):
        return
    skip = isinstance(score, Window)
    sizes = [("max", 3), ("max", 7), ("max", 15), ("average", 3), ("average", 7)]
    pools = {f"{kind} pool {size}": Smoothing(size, kind, skip_window=skip) for kind, size in sizes}
    for name, pool in {"no pool": None, **pools}.items():
        if pool != score.pool:
            yield name, replace(base, score=replace(score, pool=pool))


def windows(base: EvictionPolicy) -> Iterator[tuple[str, EvictionPolicy]]:
    if isinstance(base.score, Window):
        for size in (8, 16, 64):
            keep = replace(base.keep, recent=max(size, 32))
            yield f"window {size}", replace(base, score=replace(base.score, size=size), keep=keep)


def groups(base: EvictionPolicy) -> Iterator[tuple[str, EvictionPolicy]]:
    if isinstance(base.score, Window):
        yield "group maximum", replace(base, score=replace(base.score, group=Group.MAX))
        per_head = replace(_WINDOW.pool or Smoothing(7), per_query_head=True)
        yield "pool per query head", replace(base, score=replace(base.score, pool=per_head))
        yield (
            "group maximum, pool per query head",
            replace(base, score=replace(base.score, group=Group.MAX, pool=per_head)),
        )


def norms(base: EvictionPolicy) -> Iterator[tuple[str, EvictionPolicy]]:
    """The powers of attention, and what leverage is taken of."""
    if isinstance(base.score, Window):
        yield "squared attention", replace(base, score=replace(base.score, power=2))
    if isinstance(base.score, Leverage):
        yield "unrotated keys", replace(base, score=replace(base.score, unrotated=True))
        yield "ridge 1", replace(base, score=replace(base.score, ridge=1.0))


SCORES: dict[str, Scorer] = {
    "all queries": Cumulative(),
    "all queries, per query seen": Average(),
    "key difference": KeyDifference(),
    "leverage, unrotated keys": Leverage(0.01, unrotated=True),
}


def scores(base: EvictionPolicy) -> Iterator[tuple[str, EvictionPolicy]]:
    """Other scores under the same budget and protection."""
    for name, score in SCORES.items():
        yield f"score: {name}", replace(base, score=score)


PARTS = {
    "floors": budgets,
    "sinks": sinks,
    "recents": recents,
    "pooling": pooling,
    "window": windows,
    "group": groups,
    "norms": norms,
    "scores": scores,
}


@dataclass(frozen=True)
class Options(StudyOptions):
    """The model, its prompts, and what is changed."""

    model: str = flag(positional=True)
    samples: int = flag(8, "prompts of each category", least=1)
    tokens: int = flag(2048, least=1)
    compression: tuple[float, ...] = flag((2.0, 4.0), least=1)
    query: tuple[str, ...] = flag((AWARE, AGNOSTIC), choices=(AWARE, AGNOSTIC))
    parts: tuple[str, ...] = flag(tuple(PARTS), choices=tuple(PARTS))
    score: str | None = flag(None, "another score of the bases", choices=tuple(SCORES))
    task: str = flag("ruler", choices=sorted(TASKS))
    categories: tuple[str, ...] = flag(CATEGORIES)
    seed: int = flag(SEED)
    chat: str = flag("on", choices=("auto", "on", "off"))
    kv_memory: str = flag("1GiB")
    journal: Path = flag(Path("ablations.jsonl"))


def study(options: Options) -> Result:
    """All rows, a table for each way of asking and amount."""
    amounts = amounts_of(options.compression)
    cells: list[Cell] = [FULL_CELL]
    for query in options.query:
        base = BASES[query]
        base = base if options.score is None else replace(base, score=SCORES[options.score])
        rows = dict(_rows(base, options.parts))
        cells += [Variant(name, amount, query, policy) for name, policy in rows.items() for amount in amounts]
    with LLM(options.model, kv_memory=options.kv_memory, **engine_needs(cells), kv_floor=32) as llm:
        settings = settings_for(
            llm,
            samples=options.samples,
            tokens=(options.tokens,),
            categories=options.categories,
            seed=options.seed,
        )
        plan = EvaluationPlan(
            options.task, load_task(options.task), settings, tuple(cells), chat=options.chat
        )
        with Console().status("") as status:
            show = lambda at: status.update(f"{at.done}/{at.total} {at.cell}")  # noqa: E731
            found = evaluate(llm, plan, journal=options.journal, on_step=show)
    tables = [_table(found, query, amount) for query in options.query for amount in amounts]
    return Result("Parts of policies", tables, numbers=found.to_json())


def _rows(base: EvictionPolicy, parts: Sequence[str]) -> Iterator[tuple[str, EvictionPolicy]]:
    yield "base", base
    for part in parts:
        yield from PARTS[part](base)


def _table(found: Evaluation, query: str, amount: Amount) -> TextTable:
    asked = "question seen" if query == AWARE else "question not seen"
    lines = []
    for result in filter(None, [found.full, *found.compared(query, amount)]):
        refused = result.refusal and (f"refused: {result.refusal.reason}",)
        name = "full cache" if result.cell.is_full else result.cell.preset
        lines.append((name, refused or tuple(_numbers(found, result))))
    columns = (*found.categories, "mean", "+-", "held")
    title = f"{asked}, {amount.label}, {found.prompts} prompts a row"
    return TextTable(title, "row", columns, tuple(lines))


def _numbers(found: Evaluation, result: CellResult) -> Iterator[str]:
    for category in found.categories:
        yield f"{result.score(category):.2f}"
    everything = [score for scores in result.scores.values() for score in scores]
    yield f"{sum(everything) / len(everything):.2f}"
    yield f"{stdev(everything) / sqrt(len(everything)):.2f}" if len(everything) > 1 else "-"
    yield f"{(result.kv_bytes or 0) / 2**20:.1f} MiB"


if __name__ == "__main__":
    sys.exit(run_study(Options, study))
