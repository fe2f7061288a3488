"""The experiments of the KCache paper on a model at hand."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from winnow.cli.flags.engine import silence_transformers
from winnow.values.units import format_bytes
from winnow_lab.papers.kcache.answers import Answered, answer, known_answer, prompt_lengths
from winnow_lab.papers.kcache.protocol import PAPER, SUBJECTS, Options, Setting, settings
from winnow_lab.papers.kcache.timed import Cell, Turns, conversations, measure
from winnow_lab.report.tables import TextTable
from winnow_lab.study import Result, as_command

TITLE = "KCache: keys on the device, the values that weigh most from the host"
NOTES = """\
L: first layers whose values stay on the device; N: values that a query head reads in the others while an answer is
decoded; prompts read all. Scores are means over prompts ± standard errors. Same tokens: of the full cache's greedy
continuations of WikiText-2, and those before the first that differs. Perplexity: of text that is forced token by token
after as long a context. Query-aware: a question is part of the prompt. Weights are as softmaxed, but in rows that say
`renormalize`, the engine's default.
"""


def answer_table(found: Sequence[Answered], model: str) -> TextTable:
    """Scores, agreement and perplexity by setting, beside the paper's Table 2; subjects are in a table of their own."""
    categories = [name for name in _categories(found) if name not in SUBJECTS]
    rows = []
    for each in found:
        paper = PAPER.get(each.setting.label)
        scores = tuple(f"{each.scores[name]:.2f} ± {each.errors[name]:.2f}" for name in categories)
        agreement = f"{each.same_tokens:.1%}", f"{each.leading:.1%}", f"{each.perplexity:.3f}"
        printed = "" if paper is None else " / ".join(f"{value:.2f}" for value in paper)
        rows.append((each.setting.label, (*scores, f"{each.mean:.3f}", *agreement, printed)))
    columns = (*categories, "mean", "same tokens", "leading", "perplexity", "paper: BBH / GSM8K / TriviaQA")
    return TextTable(f"Answers, {model}", "setting", columns, tuple(rows))


def subject_table(found: Sequence[Answered], model: str) -> TextTable:
    """Scores in per cent by subject of BBH, as Table 4."""
    rows = []
    for name in filter(SUBJECTS.get, _categories(found)):
        scores = (f"{100 * each.scores[name]:.2f} ± {100 * each.errors[name]:.2f}" for each in found)
        rows.append((name, (*scores, "{:.2f}, {:.2f}".format(*SUBJECTS[name]))))
    columns = *(each.setting.label for each in found), "paper: full, KCache"
    return TextTable(f"BBH by subject, {model}", "subject", columns, tuple(rows))


def length_table(found: Mapping[str, Sequence[int]], model: str) -> TextTable:
    """Tokens of prompts, as Fig. 2."""
    columns: dict[str, Callable[[Sequence[int]], str]] = {"prompts": lambda each: f"{len(each):,}"}
    for head, part in {"shortest": 0, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "longest": 1}.items():
        columns[head] = lambda each, part=part: f"{each[round(part * (len(each) - 1))]:,}"  # type: ignore[misc]
    return TextTable.of(f"Tokens of prompts, {model}", "task", found, columns)


def _categories(found: Sequence[Answered]) -> list[str]:
    return list(dict.fromkeys(name for each in found for name in each.scores))


def throughput_table(cells: Sequence[Cell], model: str, kv_memory: str) -> TextTable:
    """Decoded tokens per second, as Table 3."""
    settings = list(dict.fromkeys(cell.setting for cell in cells))
    by_key = {(cell.setting, cell.prompt_tokens, cell.batch): cell for cell in cells}
    rows = []
    for prompt, batch in dict.fromkeys((cell.prompt_tokens, cell.batch) for cell in cells):
        entries = []
        full = by_key.get((settings[0], prompt, batch))
        for setting in settings:
            cell = by_key.get((setting, prompt, batch))
            if cell is None or cell.rate is None:
                entries.append("" if cell is None else "out of memory")
                continue
            against = "" if full is None or full.rate is None else f" ({cell.rate / full.rate:.2f}x)"
            spread = f" [{min(cell.rates):.1f}-{max(cell.rates):.1f}]" if len(cell.rates) > 1 else ""
            entries.append(f"{cell.rate:.1f}{spread}{against if setting != settings[0] else ''}")
        rows.append((f"{prompt} tokens, batch {batch}", tuple(entries)))
    title = f"Tokens per second while decoding, {model}, kv_memory {kv_memory}"
    return TextTable(title, "input", tuple(settings), tuple(rows))


def traffic_table(cells: Sequence[Cell]) -> TextTable:
    return TextTable.of(
        "Bytes held and values read",
        "setting",
        {f"{c.setting}: {c.prompt_tokens} tokens, batch {c.batch}": c for c in cells if c.rate is not None},
        {
            "device": lambda cell: format_bytes(cell.device_bytes),
            "tier": lambda cell: format_bytes(cell.tier_bytes),
            "values a head chose": lambda cell: f"{cell.rows_per_head:.1f}",
            "values read for it": lambda cell: f"{cell.rows_read:.1f}",
            "waited, ms a step": lambda cell: f"{cell.seconds_waited * 1e3:.2f}",
        },
    )


def turn_table(found: Sequence[Turns], model: str) -> TextTable:
    """Right answers to the first question about a document and to later ones, and seconds of a turn."""
    return TextTable.of(
        f"Questions in turn on one document, {model}",
        "setting",
        {each.setting: each for each in found},
        {
            "first right": lambda each: f"{each.first:.0%}",
            "later right": lambda each: f"{each.later:.0%}",
            "first, s": lambda each: f"{each.first_seconds:.2f}",
            "later, s": lambda each: f"{each.later_seconds:.2f}",
            "device, at most": lambda each: format_bytes(each.device_bytes),
        },
    )


DESCRIPTION = """\
Scores, agreement and perplexity with the N values that weigh most (the paper's Table 2), tokens per
second by input length and batch in a given KV memory (Table 3), and answers to questions that are
asked in turn about one document (its motive). BBH is also shown by subject (Table 4), and --lengths
counts the tokens of prompts (Fig. 2). docs/papers.md has the command of each table.

What is done is kept below --work: the same command resumes where it was stopped.
"""


def study(options: Options) -> Result:
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


configure, execute = as_command(Options, study, DESCRIPTION)
