"""Report of a search, as tables, a chart and a command."""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from winnow.values.units import format_bytes
from winnow_lab.plan.tuning.measure import Trial, prompts_for, risk_bound, wilson
from winnow_lab.plan.tuning.search import BYTES, Tuned
from winnow_lab.report.plots import Axis, Line, Panel, line_chart
from winnow_lab.report.tables import TextTable
from winnow_lab.study.options import flag_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def tune_table(tuned: Tuned) -> TextTable:
    """What was tried, each candidate with the most prompts that it came to."""
    rows = tuple((str(trial.candidate), _entries(trial)) for trial in tuned.last)
    return TextTable(
        f"Tried, for an agreement of {tuned.search.target:g} ({tuned.search.kind})",
        "candidate",
        ("prompts", "agreement", "95 % bounds", "tokens/s", "KVs", "note"),
        rows,
        words=(5,),
    )


def _entries(trial: Trial) -> tuple[str, ...]:
    if trial.error is not None:
        return "", "", "", "", "", " ".join(trial.error.split())[:60]
    low, high = trial.bounds
    return (
        f"{len(trial.agreement)}",
        f"{trial.mean:.3f}",
        f"{low:.2f}-{high:.2f}",
        f"{trial.rate:.1f}",
        format_bytes(trial.kv_bytes),
        "",
    )


def verdict(tuned: Tuned) -> list[str]:
    """Lines that say what was found, and whether prompts held back bear it out."""
    if tuned.best is None or tuned.check is None:
        return ["No candidate keeps that agreement on prompts held back."]
    check, full = tuned.check, tuned.full
    low, _ = wilson(check.mean, len(check.agreement), tuned.checked)
    shared = f" ({tuned.checked} candidates were tried on them)" if tuned.checked > 1 else ""
    beside = "" if full is None else f"; the full cache {full.rate:.1f} tokens/s"
    return [
        f"Best: {tuned.best.candidate}: {tuned.best.rate:.1f} tokens/s, agreement {tuned.best.mean:.3f} over "
        f"{len(tuned.best.agreement)} prompts{beside}.",
        f"On {len(check.agreement)} prompts held back: agreement {check.mean:.3f}, with 95 % confidence "
        f"above {low:.2f}{shared}.",
        _guarantee(check, tuned.search.target),
    ]


def _guarantee(check: Trial, target: float) -> str:
    """What the prompts held back guarantee of the next one, and how many would guarantee the target."""
    count, allowed = len(check.agreement), 1 - target
    bound = risk_bound(check.mean, count)
    said = f"The expected loss on a prompt like these is at most {bound:.3f} (split-conformal)"
    if bound <= allowed + 1e-9:
        return f"{said}: the {allowed:.3f} asked for is shown."
    needed = prompts_for(check.mean, target)
    more = (
        "no number of prompts would show it"
        if needed is None
        else f"{needed} prompts held back would show it, at this agreement"
    )
    return f"{said}; {allowed:.3f} was asked for: {more}."


def command(tuned: Tuned, prompts: str, engine: Sequence[str]) -> str | None:
    """The command line that runs the winner, with further flags of the engine as typed; None: there is none."""
    if tuned.best is None:
        return None
    candidate = tuned.best.candidate
    flags = []
    for name, value in (candidate.request | candidate.engine).items():
        flags += [flag_of(name), f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(["winnow", "run", prompts, "-o", "answers.jsonl", *engine, *flags])


def pareto_figure(tuned: Tuned) -> "Figure":
    """The agreement against the objective: all candidates with most prompts, and those that none beats."""
    by_bytes = tuned.search.objective == BYTES

    def value(trial: Trial) -> float:
        return trial.kv_bytes / 2**20 if by_bytes else trial.rate

    front = tuned.pareto()
    tried = [trial for trial in tuned.last if trial.error is None]
    lines = [
        Line("not beaten", [trial.mean for trial in front], [value(trial) for trial in front]),
        *(Line(str(trial.candidate), [trial.mean], [value(trial)]) for trial in tried[:20]),
    ]
    top = max((value(trial) for trial in tried), default=1.0)
    target = Line("target", [tuned.search.target] * 2, [0.0, top], reference=True)
    label = "MiB of KVs" if by_bytes else "new tokens/s"
    panel = Panel("tried", Axis("agreement", high=1.01), Axis(label, low=0), [target, *lines])
    return line_chart([panel], columns=1)
