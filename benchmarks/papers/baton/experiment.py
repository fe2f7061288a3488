"""Cells measured one after the other, each by an engine of its own, and kept as they come."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any

from benchmarks.papers.baton.cells import PAGED, Cell, Cells
from benchmarks.papers.baton.measured import Measured
from benchmarks.papers.baton.queries import Query, with_text
from benchmarks.papers.baton.run import OnStep, run_cell
from winnow.config import PaddedConfig
from winnow.evaluate.prose import shipped_sentences
from winnow.llm import LLM

Open = Callable[[dict[str, Any]], AbstractContextManager[LLM]]
"""Makes an engine of options."""


@dataclass(frozen=True)
class Experiment:
    """What is to be measured, and how engines are made.

    Attributes:
        options: of every engine; a cell's own come on top.
        head: of this start, as `Measured` keeps it.
    """

    cells: Cells
    options: Mapping[str, Any]
    open: Open
    vocab_size: int
    head: Mapping[str, Any]

    def missing(self, found: Sequence[Measured]) -> list[Cell]:
        """What is still to be measured, in order; a cell may be named several times."""
        done = Counter(each.cell for each in found)
        return [cell for turn in range(self.cells.repeats) for cell in self.cells if done[cell] <= turn]

    def measure(self, cells: Sequence[Cell], on_step: Callable[[Cell], OnStep]) -> Iterator[Measured]:
        """Run each of `cells` once, in their order.

        Raises:
            InvalidRequestError: a query does not fit into the model's context or the KV memory.
        """
        for cell in cells:
            with self.open(self.options_of(cell)) as llm:
                yield Measured(cell, run_cell(llm, self._queries(cell, llm), on_step(cell)), self.head)

    def options_of(self, cell: Cell) -> dict[str, Any]:
        """Of the cell's engine. What only padded engines know is left out for the paged one."""
        unknown = {field.name for field in fields(PaddedConfig)} if cell.mode == PAGED else set()
        return {name: value for name, value in self.options.items() if name not in unknown} | cell.options

    def _queries(self, cell: Cell, llm: LLM) -> list[Query]:
        """The same for every mode: prose, or for a model without a tokenizer its tokens in turn."""
        tokenizer = llm.tokenizer
        first: int | None = None
        if tokenizer is None:
            text = list(range(self.vocab_size))
        else:
            text = tokenizer(" ".join(shipped_sentences()), add_special_tokens=False)["input_ids"]
            first = tokenizer.bos_token_id
        return with_text(self.cells.lengths(cell), text, first, self.cells.query_seed)
