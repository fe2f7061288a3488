"""One step in the form that the CPU kernels take, so that a decoder layer can be one call."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from winnow.attention.interface import AttentionSpec

if TYPE_CHECKING:
    from winnow import _native


class NativeSpec:
    """An `AttentionSpec` in the form that the kernels take."""

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
    """A batch over a paged cache. Valid until its spans or its cache change."""

    cache: "_native.Cache"
    batch: "_native.Batch"
    work: "_native.Workspace"
    dtype: torch.dtype
    """Of the stored keys and values."""
