"""The flags that say which prompts are answered: how many, how long, from which seed."""

import argparse
from typing import Any

from winnow_lab.cli.eval import typed


def add_prompt_flags(parser: "argparse._ActionsContainer", samples: int | None = None) -> None:
    """Declare them; `samples` of each category where the user names no number, None: as many as the task's own."""
    parser.add_argument(
        "--samples",
        metavar="N",
        type=typed.count(1),
        default=samples,
        help="of each category"
        + ("; left out: the task's own" if samples is None else f" (default: {samples})"),
    )
    parser.add_argument(
        "--tokens",
        metavar="N,...",
        type=typed.lengths,
        default=(1024,),
        help="of prompt and answer together, where the task's length is free (default: 1024)",
    )
    parser.add_argument(
        "--seed",
        dest="task_seed",
        metavar="N",
        type=typed.count(0),
        default=0,
        help="of the prompts (default: 0)",
    )


def prompt_settings(namespace: argparse.Namespace) -> dict[str, Any]:
    """Return what was typed, by fields of `TaskSettings`."""
    return {"samples": namespace.samples, "tokens": namespace.tokens, "seed": namespace.task_seed}
