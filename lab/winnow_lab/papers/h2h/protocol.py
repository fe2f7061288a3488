"""What is measured beside the tasks, and what papers report of the methods."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from winnow.errors import EvaluationError
from winnow.llm import LLM
from winnow.values.eviction_request import OWN_AMOUNT, Amount
from winnow_lab.evaluate.cell import FULL, Cell
from winnow_lab.evaluate.likelihood import Keeping
from winnow_lab.evaluate.perplexity import Perplexity, WindowScore, measure_perplexity
from winnow_lab.evaluate.plan import engine_identity
from winnow_lab.evaluate.wikitext import cut_windows, wikitext
from winnow_lab.papers.h2h.variants import VARIANTS
from winnow_lab.study.journal import ResultJournal

KV_COMPRESS_DIFFERS = (
    "7B and 8B models, LongBench; a cache of C tokens whatever the prompt's length; all but KVC repeat KVs per query "
    "head, and hold 4 times as many"
)
CACHE_SIZES = (128, 256, 512, 1024)


@dataclass(frozen=True)
class LongBench:
    """Average scores of one method at the cache sizes.

    Attributes:
        method: as the paper calls it.
        preset: the same method here, with the same window: a preset, or of `VARIANTS`.
        scores: at `CACHE_SIZES`.
        also: the preset with another window, that of the method's own paper or of KV-Compress.
    """

    method: str
    preset: str
    scores: tuple[float, ...]
    also: str | None = None


@dataclass(frozen=True)
class LongBenchTable:
    """One of the KV-Compress paper's tables of 16 LongBench subsets, query-aware.

    Attributes:
        full: the full cache's average.
    """

    name: str
    model: str
    full: float
    methods: tuple[LongBench, ...]

    def relative(self, method: LongBench) -> tuple[float, ...]:
        """Its scores as shares of the full cache's average."""
        return tuple(score / self.full for score in method.scores)


LONGBENCH = (
    LongBenchTable(
        "Table 1",
        "Llama-3.1-8B-Instruct, all baselines with w = 8 and p = 7 (5.1)",
        48.54,  # the mean of the full cache's row; the table itself prints 46.30, which is not
        (
            LongBench("H2O", "h2o-once", (41.66, 42.78, 43.70, 45.21)),
            LongBench("SnapKV", "snapkv-w8", (44.19, 45.93, 47.12, 47.90), also="snapkv"),
            LongBench("Pyramid", "pyramidkv-w8", (43.66, 45.97, 46.92, 48.09), also="pyramidkv"),
            LongBench("KVC-w8-L2", "kv-compress", (45.47, 46.26, 47.69, 48.27)),
        ),
    ),
    LongBenchTable(
        "Table 2",
        "Mistral-7B-Instruct-v0.2, baselines as published by Ada-KV",
        42.51,
        (
            LongBench("H2O", "h2o-once", (34.40, 36.03, 37.22, 38.70)),
            LongBench("SnapKV", "snapkv", (35.09, 38.66, 40.26, 41.44), also="snapkv-w8"),
            LongBench("Pyramid", "pyramidkv", (35.58, 38.22, 40.01, 41.07), also="pyramidkv-w8"),
            LongBench("Ada-SKV", "ada-snapkv", (36.71, 39.72, 40.57, 41.54), also="ada-snapkv-w8"),
            LongBench("Ada-PKV", "ada-pyramidkv", (36.81, 39.28, 40.45, 41.23), also="ada-pyramidkv-w8"),
            LongBench("KVC-w32-L1", "kv-compress-w32-l1", (35.85, 38.72, 40.50, 41.52)),
            LongBench("KVC-w32-L2", "kv-compress-w32-l2", (37.33, 39.80, 41.31, 41.94)),
            LongBench("KVC-w8-L2", "kv-compress", (37.64, 39.92, 41.19, 41.95)),
            LongBench("KVC-full-L2", "kv-compress-full", (36.20, 38.35, 39.76, 41.14)),
        ),
    ),
)

TEXT = "a text on KV cache memory: Llama 3 8B, 4,096 tokens generated, budget 1,024; neither text nor code is named"
TEXT_DIFFERS = "8B model on a text that is not named, 1,024 of 4,096 KVs"


@dataclass(frozen=True)
class TextPerplexity:
    """A perplexity with a quarter of the KVs.

    Attributes:
        policy: as the text calls it.
        preset: the same policy here: a preset, or of `VARIANTS`.
    """

    policy: str
    preset: str
    perplexity: float

    @property
    def ratio(self) -> float:
        """Over the full cache's."""
        return self.perplexity / PERPLEXITIES[0].perplexity


PERPLEXITIES = (
    TextPerplexity("full cache", "full", 5.12),
    TextPerplexity("random eviction", "random", 7.85),
    TextPerplexity("recent only", "recent", 6.41),
    TextPerplexity("attention sinks (4 + 1020)", "streaming", 5.38),
    TextPerplexity("H2O", "h2o", 5.24),
    TextPerplexity("H2O + sinks", "h2o-sinks", 5.19),
)


BUDGET_SHARE = 4
"""A row keeps this part of the window: 1,024 of 4,096 tokens in the text."""
ROUND_EVERY = 16
"""Tokens between rounds, the same for all: of the presets some have one at every token, some none while decoding."""


@dataclass(frozen=True)
class Continuations:
    """Windows of a text; a quarter is the prompt, the rest is forced, with a round every few tokens."""

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
        policy = Cell(name, OWN_AMOUNT, None, VARIANTS.get(name)).policy
        when = replace(policy.when, after_prefill=True, prefill_every=None, within=False)
        return Keeping(
            replace(policy, when=replace(when, decode_every=ROUND_EVERY)),
            Amount(kv_budget=self.budget),
        )

    def measure(self, llm: LLM, presets: Sequence[str], journal: Path | None) -> list[Perplexity]:
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
