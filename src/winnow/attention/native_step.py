"""One step in the form that the CPU kernels take, so that a decoder layer can be one call."""

from dataclasses import dataclass
from functools import cached_property

from winnow import native
from winnow.attention.spans import AttentionSpec
from winnow.cache.tiers.value_store import TierTraffic, ValueStore


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
        """The kernels' own form, which needs the extension."""
        spec, sinks, slopes = self._spec, self._sinks, self._slopes
        return native.AttentionSpec(
            scale=spec.scale,
            window=spec.window or 0,
            softcap=spec.softcap or 0.0,
            sinks=0 if sinks is None else sinks.data_ptr(),
            slopes=0 if slopes is None else slopes.data_ptr(),
            chunked=spec.chunked,
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
    values.traffic.add(
        TierTraffic(
            head_queries=read.head_queries,
            rows_selected=read.selected,
            rows_read=read.rows,
            rows_prefilled=read.in_full,
            bytes_read=(read.rows + read.in_full) * values.slot_bytes,
        )
    )
