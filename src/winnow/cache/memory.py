"""Memory for what is read in scattered pieces."""

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

# What processors offer beside pages of 4 KiB.
_LARGE_PAGE = 2 * 2**20


def empty_in_large_pages(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """An uninitialised tensor; on a CPU under Linux its memory asks for large pages.

    Blocks of a row lie anywhere in the pool, so nearly every one is on another page, and looking pages up costs as much
    as reading them: with large pages decode attention is a fifth faster and scores are added up in half the time
    (docs/performance.md). Pages are taken from the system when they are first touched.
    """
    count = math.prod(shape)
    nbytes = count * dtype.itemsize
    if torch.device(device).type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE") or nbytes < _LARGE_PAGE:
        return torch.empty(*shape, dtype=dtype, device=device)
    memory = mmap.mmap(
        -1, -(-nbytes // _LARGE_PAGE) * _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    with contextlib.suppress(OSError):  # a kernel built without them: small pages do
        memory.madvise(mmap.MADV_HUGEPAGE)
    # The tensor keeps the mapping alive.
    return torch.frombuffer(memory, dtype=dtype, count=count).view(*shape)
