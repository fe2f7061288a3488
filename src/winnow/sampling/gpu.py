"""Choices of tokens in one Triton kernel each, for GPUs; nothing is sorted."""

import torch
import triton
from torch import Tensor

from winnow.sampling.faults import Fault
from winnow.sampling.triton_kernels import argmax_rows, keep_top_rows

# Logits that a program has in registers.
_BLOCK = 4096


def marked_argmax(logits: Tensor) -> Tensor:
    """Return the first of the most probable tokens of rows [R, V], or `Fault.NOT_FINITE`, int64 [R]: one kernel."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    size = logits.shape[1]
    with torch.cuda.device_of(logits):
        argmax_rows[(len(logits),)](
            logits, tokens, logits.stride(0), size, FAULT=Fault.NOT_FINITE.value,
            BLOCK=min(_BLOCK, triton.next_power_of_2(size)), num_warps=8,
        )  # fmt: skip
    return tokens


def keep_top(logits: Tensor, k: Tensor | None, largest_k: int, top_p: Tensor | None) -> None:
    """Do as `winnow.sampling.filters.keep_top`, whose sums may differ in the last bits; `largest_k` is of no use."""
    assert logits.is_contiguous(), "rows lie one behind the other"
    size = logits.shape[1]
    with torch.cuda.device_of(logits):
        keep_top_rows[(len(logits),)](
            logits, k, top_p, size, BLOCK=min(_BLOCK, triton.next_power_of_2(size)), num_warps=16
        )
