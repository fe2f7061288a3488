"""The experiments of the KCache paper on a model at hand."""

import sys
from pathlib import Path

from winnow.cli.flags.engine import silence_transformers
from winnow_lab.papers.kcache.answers import Answered, answer, known_answer, prompt_lengths
from winnow_lab.papers.kcache.protocol import Options, Setting, settings
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
from winnow_lab.papers.kcache.timed import Cell, conversations, measure
from winnow_lab.report.tables import TextTable
from winnow_lab.study import Result, as_command

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


def study(options: Options) -> Result:
    """Everything that was asked for."""
    silence_transformers()
    options.work.mkdir(parents=True, exist_ok=True)
    model = "demo model" if options.model is None else Path(options.model).name
    tables: list[TextTable] = []
    answers: list[Answered] = []
    cells: list[Cell] = []
    if options.tasks:
        for setting in settings(options.top_n, options.layers, options.extras):
            known = known_answer(setting, options.work)
            if known is None and not options.report:
                known = answer(setting, options)
                print(f"\r{known.to_json()}", file=sys.stderr)
            answers += [] if known is None else [known]
        tables.append(answer_table(answers, model))
        if "bbh" in options.tasks:
            tables.append(subject_table(answers, model))
    if options.cells:
        rows = [Setting(), *(Setting(n) for n in options.top_n)]
        cells = list(measure(rows, options.cells, options))
        tables += [throughput_table(cells, model, options.kv_memory), traffic_table(cells)]
    lengths = prompt_lengths(options) if options.lengths else {}
    if lengths:
        tables.append(length_table(lengths, model))
    turns = list(conversations(options)) if options.questions else []
    if turns:
        tables.append(turn_table(turns, model))
    fact = f"Prompts of {options.tokens[0]:,} tokens; {options.samples} of each category."
    numbers = {
        "model": model,
        "answers": [each.to_json() for each in answers],
        "cells": [vars(cell) for cell in cells],
        "lengths": lengths,
        "turns": [vars(turn) for turn in turns],
    }
    lists = ("answers", "cells", "turns")
    return Result(TITLE, tables, [fact] if answers or turns else [], NOTES, numbers, lists)


configure, execute = as_command(Options, study, DESCRIPTION + "\n" + EPILOG)
