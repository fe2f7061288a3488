"""The pictures of an evaluation: score against compression, and where lengths differ, score by category and length."""

from pathlib import Path
from typing import TYPE_CHECKING

from winnow.values.eviction_request import OWN_AMOUNT
from winnow_lab.evaluate.result import CellResult, Evaluation
from winnow_lab.evaluate.result_tables import query_label
from winnow_lab.report.plots import Axis, Line, Panel, heat_map, line_chart, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(evaluation: Evaluation, directory: Path) -> list[Path]:
    """Write every picture into `directory`, as PNG and SVG, maps into its folder `maps`; returns their paths.

    Raises:
        WinnowError: matplotlib is not installed.
    """
    scores = score_chart(evaluation)
    paths = [] if scores is None else [save_figure(scores, directory / "score")]
    if len(evaluation.lengths) > 1 and len(evaluation.categories) > 1:
        maps = directory / "maps"
        maps.mkdir(exist_ok=True)
        for result in evaluation.results:
            if result.outcomes:
                paths.append(save_figure(_map(evaluation, result), maps / result.cell.name.replace(" ", "-")))
    return paths


def score_chart(evaluation: Evaluation) -> "Figure | None":
    """Return scores over the compression reached, a panel for each query mode; None: nothing is informative.

    Raises:
        WinnowError: matplotlib is not installed.
    """
    panels = [panel for query in evaluation.queries if (panel := _curves(evaluation, query)) is not None]
    return line_chart(panels, f"{evaluation.task}: mean score") if panels else None


def _curves(evaluation: Evaluation, query: str) -> Panel | None:
    """Return a line per preset over the compression reached, each point over the categories that are informative there.

    The full cache's line has the same categories at every point. None where no category is informative anywhere.
    """
    points: dict[str, list[tuple[float, float]]] = {}
    reference: dict[float, float] = {}
    for result in evaluation.results:
        cell = result.cell
        mean = evaluation.headline(result, query, cell.amount).mean
        if cell.query != query or result.achieved_compression is None or mean is None:
            continue
        points.setdefault(cell.preset, []).append((result.achieved_compression, mean))
        if evaluation.full is not None and cell.amount != OWN_AMOUNT:
            full = evaluation.headline(evaluation.full, query, cell.amount).mean
            assert full is not None, "it has the same categories"
            reference[cell.amount.compression or result.achieved_compression] = full
    if not points:
        return None
    lines = [Line(name, *_columns(sorted(found))) for name, found in points.items()]
    if reference:
        lines.append(Line("full cache", *_columns(sorted(reference.items())), reference=True))
    return Panel(
        query_label(query),
        Axis("compression reached", "log2"),
        Axis("mean score", low=0.0, high=1.02),
        lines,
    )


def _map(evaluation: Evaluation, result: CellResult) -> "Figure":
    values = [
        [
            score if (score := result.score(name, length)) is not None else float("nan")
            for length in evaluation.lengths
        ]
        for name in evaluation.categories
    ]
    columns = [f"{length:,}" for length in evaluation.lengths]
    return heat_map(values, evaluation.categories, columns, result.cell.name, "tokens of the prompt")


def _columns(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
