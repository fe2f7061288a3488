"""An evaluation as tables and pictures, and as files: every number as JSON, all else as Markdown."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winnow.values.eviction_request import OWN_AMOUNT, Amount
from winnow.values.json_values import dump_json
from winnow.values.units import format_bytes
from winnow_lab.evaluate.cell import AGNOSTIC, FULL, FULL_CELL
from winnow_lab.evaluate.result import CellResult, Evaluation, Headline
from winnow_lab.evaluate.tasks.longbench import GROUPS
from winnow_lab.report.plots import Axis, Line, Panel, can_draw, heat_map, line_chart, save_figure
from winnow_lab.report.tables import Footnotes, TextTable
from winnow_lab.study.study import page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTABLE = 0.1
"""Below this share of difference from what was asked, the compression achieved is not shown."""
UNINFORMATIVE = "*"


def query_label(query: str) -> str:
    agnostic, aware = "query-agnostic (judged before the question)", "query-aware (question seen)"
    return agnostic if query == AGNOSTIC else aware


def mean_table(evaluation: Evaluation, query: str) -> TextTable:
    """Means over the informative categories: presets down, amounts across, the full cache first."""
    amounts = _amounts(evaluation, query)
    notes = Footnotes()
    rows: list[tuple[str, tuple[str, ...]]] = []
    full = evaluation.full
    if full is not None:
        entries = (_head(evaluation.headline(full, query, amount)) for amount in amounts)
        rows.append((FULL_CELL.label, tuple(entries)))
    for preset in dict.fromkeys(each.cell.preset for each in evaluation.results if each.cell.query == query):
        found = {
            each.cell.amount: each
            for each in evaluation.results
            if each.cell.query == query and each.cell.preset == preset
        }
        means = (_mean_entry(evaluation, found.get(amount), query, notes) for amount in amounts)
        rows.append((_named(evaluation, preset), tuple(means)))
    covered = (evaluation.headline(evaluation.results[0], query, amount) for amount in amounts)
    rows.append(("categories counted", tuple(f"{each.covered} of {each.of}" for each in covered)))
    title = f"{evaluation.task}, {query_label(query)}: mean score"
    sentences = filter(None, (_told_apart(evaluation, query, amount) for amount in amounts))
    lines = notes.lines(tuple(sentences))
    return TextTable(title, "preset", tuple(map(_named_amount, amounts)), tuple(rows), lines)


def _told_apart(evaluation: Evaluation, query: str, amount: Amount) -> str | None:
    """Return how many prompts would tell the two best presets apart at an amount; None: there are no two."""
    found = [
        each for each in evaluation.compared(query, amount) if each.cell.preset not in evaluation.controls
    ]
    ranked = sorted(
        (each for each in found if each.outcomes), key=lambda each: -(evaluation.plain_mean(each) or 0.0)
    )
    if len(ranked) < 2:
        return None
    needed, names = evaluation.prompts_to_tell(*ranked[:2]), " and ".join(e.cell.preset for e in ranked[:2])
    if needed is None:
        return f"at {_named_amount(amount)} {names} scored alike"
    verdict = "these tell" if needed <= evaluation.prompts else "more than these"
    return f"at {_named_amount(amount)} about {needed:,} prompts tell {names} apart: {verdict}"


def category_table(evaluation: Evaluation, query: str, amount: Amount) -> TextTable:
    full = evaluation.full
    compared = [*([full] if full else []), *evaluation.compared(query, amount)]
    marked = evaluation.marks(query, amount)
    notes = Footnotes()
    rows = _category_rows(evaluation, compared, query, amount, marked)
    columns = tuple(
        _named(evaluation, each.cell.preset)
        + (f" {notes.mark(_refused(each, evaluation))}" if each.refusal else "")
        for each in compared
    )
    title = f"{evaluation.task}, {query_label(query)}, {_named_amount(amount)}"
    lines = notes.lines(_reasons(marked))
    return TextTable(title, "category", columns, tuple(rows), lines, across="preset").upright()


def length_table(evaluation: Evaluation, query: str) -> TextTable:
    """Means by length of the prompt: cells down, lengths across."""
    shown = [each for each in evaluation.results if each.cell.query in (None, query) and each.outcomes]
    rows = []
    for each in shown:
        marked = evaluation.marks(each.cell.query, each.cell.amount)
        names = [name for name in evaluation.categories if name not in marked]
        entries = []
        for length in evaluation.lengths:
            entries.append(_text(_mean(each, names, length), each.error(names, length)))
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
    tables = []
    for query in evaluation.queries:
        tables.append(mean_table(evaluation, query))
        if len(evaluation.lengths) > 1:
            tables.append(length_table(evaluation, query))
        tables += [category_table(evaluation, query, amount) for amount in _amounts(evaluation, query)]
    return tables or [full_table(evaluation)]


def full_table(evaluation: Evaluation) -> TextTable:
    full = evaluation.results[0]
    marked = evaluation.marks(None, full.cell.amount)
    rows = _category_rows(evaluation, [full], None, full.cell.amount, marked)
    title = f"{evaluation.task}, full cache"
    return TextTable(title, "category", (FULL_CELL.label,), tuple(rows), _reasons(marked))


def _category_rows(
    evaluation: Evaluation,
    compared: Sequence[CellResult],
    query: str | None,
    amount: Amount,
    marked: Collection[str],
) -> list[tuple[str, tuple[str, ...]]]:
    heads = [evaluation.headline(each, query, amount) for each in compared]
    rows = [
        (
            name + UNINFORMATIVE * (name in marked),
            tuple(_text(each.score(name), each.error([name])) for each in compared),
        )
        for name in evaluation.categories
    ]
    for group, names in GROUPS.items():
        if held := [name for name in names if name in evaluation.categories]:
            rows.append(
                (f"{group}: mean", tuple(_text(_mean(each, held), each.error(held)) for each in compared))
            )
    rows.append((f"mean of {heads[0].covered}", tuple(map(_head, heads))))
    if marked:
        every = evaluation.categories
        means = tuple(_text(evaluation.plain_mean(each), each.error(every)) for each in compared)
        rows.append((f"mean of all {len(evaluation.categories)}", means))
    if query is not None:
        rows.append(("compression reached", tuple(_ratio(each.achieved_compression) for each in compared)))
    return [*rows, ("KV memory of an answer", tuple(_bytes(each.kv_bytes) for each in compared))]


def _mean(result: CellResult, names: Sequence[str], length: int | None = None) -> float | None:
    scores = [score for name in names if (score := result.score(name, length)) is not None]
    return sum(scores) / len(scores) if scores else None


def _reasons(marked: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(f"{UNINFORMATIVE} {name} is uninformative: {why}" for name, why in marked.items())


def _amounts(evaluation: Evaluation, query: str) -> list[Amount]:
    found = {each.cell.amount for each in evaluation.results if each.cell.query == query}
    return sorted(found, key=lambda amount: amount.order)


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
    mean = _head(evaluation.headline(result, query, asked))
    return f"{mean} (at {_ratio(achieved)})" if notable else mean


def _refused(result: CellResult, evaluation: Evaluation) -> str:
    assert result.refusal is not None
    return f"refused for {result.refusal.prompts} of {evaluation.prompts} prompts: {result.refusal.reason}"


def _named_amount(amount: Amount) -> str:
    return amount.label or "compression of its own"


def _text(score: float | None, error: float | None = None) -> str:
    return "-" if score is None else f"{score:.2f}{'' if error is None else f' ± {error:.2f}'}"


def _head(headline: Headline) -> str:
    return _text(headline.mean, headline.error)


def _ratio(compression: float | None) -> str:
    return "-" if compression is None else f"{compression:.1f}x"


def _bytes(held: float | None) -> str:
    return "-" if held is None else format_bytes(round(held))


# -- pictures and files ----------------------------------------------------------------------------------------------


def draw(evaluation: Evaluation, directory: Path) -> list[Path]:
    """Write every picture into `directory` as SVG, maps into its folder `maps`; returns their paths."""
    panels = [panel for query in evaluation.queries if (panel := _curves(evaluation, query)) is not None]
    chart = line_chart(panels, f"{evaluation.task}: mean score") if panels else None
    paths = [] if chart is None else [save_figure(chart, directory / "score")]
    if len(evaluation.lengths) > 1 and len(evaluation.categories) > 1:
        maps = directory / "maps"
        maps.mkdir(exist_ok=True)
        for result in evaluation.results:
            if result.outcomes:
                paths.append(save_figure(_map(evaluation, result), maps / result.cell.name.replace(" ", "-")))
    return paths


def _curves(evaluation: Evaluation, query: str) -> Panel | None:
    """A line per preset over the compression reached, each point over the categories that are informative there.

    The full cache's line has the same categories at every point. None where no category is informative anywhere.
    """
    points: dict[str, list[tuple[float, float, float]]] = {}
    reference: dict[float, float] = {}
    for result in evaluation.results:
        cell = result.cell
        headline = evaluation.headline(result, query, cell.amount)
        mean = headline.mean
        if cell.query != query or result.achieved_compression is None or mean is None:
            continue
        points.setdefault(cell.preset, []).append((result.achieved_compression, mean, headline.error or 0.0))
        if evaluation.full is not None and cell.amount != OWN_AMOUNT:
            full = evaluation.headline(evaluation.full, query, cell.amount).mean
            assert full is not None, "it has the same categories"
            reference[cell.amount.compression or result.achieved_compression] = full
    if not points:
        return None
    lines = [_line(name, found) for name, found in points.items()]
    if reference:
        lines.append(_line("full cache", [(*each, 0.0) for each in reference.items()], reference=True))
    x, y = Axis("compression reached", "log2"), Axis("mean score", low=0.0, high=1.02)
    return Panel(query_label(query), x, y, lines)


def _line(name: str, points: Iterable[tuple[float, float, float]], reference: bool = False) -> Line:
    x, y, errors = zip(*sorted(points), strict=True)
    return Line(name, x, y, reference, errors if any(errors) else ())


def _map(evaluation: Evaluation, result: CellResult) -> "Figure":
    found = [[result.score(name, length) for length in evaluation.lengths] for name in evaluation.categories]
    values = [[float("nan") if score is None else score for score in row] for row in found]
    columns = [f"{length:,}" for length in evaluation.lengths]
    return heat_map(values, evaluation.categories, columns, result.cell.name, "tokens of the prompt")


RESULTS = "results.json"
TABLES = "results.md"
_NOTES = """\
Query-aware: the policy judges the whole prompt, and so knows the question when it decides what stays. Query-agnostic:
it judges the context before it has seen the question, which is then kept whole.

A mean is over the informative categories. One that a control answers as well as the full cache does (within 5 %), or
that the full cache itself does not answer (below 0.1), is uninformative: it is marked and left out.
"""


def write_report(evaluation: Evaluation, directory: Path, head: Mapping[str, Any]) -> list[Path]:
    """Write results.json, results.md and, where matplotlib is installed, the pictures; returns their paths."""
    results, tables = directory / RESULTS, directory / TABLES
    results.write_text(dump_json({**head, **evaluation.to_json()}, indent=1) + "\n", encoding="utf-8")
    pictures = draw(evaluation, directory) if can_draw() else []
    shown = [each for each in pictures if each.parent == directory]
    each_cell = f"{evaluation.prompts} prompts per cell; ± is the standard error of a mean"
    fact = f"Model: {head['model']}; {each_cell}."
    text = page(f"winnow eval {evaluation.task}", head, [fact], _NOTES, list(all_tables(evaluation)), shown)
    maps = [f"- [{each.stem}](maps/{each.name})\n" for each in pictures if each.parent != directory]
    tables.write_text(
        text + "".join(["\n## Categories by length\n\n", *maps] if maps else []), encoding="utf-8"
    )
    return [results, tables, *pictures]
