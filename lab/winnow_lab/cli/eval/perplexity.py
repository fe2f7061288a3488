"""`winnow eval perplexity`: how well text is predicted under eviction."""

import argparse
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

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
    from winnow_lab.evaluate.likelihood import Keeping, Pair
    from winnow_lab.evaluate.perplexity import Perplexity

SUMMARY = "how well text is predicted under eviction: WikiText-2"
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
    """The windows of text."""

    tokens: int = flag(1024, "of a window", least=2)
    context: int | None = flag(None, "of them given, not predicted (default: half of them)", least=1)
    windows: int | None = flag(None, "from the front (default: the whole text)", least=1)
    round_every: int | None = flag(
        None, "tokens, under every policy (default: each has its own rounds)", least=1
    )
    data: Path | None = flag(None, "folder of the text (default: the sample that ships)")
    JOURNAL: ClassVar[str] = "windows.jsonl"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "context", self.given)
        if self.given >= self.tokens:
            raise UsageError(f"--context must be below --tokens ({self.tokens}), got {self.given}")

    @property
    def given(self) -> int:
        """Tokens that are not predicted."""
        return self.context or self.tokens // 2


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.usage = "winnow eval perplexity [MODEL] [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add_options(parser, Options)
    add_model_argument(parser)


def execute(namespace: argparse.Namespace) -> int:
    """Measure, show, write, and return the exit code."""
    asked = options_of(Options, namespace)
    from winnow_lab.evaluate.cell import AGNOSTIC, engine_needs, plan_cells
    from winnow_lab.evaluate.likelihood import Keeping
    from winnow_lab.evaluate.reports.perplexity_report import NOTE, perplexity_table

    cells = plan_cells(tuple(dict.fromkeys(asked.eviction)), asked.amounts, (AGNOSTIC,))
    keepings = {cell.label: _in_rounds(Keeping.of(cell), asked.round_every) for cell in cells}
    options = asked.opened(engine_needs(cells))
    with open_llm(options) as llm:
        windows = _windows(asked, llm)
        work = {"tokens": asked.tokens, "context": asked.given, "windows": len(windows)}
        head = run_head(llm, options) | {"settings": work}
        try:
            rows = _measure(asked, llm, windows, keepings)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(*[resume_hint()] * (asked.output is not None)) from None
    title = f"perplexity of {asked.tokens - asked.given} tokens after {asked.given}"
    table = perplexity_table(rows, title)
    show_tables(head, f"{len(windows)} windows", [table])
    write_table("perplexity", head, NOTE, table, rows, asked.output)
    return 0


def _in_rounds(keeping: "Keeping", every: int | None) -> "Keeping":
    """Return what is kept with rounds behind the prompt and every so many tokens."""
    policy = keeping.policy
    if every is None or policy.when.never:
        return keeping
    when = replace(policy.when, after_prefill=True, prefill_every=None, within=False, decode_every=every)
    return replace(keeping, policy=replace(policy, when=when))


def _windows(asked: Options, llm: "LLM") -> "list[Pair]":
    from winnow.errors import EvaluationError
    from winnow_lab.evaluate.wikitext import cut_windows, wikitext

    if llm.tokenizer is None:
        raise EvaluationError("an evaluation needs a tokenizer, which the model's directory does not have")
    text = wikitext(asked.data)
    return cut_windows(llm.tokenizer, text, asked.tokens, asked.given, asked.windows)


def _measure(
    asked: Options, llm: "LLM", windows: "list[Pair]", keepings: "dict[str, Keeping]"
) -> "list[Perplexity]":
    from winnow_lab.evaluate.perplexity import WindowScore, measure_perplexity, window_journal
    from winnow_lab.study.journal import ResultJournal

    with ExitStack() as stack:
        journal: ResultJournal[WindowScore] | None = None
        if asked.journal is not None:
            journal = stack.enter_context(
                window_journal(llm, windows, asked.journal, overwrite=asked.overwrite)
            )
        progress = stack.enter_context(open_progress(asked.progress, sys.stderr))
        meter = Meter()

        def keep(score: WindowScore) -> None:
            if journal is not None:
                journal.append([score])

        def show(done: int, name: str) -> None:
            if progress.due():
                total = len(keepings) * len(windows)
                progress.show(meter.snapshot(done, total, 0, llm.stats(), name))

        known: Any = () if journal is None else journal.found
        return measure_perplexity(llm, windows, keepings, known=known, on_score=keep, on_step=show)
