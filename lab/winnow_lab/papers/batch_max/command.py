"""What a larger batch brings when the prompt is evicted while it is read."""

from winnow.cli.flags.engine import silence_transformers
from winnow.process.threads import set_threads
from winnow.values.units import format_bytes
from winnow_lab.papers.batch_max.methods import Options
from winnow_lab.papers.batch_max.protocol import BatchMaxBench
from winnow_lab.papers.batch_max.results import BatchMaxReport, all_tables
from winnow_lab.study import Result, as_command
from winnow_lab.study.journal import CellJournal

DESCRIPTION = """\
Batch-Max (Metel et al. 2024), section 4.1, on the demo model and its tasks, or on another of each.

Batches are static. ED, the fastest decoding-only eviction, keeps one KV of each row once prompts
are read; while they are read, memory must hold all of them whole. b0 is the smallest batch for
which it does not, and ED runs with the largest below it. BM evicts while it reads (Algorithm 1,
p = 64). Its batch grows, and with it shrinks |kv|, the KVs that each prompt may keep, as long as
accuracy stays near that of the full cache (FKV). Timed answers have a fixed length; those that are
judged end as answers do. "latest KVs" is the same loop keeping the latest KVs: a task on which that
is as good tells nothing about a rule, and does not count in the mean.

examples:
  python -m winnow_lab.papers batch-max
  python -m winnow_lab.papers batch-max --kv-memory 16MiB --tasks single,passkey -o results
  python -m winnow_lab.papers batch-max --samples 960 --tasks few-shot --rules average
  python -m winnow_lab.papers batch-max --model DIR --task gsm8k --shots 16 --samples 24
  python -m winnow_lab.papers batch-max --model DIR --task summaries --shots 12 --kv-memory 200MiB
docs/benchmarks.md says what the tables mean.
"""


def study(options: Options) -> Result:
    """The whole experiment, but for the tasks that the journal knows."""
    silence_transformers()
    set_threads(options.threads)
    journal = CellJournal(options.journal, options.identity)
    report = BatchMaxBench(options, journal).run()
    facts = [*_facts(report), journal.origins]
    return Result(
        "Batch-Max's experiment", all_tables(report), facts, "", report.to_json(), ("tasks", "speeds")
    )


def _facts(report: BatchMaxReport) -> list[str]:
    config = report.config
    longest = max(task.longest_prompt for task in report.tasks)
    spent = ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in report.seconds.items())
    return [
        f"{format_bytes(report.kv_bytes_budget)} of KV memory, {config.dtype}; prompts of up to {longest:,} tokens, "
        f"{config.new_tokens} new tokens in what is timed; {config.samples} prompts of each task, one in "
        f"{960 / config.samples:g} of the paper's 960; seed {config.seed}; medians of {config.repeats}",
        f"ED runs out of memory at b = {report.out_of_memory}. The experiment took: {spent}.",
    ]


configure, execute = as_command(Options, study, DESCRIPTION)
