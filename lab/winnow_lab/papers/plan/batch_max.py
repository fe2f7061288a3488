"""Batch-Max: eager transformers, layers spread over cards that compute in turn."""

import statistics
from dataclasses import dataclass, replace

import numpy as np

from winnow_lab.papers.plan.comparison import EAGER, Comparison, comparison_table, times_batch
from winnow_lab.plan.calibrate import fit
from winnow_lab.plan.hardware import HARDWARE
from winnow_lab.plan.models import MODELS, ModelShape
from winnow_lab.plan.step_time import PARTS, Factors, StepTimes, StepWork
from winnow_lab.report.tables import TextTable

_PHI = replace(
    MODELS["llama-2-7b"],
    name="phi-3.5-mini",
    num_layers=32,
    num_query_heads=32,
    num_kv_heads=32,
    head_dim=96,
    hidden_size=3072,
    vocab_size=32064,
    num_params=3_821_079_552,
    active_params=3_722_578_944,
    lookup_params=98_500_608,
)
_BM_NEW = 512


@dataclass(frozen=True)
class _BatchMaxTask:
    """A task of its Tables 1 and 2: prompts of about `prompt` tokens; rows of method, batch, budget, tokens/s."""

    name: str
    model: ModelShape
    card: str
    prompt: int
    rows: tuple[tuple[str, int, int | None, float], ...]


_Row = tuple[int, int, float]
_ON_V100, _ON_TITAN = (MODELS["llama-2-13b"], "V100"), (_PHI, "TITAN-V")


def _task(
    name: str, on: tuple[ModelShape, str], prompt: int, batch: int, ed: float, full: float, *evicting: _Row
) -> _BatchMaxTask:
    """A task by the batch and the rates of ED and FKV, and batch, budget and rate of each row of BM."""
    rows = (("ED", batch, 1, ed), ("FKV", batch, None, full), *(("BM", *row) for row in evicting))
    return _BatchMaxTask(name, *on, prompt, rows)


BATCH_MAX = (
    _task("13B CNN/DM", _ON_V100, 3000, 4, 42.0, 30.3, (32, 1024, 73.8), (40, 896, 80.3)),
    _task("13B NarrativeQA", _ON_V100, 3000, 4, 40.0, 26.4, (15, 1792, 43.3), (16, 1728, 46.2)),
    _task("13B GSM8K", _ON_V100, 2600, 3, 30.3, 22.9, (8, 1536, 39.3), (10, 1408, 43.7)),
    _task("Phi-3.5 CNN/DM", _ON_TITAN, 3300, 2, 29.0, 27.0, (5, 2176, 36.3)),
    _task("Phi-3.5 NarrativeQA", _ON_TITAN, 3300, 2, 28.0, 26.5, (6, 1984, 37.4)),
    _task("Phi-3.5 GSM8K", _ON_TITAN, 2800, 2, 28.4, 27.1, (8, 1664, 43.8)),
)


def batch_max_work(task: _BatchMaxTask, batch: int, budget: int | None, every: int | None) -> StepWork:
    """Prompts and answers of a batch. `every`: KVs that a round of Algorithm 1 removes; None: the prompt is whole."""
    work, held, done = StepWork(), 0, 0
    while done < task.prompt:
        count = task.prompt if every is None else min(task.prompt - done, every if done else budget or every)
        if every is not None and done:
            work = work.plus(StepWork(round_kvs=batch * held, rounds=1))
            held -= every
        work = work.plus(times_batch(StepWork.prefill(count, held), batch))
        held, done = held + count, done + count
    for step in range(_BM_NEW):
        if every is not None and held == budget:
            work = work.plus(StepWork(round_kvs=batch * held, rounds=1))
            held -= every
        kvs = held if every is not None else task.prompt + step if budget is None else budget
        work = work.plus(StepWork.decode(batch, kvs))
        held += 1
    return work


def _times(task: _BatchMaxTask, factors: Factors) -> StepTimes:
    model = task.model
    return StepTimes(
        model, HARDWARE[task.card], 2 * model.num_params, 2 * model.kv_elements(), factors=factors
    )


def _works(task: _BatchMaxTask) -> list[StepWork]:
    return [
        batch_max_work(task, batch, budget, _BM_EVERY if method == "BM" else None)
        for method, batch, budget, _ in task.rows
    ]


def _is_known(task: _BatchMaxTask, row: int) -> bool:
    """Return whether factors are fitted to a row: ED's and FKV's, and the card's first of BM."""
    first = next(each for each in BATCH_MAX if each.card == task.card)
    return row < _KNOWN or (task is first and row == _KNOWN)


def _fitted(card: str) -> Factors:
    rows: list[list[float]] = []
    seconds: list[float] = []
    for task in (each for each in BATCH_MAX if each.card == card):
        for row, (work, (_, batch, _, printed)) in enumerate(zip(_works(task), task.rows, strict=True)):
            if _is_known(task, row):
                ideal = _times(task, EAGER).ideal(work)
                rows.append([ideal[part] for part in PARTS])
                seconds.append(batch * _BM_NEW / printed)
    return fit(np.array(rows), np.array(seconds), EAGER, _PRIOR)


def batch_max() -> TextTable:
    """New tokens per second, and those of Batch-Max over ED, the bound of decoding-only eviction."""
    factors = {card: _fitted(card) for card in {task.card: None for task in BATCH_MAX}}
    rows: list[Comparison] = []
    gains: list[Comparison] = []
    foretold: list[float] = []
    for task in BATCH_MAX:
        times, works = _times(task, factors[task.card]), _works(task)
        rates = [row[1] * _BM_NEW / times.seconds(work) for work, row in zip(works, task.rows, strict=True)]
        for index, (work, rate) in enumerate(zip(works, rates, strict=True)):
            method, batch, budget, printed = task.rows[index]
            label = f"{task.name}, {method} b={batch}" + (
                f" kv={budget}, {work.rounds:.0f} rounds" if work.rounds else ""
            )
            rows.append(Comparison(f"{label}, tokens/s", printed, rate))
            if not _is_known(task, index):
                foretold.append(abs(rows[-1].error))
            if method == "BM":
                gains.append(Comparison(f"{label} over ED", printed / task.rows[0][3], rate / rates[0]))
    return comparison_table(
        "Batch-Max: throughput, and over ED (V100, TITAN V; 512 new tokens)",
        "",
        [*rows, *gains],
        (
            f"Of the {len(foretold)} rows of BM that no factor was fitted to: {statistics.fmean(foretold):.0%}, at "
            f"most {max(foretold):.0%}.",
            "Closed form, layers in turn on their cards; rounds are Algorithm 1's. Each card's factors are fitted",
            "to its rows of ED and FKV (six each), to its first row of BM, which tells what a round costs "
            f"({', '.join(f'{own.ranked:.1f}' for own in factors.values())}",
            "readings of the KVs), and to eager transformers' usual ones. Cause of errors: mean prompt lengths are not",
            "printed (limit 3584; 2600 to 3300 assumed).",
        ),
    )


_BM_EVERY = 64
_KNOWN = 2
"""Rows of a task before its first of BM: those of ED and FKV."""
_PRIOR = 0.02
"""Weight of eager transformers' usual factors beside one row."""
