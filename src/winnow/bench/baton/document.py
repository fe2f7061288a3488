"""The results as a page of Markdown, with the figures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from winnow.evaluate.origin import origin_of_run
from winnow.text_table import TextTable

NOTES = """\
- **seconds to complete**: from the first submission, all queries at once, to the last token; medians where a cell was
  run more than once. Prompts are passages of prose, answers greedy. The end of text does not end them, a drawn length
  does, so that all modes compute the same. As in the paper a set is not replenished: at its end batches run empty.
- **passes**: forward passes of the running batch. **by passes**: static's passes over these: the gain if all took the
  same time. **at most**: the same if every row of every pass were of use, which no order of the queries can pass.
- **idle**: positions that were padding or belonged to nobody, of all computed, prefills included.
- **columns**: columns that the batch held over its longest unfinished query, summed over passes; 1 is the bound.
- **KV peak**: most memory of KVs after a step: tensors with their free columns, and KVs that wait outside the batch.
- **differ**: answers whose tokens are not static's.
- Table 2 names its method as Table 1 names the one without P&D (`shaping`); its gains stand beside both. At batch 4 it
  prints 1.89x, its seconds give 1.87x.
- Answers of a to b tokens let a batch of n need at most nb / (b + (n - 1)a) times fewer passes, in the order that
  favours it most: 1.79x at batch 2 with 24 to 200. 1.94x there takes passes that are themselves slower in the baseline.
  Here static batches share cache, kernels and steps with the other modes.
"""


def page(
    heads: Sequence[Mapping[str, Any]],
    facts: Sequence[str],
    tables: Sequence[TextTable],
    figures: Sequence[Path],
) -> str:
    """Everything that a reader of the results needs.

    Args:
        heads: of `report_head`, one for each command and commit that measured something.
        facts: sentences about work, model and answers.
        figures: PNG files beside the page.
    """
    lines = ["# BATON: four ways to batch", ""]
    for head in heads:
        lines += origin_of_run(head)
    lines += [*facts, "", NOTES]
    for table in tables:
        lines += table.markdown()
    lines += [text for path in figures for text in (f"![{path.stem.replace('_', ' ')}]({path.name})", "")]
    return "\n".join(lines).rstrip() + "\n"
