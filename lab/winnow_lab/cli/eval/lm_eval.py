"""`winnow eval lm-eval`: tasks of lm-evaluation-harness under eviction."""

import argparse
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

from winnow.errors import UsageError
from winnow_lab.cli.eval.options import EvalOptions, show_tables, show_work
from winnow_lab.study import flag
from winnow_lab.study.options import options_of

SUMMARY = "tasks of lm-evaluation-harness"
ARGUMENTS = "--tasks A,B,... "
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


def execute(namespace: argparse.Namespace) -> int:
    asked = options_of(Options, namespace)
    from winnow_lab.evaluate.cell import AWARE, plan_cells
    from winnow_lab.evaluate.likelihood import Keeping
    from winnow_lab.evaluate.lm_eval.lm_eval_cell import (
        NOTE,
        LmEvalPlan,
        LmEvalResult,
        lm_eval_table,
        run_cell,
    )
    from winnow_lab.evaluate.plan import engine_identity

    cells = plan_cells(tuple(dict.fromkeys(asked.eviction)), asked.amounts, (AWARE,))
    tasks, chat = tuple(dict.fromkeys(asked.tasks)), asked.apply_chat_template
    plan = LmEvalPlan(tasks, asked.num_fewshot, asked.limit, asked.include_path, chat)
    found: dict[str, LmEvalResult] = {}
    with asked.open_engine(cells) as (llm, head):
        head["settings"] = plan.to_json()
        manager = plan.task_manager()
        identity = engine_identity(llm, plan.digest(), {"task": "lm-eval"} | plan.to_json())
        with (
            asked.open_journal(identity, LmEvalResult.from_json) as journal,
            show_work(asked.progress) as show,
        ):
            if journal is not None:
                found = {result.cell: result for result in journal.found}

            def tell(name: str) -> None:
                show(len(found), len(cells), llm.stats(), name)

            for cell in cells:
                name = cell.label
                if name not in found:
                    found[name] = run_cell(llm, plan, manager, name, Keeping.of(cell), partial(tell, name))
                    if journal is not None and found[name].refusal is None:
                        journal.append([found[name]])
    results = [found[cell.label] for cell in cells]
    table = lm_eval_table(results)
    show_tables(head, f"lm_eval {version('lm_eval')}", [table])
    asked.write_table("lm-eval", head, NOTE, table, results)
    return 0
