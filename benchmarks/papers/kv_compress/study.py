"""All cells, measured in turn by two engines with the same KV memory, and kept as they come."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.papers.kv_compress.grid import Cell, Grid
from benchmarks.papers.kv_compress.prompts import TimedPrompt
from benchmarks.papers.kv_compress.run import OnStep, Run, run_cell
from winnow.errors import ConfigError
from winnow.llm import LLM
from winnow.sampling import SamplingParams

Prompts = Mapping[int, Sequence[TimedPrompt]]
"""By context."""


@dataclass
class Study:
    """Runs by cell, one for each time that the cells were gone through."""

    grid: Grid
    engine: Mapping[str, Any]
    """Options of the engines, as JSON values."""
    runs: dict[Cell, list[Run]] = field(default_factory=dict)
    heads: list[dict[str, Any]] = field(default_factory=list)
    """Command, commit, machine and date of each start that measured something."""

    @property
    def missing(self) -> list[Cell]:
        """What is still to be measured, in order; a cell may be named several times."""
        return [
            cell
            for number in range(self.grid.repeat)
            for cell in self.grid.cells()
            if len(self.runs.get(cell, ())) <= number
        ]

    def add(self, cell: Cell, run: Run) -> None:
        """Keep one more run of a cell."""
        self.runs.setdefault(cell, []).append(run)

    def to_json(self) -> dict[str, Any]:
        """Settings and runs, from which `resume` makes the same study."""
        runs = [asdict(cell) | asdict(run) for cell, runs in self.runs.items() for run in runs]
        return {
            "measured": self.heads,
            "settings": self.grid.settings(),
            "engine": dict(self.engine),
            "runs": runs,
        }

    def resume(self, report: Mapping[str, Any]) -> None:
        """Take over the runs of an earlier report.

        Raises:
            ConfigError: they were measured with other settings; names the first that differs.
        """
        for part, ours in (("settings", self.grid.settings()), ("engine", dict(self.engine))):
            theirs = report.get(part, {})
            for name in sorted(ours.keys() | theirs.keys()):
                if ours.get(name) != theirs.get(name):
                    raise ConfigError(
                        f"cannot go on from runs of other settings: {name} was {theirs.get(name)!r} "
                        f"and is {ours.get(name)!r}"
                    )
        self.heads += report["measured"]
        for told in report["runs"]:
            cell = Cell(
                **{name: told.pop(name) for name in ("context", "preset", "compression", "prefill_only")}
            )
            self.add(cell, Run(**told | {"scores": tuple(told["scores"])}))


def measure(
    study: Study,
    full: LLM,
    evicting: LLM,
    prompts: Prompts,
    on_step: OnStep,
    on_run: Callable[[], None],
) -> None:
    """Measure what the study misses.

    Args:
        full: an engine without eviction.
        evicting: one opened for policies whose rows differ, with as much KV memory; requests bring their policy.
        on_run: is called after each run, when the study has it.

    Raises:
        InvalidRequestError: a request does not fit into the model's context or the KV memory.
    """
    longest = prompts[study.grid.contexts[-1]][0].token_ids
    for llm in (full, evicting):  # chunks and steps of the shapes to come, so that no cell is the first
        llm.generate(
            longest, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
        )
    for cell in study.missing:
        llm = evicting if cell.options else full
        new_tokens = study.grid.answer_tokens(cell.context)
        study.add(cell, run_cell(llm, cell, prompts[cell.context], new_tokens, on_step))
        on_run()
