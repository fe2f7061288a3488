"""What all commands of `winnow eval` share: options, an engine for the cells, journals, progress, tables and files."""

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from winnow.cli.flags.engine import model_files, open_llm
from winnow.cli.flags.paths import require_distinct, require_writable
from winnow.cli.screen.progress import MODES, Meter, open_progress
from winnow.cli.screen.terminal import resume_hint
from winnow.errors import UsageError
from winnow.report.provenance import typed_command
from winnow.values.json_values import dump_json
from winnow_lab.report.tables import console, print_tables
from winnow_lab.study import EngineFlags, flag
from winnow_lab.study.study import page

if TYPE_CHECKING:
    from winnow.llm import LLM
    from winnow.outputs import EngineStats
    from winnow.values.eviction_request import Amount
    from winnow_lab.evaluate.cell import Cell
    from winnow_lab.report.tables import TextTable
    from winnow_lab.study.journal import ResultJournal

RESULTS = ("results.json", "results.md")
"""Files that every evaluation writes."""


@dataclass(frozen=True)
class EvalOptions(EngineFlags):
    eviction: tuple[str, ...] = flag((), "presets to compare, see winnow policies (default: full alone)")
    kv_budget: tuple[int, ...] = flag((), "KVs kept per row on average, beside compressions", least=1)
    compression: tuple[float, ...] = flag((), "tokens judged per KV kept; 1: full (default: 4)", least=1)
    output: Path | None = flag(None, "write tables, plots, every score and the journal there", short=("-o",))
    overwrite: bool = flag(False, "start afresh in --output")
    progress: str = flag("auto", "auto: live on a terminal, else a line every 5 s", choices=MODES)
    CHOSEN: ClassVar[tuple[str, ...]] = ("eviction", "compression", "kv_budget", "seed")
    # Compressions are reached only where nothing else holds more than they say.
    SHOWN: ClassVar[Mapping[str, Any]] = MappingProxyType({"kv_floor": 1})
    JOURNAL: ClassVar[str] = ""  # the file that keeps finished answers

    def __post_init__(self) -> None:
        """Refuse places that would be found unusable only after the work, or hold what is read."""
        super().__post_init__()
        data: Path | None = getattr(self, "data", None)
        if data is not None and not data.is_dir():
            raise UsageError(f"--data must be a directory, got {str(data)!r}")
        if self.output is None:
            if self.overwrite:
                raise UsageError("--overwrite needs -o DIR: there is nothing to replace")
            return
        if self.output.exists() and not self.output.is_dir():
            raise UsageError(f"-o must be a directory, got the file {str(self.output)!r}")
        names = (*RESULTS, self.JOURNAL)
        written = [("-o", self.output), *((f"{name} of -o", self.output / name) for name in names)]
        read = [] if data is None else [("--data", data)]
        require_distinct(written, [*read, *model_files(self.engine)])
        require_writable(self.output / RESULTS[0], f"-o {self.output}")

    @property
    def amounts(self) -> "tuple[Amount, ...]":
        from winnow_lab.evaluate.cell import amounts_of

        compressions = self.compression or (() if self.kv_budget else (4.0,))
        return amounts_of(sorted(set(compressions)), sorted(set(self.kv_budget)))

    @property
    def journal(self) -> Path | None:
        return self.output and self.output / self.JOURNAL

    @contextmanager
    def open_journal(
        self, identity: Any, read: Callable[[Any], Any]
    ) -> "Iterator[ResultJournal[Any] | None]":
        """Yield the journal of finished answers; None: there is no folder for one."""
        from winnow_lab.study.journal import ResultJournal

        if self.journal is None:
            yield None
        else:
            with ResultJournal(
                self.journal, identity, read, overwrite=self.overwrite, answers_alone=True
            ) as journal:
                yield journal

    @contextmanager
    def open_engine(self, cells: "Sequence[Cell]") -> "Iterator[tuple[LLM, dict[str, Any]]]":
        """Yield an engine that can run all cells, and the head of an output: command, date, machine, model, options.

        It has no prefix cache unless that is asked for. With it, the last bits of a prompt's logits depend on which
        prompts came before, and an evaluation that was stopped must resume to the same numbers.
        """
        from winnow.report.provenance import Machine, report_head
        from winnow_lab.evaluate.cell import engine_needs

        needs = engine_needs(cells)
        options = {"kv_floor": 1, **needs, "enable_prefix_caching": False, **self.engine}
        with open_llm(options) as llm:
            model = llm.config.model.model
            head = report_head(typed_command(), Machine.here(options.get("device", "auto"))) | {
                "model": "the demo model" if model is None else str(model),
                "engine": llm.config.settings(),
            }
            try:
                yield llm, head
            except KeyboardInterrupt:
                raise KeyboardInterrupt(*[resume_hint()] * (self.output is not None)) from None

    def write_table(
        self, name: str, head: Mapping[str, Any], note: str, table: "TextTable", cells: Sequence[Any]
    ) -> None:
        """Write the files of an evaluation of one table, where there is a folder; `name` is that of the command."""
        if self.output is not None:
            values = {**head, "task": name, "cells": [cell.to_json() for cell in cells]}
            (self.output / RESULTS[0]).write_text(dump_json(values, indent=1) + "\n", encoding="utf-8")
            text = page(f"winnow eval {name}", head, [f"Model: {head['model']}."], f"{note}\n", [table])
            (self.output / RESULTS[1]).write_text(text, encoding="utf-8")
            print(f"wrote {', '.join(RESULTS)} in {self.output}", file=sys.stderr)


@contextmanager
def show_work(mode: str) -> "Iterator[Callable[[int, int, EngineStats, str], None]]":
    """Yield what to call after each step with what is done, of how much, the engine's counters and a cell's name."""
    with open_progress(mode, sys.stderr) as progress:
        meter = Meter()

        def show(done: int, total: int, stats: "EngineStats", cell: str) -> None:
            if progress.due():
                progress.show(meter.snapshot(done, total, 0, stats, cell))

        yield show


def show_tables(head: dict[str, Any], amount: str, tables: "Iterable[TextTable]") -> None:
    """Print tables, below a line that says how, where, when and how much was measured."""
    from winnow.report.provenance import device_name

    out = console()
    out.print(shlex.join(head["command"]), highlight=False, markup=False, soft_wrap=True)
    where = device_name(head["machine"])
    out.print(f"{where}; commit {head['commit']}; {head['date']}; {amount}", highlight=False, soft_wrap=True)
    print_tables(out, tables)
