"""The comparison as a page of Markdown."""

from collections.abc import Mapping
from typing import Any

from winnow.evaluate.origin import origin
from winnow.evaluate.result import Evaluation
from winnow.evaluate.tables import all_tables

_SETTING = """\
- Both compute the same weights in float32 on the CPU, answer greedily, and are scored by the same metrics.
- Both see the same token ids and keep as many KVs per row of what is judged: ceil(tokens / compression). Presses have
  kvpress's own defaults.
- Query-agnostic, what is judged ends before the question. Query-aware, the question is judged too, but for its last
  line, "Answer:", which both compute after the cut. kvpress's own pipeline does the same.
- Presses cut once, when what is judged is computed. Winnow's presets keep their own rounds: `winnow-pd` and `keydiff`
  cut within the prompt already, so that it never lies in memory whole, and have worse keys to choose from.
- KV memory is what an answer held at its end: for Winnow the blocks, rounded up and with their tables; for kvpress the
  tensors of its cache. Presses with AdaKV mask KVs and free none.
- A press that refuses a prompt, or fails on it, is left out of its cell, with its message."""


def markdown(evaluation: Evaluation, head: Mapping[str, Any]) -> list[str]:
    """The lines of the page."""
    lines = [
        "# Winnow beside kvpress",
        "",
        *origin(head),
        f"- {head['peer']}; {head['model']}; cores used: {head['threads']}; {evaluation.prompts} prompts per cell",
        "",
        _SETTING,
        "",
    ]
    for table in all_tables(evaluation):
        lines += table.markdown()
    return lines
