"""The table of a comparison."""

import statistics
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from winnow.report.provenance import Machine
from winnow_lab.peers.runner import Outcome
from winnow_lab.peers.works import GivenWork

WIDTH = 120
# Ratios are to the first of these that ran: the fastest engine known for this within the same limit, else our own.
OWN = ("winnow", "full cache")
REFERENCES = (("openvino", "bf16 KVs"), ("openvino", "f32 KVs"), OWN)


def show(outcomes: list[Outcome], given: GivenWork, machine: Machine, head: dict[str, Any]) -> None:
    """Print machine, work and a row per configuration."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, WIDTH))
    for line in (f"{machine}; commit {head['commit']}; {head['date']}", given.summary):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(table(outcomes))
    for name, error in _errors(outcomes).items():
        console.print(Text.assemble((name, "bold"), ": ", error), soft_wrap=True)


def table(outcomes: list[Outcome]) -> Table:
    """Output tokens per second, and what they are beside the reference."""
    reference = find(outcomes, REFERENCES)
    own = find(outcomes, (OWN,))
    ratio = "ratio" if reference is None else f"to {reference.peer.name}"
    shown = Table(box=box.SIMPLE_HEAD)
    for column in ("peer", "version", "configuration", "KV memory for"):
        shown.add_column(column)
    for column in ("tokens/s", "least", "most", ratio, "same first token"):
        shown.add_column(column, justify="right")
    for outcome in outcomes:
        name = outcome.configuration.name
        version = next(iter(outcome.versions.values()), "")
        cells = [outcome.peer.name, version, name, outcome.configuration.kv_memory]
        if outcome.median is None:
            shown.add_row(*cells, "failed", style="red")
            continue
        same = None if own is None else outcome.first_tokens_as(own)
        cells += [f"{rate:.1f}" for rate in (outcome.median, min(outcome.rates), max(outcome.rates))]
        cells.append(
            "" if reference is None else f"{outcome.median / statistics.median(reference.rates):.2f} x"
        )
        cells.append("" if same is None else f"{same:.0%}")
        shown.add_row(*cells)
    return shown


def find(outcomes: list[Outcome], wanted: tuple[tuple[str, str], ...]) -> Outcome | None:
    """The first of `wanted`, (peer, configuration), that ran."""
    ran = {(o.peer.name, o.configuration.name): o for o in outcomes if o.median is not None}
    return next((ran[key] for key in wanted if key in ran), None)


def _errors(outcomes: list[Outcome]) -> dict[str, str]:
    """By peer, or by configuration where only some of a peer's failed."""
    errors: dict[str, str] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            same = [other for other in outcomes if other.peer is outcome.peer]
            everywhere = all(other.error == outcome.error for other in same)
            name = outcome.peer.name if everywhere else f"{outcome.peer.name}, {outcome.configuration.name}"
            errors[name] = outcome.error
    return errors
