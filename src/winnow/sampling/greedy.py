"""The most probable token of each row."""

from collections.abc import Callable

import torch
from torch import Tensor

from winnow.native import DTYPES, native_kernels
from winnow.sampling.row_blocks import clean_rows, row_blocks

Argmax = Callable[[Tensor], Tensor]
"""Logits [R, V] of any float type -> tokens [R] int64. The first of equals; NaN is impossible; 0 if all are."""


def open_argmax(device: torch.device) -> Argmax:
    """Return the fastest that there is on a device."""
    kernels = native_kernels() if device.type == "cpu" else None
    if kernels is None:
        return _argmax

    def native_argmax(logits: Tensor) -> Tensor:
        if logits.dtype not in DTYPES or logits.stride(1) != 1:
            return _argmax(logits)
        count, size = logits.shape
        tokens = torch.empty(count, dtype=torch.int64, device="cpu")
        kernels.greedy(
            DTYPES[logits.dtype],
            logits.data_ptr(),
            logits.stride(0),
            count,
            size,
            tokens.data_ptr(),
            torch.get_num_threads(),
        )
        return tokens

    return native_argmax


def _argmax(logits: Tensor) -> Tensor:
    blocks = row_blocks(*logits.shape)
    return torch.cat([clean_rows(logits[first:end]).argmax(1) for first, end in blocks])
