"""What the CPU kernels compute for scores: on keys where they lie in the pool, without a copy of them."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from winnow.attention import Pool
from winnow.eviction.rows import LayerRows
from winnow.native import native_kernels

if TYPE_CHECKING:
    from winnow import _native


class RowKernels:
    """The rows of a layer, as the kernels see them. Results do not depend on the number of threads."""

    def __init__(self, kernels: "_native.Kernels", rows: LayerRows) -> None:
        from winnow import _native

        formats = {
            torch.float32: _native.DType.f32,
            torch.bfloat16: _native.DType.bf16,
            torch.float16: _native.DType.f16,
        }
        keys = rows.pool.k
        self._kernels = kernels
        self._threads = torch.get_num_threads()
        # The kernels get addresses, so these must live as long.
        self._slot, self._position = rows.slot.contiguous(), rows.position.contiguous()
        self._length = rows.length.contiguous()
        self._keys = _native.KeyRows(
            dtype=formats[keys.dtype],
            k=keys.data_ptr(),
            head_dim=keys.shape[-1],
            block_size=keys.shape[1],
            block_stride=keys.stride(0),
            slot=self._slot.data_ptr(),
            length=self._length.data_ptr(),
            rows=self._length.numel(),
            stride=self._slot.shape[-1],
        )

    @classmethod
    def of(cls, rows: LayerRows) -> "RowKernels | None":
        """None where the rows are not on the CPU, or Winnow was installed without a compiler."""
        kernels = native_kernels() if rows.slot.device.type == "cpu" else None
        return None if kernels is None else cls(kernels, rows)

    def leverage(self, ridge: float) -> Tensor:
        """See `Leverage`; not pooled. float32 [B, H, N], zeros where not valid."""
        score = torch.empty(self._slot.shape, dtype=torch.float32)
        self._kernels.leverage(self._keys, ridge, score.data_ptr(), self._threads)
        return score

    def key_difference(self) -> Tensor:
        """See `KeyDifference`. float32 [B, H, N], zeros where not valid."""
        score = torch.empty(self._slot.shape, dtype=torch.float32)
        self._kernels.key_difference(self._keys, score.data_ptr(), self._threads)
        return score

    def pooled(self, score: Tensor, pool: Pool) -> Tensor:
        """`score`, float32 [B, H, N], pooled over neighbours; zeros where not valid. The pool's heads and window are
        not looked at."""
        score = score.contiguous()
        pooled = torch.empty_like(score)
        self._kernels.pool_rows(
            score.data_ptr(),
            self._position.data_ptr(),
            self._length.data_ptr(),
            self._length.numel(),
            score.shape[-1],
            pool.size,
            pool.kind == "max",
            pooled.data_ptr(),
            self._threads,
        )
        return pooled
