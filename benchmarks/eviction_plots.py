"""What eviction_accuracy.py measured, as tables and plots. Alone it writes them anew from the results beside them:

python benchmarks/eviction_plots.py docs/results/eviction_accuracy.json
"""

import math
import statistics
import sys
from collections.abc import Sequence
from json import loads
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from winnow.evaluate.demo_tasks import CATEGORIES
from winnow.eviction import (
    PRESETS,
    AdaptiveRows,
    Cumulative,
    EvictionPolicy,
    KeyDifference,
    KeyNorm,
    Random,
    Recency,
    Window,
)

Cell = dict[str, Any]
Cells = dict[tuple[str | None, str, float | None], Cell]

# Okabe and Ito's colours for all kinds of colour vision, without the yellow, which is faint on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)), (0, (1, 1)))
FAMILIES = (
    "Rows compete (KV-Compress)",
    "Attention of a window of queries",
    "Attention summed over queries",
    "Other statistics of attention",
    "Keys alone",
    "Position or chance",
)
# Below this share of difference the compression reached goes without saying.
NOTABLE = 0.1


def index(data: dict[str, Any]) -> Cells:
    return {(cell["mode"], cell["preset"], cell["compression"]): cell for cell in data["cells"]}


def mean(cell: Cell) -> float:
    """Over all prompts; categories have equally many."""
    return statistics.mean(each for scores in cell["scores"].values() for each in scores)


def reached(cell: Cell) -> str:
    """Nothing where every answer ended before the cut."""
    return "" if cell["reached"] is None else f"{cell['reached']:,.1f}x"


def counted(count: int, noun: str = "prompt") -> str:
    return f"{count} {noun}{'s' if count != 1 else ''}"


def largest_error(samples: int) -> float:
    """Standard error of a mean of `samples` numbers between 0 and 1, at most: half of them 0, half of them 1."""
    return 0.5 / math.sqrt(samples)


def family(policy: EvictionPolicy) -> int:
    """Index of the panel, by what a policy listens to."""
    if isinstance(policy.budget, AdaptiveRows):
        return 0
    kinds = ((Window,), (Cumulative,), (), (KeyNorm, KeyDifference), (Recency, Random))
    return next((number for number, kind in enumerate(kinds, start=1) if type(policy.score) in kind), 3)


def names_in(cells: Cells, mode: str) -> list[str]:
    """Presets with a cell in a mode, in the order in which Winnow lists them."""
    present = {preset for each, preset, _ in cells if each == mode}
    return [name for name in PRESETS if name in present]


# -- tables --------------------------------------------------------------------------------------------------


class Footnotes:
    """Numbers for the reasons why cells are missing."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, cell: Cell, asked: int) -> str:
        how_many = "all" if cell["refused_prompts"] == asked else f"{cell['refused_prompts']} of {asked}"
        text = f"refused for {how_many} prompts: {cell['refused']}"
        return f"- [{self._numbers.setdefault(text, len(self._numbers) + 1)}]"

    def lines(self) -> list[str]:
        return [f"[{number}] {text}  " for text, number in self._numbers.items()]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [list(head), ["---", *["---:"] * (len(head) - 1)], *map(list, rows)]
    return [f"| {' | '.join(line)} |" for line in lines] + [""]


def write_tables(data: dict[str, Any], path: Path) -> None:
    """Markdown: first the means, then every category."""
    cells, notes = index(data), Footnotes()
    lines = ["# Accuracy under eviction", "", *preamble(data, cells)]
    modes = [mode for mode in ("aware", "agnostic") if names_in(cells, mode)]
    for mode in modes:
        lines += [f"## Query-{mode}: mean of the categories", ""]
        lines += [f"![Query-{mode}: mean accuracy against compression](eviction_accuracy_{mode}.svg)", ""]
        lines += means(cells, mode, notes, data["settings"]["samples"])
    for mode in modes:
        lines += [f"## Query-{mode}: by category", ""]
        lines += by_category(cells, mode, notes, data["settings"]["samples"])
    missing = notes.lines()
    lines += ["## Missing cells", "", *missing, ""] if missing else []
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def preamble(data: dict[str, Any], cells: Cells) -> list[str]:
    """What was measured, how and where."""
    settings, count = data["settings"], len(CATEGORIES)
    samples = settings["samples"]
    used = sorted({cell["run"] for cell in data["cells"]})
    full = cells.get((None, "full", 1.0))
    lines = [
        f"Winnow's demo model, {count} categories of tasks, {counted(samples)} of each, {settings['tokens']:,} tokens "
        f"a prompt with its answer (seed {settings['seed']}); the same {counted(count * samples)} in every cell. Facts "
        "are hidden in prose of two books that the model was never trained on, taken from "
        "`examples/demo/prompts.jsonl`. Greedy, float32, `kv_floor=1`. Scores lie between 0 and 1: exact match, for "
        "key-points ROUGE-L F1.",
        "",
        "- **Query-aware**: the policy judges the whole prompt, whose end is the question. **Query-agnostic**: it "
        "judges what stands before the question, and the question is kept whole until the answer begins "
        "(`context_tokens`).",
        "- **Compression**: tokens of what is judged for each KV kept in a row on average. Reached is what came of it, "
        "the mean over prompts, when what is judged was cut; for presets that go on cutting while the answer is "
        "written, tokens of prompt and answer for each KV at the answer's end. Beside a mean it stands where it "
        f"differs by more than {NOTABLE:.0%}.",
        "- **First token**: query-aware, presets whose first round comes after the prompt take the first token of the "
        "answer from the whole cache. Query-agnostic, the cut comes before the question.",
        f"- **Standard error**: at most {largest_error(samples):.2f} for one category ({counted(samples)}) and "
        f"{largest_error(count * samples):.2f} for a mean of all ({counted(count * samples)}). Cells share their "
        "prompts, so that differences between cells are known better than that.",
    ]
    if full is not None:
        lines += [
            f"- **Full cache** (compression 1, no eviction, query-aware and query-agnostic alike): {mean(full):.2f}"
        ]
    lines.append(f"- **Computing** took {sum(cell['seconds'] for cell in data['cells']) / 60:.1f} minutes.")
    for run in (data["runs"][number] for number in used):
        where = f"{run['cpu']}, {counted(run['cores'], 'core')}, {counted(run['threads'], 'thread')}"
        where += "" if run["device"] == "CPU" else f", computed on {run['device']}"
        lines.append(
            f"- **Run** of {run['date']}: `{run['command']}`, commit {run['commit']}, {where}, torch {run['torch']}"
        )
    return [*lines, ""]


def means(cells: Cells, mode: str, notes: Footnotes, samples: int) -> list[str]:
    """Presets down, compressions across; below them the presets that take no budget."""
    names = names_in(cells, mode)
    ratios = sorted({ratio for each, _, ratio in cells if each == mode and ratio is not None})
    asked = samples * len(CATEGORIES)

    def entry(cell: Cell | None) -> str:
        if cell is None:
            return ""
        if "refused" in cell:
            return notes.mark(cell, asked)
        told = abs((cell["reached"] or cell["compression"]) / cell["compression"] - 1) > NOTABLE
        return f"{mean(cell):.2f}" + (f" (at {cell['reached']:.1f}x)" if told else "")

    lines: list[str] = []
    bound = [name for name in names if (mode, name, None) not in cells]
    if bound:
        rows = [[name, *(entry(cells.get((mode, name, ratio))) for ratio in ratios)] for name in bound]
        lines += table([f"query-{mode}", *(f"{ratio:g}x" for ratio in ratios)], rows)
    free = [(name, cells[mode, name, None]) for name in names if (mode, name, None) in cells]
    if free:
        lines += ["Presets that decide themselves how much they keep:", ""]
        rows = [
            [name, notes.mark(cell, asked), ""]
            if "refused" in cell
            else [name, f"{mean(cell):.2f}", reached(cell)]
            for name, cell in free
        ]
        lines += table([f"query-{mode}", "mean", "reached"], rows)
    return lines


def by_category(cells: Cells, mode: str, notes: Footnotes, samples: int) -> list[str]:
    """A table for each compression, and one for the presets that take none."""
    lines, asked = list[str](), samples * len(CATEGORIES)
    ratios = {ratio for each, _, ratio in cells if each == mode}
    full = cells.get((None, "full", 1.0))
    for ratio in sorted(ratios, key=lambda each: math.inf if each is None else each):
        label = "compression of their own" if ratio is None else f"{ratio:g}x"
        rows = [] if full is None else [["full (1x)", *category_row(full)]]
        for name in names_in(cells, mode):
            cell = cells.get((mode, name, ratio))
            if cell is not None and "refused" in cell:
                rows.append([name, *[""] * len(CATEGORIES), notes.mark(cell, asked), ""])
            elif cell is not None:
                rows.append([name, *category_row(cell)])
        lines += [f"### Query-{mode}, {label}", ""]
        lines += table([f"query-{mode}, {label}", *CATEGORIES, "mean", "reached"], rows)
    return lines


def category_row(cell: Cell) -> list[str]:
    scores = [f"{statistics.mean(cell['scores'][name]):.2f}" for name in CATEGORIES]
    return [*scores, f"{mean(cell):.2f}", reached(cell)]


# -- plots ---------------------------------------------------------------------------------------------------


def write_plots(data: dict[str, Any], out: Path) -> None:
    """One SVG for each mode, eviction_accuracy_aware.svg and eviction_accuracy_agnostic.svg."""
    cells = index(data)
    for mode in ("aware", "agnostic"):
        if names_in(cells, mode):
            draw(data, cells, mode, out / f"eviction_accuracy_{mode}.svg")


def curve(cells: Cells, mode: str, name: str) -> list[tuple[float, float]]:
    """(compression reached, mean), by compression; from the full cache on where that was measured."""
    own = [cell for (each, preset, _), cell in cells.items() if (each, preset) == (mode, name)]
    points = sorted((cell["reached"], mean(cell)) for cell in own if cell.get("reached") is not None)
    full = cells.get((None, "full", 1.0))
    if full is not None and (mode, name, None) not in cells:
        points.insert(0, (1.0, mean(full)))
    return points


def draw(data: dict[str, Any], cells: Cells, mode: str, path: Path) -> None:
    """Small multiples: a panel for each family of presets in colour, all others grey behind it."""
    curves = {name: points for name in names_in(cells, mode) if (points := curve(cells, mode, name))}
    most = max([2.0, *(ratio for each, _, ratio in cells if each == mode and ratio is not None)])
    full = cells.get((None, "full", 1.0))
    settings = data["settings"]
    with plt.rc_context({"svg.hashsalt": "winnow", "svg.fonttype": "path", "font.size": 9}):
        figure, panels = plt.subplots(2, 3, figsize=(14, 8), sharex=True, sharey=True)
        for number, panel in enumerate(panels.flat):
            set_up(panel, FAMILIES[number], most)
            if full is not None:
                panel.axhline(mean(full), color="0.35", linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
            mine = [name for name in curves if family(PRESETS[name].policy) == number]
            for name in curves.keys() - set(mine):
                panel.plot(*zip(*curves[name], strict=True), color="0.87", linewidth=0.8, zorder=0)
            highlight(panel, {name: curves[name] for name in mine}, most)
        for panel in panels[-1]:
            panel.set_xlabel("compression reached (tokens for each KV kept)")
        for panel in panels[:, 0]:
            panel.set_ylabel(f"query-{mode} accuracy, mean of {len(CATEGORIES)} categories")
        asked = len(CATEGORIES) * settings["samples"]
        figure.suptitle(
            f"Query-{mode} accuracy of Winnow's demo model under eviction, {settings['tokens']:,} tokens",
            fontsize=13,
        )
        figure.text(
            0.5,
            0.012,
            f"Each point: the same {counted(asked)}; standard error at most {largest_error(asked):.2f}. "
            "Dashed: full cache. Grey: the presets of the other panels.",
            ha="center",
        )
        figure.subplots_adjust(left=0.05, right=0.87, top=0.91, bottom=0.09, wspace=0.6, hspace=0.16)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def set_up(panel: Axes, title: str, most: float) -> None:
    panel.set_title(title, loc="left", fontsize=10)
    panel.set_xscale("log", base=2)
    panel.set_xlim(0.93, most * 1.12)
    panel.set_ylim(-0.03, 1.03)
    ticks = [2.0**power for power in range(int(math.log2(most)) + 1)]
    panel.xaxis.set_major_locator(FixedLocator(ticks))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(lambda ratio, _: f"{ratio:g}x")
    panel.grid(color="0.93", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelbottom=True, labelleft=True)


def highlight(panel: Axes, curves: dict[str, list[tuple[float, float]]], most: float) -> None:
    """Lines in colour, each named at the right, level with its end as far as the names leave each other room."""
    named = spread({name: points[-1][1] for name, points in curves.items()})
    edge = most * 1.12
    for number, (name, points) in enumerate(curves.items()):
        # Where lines coincide, gaps and smaller marks let the ones below show.
        marks: dict[str, Any] = {
            "color": COLOURS[number % len(COLOURS)],
            "marker": MARKERS[number % len(MARKERS)],
            "markersize": 7.5 - 0.7 * number,
            "clip_on": False,
        }
        shown = [(min(ratio, edge), share) for ratio, share in points]
        line: dict[str, Any] = {
            "linestyle": DASHES[number % len(DASHES)],
            "linewidth": 1.8,
            "zorder": 3 + number,
        }
        panel.plot(*zip(*shown, strict=True), **marks, **line)
        x, y = edge * 1.1, named[name]
        panel.plot([shown[-1][0], x], [shown[-1][1], y], color="0.7", linewidth=0.6, clip_on=False, zorder=2)
        panel.plot([x], [y], **marks)
        label = f"{name} (at {points[-1][0]:,.0f}x)" if points[-1][0] > edge else name
        panel.annotate(
            label,
            (x, y),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            annotation_clip=False,
        )


def spread(wanted: dict[str, float], gap: float = 0.052) -> dict[str, float]:
    """Heights near the wanted ones, at least `gap` apart and inside the panel."""
    order = sorted(wanted, key=wanted.__getitem__)
    heights: list[float] = []
    for name in order:
        heights.append(max(wanted[name], heights[-1] + gap) if heights else max(wanted[name], 0.0))
    ceiling = 1.0
    for number in reversed(range(len(heights))):
        heights[number] = min(heights[number], ceiling)
        ceiling = heights[number] - gap
    return dict(zip(order, heights, strict=True))


def main() -> None:
    """Write tables and plots of the results named on the command line."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    path = Path(sys.argv[1])
    data = loads(path.read_text(encoding="utf-8"))
    write_tables(data, path.with_suffix(".md"))
    write_plots(data, path.parent)


if __name__ == "__main__":
    main()
