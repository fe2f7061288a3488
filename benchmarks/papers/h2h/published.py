"""What papers report of the methods, and how their settings differ from ours."""

from dataclasses import dataclass

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
        preset: the same method here, with the same window.
        scores: at `CACHE_SIZES`.
        also: the preset with the window of the method's own paper, if that is another.
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
            LongBench("SnapKV", "snapkv", (35.09, 38.66, 40.26, 41.44)),
            LongBench("Pyramid", "pyramidkv", (35.58, 38.22, 40.01, 41.07)),
            LongBench("Ada-SKV", "ada-snapkv", (36.71, 39.72, 40.57, 41.54)),
            LongBench("Ada-PKV", "ada-pyramidkv", (36.81, 39.28, 40.45, 41.23)),
            LongBench("KVC-w32-L1", "kv-compress-w32-l1", (35.85, 38.72, 40.50, 41.52)),
            LongBench("KVC-w32-L2", "kv-compress-w32-l2", (37.33, 39.80, 41.31, 41.94)),
            LongBench("KVC-w8-L2", "kv-compress", (37.64, 39.92, 41.19, 41.95)),
            LongBench("KVC-full-L2", "kv-compress-full", (36.20, 38.35, 39.76, 41.14)),
        ),
    ),
)

TEXT = "a text on KV cache memory: Llama 3 8B, 4,096 tokens generated, budget 1,024; neither text nor code is named"
TEXT_DIFFERS = "8B model of 5.12 on a text that is not told; ours is 5.4 million weights, trained to retrieve"


@dataclass(frozen=True)
class TextPerplexity:
    """A perplexity with a quarter of the KVs.

    Attributes:
        policy: as the text calls it.
        preset: the same policy here.
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
