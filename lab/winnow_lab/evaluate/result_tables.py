"""The tables of an evaluation."""

from collections.abc import Collection, Sequence

from winnow.values.eviction_request import Amount
from winnow.values.units import format_bytes
from winnow_lab.evaluate.cell import AGNOSTIC, FULL, FULL_CELL
from winnow_lab.evaluate.result import CellResult, Evaluation
from winnow_lab.report.tables import Footnotes, TextTable

NOTABLE = 0.1
"""Below this share of difference from what was asked, the compression achieved is not shown."""
UNINFORMATIVE = "*"


def query_label(query: str) -> str:
    """Return what a query mode means, for titles."""
    return (
        "query-agnostic (judged before the question)" if query == AGNOSTIC else "query-aware (question seen)"
    )


def mean_table(evaluation: Evaluation, query: str) -> TextTable:
    """Return means over the informative categories: presets down, amounts across, the full cache first."""
    amounts = _amounts(evaluation, query)
    notes = Footnotes()
    rows: list[tuple[str, tuple[str, ...]]] = []
    full = evaluation.full
    if full is not None:
        entries = (_text(evaluation.headline(full, query, amount).mean) for amount in amounts)
        rows.append((FULL_CELL.label, tuple(entries)))
    for preset in _presets(evaluation, query):
        found = {
            each.cell.amount: each
            for each in evaluation.results
            if each.cell.query == query and each.cell.preset == preset
        }
        rows.append(
            (
                _named(evaluation, preset),
                tuple(_mean_entry(evaluation, found.get(amount), query, notes) for amount in amounts),
            )
        )
    covered = [
        evaluation.headline(each, query, amount) for amount in amounts for each in evaluation.results[:1]
    ]
    rows.append(("categories counted", tuple(f"{each.covered} of {each.of}" for each in covered)))
    title = f"{evaluation.task}, {query_label(query)}: mean score"
    return TextTable(title, "preset", tuple(map(_named_amount, amounts)), tuple(rows), notes.lines())


def category_table(evaluation: Evaluation, query: str, amount: Amount) -> TextTable:
    """Return scores by category in a query mode at an amount, beside the full cache."""
    full = evaluation.full
    compared = [*([full] if full else []), *evaluation.compared(query, amount)]
    marked = evaluation.marks(query, amount)
    notes = Footnotes()
    rows = [
        (
            name + UNINFORMATIVE * (name in marked),
            tuple(_text(each.score(name)) for each in compared),
        )
        for name in evaluation.categories
    ]
    heads = [evaluation.headline(each, query, amount) for each in compared]
    rows += [
        (f"mean of {heads[0].covered}", tuple(_text(each.mean) for each in heads)),
        *_plain_mean(evaluation, compared, marked),
        ("compression reached", tuple(_ratio(each.achieved_compression) for each in compared)),
        ("KV memory of an answer", tuple(_bytes(each.kv_bytes) for each in compared)),
    ]
    columns = tuple(
        _named(evaluation, each.cell.preset)
        + (f" {notes.mark(_refused(each, evaluation))}" if each.refusal else "")
        for each in compared
    )
    reasons = [f"{UNINFORMATIVE} {name} is uninformative: {why}" for name, why in marked.items()]
    title = f"{evaluation.task}, {query_label(query)}, {_named_amount(amount)}"
    return TextTable(title, "category", columns, tuple(rows), notes.lines(reasons), across="preset").upright()


def length_table(evaluation: Evaluation, query: str) -> TextTable:
    """Return means by length of the prompt: cells down, lengths across."""
    shown = [each for each in evaluation.results if each.cell.query in (None, query) and each.outcomes]
    rows = []
    for each in shown:
        marked = evaluation.marks(each.cell.query, each.cell.amount)
        names = [name for name in evaluation.categories if name not in marked]
        entries = []
        for length in evaluation.lengths:
            scores = [s for name in names if (s := each.score(name, length)) is not None]
            entries.append(_text(sum(scores) / len(scores) if scores else None))
        rows.append((f"{each.cell.label} (of {len(names)})", tuple(entries)))
    title = f"{evaluation.task}, {query_label(query)}: mean score by tokens of the prompt"
    return TextTable(
        title, "cell (of so many categories)", tuple(f"{n:,}" for n in evaluation.lengths), tuple(rows)
    )


class ShownEvaluation(Evaluation):
    """Evaluation that a notebook shows as its tables."""

    def _repr_markdown_(self) -> str:
        return "\n".join(line for table in all_tables(self) for line in table.markdown())


def all_tables(evaluation: Evaluation) -> list[TextTable]:
    """Return every table: for each query mode the means, then lengths, then categories."""
    tables = []
    for query in evaluation.queries:
        tables.append(mean_table(evaluation, query))
        if len(evaluation.lengths) > 1:
            tables.append(length_table(evaluation, query))
        tables += [category_table(evaluation, query, amount) for amount in _amounts(evaluation, query)]
    return tables or [full_table(evaluation)]


def full_table(evaluation: Evaluation) -> TextTable:
    """Return the full cache alone, where nothing else was asked for."""
    full = evaluation.results[0]
    marked = evaluation.marks(None, full.cell.amount)
    rows: list[tuple[str, tuple[str, ...]]] = [
        (name + UNINFORMATIVE * (name in marked), (_text(full.score(name)),))
        for name in evaluation.categories
    ]
    headline = evaluation.headline(full, None, full.cell.amount)
    rows += [
        (f"mean of {headline.covered}", (_text(headline.mean),)),
        *_plain_mean(evaluation, [full], marked),
        ("KV memory of an answer", (_bytes(full.kv_bytes),)),
    ]
    notes = tuple(f"{UNINFORMATIVE} {name} is uninformative: {why}" for name, why in marked.items())
    return TextTable(f"{evaluation.task}, full cache", "category", (FULL_CELL.label,), tuple(rows), notes)


def _plain_mean(
    evaluation: Evaluation, shown: Sequence[CellResult], marked: Collection[str]
) -> list[tuple[str, tuple[str, ...]]]:
    if not marked:
        return []
    means = tuple(_text(evaluation.plain_mean(each)) for each in shown)
    return [(f"mean of all {len(evaluation.categories)}", means)]


def _amounts(evaluation: Evaluation, query: str) -> list[Amount]:
    found = {each.cell.amount for each in evaluation.results if each.cell.query == query}
    return sorted(found, key=lambda amount: amount.order)


def _presets(evaluation: Evaluation, query: str) -> list[str]:
    return list(dict.fromkeys(each.cell.preset for each in evaluation.results if each.cell.query == query))


def _named(evaluation: Evaluation, preset: str) -> str:
    if preset == FULL:
        return FULL_CELL.label
    return f"{preset} (control)" if preset in evaluation.controls else preset


def _mean_entry(evaluation: Evaluation, result: CellResult | None, query: str, notes: Footnotes) -> str:
    if result is None:
        return ""
    if result.refusal is not None:
        return f"- {notes.mark(_refused(result, evaluation))}"
    asked, achieved = result.cell.amount, result.achieved_compression
    ratio = asked.compression
    notable = achieved is not None and (ratio is None or abs(achieved / ratio - 1) > NOTABLE)
    mean = _text(evaluation.headline(result, query, asked).mean)
    return f"{mean} (at {_ratio(achieved)})" if notable else mean


def _refused(result: CellResult, evaluation: Evaluation) -> str:
    assert result.refusal is not None
    return f"refused for {result.refusal.prompts} of {evaluation.prompts} prompts: {result.refusal.reason}"


def _named_amount(amount: Amount) -> str:
    return amount.label or "compression of its own"


def _text(score: float | None) -> str:
    return "-" if score is None else f"{score:.2f}"


def _ratio(compression: float | None) -> str:
    return "-" if compression is None else f"{compression:.1f}x"


def _bytes(held: float | None) -> str:
    return "-" if held is None else format_bytes(round(held))
