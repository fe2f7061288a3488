"""Perplexity with a quarter of the KVs: the table of eviction policies in the text that `published` names."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.papers.h2h.published import PERPLEXITIES
from winnow.errors import EvaluationError
from winnow.evaluate.cell import FULL, Cell
from winnow.evaluate.journal import ResultJournal
from winnow.evaluate.likelihood import Keeping
from winnow.evaluate.perplexity import Perplexity, WindowScore, measure_perplexity
from winnow.evaluate.plan import engine_identity
from winnow.evaluate.wikitext import cut_windows, wikitext

if TYPE_CHECKING:
    from winnow.llm import LLM

BUDGET_SHARE = 4
"""A row keeps this part of the window: 1,024 of 4,096 tokens in the text."""
ROUND_EVERY = 16
"""Tokens between rounds, the same for all: of the presets some have one at every token, some none while decoding."""


@dataclass(frozen=True)
class Continuations:
    """So many windows of a text; a quarter is the prompt, the rest is forced, with a round every few tokens."""

    windows: int
    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 4 * BUDGET_SHARE:
            raise EvaluationError(f"a window must have at least {4 * BUDGET_SHARE} tokens, got {self.tokens}")

    @property
    def budget(self) -> int:
        """KVs per row that a round leaves."""
        return self.tokens // BUDGET_SHARE

    def keepings(self, presets: Sequence[str]) -> dict[str, Keeping]:
        """The presets with rounds where this table has them, each name once."""
        return {name: self._keeping(name) for name in dict.fromkeys(presets)}

    def _keeping(self, name: str) -> Keeping:
        if name == FULL:
            return Keeping()
        policy = Cell(name, None, None).policy
        when = replace(policy.when, after_prefill=True, prefill_every=None, within=False)
        return Keeping(
            replace(policy, when=replace(when, decode_every=ROUND_EVERY)),
            kv_budget=self.budget,
        )

    def measure(self, llm: "LLM", presets: Sequence[str], journal: Path | None) -> list[Perplexity]:
        """The perplexity under each preset; the full cache comes first.

        Raises:
            EvaluationError: the text fills fewer windows than asked for, or the journal is of other settings.
        """
        windows = cut_windows(llm.tokenizer, wikitext(), self.tokens, self.budget, self.windows)
        if len(windows) < self.windows:
            raise EvaluationError(
                f"the text fills {len(windows)} windows of {self.tokens}, not {self.windows}"
            )
        keepings = self.keepings([FULL, *presets])
        if journal is None:
            return measure_perplexity(llm, windows, keepings)
        settings = {"windows": self.windows, "tokens": self.tokens, "round_every": ROUND_EVERY}
        identity = engine_identity(llm, "wikitext2", settings)
        with ResultJournal[WindowScore](journal, identity, WindowScore.from_json) as book:
            return measure_perplexity(
                llm, windows, keepings, known=book.found, on_score=lambda score: book.append([score])
            )


def text_presets() -> tuple[str, ...]:
    """Those that the text has numbers for."""
    return tuple(each.preset for each in PERPLEXITIES)
