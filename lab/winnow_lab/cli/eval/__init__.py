"""`winnow eval`: how good the answers are under eviction."""

import argparse
from collections.abc import Mapping
from typing import Any

from winnow.cli.flags.options import add_model_argument
from winnow_lab.cli.eval import lm_eval, perplexity, reuse, task
from winnow_lab.evaluate.tasks import TASKS, load_task
from winnow_lab.study.options import add_options

DESCRIPTION = """\
Run a task through the engine under the full cache and under eviction, and tell what it costs in
accuracy, by category and compression.
"""
EPILOG = """\
examples:
  winnow eval demo --eviction kv-compress,snapkv --compression 2,8 --samples 5
  winnow eval ruler --eviction kv-compress --kv-budget 128,256,512,1024 --tokens 2048
  winnow eval needle --eviction keydiff --compression 4 --tokens 512,1024,2048 -o needle
  winnow eval perplexity --eviction h2o --compression 4
  winnow eval lm-eval --tasks arc_easy --eviction snapkv --compression 4
  winnow eval reuse --prompts asked.jsonl --reuse anywhere
  winnow eval demo --help
docs/evaluation.md says what cells, categories and marks are.
"""
# Those whose work is not questions with right answers.
OTHERS = {"perplexity": perplexity, "lm-eval": lm_eval, "reuse": reuse}


def configure(parser: argparse.ArgumentParser, names: Mapping[str, str] = TASKS) -> None:
    parser.usage = f"{parser.prog} TASK [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    tasks = parser.add_subparsers(title="tasks", metavar="TASK", dest="task", required=True, prog=parser.prog)

    def declare(name: str, command: Any, summary: str, texts: tuple[str, str], **defaults: Any) -> None:
        own = tasks.add_parser(name, help=summary)
        own.usage = f"{own.prog} [MODEL] {command.ARGUMENTS}[options]"
        own.description, own.epilog = texts
        add_options(own, command.Options)
        add_model_argument(own)
        own.set_defaults(parser=own, **defaults)

    for name in names:
        loaded = load_task(name, names)
        declare(name, task, loaded.summary, task.texts(loaded), loaded=loaded)
    for name, command in OTHERS.items():
        declare(name, command, command.SUMMARY, (command.DESCRIPTION, command.EPILOG))


def execute(namespace: argparse.Namespace) -> int:
    return OTHERS.get(namespace.task, task).execute(namespace)
