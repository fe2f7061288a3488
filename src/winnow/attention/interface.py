"""The three operations over a paged cache that every backend computes."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from winnow.attention.spans import Spans
from winnow.cache import KVPool, PagedCache


@dataclass(frozen=True)
class AttentionSpec:
    """How a layer attends: softmax(q k^T) v over KVs whose position is not above the query's, with these changes."""

    scale: float
    """Factor of the logits."""
    window: int | None = None
    """A query sees only KVs fewer than `window` positions back."""
    softcap: float | None = None
    """Bends scaled logits x to softcap * tanh(x / softcap) (Gemma 2)."""
    sinks: Tensor | None = None
    """[Hq]: one more logit per query head, which takes probability and gives no value (gpt-oss)."""


class AttentionBackend(Protocol):
    """Shapes: T tokens of the packed batch, Hq query heads, H KV heads (Hq a multiple of H), d = head_dim."""

    def write(self, cache: PagedCache, spans: Spans, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the KVs of the batch's tokens, [T, H, d] each, in the last slots of their rows."""

    def attend(self, cache: PagedCache, spans: Spans, layer: int, q: Tensor, spec: AttentionSpec) -> Tensor:
        """Attention of q, [T, Hq, d], over the rows of each token's sequence. Returns [T, Hq, d] in q's dtype.

        In the same pass the scores of the KVs change as `spans.observe` asks for each sequence.
        """

    def compact(self, pool: KVPool, source: Tensor, target: Tensor) -> None:
        """Move KVs between slots of the pool: key, value, position and scores together.

        `source` and `target` are int64 [n], flat slot numbers (block * block_size + offset); no slot is in both.
        """
