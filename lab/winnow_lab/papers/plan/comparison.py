"""Printed numbers beside those of a planner that is fitted to some of them."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from winnow_lab.plan.step_time import Factors, StepWork
from winnow_lab.report.tables import TextTable


@dataclass(frozen=True)
class Comparison:
    label: str
    printed: float
    fitted: float

    @property
    def error(self) -> float:
        return self.fitted / self.printed - 1


def comparison_table(title: str, unit: str, rows: Sequence[Comparison], notes: tuple[str, ...]) -> TextTable:
    lines = [f"{row.label} | {row.printed:.4g} | {row.fitted:.4g} | {row.error:+.0%}" for row in rows]
    mean = statistics.fmean(abs(row.error) for row in rows)
    return TextTable.read(
        title, f"{unit} | printed | fitted | error", lines, (f"Mean error {mean:.0%}.", *notes)
    )


def times_batch(work: StepWork, batch: int) -> StepWork:
    """A prefill step of `batch` equal sequences, of which `work` is one."""
    return replace(
        work,
        tokens=batch * work.tokens,
        sequences=batch,
        kv_tokens=batch * work.kv_tokens,
        attended=batch * work.attended,
        prompt_tokens=batch * work.prompt_tokens,
    )


EAGER = Factors(
    compute=3.0, attention=3.0, weights=1.6, kv=5.0, layer=1.0e-3, sequence=0.0, step=2e-3, ranked=8.0
)
"""Eager transformers: about a millisecond of Python and launches a layer; attention copies its padded cache."""
