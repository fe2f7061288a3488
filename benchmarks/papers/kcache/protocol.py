"""What is run, and what the paper printed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

TOP_N, LAYERS = (32, 64, 128), (0, 1, 2, 3)
"""Values that a query head reads, and first layers whose values stay on the device: the paper's."""
CATEGORIES = {
    "demo": (),
    "ruler": ("niah_single_1", "niah_single_2"),
    "kv-retrieval": ("grown",),
}
"""By task; empty: all that it has."""
PAPER = {
    "full": (39.87, 15.09, 64.24),
    "N=32, L=0": (33.19, 5.46, 63.57),
    "N=32, L=1": (36.94, 12.59, 64.16),
    "N=32, L=2": (37.08, 14.25, 64.12),
    "N=32, L=3": (36.63, 14.33, 64.14),
    "N=64, L=0": (35.75, 6.14, 62.48),
    "N=64, L=1": (38.03, 13.42, 64.18),
    "N=64, L=2": (37.97, 15.31, 64.18),
    "N=64, L=3": (38.07, 15.16, 64.22),
    "N=128, L=0": (37.26, 8.49, 64.07),
    "N=128, L=1": (38.57, 14.25, 64.24),
    "N=128, L=2": (39.0, 15.01, 64.24),
    "N=128, L=3": (38.89, 15.09, 64.25),
}
"""Table 2, LLaMA2-7B: BBH 3-shot, GSM8K 8-shot, TriviaQA 5-shot."""


@dataclass(frozen=True)
class Setting:
    """One row of the tables.

    Attributes:
        top_n: None: the full cache.
        extra: further words of `value_tier`, such as "renormalize".
    """

    top_n: int | None = None
    layers: int = 1
    extra: str = ""

    @property
    def label(self) -> str:
        """As the tables name it."""
        if self.top_n is None:
            return "full"
        return f"N={self.top_n}, L={self.layers}" + (f", {self.extra}" if self.extra else "")

    @property
    def options(self) -> dict[str, Any]:
        """Of `LLM`."""
        if self.top_n is None:
            return {}
        # The paper does not say what becomes of the weights; the rows without a word are the plain sum.
        words = self.extra if "renormalize" in self.extra else f"as-softmaxed,{self.extra}".rstrip(",")
        return {"value_tier": f"host:L={self.layers},N={self.top_n},{words}"}

    @property
    def folder(self) -> str:
        """A name for files."""
        return (
            "full"
            if self.top_n is None
            else f"n{self.top_n}-l{self.layers}-{self.extra}".strip("-").replace("=", "")
        )


def settings(top_n: Sequence[int], layers: Sequence[int], extras: Sequence[str]) -> Iterator[Setting]:
    """The full cache, then every pair, then each of `extras` with the first layer's values on the device."""
    yield Setting()
    for n in top_n:
        for count in layers:
            yield Setting(n, count)
    for extra in extras:
        for n in top_n:
            yield Setting(n, 1, extra)
