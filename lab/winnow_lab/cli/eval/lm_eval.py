"""`winnow eval lm-eval`: tasks of lm-evaluation-harness under eviction."""

import argparse
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from winnow.cli.flags.engine import open_llm
from winnow.cli.flags.options import add_model_argument
from winnow.cli.screen.progress import Meter, open_progress
from winnow.cli.screen.terminal import resume_hint
from winnow.errors import UsageError
from winnow_lab.cli.eval.options import EvalOptions, run_head, show_tables, write_table
from winnow_lab.study import flag
from winnow_lab.study.options import add_options, options_of

if TYPE_CHECKING:
    from winnow.llm import LLM
    from winnow_lab.evaluate.likelihood import Keeping
    from winnow_lab.evaluate.lm_eval.lm_eval_cell import LmEvalPlan, LmEvalResult

SUMMARY = "tasks of lm-evaluation-harness"
DESCRIPTION = """\
Run tasks of lm-evaluation-harness (EleutherAI) with the full cache and under eviction.

Prompts, answers and metrics are that library's. A continuation is scored by forced decoding after
its context was computed and cut: a policy judges the context, few-shot examples and question in
it, and never the continuation. It needs the extra lm-eval.

With -o, cells reach the disk as they finish, and the same command resumes with those left.
"""
EPILOG = """\
examples:
  winnow eval lm-eval --tasks arc_easy,gsm8k --eviction kv-compress,snapkv --compression 4 --limit 100
  winnow eval lm-eval --tasks mine --include-path tasks --num-fewshot 3 -o results
Tasks that come from the network are fetched by that library; --include-path takes a directory of
task files whose data may lie here too.
"""


@dataclass(frozen=True)
class Options(EvalOptions):
    """The tasks."""

    tasks: tuple[str, ...] = flag(text="names of tasks or groups")
    num_fewshot: int | None = flag(None, "worked examples (default: the task's own)", least=0)
    limit: int | None = flag(None, "documents of each task (default: all)", least=1)
    include_path: Path | None = flag(None, "a folder with more task files")
    apply_chat_template: bool = flag(False, "put prompts through the model's chat template")
    JOURNAL: ClassVar[str] = "cells.jsonl"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.include_path is not None and not self.include_path.is_dir():
            raise UsageError(f"--include-path must be a directory, got {str(self.include_path)!r}")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.usage = "winnow eval lm-eval [MODEL] --tasks A,B,... [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add_options(parser, Options)
    add_model_argument(parser)


def execute(namespace: argparse.Namespace) -> int:
    """Evaluate, show, write, and return the exit code."""
    asked = options_of(Options, namespace)
    from winnow_lab.evaluate.cell import AWARE, engine_needs, plan_cells
    from winnow_lab.evaluate.likelihood import Keeping
    from winnow_lab.evaluate.lm_eval.lm_eval_cell import LmEvalPlan
    from winnow_lab.evaluate.lm_eval.result_files import NOTE, lm_eval_table

    cells = plan_cells(tuple(dict.fromkeys(asked.eviction)), asked.amounts, (AWARE,))
    keepings = {cell.label: Keeping.of(cell) for cell in cells}
    tasks, chat = tuple(dict.fromkeys(asked.tasks)), asked.apply_chat_template
    plan = LmEvalPlan(tasks, asked.num_fewshot, asked.limit, asked.include_path, chat)
    options = asked.opened(engine_needs(cells))
    with open_llm(options) as llm:
        head = run_head(llm, options) | {"settings": plan.to_json()}
        try:
            results = _run(asked, llm, plan, keepings)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(*[resume_hint()] * (asked.output is not None)) from None
    table = lm_eval_table(results)
    show_tables(head, f"lm_eval {version('lm_eval')}", [table])
    write_table("lm-eval", head, NOTE, table, results, asked.output)
    return 0


def _run(
    asked: Options, llm: "LLM", plan: "LmEvalPlan", keepings: "dict[str, Keeping]"
) -> "list[LmEvalResult]":
    from winnow_lab.evaluate.lm_eval.lm_eval_cell import LmEvalResult, run_cell
    from winnow_lab.evaluate.plan import engine_identity
    from winnow_lab.study.journal import ResultJournal

    manager = plan.task_manager()
    with ExitStack() as stack:
        journal: ResultJournal[LmEvalResult] | None = None
        found: dict[str, LmEvalResult] = {}
        if asked.journal is not None:
            identity = engine_identity(llm, plan.digest(), {"task": "lm-eval"} | plan.to_json())
            journal = ResultJournal(
                asked.journal, identity, LmEvalResult.from_json, overwrite=asked.overwrite, answers_alone=True
            )
            stack.enter_context(journal)
            found = {result.cell: result for result in journal.found}
        progress = stack.enter_context(open_progress(asked.progress, sys.stderr))
        meter = Meter()
        for name, keeping in keepings.items():
            if name in found:
                continue

            def show(name: str = name) -> None:
                if progress.due():
                    progress.show(meter.snapshot(len(found), len(keepings), 0, llm.stats(), name))

            found[name] = run_cell(llm, plan, manager, name, keeping, show)
            if journal is not None and found[name].refusal is None:
                journal.append([found[name]])
    return [found[name] for name in keepings]
