"""`winnow eval perplexity`: how well text is predicted under eviction."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from winnow.errors import EvaluationError, UsageError
from winnow_lab.cli.eval.options import EvalOptions, show_tables, show_work
from winnow_lab.study import flag
from winnow_lab.study.options import options_of

SUMMARY = "how well text is predicted under eviction: WikiText-2"
ARGUMENTS = ""
DESCRIPTION = """\
Predict WikiText-2 token by token, with the full cache and under eviction.

The text is cut into windows. Of each window the first tokens are given: they are computed, and the
policy cuts their KVs before it has seen what follows. The other tokens are forced one by one, as if
the model had chosen them, with the policy's rounds in between; they alone count. In one pass over a
window nothing would ever be evicted.

With -o, windows reach the disk as they finish, and the same command resumes where it was stopped.
"""
EPILOG = """\
examples:
  winnow eval perplexity --eviction recent,h2o,snapkv --compression 2,8
  winnow eval perplexity --eviction streaming --compression 4 --tokens 4096 --context 2048
  winnow eval perplexity --data wikitext-2 --eviction kv-compress --compression 4 -o perplexity
Four articles ship with Winnow; --data takes a directory with the whole test split, test.txt or
wiki.test.tokens. Its text has <unk> for rare words, so that numbers compare with each other, not
with those of other texts.
"""


@dataclass(frozen=True)
class Options(EvalOptions):
    tokens: int = flag(1024, "of a window", least=2)
    context: int | None = flag(None, "of them given, not predicted (default: half of them)", least=1)
    windows: int | None = flag(None, "from the front (default: the whole text)", least=1)
    round_every: int | None = flag(None, "tokens, under every policy (default: its own)", least=1)
    data: Path | None = flag(None, "folder of the text (default: the sample that ships)")
    JOURNAL: ClassVar[str] = "windows.jsonl"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "context", self.given)
        if self.given >= self.tokens:
            raise UsageError(f"--context must be below --tokens ({self.tokens}), got {self.given}")

    @property
    def given(self) -> int:
        return self.context or self.tokens // 2


def execute(namespace: argparse.Namespace) -> int:
    asked = options_of(Options, namespace)
    from winnow_lab.evaluate.cell import AGNOSTIC, plan_cells
    from winnow_lab.evaluate.likelihood import Keeping
    from winnow_lab.evaluate.perplexity import (
        NOTE,
        WindowScore,
        measure_perplexity,
        perplexity_table,
        windows_identity,
    )
    from winnow_lab.evaluate.wikitext import cut_windows, wikitext

    cells = plan_cells(tuple(dict.fromkeys(asked.eviction)), asked.amounts, (AGNOSTIC,))
    keepings = {cell.label: Keeping.of(cell).in_rounds(asked.round_every) for cell in cells}
    with asked.open_engine(cells) as (llm, head):
        if llm.tokenizer is None:
            raise EvaluationError(
                "an evaluation needs a tokenizer, which the model's directory does not have"
            )
        text = wikitext(asked.data)
        windows = cut_windows(llm.tokenizer, text, asked.tokens, asked.given, asked.windows)
        head["settings"] = {"tokens": asked.tokens, "context": asked.given, "windows": len(windows)}
        total = len(keepings) * len(windows)
        with (
            asked.open_journal(windows_identity(llm, windows), WindowScore.from_json) as journal,
            show_work(asked.progress) as show,
        ):
            rows = measure_perplexity(
                llm,
                windows,
                keepings,
                known=() if journal is None else journal.found,
                on_score=lambda score: None if journal is None else journal.append([score]),
                on_step=lambda done, name: show(done, total, llm.stats(), name),
            )
    table = perplexity_table(rows, f"perplexity of {asked.tokens - asked.given} tokens after {asked.given}")
    show_tables(head, f"{len(windows)} windows", [table])
    asked.write_table("perplexity", head, NOTE, table, rows)
    return 0
