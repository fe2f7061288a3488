"""The operations over a paged cache that every backend computes."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from winnow.attention.ranked_rows import RankedRows
from winnow.attention.spans import AttentionSpec, Spans
from winnow.cache import KVPool, PagedCache

if TYPE_CHECKING:
    from winnow.attention.native_step import NativeStep


@dataclass(frozen=True)
class JudgedKVs:
    """The KVs of a context that one chunk of a replay scores: the first `head`, and `start` up to `end`, exclusive."""

    head: int
    start: int
    end: int
    context_len: int
    """Tokens of the context; the replay's own KVs lie behind it."""

    @property
    def count(self) -> int:
        return self.head + self.end - self.start


@dataclass(frozen=True)
class ReplayQueries:
    """Queries by which a repetition of a context judges some of its KVs in one layer.

    Attributes:
        q: [n, Hq, d], n > 0 queries at the positions `first`, `first + every` and so on, behind the context.
        query_logs: float32 [n], subtracted from the logarithm of what a query pays.
        key_logs: float32 [Hq, judged KVs], added to it.
    """

    q: Tensor
    judged: JudgedKVs
    first: int
    every: int = 1
    query_logs: Tensor | None = None
    key_logs: Tensor | None = None


class HeadNorm(Protocol):
    """Root-mean-square norm of the vectors of heads; with `one_plus` by 1 + weight."""

    weight: Tensor
    eps: float
    one_plus: bool


@dataclass(frozen=True)
class HeadRotation:
    """Rotation of the queries and keys of new tokens, dimension i with dimension i + rotary_dim / 2.

    Attributes:
        cos, sin: [T, rotary_dim].
        query_norm, key_norm: of each head, before it is rotated.
    """

    cos: Tensor
    sin: Tensor
    query_norm: HeadNorm | None = None
    key_norm: HeadNorm | None = None


class BackendStep(ABC):
    """A packed batch over a paged cache in the form that one backend takes: made once, used by all layers.

    It is valid until the cache's tables change. KVs' format is the layout's codec and independent of the dtype of q, k
    and v (activations).

    Shapes: T tokens of the packed batch, Hq query heads, H KV heads (Hq a multiple of H), d = head_dim.
    """

    whole_layers: "NativeStep | None" = None
    """Form of the batch for layers that attend within a native call of their own; None: they cannot."""

    def __init__(self, cache: PagedCache, spans: Spans) -> None:
        self.cache, self.spans = cache, spans

    @abstractmethod
    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the KVs of the batch's tokens, [T, H, d] each, in the last slots of their rows.

        Their accumulators start at 0.
        """

    def rotate_and_write(self, layer: int, heads: Tensor, query_heads: int, rotation: HeadRotation) -> bool:
        """Norm and rotate queries and keys in place, and store KVs as `write` does, in one pass.

        Args:
            heads: [T, (Hq + 2 H) * d], rows dense: queries, keys, values.

        Returns:
            False: there is no such pass for this cache, and nothing was done.
        """
        return False

    @abstractmethod
    def attend(self, layer: int, q: Tensor, spec: AttentionSpec) -> Tensor:
        """Return attention of q, [T, Hq, d], over the rows of each token's sequence: [T, Hq, d] in q's dtype.

        In the same pass the accumulators of the KVs change as `spans.observe` asks for each sequence.
        """

    @abstractmethod
    def replay(self, layer: int, slot: int, queries: ReplayQueries, spec: AttentionSpec) -> None:
        """Raise accumulator 0 of the judged KVs to the largest attention that the queries pay them.

        The softmax of a query goes over the judged KVs and those behind the context up to its own position.

        Args:
            slot: of the sequence; the KVs of its rows lie in the order of their positions, none is missing.
        """


class AttentionBackend(ABC):
    """Interface by which KVs are stored, read and moved."""

    @abstractmethod
    def prepare(self, cache: PagedCache, spans: Spans) -> BackendStep:
        """Return the batch as this backend's layers take it."""

    @abstractmethod
    def compact(self, pool: KVPool, source: Tensor, target: Tensor) -> None:
        """Move KVs between slots of the pool: fields, position and accumulators together.

        `source` and `target` are int64 [n], flat slot numbers (block * block_size + offset); no slot is in both.
        """

    @abstractmethod
    def keep_best(self, pool: KVPool, rows: RankedRows, kept: Tensor, most_evicted: int) -> None:
        """Move the KVs of each row that stay to its first slots: protected ones, then those with the highest scores.

        Survivors beyond the first `kept` slots fill the holes below them in order; the other KVs do not move.

        Args:
            kept: [...], how many KVs of each row stay, at least as many as are protected.
            most_evicted: the most that one row loses, known on the host.
        """

    def capturable(self, spans: Spans, query_heads: int) -> bool:
        """Return whether a step over `spans` launches the same work whatever the device holds, so that a CUDA graph
        fits.

        Slots may be -1 then: such a sequence only fills the batch, its rows are empty.
        """
        return False
