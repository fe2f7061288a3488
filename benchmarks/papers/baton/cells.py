"""What is measured: sets, modes and batch sizes."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from benchmarks.papers.baton.paper import MIXED, SETS, published_batches
from benchmarks.papers.baton.queries import Lengths, draw_lengths
from winnow.bench.lists import integers, names
from winnow.config import option
from winnow.errors import ConfigError

PAGED = "paged"
"""Winnow's own engine, for comparison."""
MODES = ("static", "pd", "shaping-gaps", "shaping", "embedding", PAGED)


@dataclass(frozen=True)
class Cell:
    """One set of queries, answered by one mode at one batch size."""

    query_set: str
    mode: str
    batch: int

    @property
    def options(self) -> dict[str, Any]:
        """What the engine is opened with."""
        if self.mode == PAGED:
            return {"engine": "paged", "max_num_seqs": self.batch}
        return {"engine": "padded", "padded_mode": self.mode, "max_num_seqs": self.batch}


@dataclass(frozen=True)
class Cells:
    """The cells that are asked for, and the work in each.

    Raises:
        ConfigError: a value is out of range.
    """

    sets: tuple[str, ...] = option(
        SETS,
        "mixed: 120 queries with long and short prompts and answers; short: 30 queries; commas between",
        parse=names,
    )
    modes: tuple[str, ...] = option(MODES, f"of {', '.join(MODES)}; commas between", parse=names)
    batches: tuple[int, ...] = option(
        (),
        "batch sizes, commas between; left out: the paper's, 4,8 for mixed and 2,4,6,8,10 for short",
        parse=integers,
    )
    scale: float = option(0.05, "tokens for each of the paper's words in the mixed set")
    short_scale: float = option(1.0, "the same, in the short set")
    repeats: int = option(1, "runs of a cell; all cells are run once, then all of them again")
    query_seed: int = option(0, "of lengths, order and text")

    def __post_init__(self) -> None:
        for name, known in (("sets", SETS), ("modes", MODES)):
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
            for each in getattr(self, name):
                if each not in known:
                    raise ConfigError(f"{name} must be of {', '.join(known)}, got {each!r}")
        for name, values, least in (
            ("batches", self.batches, 1),
            ("repeats", (self.repeats,), 1),
            ("query_seed", (self.query_seed,), 0),
        ):
            if any(value < least for value in values):
                raise ConfigError(f"{name} must be at least {least}, got {min(values)}")
        for name, scale in (("scale", self.scale), ("short_scale", self.short_scale)):
            if not 0 < scale < float("inf"):
                raise ConfigError(f"{name} must be a number above 0, got {scale:g}")

    def __iter__(self) -> Iterator[Cell]:
        """In the order in which they are measured: what is compared stands close together."""
        for query_set in self.sets:
            batches = self.batches or published_batches(query_set)
            for batch, mode in product(batches, self.modes):
                yield Cell(query_set, mode, batch)

    def lengths(self, cell: Cell) -> list[Lengths]:
        """Of the queries; the same for every mode."""
        scale = self.scale if cell.query_set == MIXED else self.short_scale
        return draw_lengths(cell.query_set, cell.batch, scale, self.query_seed)

    @property
    def longest(self) -> int:
        """Tokens of the longest query with its answer."""
        return max(each.total for cell in self for each in self.lengths(cell))

    @property
    def settings(self) -> dict[str, Any]:
        """What runs must share to be compared."""
        return {name: getattr(self, name) for name in ("scale", "short_scale", "query_seed")}
