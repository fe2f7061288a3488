"""Throughput, decoding batch and accuracy against compression, where KV memory is short."""

import dataclasses
from collections.abc import Iterator

from winnow.cli.flags.engine import open_llm, silence_transformers
from winnow.config import EngineConfig, EvictionConfig
from winnow.process.threads import set_threads
from winnow.values.units import format_bytes
from winnow_lab.bench.kv_memory import kv_memory_for
from winnow_lab.bench.presets import model_cache
from winnow_lab.papers.judged import DEMO
from winnow_lab.papers.kv_compress.measure import RANDOM, Options, measure
from winnow_lab.papers.kv_compress.results import NOTES, TITLE, all_tables, figures, read_rows
from winnow_lab.study import Result, as_command
from winnow_lab.study.journal import CellJournal

DESCRIPTION = """\
Answer the same prompts in the same KV memory with the full cache and at each compression, and tell
how many times faster that is, how large the decoding batch became, and what it costs in accuracy.

Two policies stand side by side (--whole, --p-and-d). kv-compress shrinks a sequence after its prompt, which has to fit
whole, and before a preemption. kv-compress-pd also shrinks it within the prompt and while it
decodes, so that the batch grows nearly with the compression.

Beside every gain stands its bound: the gain if decoding took no time. It is measured in the same
run, from the same prompts with one new token each. Rounds within the prompt can pass it, since they
shorten attention in the prompt too.

examples:
  python -m winnow_lab.papers kv-compress
  python -m winnow_lab.papers kv-compress --contexts 3584 --compressions 1,2,4,8,16,32,64 --requests 48
  python -m winnow_lab.papers kv-compress --whole leverage --p-and-d leverage-pd --contexts 3584 --compressions 1,16,64
  python -m winnow_lab.papers kv-compress --repeat 3 --journal runs/kvc.jsonl -o results
  python -m winnow_lab.papers kv-compress --contexts 500,1000,2000,3500 --mixed --new-tokens 500
  python -m winnow_lab.papers kv-compress --random-model --contexts 6000 --compressions 1,64
  python -m winnow_lab.papers kv-compress --model DIR --task ruler --categories niah_single_1,niah_multikey_1

The demo model answers its own tasks; other models those of --task, so that every timed answer has a score, or
random tokens.
A large gain needs a full cache that holds few sequences (--kv-seqs), and enough requests to fill
the memory when they are compressed. --kv-floor bounds how far short prompts are compressed.
"""


def study(options: Options) -> Iterator[Result]:
    """All cells in turn, some times."""
    silence_transformers()
    set_threads(options.engine.get("threads"))
    if options.random_model:
        model = str(RANDOM.save(model_cache()))
        options = dataclasses.replace(options, random_model=False, engine={**options.engine, "model": model})
    opened = options.opened
    opened["kv_memory"] = kv_memory_for(
        EngineConfig.from_options(opened), options.kv_seqs, options.longest_sequence
    )
    journal = CellJournal(options.journal, options.identity(opened))
    tokens = f"task {options.task or DEMO}" if options.is_judged else "random tokens"
    floor = opened.get("kv_floor", EvictionConfig.kv_floor)
    fact = (
        f"{options.requests} requests a cell, {tokens}, {opened['dtype']}. "
        f"KV memory: {format_bytes(opened['kv_memory'])}, as {options.kv_seqs} x {options.longest_sequence} tokens "
        f"take with the full cache. Compression leaves at least {floor} KVs a row on average. "
        f"Whole prompt: {options.whole}. P&D: {options.p_and_d}."
    )
    with open_llm(opened) as full, open_llm(opened | {"eviction": options.p_and_d}) as evicting:
        for _ in measure(options, journal, full, evicting):
            rows = read_rows(options, journal)
            numbers = {"engine": options.identity(opened)["engine"], "rows": [row.to_json() for row in rows]}
            tables, drawn = all_tables(options, rows), figures(options, rows)
            yield Result(TITLE, tables, [fact, journal.origins], NOTES, numbers, figures=drawn)


configure, execute = as_command(Options, study, DESCRIPTION)
