"""Answers under Winnow's presets beside NVIDIA's kvpress."""

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console

from winnow.cli.flags.engine import add_engine_flags, engine_options, open_llm, silence_transformers
from winnow.errors import UsageError, known_names
from winnow.process.threads import set_threads
from winnow_lab.bench.presets import model_cache
from winnow_lab.cli.eval import typed
from winnow_lab.cli.eval.cells import add_compression_flag
from winnow_lab.cli.eval.display import show_evaluation
from winnow_lab.cli.eval.output import run_head, show_tables
from winnow_lab.cli.eval.prompts import prompt_settings
from winnow_lab.evaluate.cell import amounts_of, check_presets, engine_needs, plan_cells
from winnow_lab.evaluate.result_tables import all_tables
from winnow_lab.evaluate.settings import settings_for
from winnow_lab.papers.evaluations import CONTROLS, QUERIES, add_evaluation_flags, write_evaluation
from winnow_lab.papers.harness import check_outputs
from winnow_lab.papers.kvpress.compare import Comparison
from winnow_lab.papers.kvpress.presses import PACKAGE, PRESSES, SOURCES
from winnow_lab.peers.environment import Environment, PeerError

DESCRIPTION = """\
Answer the demo model's tasks under Winnow's presets and under kvpress's presses, and tell how many
answers are right and how many bytes are held.

kvpress gets an environment of its own below --folder, since it needs an older transformers. Both
see the same token ids, keep as many KVs of them, answer greedily in float32, and are scored alike.
Query-agnostic, the context is compressed before the question is seen; query-aware, the question is
compressed with it, but for its last line ("Answer:").

What is answered stays below --folder: a comparison that was interrupted resumes where it stopped.
"""
EPILOG = f"""\
examples:
  python -m winnow_lab.papers kvpress --samples 2 --compression 4
  python -m winnow_lab.papers kvpress --presets winnow,keydiff --presses KeyDiff,Compactor --query agnostic
  python -m winnow_lab.papers kvpress --samples 10 -o docs/results
presses: {", ".join(PRESSES)}
"""
NOTES = f"""\
- The peer is {PACKAGE}, with as many cores as Winnow.
- Both compute the same weights in float32 on the CPU, answer greedily, and are scored by the same metrics.
- Both see the same token ids and keep as many KVs per row of what is judged: ceil(tokens / compression). Presses have
  kvpress's own defaults.
- Query-agnostic, what is judged ends before the question. Query-aware, the question is judged too, but for its last
  line, "Answer:", which both compute after the cut. kvpress's own pipeline does the same.
- Presses cut once, when what is judged is computed. Winnow's presets keep their own rounds: `leverage-pd` and `keydiff`
  cut within the prompt already, so that it never lies in memory whole, and have worse keys to choose from.
- KV memory is what an answer held at its end: for Winnow the blocks, rounded up and with their tables; for kvpress the
  tensors of its cache. Presses with AdaKV mask KVs and free none.
- A press that refuses a prompt, or fails on it, is left out of its cell, with its message.
"""
_PRESETS = ("leverage", "leverage-pd", "keydiff", "kv-compress", "snapkv", "ada-snapkv")
_OWN = (
    "model",
    "eviction",
    "compression",
    "kv_budget",
    "seed",
    "dtype",
    "device",
    "num_accumulators",
    "kv_bias",
)
_KV_FLOOR = 1


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.usage = f"{parser.prog} [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add_evaluation_flags(parser, _PRESETS, samples=5)
    add_compression_flag(parser, (4.0, 8.0))
    parser.add_argument(
        "--presses", metavar="A,B,...", type=typed.names, default=tuple(PRESSES), help="default: all"
    )
    parser.add_argument(
        "--folder",
        metavar="DIR",
        type=Path,
        default=model_cache() / "kvpress",
        help="for kvpress's environment and what is answered (default: %(default)s)",
    )
    parser.add_argument(
        "-o", "--output", metavar="DIR", type=Path, help="write kvpress.json and kvpress.md there"
    )
    add_engine_flags(parser, _OWN, {"kv_floor": _KV_FLOOR})


def execute(namespace: argparse.Namespace) -> int:
    """Compare, show, write, and return the exit code."""
    options, output, folder = engine_options(namespace), namespace.output, namespace.folder.resolve()
    for name in namespace.presses:
        if name not in PRESSES:
            raise UsageError(f"--presses: no press {name!r}; {known_names(name, PRESSES)}")
    for flag, directory in (("-o", output), ("--folder", folder)):  # they may be one directory
        check_outputs(options, {}, {flag: directory and directory / "kvpress.json"})
    check_presets(namespace.presets)
    silence_transformers()
    set_threads(options.get("threads"))
    presses = tuple(PRESSES[name] for name in namespace.presses)
    comparison = Comparison(namespace.presets, presses, namespace.compressions, QUERIES[namespace.query])
    folder.mkdir(parents=True, exist_ok=True)
    environment = Environment(folder / "environment")
    cells = plan_cells(namespace.presets, amounts_of(namespace.compressions), ("agnostic",), CONTROLS)
    needs = {
        "kv_floor": _KV_FLOOR,
        **engine_needs(cells),
        "dtype": "float32",
        "device": "cpu",
    }
    threads = torch.get_num_threads()  # kvpress's too

    def tell(query: str) -> None:
        print(f"winnow: kvpress answers, query-{query}", file=sys.stderr)

    try:
        with Console(stderr=True).status(f"an environment with {PACKAGE}"):
            environment.prepare([PACKAGE], sources=SOURCES)
        with open_llm(needs | options) as llm, show_evaluation(namespace.progress) as show:
            settings = settings_for(llm, **prompt_settings(namespace))
            head = run_head(llm, needs | options) | {"peer": PACKAGE, "threads": threads}
            evaluation = comparison.run(llm, settings, environment, folder, threads, show, tell)
    except PeerError as error:
        raise UsageError(f"kvpress: {error}") from None
    tables = all_tables(evaluation)
    show_tables(head, f"{evaluation.prompts} prompts per cell", tables)
    if output is not None:
        title = "Winnow beside kvpress"
        write_evaluation(output, title, head, evaluation, NOTES, tables, name="kvpress", numbers={})
    return 0
