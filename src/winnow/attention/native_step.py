"""A step as the CPU kernels take it, so that a decoder layer can be one call."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from winnow.attention.interface import AttentionSpec

if TYPE_CHECKING:
    from winnow import _native


class NativeSpec:
    """An `AttentionSpec` for the kernels."""

    def __init__(self, spec: AttentionSpec) -> None:
        from winnow import _native

        sinks = None if spec.sinks is None else spec.sinks.detach().float().contiguous()
        self._sinks = sinks  # what `native` points at
        self.native = _native.AttentionSpec(
            scale=spec.scale,
            window=spec.window or 0,
            softcap=spec.softcap or 0.0,
            sinks=0 if sinks is None else sinks.data_ptr(),
        )


@dataclass(frozen=True)
class NativeStep:
    """A batch over a paged cache, good until its spans or its cache change."""

    cache: "_native.Cache"
    batch: "_native.Batch"
    work: "_native.Workspace"
