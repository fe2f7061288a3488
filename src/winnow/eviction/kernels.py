"""CPU kernels for scorers. They read keys in place, without a copy."""

import torch
from torch import Tensor

from winnow import native
from winnow.attention import Smoothing
from winnow.eviction.round_rows import LayerRows
from winnow.native import native_kernels


class RowKernels:
    """Scores of the rows of a layer by CPU kernels. Results do not depend on the number of threads."""

    def __init__(self, kernels: "native.Kernels", rows: LayerRows) -> None:
        from winnow.attention.native_views import key_rows  # needs the extension

        self._kernels = kernels
        self._threads = torch.get_num_threads()
        # The kernels hold addresses of these tensors.
        self._slot, self._position = rows.slot.contiguous(), rows.position.contiguous()
        self._length = rows.length.contiguous()
        self._keys = key_rows(rows.pool, self._slot, self._length)

    @classmethod
    def of(cls, rows: LayerRows) -> "RowKernels | None":
        """Return None: the rows are not on the CPU, the kernels do not read their codec, or there are no kernels."""
        kernels = native_kernels() if rows.slot.device.type == "cpu" else None
        if kernels is None:
            return None
        from winnow.attention.native_views import reads

        return cls(kernels, rows) if reads(rows.pool.kind.codec) else None

    def leverage(self, ridge: float) -> Tensor:
        """Return scores of `Leverage`, not smoothed: float32 [B, H, N], zeros where not valid."""
        score = torch.empty(self._slot.shape, dtype=torch.float32, device="cpu")
        self._kernels.leverage(self._keys, ridge, score.data_ptr(), self._threads)
        return score

    def key_difference(self) -> Tensor:
        """Return scores of `KeyDifference`: float32 [B, H, N], zeros where not valid."""
        score = torch.empty(self._slot.shape, dtype=torch.float32, device="cpu")
        self._kernels.key_difference(self._keys, score.data_ptr(), self._threads)
        return score

    def pooled(self, score: Tensor, smoothing: Smoothing) -> Tensor:
        """Return `score`, float32 [B, H, N], pooled over neighbours; zeros where not valid.

        The pool's heads and window are not looked at.
        """
        score = score.contiguous()
        pooled = torch.empty_like(score)
        self._kernels.smooth_rows(
            score.data_ptr(),
            self._position.data_ptr(),
            self._length.data_ptr(),
            self._length.numel(),
            score.shape[-1],
            smoothing.size,
            smoothing.kind == "max",
            pooled.data_ptr(),
            self._threads,
        )
        return pooled
