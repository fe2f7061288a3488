"""One step in the form that the CPU kernels take, so that a decoder layer can be one call."""

from dataclasses import dataclass

from winnow import native
from winnow.attention.spans import AttentionSpec


class NativeSpec:
    """An `AttentionSpec` in the form that the kernels take."""

    def __init__(self, spec: AttentionSpec) -> None:
        sinks = None if spec.sinks is None else spec.sinks.detach().float().contiguous()
        self._sinks = sinks  # what `native` points at
        self.native = native.AttentionSpec(
            scale=spec.scale,
            window=spec.window or 0,
            softcap=spec.softcap or 0.0,
            sinks=0 if sinks is None else sinks.data_ptr(),
        )


@dataclass(frozen=True)
class NativeStep:
    """A batch over a paged cache. Valid until its spans or its cache change."""

    # Quoted: without the extension this module is imported too, and `native` lacks its types.
    cache: "native.Cache"
    batch: "native.Batch"
    work: "native.Workspace"
