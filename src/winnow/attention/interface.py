"""Operations over a paged cache that every attention backend implements."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor

from winnow.attention.ranked_rows import RankedRows
from winnow.attention.spans import AttentionSpec, Spans
from winnow.cache import KVPool, PagedCache
from winnow.cache.tiers.value_store import TierTraffic, ValueStore
from winnow.process import native


@dataclass(frozen=True)
class JudgedKVs:
    """KVs of a context that one chunk of a replay scores: the first `head`, and `start` up to `end`, exclusive."""

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
    """Queries of one layer that score some KVs of a context while it is repeated.

    Attributes:
        q: [n, Hq, d], n > 0 queries at positions `first`, `first + every` and so on, after the context.
    """

    q: Tensor
    judged: JudgedKVs
    first: int
    every: int = 1


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
    """Packed batch over a paged cache, prepared once for a backend and used by all layers.

    It is valid until the cache's tables change. KVs are stored by the layout's codec, whatever the dtype of q, k and v.

    Shapes: T tokens of the packed batch, Hq query heads, H KV heads (Hq a multiple of H), d = head_dim.
    """

    whole_layers: "NativeStep | None" = None
    """Form of the batch for layers that attend within a native call of their own; None: they cannot."""

    def __init__(self, cache: PagedCache, spans: Spans) -> None:
        self.cache, self.spans = cache, spans

    @abstractmethod
    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the KVs of the batch's tokens, [T, H, d] each, in the last slots of their rows; accumulators are 0."""

    def rotate_and_write(self, layer: int, heads: Tensor, query_heads: int, rotation: HeadRotation) -> bool:
        """Apply norms and rotation to queries and keys in place, and store KVs as `write` does, in one pass.

        Args:
            heads: [T, (Hq + 2 H) * d], rows dense: queries, keys, values.

        Returns:
            False if the backend has no such pass for this cache; nothing is done then.
        """
        return False

    @abstractmethod
    def attend(self, layer: int, q: Tensor, spec: AttentionSpec) -> Tensor:
        """Compute attention of q, [T, Hq, d], over the rows of each token's sequence: [T, Hq, d] in q's dtype.

        The same pass updates the accumulators of the KVs as `spans.observe` prescribes for each sequence.
        """

    @abstractmethod
    def replay(self, layer: int, slot: int, queries: ReplayQueries, spec: AttentionSpec) -> None:
        """Raise accumulator 0 of the judged KVs to their largest attention weight under the queries.

        The softmax of a query covers the judged KVs and those after the context up to its own position.

        Args:
            slot: of the sequence, whose rows hold all KVs in the order of their positions.
        """


class AttentionBackend(ABC):
    """Implementation of attention: how KVs are stored, read and moved."""

    @abstractmethod
    def prepare(self, cache: PagedCache, spans: Spans) -> BackendStep:
        """Prepare a batch: plan its launches and upload its layout. Returns the step that all layers use."""

    @abstractmethod
    def compact(self, pool: KVPool, source: Tensor, target: Tensor) -> None:
        """Move KVs between slots of the pool: fields, position and accumulators together.

        `source` and `target` are int64 [n], flat slot numbers (block * block_size + offset); no slot is in both.
        """

    @abstractmethod
    def keep_best(self, pool: KVPool, rows: RankedRows, kept: Tensor, most_evicted: int) -> None:
        """Keep the protected KVs of each row and those with the highest scores, in its first slots.

        KVs that stay beyond the first `kept` slots fill the holes below them in order; the others do not move.

        Args:
            kept: [...], number of KVs of each row that stay, at least the protected ones.
            most_evicted: most KVs that one row loses, known on the host.
        """

    def capturable(self, spans: Spans, query_heads: int) -> bool:
        """Return whether a step over `spans` launches the same work whatever the device holds, as CUDA graphs require.

        Slots of such a step may be -1: padding, sequences with empty rows.
        """
        return False


class NativeSpec:
    """An `AttentionSpec` in the form that the kernels take."""

    def __init__(self, spec: AttentionSpec) -> None:
        # What `native` points at.
        self._sinks, self._slopes = (
            None if x is None else x.detach().float().contiguous() for x in (spec.sinks, spec.slopes)
        )
        self._spec = spec

    @cached_property
    def native(self) -> "native.AttentionSpec":
        spec, window, softcap = self._spec, self._spec.window or 0, self._spec.softcap or 0.0
        sinks, slopes = (0 if x is None else x.data_ptr() for x in (self._sinks, self._slopes))
        return native.AttentionSpec(
            scale=spec.scale, window=window, softcap=softcap, sinks=sinks, slopes=slopes, chunked=spec.chunked
        )


@dataclass(frozen=True)
class NativeStep:
    """A batch over a paged cache. Valid until its spans or its cache change."""

    # Quoted: without the extension this module is imported too, and `native` lacks its types.
    cache: "native.Cache"
    batch: "native.Batch"
    work: "native.Workspace"
    far: "native.FarLayers | None" = None
    """Layers whose values lie on a tier; None: there are none."""
    selection: "native.Selection | None" = None
    """KVs that queries read of these."""
    values: ValueStore | None = None
    """Place of them."""

    def count_reads(self) -> None:
        """Add what layers read of the tier since the last call to its traffic."""
        if self.far is not None and self.values is not None:
            count_reads(self.far.take_counts(), self.values)


def count_reads(read: "native.ValuesRead", values: ValueStore) -> None:
    """Add what kernels read of values on a tier to its traffic."""
    nbytes = (read.rows + read.in_full) * values.slot_bytes
    values.traffic.add(
        TierTraffic(read.head_queries, read.selected, read.rows, read.in_full, bytes_read=nbytes)
    )
