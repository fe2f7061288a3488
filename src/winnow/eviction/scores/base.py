"""The interface of scorers."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from winnow.attention import AttentionObserver, Smoothing
from winnow.eviction.replay import Replay
from winnow.eviction.round_rows import LayerRows
from winnow.eviction.signals import Needs


@dataclass(frozen=True)
class Scorer(ABC):
    """Scores KVs. The lowest score is evicted first; ties go to the older KV.

    A new scorer is a frozen dataclass with `score`, and `observe` if it uses attention: see examples/own_score.py.
    """

    num_accumulators: ClassVar[int] = 0
    """Number of float32 accumulators per KV, 0 to 2."""
    per_layer: ClassVar[bool] = False
    """Average the score over the heads of a layer, so that all keep the same tokens (TOVA)."""

    factors: ClassVar[bool] = True
    """True if the score is at least 0 and may be multiplied, such as by the norm of the value."""

    by_row: ClassVar[bool] = False
    """True if a kernel scores each row by its keys and positions alone: rows of all layers go together."""

    @property
    def needs(self) -> Needs:
        """Signals that it uses besides keys, values and accumulators."""
        return Needs()

    @property
    def window(self) -> int | None:
        """Number of last queries of the prompt before a round that it observes; None: all."""
        return None

    @property
    def replay(self) -> Replay | None:
        """The replay that runs before the round after the context and sets accumulator 0 of each of its KVs to the
        largest attention from the replay's queries; None: no replay."""
        return None

    @property
    def before_template(self) -> bool:
        """Return whether tokens after the question (`SamplingParams.template_tail`) are protected, and windows end
        before them.
        """
        return True

    def observe(self, *, decoding: bool) -> AttentionObserver | None:
        """Return how attention updates the accumulators while prefilling or decoding; None: it does not."""
        return None

    @abstractmethod
    def score(self, rows: LayerRows) -> Tensor:
        """Score the KVs of a layer: finite float32 [B, H, N], the highest stay; ignored where not valid."""

    def with_pool(self, pool: Smoothing) -> "Scorer":
        return replace(self, pool=pool)  # type: ignore[call-arg]

    @property
    def resets_accumulators(self) -> bool:
        """Return whether each round resets the accumulators to 0."""
        return False
