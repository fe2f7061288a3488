"""Running a study: its cells in turn; its results shown, and written as page and JSON with where they come from."""

import argparse
import inspect
import json
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from winnow.cli.flags.paths import check_json_path, require_writable, write_json
from winnow.errors import WinnowError
from winnow.report.provenance import Machine, device_name, report_head, typed_command
from winnow.values.json_values import dump_json
from winnow_lab.report.tables import TextTable, console, print_tables
from winnow_lab.study.options import StudyOptions, add_options, options_of, parse
from winnow_lab.study.parts import page_of, write_part

_Options = TypeVar("_Options", bound=StudyOptions)
_Cell = TypeVar("_Cell")
_Row = TypeVar("_Row")


@dataclass(frozen=True)
class Result:
    """What a study found.

    Attributes:
        lists: names of the numbers whose entries take a line each.
        figures: draw a figure, by what its file's name adds to the study's.
        ok: False: a promise was broken; the exit code is 1.
    """

    title: str
    tables: Sequence[TextTable] = ()
    facts: Sequence[str] = ()
    notes: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    lists: Collection[str] = ("rows",)
    figures: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    ok: bool = True


def run_study(
    kind: type[_Options],
    measure: Callable[[_Options], Result | Iterable[Result]],
    words: Sequence[str] | None = None,
) -> int:
    """Parse the command line, measure, show and write. Returns the exit code.

    Args:
        measure: of a module whose docstring is the help; yields results of rounds so far, or returns the only one.
    """
    module = inspect.getmodule(measure)
    options = parse(kind, (module and module.__doc__) or "", words)
    name = options.name or Path(getattr(module, "__file__", None) or "study").stem
    try:
        return perform(options, measure, name)
    except WinnowError as error:
        raise SystemExit(f"error: {error}") from None


def as_command(
    kind: type[_Options], measure: Callable[[_Options], Result | Iterable[Result]], text: str
) -> tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]:
    """Return `configure` and `execute` of a command among others, whose help begins with `text`."""

    def configure(parser: argparse.ArgumentParser) -> None:
        parser.usage, parser.description = f"{parser.prog} [options]", text
        add_options(parser, kind)

    def execute(namespace: argparse.Namespace) -> int:
        options = options_of(kind, namespace)
        return perform(options, measure, options.name)

    return configure, execute


def perform(options: _Options, measure: Callable[[_Options], Result | Iterable[Result]], name: str) -> int:
    """Measure, show and write, once the files are found to be writable. Returns the exit code."""
    check_json_path(options.json)
    if options.output is not None:
        require_writable(options.output / page_of(name), f"-o {options.output}")
    found = measure(options)
    engine = getattr(options, "engine", None)
    device = getattr(options, "device", "cpu") if engine is None else engine.get("device", "auto")
    head = report_head(typed_command(), Machine.here(device))
    result: Result | None = None
    for result in (found,) if isinstance(found, Result) else found:
        _write(result, head, options, name)
    assert result is not None, "a study yields a result"
    out = console()
    where = f"{Machine(**head['machine'])}; commit {head['commit']}; {head['date']}"
    for line in (result.title, where, *result.facts):
        out.print(line, highlight=False, soft_wrap=True)
    print_tables(out, result.tables)
    return int(not result.ok)


def _write(result: Result, head: Mapping[str, Any], options: StudyOptions, name: str) -> None:
    values = dict(head) | dict(result.numbers)
    write_json(options.json, values)
    if options.output is None:
        return
    from winnow_lab.report.plots import can_draw, save_figure

    stem = options.output / name
    stem.with_suffix(".json").write_text(results_json(values, result.lists), encoding="utf-8")
    drawn = result.figures.items() if can_draw() else ()
    figures = [save_figure(draw(), stem.with_name(name + suffix)) for suffix, draw in drawn]
    text = page(result.title, head, result.facts, result.notes, result.tables, figures)
    write_part(options.output / page_of(name), name, text)


def in_turn(
    cells: Mapping[str, _Cell], repeats: int, measure: Callable[[_Cell], _Row]
) -> Iterator[dict[str, list[_Row]]]:
    """Yield, after each of `repeats` rounds over all cells, every row so far: what slows the machine slows all."""
    rows: dict[str, list[_Row]] = {name: [] for name in cells}
    for _ in range(repeats):
        for name, cell in cells.items():
            rows[name].append(measure(cell))
            print(name, rows[name][-1], flush=True)
        yield rows


def page(
    title: str,
    head: Mapping[str, Any],
    facts: Sequence[str],
    notes: str,
    tables: Sequence[TextTable],
    figures: Sequence[Path] = (),
) -> str:
    """Everything that a reader of the results needs, in Markdown; `notes` end a line."""
    where = f"{device_name(head['machine'])}, torch {head['machine']['torch_version']}"
    command, origin = shlex.join(head["command"]), f"(commit {head['commit']}; {where}; {head['date'][:10]})"
    lines = [f"# {title}\n\n    {command}\n\n{origin}\n", *facts, "", notes]
    for table in tables:
        lines += table.markdown()
    lines += [text for path in figures for text in (f"![{path.stem.replace('_', ' ')}]({path.name})", "")]
    return "\n".join(lines).rstrip() + "\n"


def results_json(numbers: Mapping[str, Any], lists: Collection[str] = ("cells",)) -> str:
    """A line for each field, and for each entry of the fields in `lists`."""
    parts = []
    for name, value in numbers.items():
        text = "[\n" + ",\n".join(map(dump_json, value)) + "\n]" if name in lists else dump_json(value)
        parts.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
