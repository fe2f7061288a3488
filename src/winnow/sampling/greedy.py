"""The most probable token of each row."""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from winnow.native import DTYPES, native_kernels
from winnow.sampling.rows import HostCopy, clean_rows, marked_tokens, row_blocks

Argmax = Callable[[Tensor], Tensor]
"""Logits [R, V] of any float type -> tokens [R] int64. Ties go to the first; NaN is impossible; 0 if all are.

On GPUs a row that no token can be taken from may give `Fault.NOT_FINITE` instead."""
Greedy = Callable[[Tensor], tuple[Tensor, Callable[[], list[int]]]]
"""Logits [R, V] -> tokens [R] int64, and what waits for them and returns them, with faults in their places."""


def open_greedy(device: torch.device) -> Greedy:
    """Return the fastest choice of tokens for rows that ask for nothing else; on GPUs it is one kernel."""
    argmax = open_argmax(device)
    if device.type == "cuda" and find_spec("triton") is not None:
        return lambda logits: _on_the_way(argmax(logits))

    def greedy(logits: Tensor) -> tuple[Tensor, Callable[[], list[int]]]:
        tokens = argmax(logits)
        return tokens, marked_tokens(tokens, logits)

    return greedy


def _on_the_way(tokens: Tensor) -> tuple[Tensor, Callable[[], list[int]]]:
    copy = HostCopy(tokens)
    return tokens, lambda: copy.read().tolist()


def open_argmax(device: torch.device) -> Argmax:
    """Return the fastest that there is on a device."""
    if device.type == "cuda" and find_spec("triton") is not None:
        from winnow.sampling import triton_kernels

        return triton_kernels.marked_argmax
    kernels = native_kernels() if device.type == "cpu" else None
    if kernels is None:
        return _argmax

    def native_argmax(logits: Tensor) -> Tensor:
        if logits.dtype not in DTYPES or logits.stride(1) != 1:
            return _argmax(logits)
        count, size = logits.shape
        tokens = torch.empty(count, dtype=torch.int64, device="cpu")
        kernels.greedy(
            DTYPES[logits.dtype], logits.data_ptr(), logits.stride(0), count, size, tokens.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return tokens

    return native_argmax


def _argmax(logits: Tensor) -> Tensor:
    blocks = row_blocks(*logits.shape)
    return torch.cat([clean_rows(logits[first:end]).argmax(1) for first, end in blocks])
