"""`winnow policies`: what can decide which KVs stay, as a table or one in full."""

import argparse
import json
from collections.abc import Iterator, Mapping

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from winnow.cli.known_accuracy import PAGE, record, share_range
from winnow.errors import UsageError, known_names
from winnow.eviction import PRESETS, Preset
from winnow.eviction.describe import PARTS, brief_policy, full_preset

KNOWN_MODEL = "SmolLM2-135M-Instruct"
NOTES: Mapping[str, tuple[str, str, str]] = {
    "full": ("exact answers", "memory alone", "-"),
    "winnow": ("one of the next that suits", "as that", "-"),
    "winnow-seen": ("questions at the end", "next to nothing", "the question seen"),
    "winnow-sentence": ("as winnow-seen, few rows", "next to nothing", "the question seen"),
    "winnow-seen-pd": ("the same, longer prompts", "next to nothing", "the question seen"),
    "winnow-keys": ("a document, asked often", "next to nothing", "-"),
    "winnow-keys-pd": ("prompts beyond memory", "next to nothing", "-"),
    "kvzip-keys": ("as winnow-keys, at 16x", "1.6 prefills", "room for it twice"),
    "kvzip": ("a document, asked often", "1.6 prefills", "room for it twice"),
    "snapkv": ("questions at the end", "next to nothing", "the question seen"),
    "streaming": ("endless text, only its end", "nothing", "-"),
    "leverage": ("the demo model alone", "next to nothing", "-"),
}
"""The job that a policy is for, what it costs beside the cache, what must be there; other presets are for research."""


def known_shares(policy: str) -> str:
    """Return the measured shares of the full cache's answers on `KNOWN_MODEL`, up to 8x, as text."""
    if policy in ("full", "winnow"):
        return "1.00" if policy == "full" else "as that"
    rows = [each for each in record() if each.policy == policy and each.is_of(KNOWN_MODEL)]
    rate = max((each.compression for each in rows if each.compression <= 8.0), default=None)
    if rate is None:
        return "not measured"
    return f"{share_range([each for each in rows if each.compression == rate])} at {rate:g}x"


DESCRIPTION = """\
List the eviction policies that have names, or show one of them in full: those to choose from, what
each is for, costs and needs, and what share of the full cache's answers it keeps on a real model
(SmolLM2-135M; docs/results/known.md). --all lists those of papers and baselines too, by their parts.

A policy is four choices: the score says how much a KV is worth, the budget who keeps how much,
keep what may never go, and when says when KVs are taken. Only what differs from the defaults of
its class is listed; NAME shows every field.
"""
EPILOG = """\
examples:
  winnow policies
  winnow policies --all
  winnow policies snapkv
  winnow policies --json
  winnow run prompts.jsonl -o answers.jsonl --eviction snapkv --compression 8
"""
CHOICE_FOOTNOTE = f"""\
Known: share of the full cache's answers, {KNOWN_MODEL}, from the worst task to the best ({PAGE}).
winnow policies --all lists papers' policies too; winnow policies NAME shows one with every field."""
FOOTNOTE = """\
A number of KVs is the policy's own budget per row, held to where the user names none.
Plug-ins for --eviction, in the repository's examples/policies: compactor.py:COMPACTOR,
dropkv.py:DROPKV, expected_attention.py:EXPECTED, fastgen.py:FASTGEN, kvzip_plus.py:KVZIP_PLUS,
roco.py:ROCO, scissorhands.py:SCISSORHANDS (budgets of layers), simlayerkv.py:SIMLAYERKV,
squeezeattention.py:SQUEEZE. Each file names its paper.
winnow policies NAME shows a policy with every field."""
WIDTH = 100
"""Columns where the output is no terminal: a file or another program has no width of its own."""
# The widest entry of columns that hold few words; the others share what is left.
_WIDTHS = {"score": 18, "budget": 13, "keep": 10, "when": 14}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "winnow policies [NAME] [--all] [--json]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("name", metavar="NAME", nargs="?", help="show this policy with every field")
    parser.add_argument("--all", action="store_true", help="every policy, by its parts")
    parser.add_argument("--json", action="store_true", help="print JSON, with every field")


def execute(namespace: argparse.Namespace) -> int:
    name: str | None = namespace.name
    if name is not None and name not in PRESETS:
        raise UsageError(f"no policy is called {name!r}; {known_names(name.lower(), PRESETS)}")
    if namespace.json:
        described = [full_preset(*item) for item in PRESETS.items() if name in (None, item[0])]
        print(json.dumps(described if name is None else described[0], indent=2))
        return 0
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    if name is None and not namespace.all:
        console.print(_choices(), "", Text(CHOICE_FOOTNOTE, style="dim"), sep="\n")
    elif name is None:
        console.print(_table(), "", Text(FOOTNOTE, style="dim"), sep="\n")
    else:
        for line in _pages(name, PRESETS[name]):
            console.print(line)
    return 0


def _choices() -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("name", style="bold", no_wrap=True)
    for column in ("for", "costs", "needs", "known"):
        table.add_column(column)
    for name, note in NOTES.items():
        table.add_row(name, *map(Text, (*note, known_shares(name))))
    return table


def _table() -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), leading=1, pad_edge=False, show_edge=False)
    table.add_column("name", style="bold", no_wrap=True)
    for column in (*PARTS, "paper"):
        table.add_column(column, width=_WIDTHS.get(column))
    for name, preset in PRESETS.items():
        described = brief_policy(preset.policy)
        if preset.kv_budget is not None:
            described["budget"] += f"\n{preset.kv_budget} KVs"
        # What is kept and the moments are lists: a line for each entry.
        described |= {part: described[part].replace(", ", "\n") for part in ("keep", "when")}
        table.add_row(name, *map(Text, described.values()), Text(preset.paper))
    return table


def _pages(name: str, preset: Preset) -> Iterator[Text]:
    yield Text.assemble((name, "bold"), f": {preset.paper}")
    if name in NOTES:
        known = known_shares(name)
        yield Text("for {}; costs: {}; needs: {}; on a real model: {}".format(*NOTES[name], known))
    if preset.kv_budget is not None:
        yield Text(f"{preset.kv_budget} KVs per row where the user names no budget")
    yield Text(json.dumps(full_preset(name, preset), indent=2))
