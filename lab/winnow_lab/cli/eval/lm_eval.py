"""`winnow eval lm-eval`: tasks of lm-evaluation-harness under eviction."""

import argparse
import sys
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from winnow.cli.flags.engine import add_engine_flags, evaluation_options, open_llm
from winnow.cli.flags.options import add_model_argument
from winnow.cli.screen.meter import Meter
from winnow.cli.screen.progress import open_progress
from winnow.cli.screen.terminal import resume_hint
from winnow.errors import UsageError
from winnow_lab.cli.eval import typed
from winnow_lab.cli.eval.cells import KV_FLOOR, OF_CELLS, add_cell_flags, cell_amounts
from winnow_lab.cli.eval.output import add_output_flags, check_output, run_head, show_tables

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
_JOURNAL = "cells.jsonl"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.usage = "winnow eval lm-eval [MODEL] --tasks A,B,... [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add_cell_flags(parser)
    work = parser.add_argument_group("the work")
    work.add_argument(
        "--tasks", metavar="A,B,...", type=typed.names, required=True, help="names of tasks or groups"
    )
    work.add_argument(
        "--num-fewshot", metavar="N", type=typed.count(0), help="worked examples; left out: the task's own"
    )
    work.add_argument(
        "--limit", metavar="N", type=typed.count(1), help="documents of each task; left out: all"
    )
    work.add_argument("--include-path", metavar="DIR", type=Path, help="a directory with more task files")
    work.add_argument(
        "--apply-chat-template", action="store_true", help="put prompts through the model's chat template"
    )
    add_output_flags(parser)
    add_model_argument(parser)
    add_engine_flags(parser, OF_CELLS, {"kv_floor": KV_FLOOR})


def execute(namespace: argparse.Namespace) -> int:
    """Evaluate, show, write, and return the exit code."""
    options = evaluation_options(namespace)
    check_output(namespace, options, _JOURNAL)
    place: Path | None = namespace.include_path
    if place is not None and not place.is_dir():
        raise UsageError(f"--include-path must be a directory, got {str(place)!r}")
    from winnow_lab.evaluate.cell import AWARE, engine_needs, plan_cells
    from winnow_lab.evaluate.likelihood import Keeping
    from winnow_lab.evaluate.lm_eval.lm_eval_cell import LmEvalPlan
    from winnow_lab.evaluate.lm_eval.result_files import lm_eval_table, write_lm_eval

    cells = plan_cells(namespace.presets, cell_amounts(namespace), (AWARE,))
    keepings = {cell.label: Keeping.of(cell) for cell in cells}
    chat = namespace.apply_chat_template
    plan = LmEvalPlan(namespace.tasks, namespace.num_fewshot, namespace.limit, place, chat)
    options = {"kv_floor": KV_FLOOR} | engine_needs(cells) | options
    with open_llm(options) as llm:
        head = run_head(llm, options) | {"settings": plan.to_json()}
        try:
            results = _run(namespace, llm, plan, keepings)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(*[resume_hint()] * (namespace.output is not None)) from None
    table = lm_eval_table(results)
    show_tables(head, f"lm_eval {version('lm_eval')}", [table])
    if namespace.output is not None:
        paths = write_lm_eval(results, table, namespace.output, head)
        print(f"wrote {', '.join(path.name for path in paths)} in {namespace.output}", file=sys.stderr)
    return 0


def _run(
    namespace: argparse.Namespace, llm: "LLM", plan: "LmEvalPlan", keepings: "dict[str, Keeping]"
) -> "list[LmEvalResult]":
    from winnow_lab.evaluate.lm_eval.lm_eval_cell import LmEvalResult, run_cell
    from winnow_lab.evaluate.plan import engine_identity
    from winnow_lab.study.journal import ResultJournal

    manager = plan.task_manager()
    with ExitStack() as stack:
        journal: ResultJournal[LmEvalResult] | None = None
        found: dict[str, LmEvalResult] = {}
        if namespace.output is not None:
            identity = engine_identity(llm, plan.digest(), {"task": "lm-eval"} | plan.to_json())
            path = namespace.output / _JOURNAL
            journal = ResultJournal(
                path, identity, LmEvalResult.from_json, overwrite=namespace.overwrite, answers_alone=True
            )
            stack.enter_context(journal)
            found = {result.cell: result for result in journal.found}
        progress = stack.enter_context(open_progress(namespace.progress, sys.stderr))
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
