"""What the CPU kernels compute for scores: on keys where they lie in the pool, without a copy of them."""

import torch
from torch import Tensor

from winnow import native
from winnow.attention import Smoothing
from winnow.attention.native import key_rows
from winnow.eviction.rows import LayerRows
from winnow.native import native_kernels


class RowKernels:
    """The rows of a layer, as the kernels see them. Results do not depend on the number of threads."""

    def __init__(self, kernels: "native.Kernels", rows: LayerRows) -> None:
        self._kernels = kernels
        self._threads = torch.get_num_threads()
        # The kernels get addresses, so these must live as long.
        self._slot, self._position = rows.slot.contiguous(), rows.position.contiguous()
        self._length = rows.length.contiguous()
        self._keys = key_rows(rows.pool, self._slot, self._length)

    @classmethod
    def of(cls, rows: LayerRows) -> "RowKernels | None":
        """None where the rows are not on the CPU, or Winnow was installed without a compiler."""
        kernels = native_kernels() if rows.slot.device.type == "cpu" else None
        return None if kernels is None else cls(kernels, rows)

    def leverage(self, ridge: float) -> Tensor:
        """See `Leverage`; not pooled. float32 [B, H, N], zeros where not valid."""
        worth = torch.empty(self._slot.shape, dtype=torch.float32)
        self._kernels.leverage(self._keys, ridge, worth.data_ptr(), self._threads)
        return worth

    def key_difference(self) -> Tensor:
        """See `KeyDifference`. float32 [B, H, N], zeros where not valid."""
        worth = torch.empty(self._slot.shape, dtype=torch.float32)
        self._kernels.key_difference(self._keys, worth.data_ptr(), self._threads)
        return worth

    def pooled(self, worth: Tensor, smoothing: Smoothing) -> Tensor:
        """`worth`, float32 [B, H, N], pooled over neighbours; zeros where not valid. The pool's heads and window are
        not looked at."""
        worth = worth.contiguous()
        pooled = torch.empty_like(worth)
        self._kernels.smooth_rows(
            worth.data_ptr(),
            self._position.data_ptr(),
            self._length.data_ptr(),
            self._length.numel(),
            worth.shape[-1],
            smoothing.size,
            smoothing.kind == "max",
            pooled.data_ptr(),
            self._threads,
        )
        return pooled
