"""What a score is: what attention must tell it, and how much that makes a KV worth."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from winnow.attention import AttentionObserver
from winnow.eviction.replay import Replay
from winnow.eviction.rows import LayerRows
from winnow.eviction.signals import Needs


@dataclass(frozen=True)
class Score(ABC):
    """How much a KV is worth. The least worthy go first, and of equals the older.

    A new score is a frozen dataclass with `worth`, and `observe` if it needs attention: see examples/own_score.py.
    """

    num_accumulators: ClassVar[int] = 0
    """float32 accumulators that it needs per KV, 0 to 2."""
    per_layer: ClassVar[bool] = False
    """One token set for all heads of a layer: worth is averaged over them, and rows stay alike (TOVA)."""

    factors: ClassVar[bool] = True
    """Whether worth is at least 0 and may be multiplied, such as by the norm of the value."""

    @property
    def needs(self) -> Needs:
        """What it must know besides keys, values and accumulators."""
        return Needs()

    @property
    def window(self) -> int | None:
        """How many of the last queries before a round are observed in the prompt; None: all of them."""
        return None

    @property
    def replay(self) -> Replay | None:
        """How the context is repeated before the round after it, so that accumulator 0 of each of its KVs is the
        largest attention that the repetition pays it; None: it is not."""
        return None

    @property
    def before_template(self) -> bool:
        """Whether what follows the question (`SamplingParams.template_tail`) is left out of windows and kept."""
        return True

    def observe(self, *, decoding: bool) -> AttentionObserver | None:
        """What attention does to the accumulators while the prompt is computed, or after it."""
        return None

    @abstractmethod
    def worth(self, rows: LayerRows) -> Tensor:
        """Float32 [B, H, N] of finite numbers, higher is worth more; ignored where a slot is not valid."""

    @property
    def forgets(self) -> bool:
        """Whether the accumulators start anew after each round."""
        return False
