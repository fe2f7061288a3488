"""Kernels for scorers. They read keys in place, without a copy."""

from collections.abc import Callable

import torch
from torch import Tensor

from winnow.attention import Smoothing
from winnow.attention.backends import BACKENDS
from winnow.attention.observer import smooth
from winnow.eviction.round_rows import LayerRows
from winnow.eviction.signals import KeyDirections, RotationTable
from winnow.process import native
from winnow.process.native import native_kernels


class RowKernels:
    """Scores of the rows of a layer by CPU kernels. Results do not depend on the number of threads."""

    def __init__(self, kernels: "native.Kernels", rows: LayerRows) -> None:
        from winnow.attention.native import key_rows  # needs the extension

        self._kernels = kernels
        self._threads = torch.get_num_threads()
        # The kernels hold addresses of these tensors.
        self._slot, self._position = rows.slot.contiguous(), rows.position.contiguous()
        self._length = rows.length.contiguous()
        self._head_dim = rows.pool.kind.key_size
        self._keys = key_rows(rows.pool, self._slot, self._length)

    @classmethod
    def of(cls, rows: LayerRows) -> "RowKernels | None":
        """Return None: the rows are not on the CPU, the kernels do not read their codec, or there are no kernels."""
        kernels = native_kernels() if rows.slot.device.type == "cpu" else None
        if kernels is None:
            return None
        from winnow.attention.native import reads

        return cls(kernels, rows) if reads(rows.pool.kind.codec) else None

    def leverage(self, ridge: float) -> Tensor:
        score = torch.empty(self._slot.shape, dtype=torch.float32, device="cpu")
        self._kernels.leverage(self._keys, ridge, score.data_ptr(), self._threads)
        return score

    def key_difference(
        self, directions: KeyDirections | None = None, rotation: RotationTable | None = None
    ) -> Tensor:
        """Return minus the cosine of each key and the mean direction of its row: float32 [B, H, N], 0 where not valid.

        Args:
            directions: sums so far, to which the keys behind those counted are added in place; None: the row's keys.
            rotation: before which keys are compared; None: as they are stored.
        """
        score = torch.empty(self._slot.shape, dtype=torch.float32, device="cpu")
        batch, heads, _ = self._slot.shape
        directions = directions or _no_directions(score, self._head_dim)
        rotation = rotation or _no_rotation(score)
        counted = directions.counted[:, None].expand(batch, heads).contiguous()
        assert directions.sums.is_contiguous(), "the kernel writes there"
        self._kernels.key_difference(
            self._keys, position=self._position.data_ptr(), sum=directions.sums.data_ptr(),
            counted=counted.data_ptr(), cos=rotation.cos.data_ptr(), sin=rotation.sin.data_ptr(),
            pairs=rotation.pairs, stride=rotation.cos.shape[1], first=rotation.first,
            interleaved=rotation.interleaved, score=score.data_ptr(), threads=self._threads,
        )  # fmt: skip
        return score

    def pooled(self, score: Tensor, smoothing: Smoothing) -> Tensor:
        """Return `score`, float32 [B, H, N], pooled by size and kind over neighbours; zeros where not valid."""
        score = score.contiguous()
        pooled = torch.empty_like(score)
        self._kernels.smooth_rows(
            score.data_ptr(), self._position.data_ptr(), self._length.data_ptr(), self._length.numel(),
            score.shape[-1], smoothing.size, smoothing.kind == "max", pooled.data_ptr(), self._threads,
        )  # fmt: skip
        return pooled


def pool_rows(score: Tensor, rows: LayerRows, smoothing: Smoothing) -> Tensor:
    """Return `score`, float32 [B, H, N], at least 0, pooled over neighbours of the rows; arbitrary where not valid."""
    kernels = RowKernels.of(rows)
    if kernels is not None:
        return kernels.pooled(score, smoothing)
    return smooth(score[:, :, None], rows.position, rows.valid, smoothing)[:, :, 0]


def key_difference_kernel(
    rows: LayerRows,
) -> Callable[[KeyDirections | None, RotationTable | None], Tensor] | None:
    """Return `RowKernels.key_difference`, or what computes the same on a GPU; None: no kernel reads the rows."""
    kernels = RowKernels.of(rows)
    if kernels is not None:
        return kernels.key_difference
    if BACKENDS["triton"].refusal(rows.slot.device, None) is not None:
        return None
    from winnow.attention.triton.key_difference import key_difference, key_format  # needs triton

    def by_triton(directions: KeyDirections | None, rotation: RotationTable | None) -> Tensor:
        sums, counted = directions or _no_directions(rows.slot, rows.pool.kind.key_size)
        turns = rotation or _no_rotation(rows.slot)
        return key_difference(rows.pool, rows.slot, rows.position, rows.length, sums, counted, *turns)

    return None if key_format(rows.pool.kind) is None else by_triton


def _no_directions(x: Tensor, head_dim: int) -> KeyDirections:
    """Return the sums before the first key of rows like x, [B, H, N]."""
    batch, heads, _ = x.shape
    sums = x.new_zeros((batch, heads, head_dim), dtype=torch.float32)
    return KeyDirections(sums, x.new_zeros(batch, dtype=torch.int32))


def _no_rotation(x: Tensor) -> RotationTable:
    none = x.new_zeros((1, 0), dtype=torch.float32)
    return RotationTable(none, none, 0)
