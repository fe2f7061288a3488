"""What scores and budgets may ask of the engine besides keys, values and the attention that was watched."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from winnow.eviction.predictor import PredictorSource


@dataclass(frozen=True)
class Needs:
    """What a score wants to know; the engine learns nothing that nobody wants."""

    moments_from: int | None = None
    """Mean and covariance of the context's queries before their rotation, from this position on; None: neither."""
    chunk: int | None = None
    """Attention within chunks of this many tokens of the context, each token seeing all of its chunk; None: none."""
    chunk_from: int = 0
    """Position at which the first chunk begins."""
    rotation: bool = False
    """How keys are rotated."""
    output: bool = False
    """The weights that project what heads read to the hidden state."""
    predictor: PredictorSource | None = None
    """What was fitted to the model."""

    inputs: bool = False
    """What attention is computed from, of the tokens of a replay."""

    @property
    def queries(self) -> bool:
        """Whether queries must be seen while the context is computed."""
        return self.moments_from is not None or self.chunk is not None


@dataclass(frozen=True)
class QueryMoments:
    """Of the context's queries in one layer, before rotation, times the factor of the layer's logits.

    Attributes:
        mean: float32 [B, Hq, d].
        covariance: float32 [B, Hq, d, d].
    """

    mean: Tensor
    covariance: Tensor


class Signals(Protocol):
    """What budgets and scores may ask about tokens, layers and queries."""

    def similarity(self, slots: Sequence[int]) -> Tensor:
        """float32 [B, L], cosine of the hidden state before and after attention, mean over tokens so far."""

    def kinds(self, slots: Sequence[int]) -> Tensor:
        """uint8 [B, longest], the kind of each token: 0, SPECIAL or PUNCTUATION."""

    def moments(self, layer: int, slots: Sequence[int]) -> QueryMoments:
        """Of the queries of each sequence so far."""

    def chunk_attention(self, layer: int, slots: Sequence[int]) -> Tensor:
        """float32 [B, H, longest], what each token got within its chunk; zeros where no chunk is."""

    def turn(self, layer: int, keys: Tensor, difference: Tensor) -> Tensor:
        """Keys, float32 [..., d], moved by `difference` positions, [...]."""

    def mean_turn(self, layer: int, first: Tensor, count: int) -> Tensor:
        """float32 [B, d, d], the mean of the rotations to `count` positions from `first`, [B], on."""

    def output_weights(self, layer: int) -> Tensor:
        """[Hq, d, hidden_size], what each query head adds to the hidden state for what it read."""

    def key_probe(self) -> Tensor:
        """Keys by which the model is known again, float32 [L, H, d] on the CPU."""

    def predicted(self, layer: int, source: PredictorSource, keys: Tensor, values: Tensor) -> Tensor:
        """What a predictor says of KVs with these unrotated keys and values, [B, H, N, d]: float32 [B, H, N]."""
