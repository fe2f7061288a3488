"""The experiments of the KCache paper on a model at hand."""

import argparse
import sys
from pathlib import Path

from winnow.cli.flags.engine import silence_transformers
from winnow_lab.cli.eval import typed
from winnow_lab.papers.harness import check_outputs, head_of, show_results, write_page
from winnow_lab.papers.kcache.answers import Answered, answer, known_answer, prompt_lengths
from winnow_lab.papers.kcache.protocol import CATEGORIES, LAYERS, TOP_N, Setting, settings
from winnow_lab.papers.kcache.results import (
    NOTES,
    TITLE,
    answer_table,
    length_table,
    subject_table,
    throughput_table,
    traffic_table,
    turn_table,
)
from winnow_lab.papers.kcache.throughput import Cell, measure
from winnow_lab.papers.kcache.turns import conversations
from winnow_lab.papers.page import results_json
from winnow_lab.report.tables import TextTable

DESCRIPTION = """\
Scores, agreement and perplexity with the N values that weigh most (the paper's Table 2), tokens per
second by input length and batch in a given KV memory (Table 3), and answers to questions that are
asked in turn about one document (its motive). BBH is also shown by subject (Table 4), and --lengths
counts the tokens of prompts (Fig. 2).

What is done is kept below --work: the same command resumes where it was stopped.
"""
EPILOG = """\
examples:
  python -m winnow_lab.papers kcache --tasks demo -o docs/results --name kcache_demo
  python -m winnow_lab.papers kcache --model models/SmolLM2-135M-Instruct.Q4_1.gguf --tokens 2048 -o docs/results
  python -m winnow_lab.papers kcache --model MODEL --cells 1024:8,4096:4 --decode-tokens 1000 --runs 3 --layers 1
  python -m winnow_lab.papers kcache --model MODEL --questions 20 --samples 3 --tokens 2048
  python -m winnow_lab.papers kcache --model MODEL --lengths bbh,gsm8k,nq-open
  python -m winnow_lab.papers kcache --model MODEL --tasks bbh --top-n 128 --layers 1 --work runs/bbh
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.usage = f"{parser.prog} [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("--model", metavar="MODEL", help="(default: the demo model)")
    parser.add_argument(
        "--tasks", type=typed.names, default=(), help=f"of {', '.join(CATEGORIES)}; left out: no answers"
    )
    parser.add_argument("--categories", type=typed.names, default=(), help="of these (default: some)")
    parser.add_argument("--data", metavar="DIR", type=Path, help="files of the task (default: what ships)")
    parser.add_argument(
        "--lengths", type=typed.names, default=(), help="tasks whose prompts are counted, as in Fig. 2"
    )
    parser.add_argument(
        "--samples", type=typed.count(1), default=8, help="of each category (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=typed.lengths, default=(1024,), help="of a task's prompt (default: 1024)"
    )
    parser.add_argument("--seed", type=typed.count(0), default=0, help="of the prompts")
    parser.add_argument("--top-n", type=typed.lengths, default=TOP_N, help="(default: 32,64,128)")
    parser.add_argument("--layers", type=_counts, default=LAYERS, help="(default: 0,1,2,3)")
    parser.add_argument(
        "--extras",
        type=typed.names,
        default=("renormalize",),
        help="further words of value_tier, each with L=1",
    )
    parser.add_argument("--given", type=typed.count(1), default=512, help="tokens of a window's context")
    parser.add_argument("--windows", type=typed.count(1), default=4, help="of text (default: %(default)s)")
    parser.add_argument("--new-tokens", type=typed.count(1), default=64, help="of a greedy continuation")
    parser.add_argument("--cells", type=_cells, default=(), help="INPUT:BATCH,...; none: no throughput")
    parser.add_argument("--decode-tokens", type=typed.count(2), default=24, help="of an answer there")
    parser.add_argument("--runs", type=typed.count(1), default=1, help="of a cell there; the median counts")
    parser.add_argument(
        "--questions",
        type=typed.count(2),
        help="asked in turn about each of --samples documents; none: no turns",
    )
    parser.add_argument("--compression", type=float, default=8.0, help="of kv-compress there (default: 8)")
    parser.add_argument("--kv-memory", default="1GiB", help="on the device (default: %(default)s)")
    parser.add_argument("--max-num-seqs", type=typed.count(1), default=8)
    parser.add_argument("--threads", metavar="N", type=typed.count(1), help="(default: the engine's)")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/kcache"), help="journals (default: %(default)s)"
    )
    parser.add_argument("--report", action="store_true", help="measure nothing: report the journals")
    parser.add_argument("-o", "--output", metavar="DIR", type=Path, help="write NAME.json and NAME.md there")
    parser.add_argument("--name", default="kcache", help="(default: %(default)s)")


def execute(namespace: argparse.Namespace) -> int:
    """Measure, show, write, and return the exit code."""
    output: Path | None = namespace.output
    check_outputs({}, {}, {"-o": output and output / f"{namespace.name}.json"})
    silence_transformers()
    namespace.work.mkdir(parents=True, exist_ok=True)
    model = "demo model" if namespace.model is None else Path(namespace.model).name
    tables: list[TextTable] = []
    answers: list[Answered] = []
    cells: list[Cell] = []
    if namespace.tasks:
        for setting in settings(namespace.top_n, namespace.layers, namespace.extras):
            known = known_answer(setting, namespace.work)
            if known is None and not namespace.report:
                known = answer(setting, namespace)
                print(f"\r{known.to_json()}", file=sys.stderr)
            answers += [] if known is None else [known]
        tables.append(answer_table(answers, model))
        if "bbh" in namespace.tasks:
            tables.append(subject_table(answers, model))
    if namespace.cells:
        rows = [Setting(), *(Setting(n) for n in namespace.top_n)]
        cells = list(measure(rows, namespace.cells, namespace))
        tables += [throughput_table(cells, model, namespace.kv_memory), traffic_table(cells)]
    lengths = prompt_lengths(namespace) if namespace.lengths else {}
    if lengths:
        tables.append(length_table(lengths, model))
    turns = list(conversations(namespace)) if namespace.questions else []
    if turns:
        tables.append(turn_table(turns, model))
    head = head_of({"device": "cpu"}) | {"model": model}
    facts = (
        [f"Prompts of {namespace.tokens[0]:,} tokens; {namespace.samples} of each category."]
        if answers or turns
        else []
    )
    show_results([head], facts, tables)
    if output is not None:
        values = head | {
            "answers": [each.to_json() for each in answers],
            "cells": [vars(cell) for cell in cells],
            "lengths": lengths,
            "turns": [vars(turn) for turn in turns],
        }
        (output / f"{namespace.name}.json").write_text(
            results_json(values, ("answers", "cells", "turns")), encoding="utf-8"
        )
        write_page(output / f"{namespace.name}.md", TITLE, [head], facts, NOTES, tables)
    return 0


def _cells(text: str) -> tuple[tuple[int, int], ...]:
    """Read "1024:8,4096:4" as input lengths and batches."""
    pairs = [part.partition(":") for part in filter(None, text.split(","))]
    return tuple((int(tokens), int(batch)) for tokens, _, batch in pairs)


def _counts(text: str) -> tuple[int, ...]:
    """Read "0,1,2" as numbers."""
    return tuple(int(part) for part in text.split(","))
