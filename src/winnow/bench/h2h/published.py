"""What papers report of the methods, and how their settings differ from ours."""

from dataclasses import dataclass

KV_COMPRESS = "KV-Compress (Rehg 2024), Table 1: Llama-3.1-8B-Instruct, 16 LongBench subsets, query-aware"
KV_COMPRESS_DIFFERS = (
    "8B model, LongBench; a cache of C tokens whatever the prompt's length; all but KVC repeat KVs per query head, and "
    "hold 4 times as many"
)
# The mean of the full cache's row; the table itself prints 46.30, which is not.
_FULL = 48.54
CACHE_SIZES = (128, 256, 512, 1024)


@dataclass(frozen=True)
class LongBench:
    """Average scores of one method at the cache sizes.

    Attributes:
        method: as the paper calls it.
        preset: the same method here.
        scores: at `CACHE_SIZES`.
    """

    method: str
    preset: str
    scores: tuple[float, ...]

    @property
    def relative(self) -> tuple[float, ...]:
        """As shares of the full cache's average."""
        return tuple(score / _FULL for score in self.scores)


LONGBENCH = (
    LongBench("H2O", "h2o-once", (41.66, 42.78, 43.70, 45.21)),
    LongBench("SnapKV", "snapkv", (44.19, 45.93, 47.12, 47.90)),
    LongBench("Pyramid", "pyramidkv", (43.66, 45.97, 46.92, 48.09)),
    LongBench("KVC-w8-L2", "kv-compress", (45.47, 46.26, 47.69, 48.27)),
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
