"""Tables beside the papers' numbers, and the page."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from winnow.values.eviction_request import OWN_AMOUNT, Amount
from winnow_lab.evaluate.cell import AWARE
from winnow_lab.evaluate.charts import score_chart
from winnow_lab.evaluate.perplexity import Perplexity
from winnow_lab.evaluate.result import Evaluation
from winnow_lab.evaluate.result_tables import all_tables
from winnow_lab.papers.h2h.protocol import (
    CACHE_SIZES,
    KV_COMPRESS_DIFFERS,
    LONGBENCH,
    PERPLEXITIES,
    ROUND_EVERY,
    TEXT,
    TEXT_DIFFERS,
    Continuations,
    LongBenchTable,
)
from winnow_lab.report.tables import TextTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def longbench_tables(evaluation: Evaluation) -> list[TextTable]:
    """Share of the full cache's score that is left: the paper's by cache size, ours by compression, query-aware.

    A table for each of the paper's of which presets were run query-aware.
    """
    amounts = sorted(
        {
            each.cell.amount
            for each in evaluation.results
            if each.cell.query == AWARE and each.cell.amount != OWN_AMOUNT
        },
        key=lambda amount: amount.order,
    )
    found = [_longbench_table(evaluation, published, amounts) for published in LONGBENCH]
    return [table for table in found if table.rows]


def _longbench_table(
    evaluation: Evaluation, published: LongBenchTable, amounts: Sequence[Amount]
) -> TextTable:
    rows = []
    for method in published.methods:
        paper = [f"{share:.3f}" for share in published.relative(method)]
        for preset in filter(None, (method.preset, method.also)):
            ours = [_relative(evaluation, preset, amount) for amount in amounts]
            if any(ours):
                name = method.method if preset == method.preset else f"{method.method}, another window"
                rows.append((f"{name}: {preset}", (*paper, *(each or "-" for each in ours))))
    columns = [f"paper, C={size}" for size in CACHE_SIZES] + [f"here, {amount.label}" for amount in amounts]
    notes = (
        f"paper: KV-Compress (Rehg 2024), {published.name}: {published.model}, 16 LongBench subsets, query-aware, over "
        f"the full cache's {published.full:g}",
        f"what differs there: {KV_COMPRESS_DIFFERS}",
    )
    title = f"Share of the full cache's mean score that is left, query-aware, beside KV-Compress's {published.name}"
    return TextTable(title, "method: preset", tuple(columns), tuple(rows), notes)


def _relative(evaluation: Evaluation, preset: str, amount: Amount) -> str:
    """Over the informative categories; empty where there is nothing to divide."""
    found = [each for each in evaluation.compared(AWARE, amount) if each.cell.preset == preset]
    if not found or evaluation.full is None:
        return ""
    mean = evaluation.headline(found[0], AWARE, amount).mean
    full = evaluation.headline(evaluation.full, AWARE, amount).mean
    return "" if mean is None or not full else f"{mean / full:.3f}"


def perplexity_table(found: Sequence[Perplexity], continuations: Continuations) -> TextTable:
    """Perplexity with a quarter of the KVs, each over the full cache's, beside the text's."""
    full = found[0]
    rows = []
    for each in found:
        quoted = [(p.policy, p.perplexity, p.ratio) for p in PERPLEXITIES if p.preset == each.name]
        policy, theirs, ratio = (
            (quoted[0][0], f"{quoted[0][1]:.2f}", f"{quoted[0][2]:.3f}") if quoted else ("-", "-", "-")
        )
        change = each.over(full)
        error = "" if change is None or change.error is None else f" +- {change.error:.3f}"
        ours = "refused" if each.value is None else f"{each.value:.1f}"
        kept = "-" if each.mean_kept is None else f"{each.mean_kept:,.0f}"
        over = "-" if change is None else f"{change.ratio:.3f}{error}"
        rows.append((each.name, (policy, theirs, ratio, ours, over, kept)))
    notes = (
        f"here: {len(full.scores)} windows of {continuations.tokens:,} tokens of WikiText-2, of which the last "
        f"{full.tokens // len(full.scores):,} are forced and count; {continuations.budget:,} KVs per row after each "
        f"round, a round every {ROUND_EVERY} tokens",
        f"theirs: {TEXT}",
        f"what differs there: {TEXT_DIFFERS}",
        *(f"{each.name}: {each.refusal}" for each in found if each.refusal),
    )
    columns = ("theirs", "perplexity", "over full", "here", "over full", "KVs per row at the end")
    return TextTable("Perplexity with a quarter of the KVs", "preset", columns, tuple(rows), notes)


_LINES = 8
"""Presets in a panel of the picture: the best ones. More cannot be distinguished."""
TITLE = "Eviction policies head to head"
NOTES = """\
Query-aware: the policy judges the whole prompt, and so knows the question when it decides what stays. Query-agnostic:
it judges the context before it has seen the question, which is then kept whole. Means are over the
informative categories: one that a control (`recent`, `random`) answers within 5 % of the full cache says nothing about
a policy; it is marked and left out. Presets run without rounds under pressure.
"""


def tables(
    evaluation: Evaluation | None, found: Sequence[Perplexity], continuations: Continuations
) -> list[TextTable]:
    """Every table, those beside the papers last."""
    beside = [perplexity_table(found, continuations)] if found else []
    if evaluation is None:
        return beside
    return [*all_tables(evaluation), *longbench_tables(evaluation), *beside]


def best_chart(evaluation: Evaluation) -> "Figure | None":
    """Return scores over compression, of the presets that are best on average."""

    def merit(preset: str) -> float:
        means = [
            evaluation.headline(each, each.cell.query, each.cell.amount).mean or 0.0
            for each in evaluation.results
            if each.cell.preset == preset
        ]
        return sum(means) / len(means)

    presets = {
        each.cell.preset
        for each in evaluation.results
        if each.cell.amount != OWN_AMOUNT and not each.cell.is_full
    }
    best = sorted(presets - {*evaluation.controls}, key=merit, reverse=True)[:_LINES]
    kept = {*best, *evaluation.controls}
    shown = tuple(each for each in evaluation.results if each.cell.is_full or each.cell.preset in kept)
    return score_chart(replace(evaluation, results=shown))
